"""The values that a key may have: ranges of numbers, names to choose among, and texts of a form.

It also parses numbers in plain digits. Each mistake becomes a sentence with the fix.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Callable, Collection, Mapping, Sequence

from config.old_names import instead_of

# Python itself would also accept 1_000, digits of other scripts, surrounding blanks, nan and inf
WHOLE_NUMBER = re.compile(r"-?[0-9]+")
POSITIVE_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
NUMBER = re.compile("-?" + POSITIVE_NUMBER)
COUNT = 1_000_000_000  # the largest number of anything countable


class Allowed:
    """Base class of the values that a key may have; `advice` describes them in words."""

    advice: str

    def holds(self, value: Any) -> bool:
        """Return whether the value is one of them."""
        raise NotImplementedError

    def refusal(self, key_name: str, value: Any) -> str:
        """Return the sentence for another value of the key `key_name`, with the fix."""
        return f"{key_name}={value} is not possible: give {self.advice}"


@dataclass(frozen=True)
class Range(Allowed):
    """The numbers from `min_value` to `max_value`, and the `special_values`, each with its meaning."""

    min_value: float
    max_value: float
    special_values: Mapping[float, str] = field(default_factory=dict)

    def holds(self, value: float) -> bool:
        """Return whether the number is in the range; NaN never is."""
        return value in self.special_values or self.min_value <= value <= self.max_value

    @property
    def advice(self) -> str:  # type: ignore[override]
        """The allowed values in words."""
        special_words = [f"{value} for {meaning}" for value, meaning in self.special_values.items()]
        usual_words = f"a number from {decimal(self.min_value)} to {decimal(self.max_value)}"
        return " or ".join([*special_words, usual_words])


@dataclass(frozen=True)
class TextForm(Allowed):
    """Texts of one form: their pattern, and the ranges of the numbers in the pattern's groups."""

    pattern: str
    advice: str
    group_ranges: Sequence[Range] = ()

    def holds(self, text: str) -> bool:
        match = re.fullmatch(self.pattern, text)
        return match is not None and all(
            group is None or allowed.holds(float(group)) for group, allowed in zip(match.groups(), self.group_ranges))


@dataclass
class Choices(Allowed):
    """The names among which a key chooses, and the texts that are names of files by `is_file`."""

    names: Collection[str]
    is_file: Callable[[str], bool] | None = None

    def holds(self, name: str) -> bool:
        return name in self.names or self.is_file is not None and self.is_file(name)

    def refusal(self, key_name: str, value: Any) -> str:
        return f"{key_name}={value} is unknown: {instead_of(key_name, value, self.names)}"


def decimal(value: float) -> str:
    """Format a number without an exponent."""
    return format(Decimal(str(value)), "f")


def integer(text: str) -> int:
    """Parse a whole number in plain digits. Raises ValueError for anything else."""
    if not WHOLE_NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number in plain digits")
    return int(text)


def number(text: str) -> float:
    """Parse a number in plain digits; -0 becomes 0. Raises ValueError for anything else."""
    if not NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a number in plain digits")
    return float(text) + 0.0


def listed(text: str) -> tuple[str, ...]:
    """Split a comma-separated list; empty entries are ignored."""
    entries = map(str.strip, text.split(","))
    return tuple(filter(None, entries))
