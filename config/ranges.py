"""Values that a person gives: how numbers are written, and which ones a key may have.

It knows nothing about single keys: a table of ranges stands beside the options that it is about.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Iterator, Mapping, Sequence

# Python itself would take 1_000, digits of other scripts, blanks around, nan and inf
WHOLE = re.compile(r"-?[0-9]+")
NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, and those `besides` that mean something of their own: what they mean."""

    least: float
    most: float
    besides: Mapping[float, str] = field(default_factory=dict)

    def holds(self, value: float) -> bool:
        """Not a number is in no range."""
        return value in self.besides or self.least <= value <= self.most

    @property
    def advice(self) -> str:
        """What may be given, in words."""
        words = [f"{value} for {meaning}" for value, meaning in self.besides.items()]
        return " or ".join([*words, f"a number from {decimal(self.least)} to {decimal(self.most)}"])


def decimal(value: float) -> str:
    """A number as a person writes it, without an exponent."""
    return format(Decimal(str(value)), "f")


def outside(values: Mapping[str, Any], ranges: Mapping[str, Range]) -> Iterator[str]:
    """What is wrong with the values of keys, each in a sentence that names the fix."""
    for name, allowed in ranges.items():
        if not allowed.holds(values[name]):
            yield f"{name}={values[name]} is not possible: give {allowed.advice}"


def unknown(values: Mapping[str, Any], choices: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Which keys have a value that is none of their choices, each in a sentence that names them."""
    for name, allowed in choices.items():
        if values[name] not in allowed:
            yield f"{name}={values[name]} is unknown: choose one of {', '.join(allowed)}"


@dataclass(frozen=True)
class Checked:
    """Keys that fit together, or ValueError with the first of their `problems`."""

    def __post_init__(self) -> None:
        problem = next(self.problems(), "")
        if problem:
            raise ValueError(problem)

    def problems(self) -> Iterator[str]:
        """What is wrong, each in a sentence that names the fix. A dataclass with more keys adds its own to these."""
        yield from ()


def listed(text: str) -> tuple[str, ...]:
    """The words of a list with commas between."""
    words = map(str.strip, text.split(","))
    return tuple(filter(None, words))


def whole(text: str) -> int:
    """A whole number in plain digits; anything else is a ValueError."""
    if not WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is no whole number in plain digits")
    return int(text)


def number(text: str) -> float:
    """A number in plain digits; anything else is a ValueError. There is one zero, without a sign."""
    if not NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is no number in plain digits")
    return float(text) + 0.0
