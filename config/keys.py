"""The words of a command, `[PRESET] key=value ...`: layers of them, the checked dataclass that they become, its values.

It knows the keys only from the dataclass: a field `name: TYPE = DEFAULT  # MEANING` with TYPE int, float, bool or str,
in groups that begin with a comment of their own. What a person got wrong is a ValueError whose sentence names the fix.
"""
from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass, field, fields
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, Collection, Iterable, Iterator, Mapping, NamedTuple, Sequence, TypeVar

from config import files

Kind = TypeVar("Kind")
SIMILAR = 0.5  # difflib ratio from which a name may be what was meant
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
TITLE = re.compile(r"    # (.+)")  # a line of the dataclass that begins a group of keys
ENTRY = re.compile(r"    (\w+): \w+ = .+?  # (.+)")  # and one that is a key
TRUTH = {"true": True, "1": True, "false": False, "0": False}
HELP = ("-h", "--help", "help")
ENDING = ".json"  # of a file that stands in place of a preset
_source = lru_cache(maxsize=None)(inspect.getsource)  # for each class Python parses the whole file that it stands in
ASKS = ("", *HELP)  # the first word of a command that has commands, when its help is what is wanted


# --- layers -----------------------------------------------------------------------------------------------------------

def opened(argv: Sequence[str]) -> list[str]:
    """The words of a command, those of a file {"preset": NAME, "keys": {KEY: VALUE}} in the place of its preset."""
    if not argv or "=" in argv[0] or not argv[0].endswith(ENDING):
        return list(argv)
    found = files.whole(os.path.expanduser(argv[0]), "name a preset, or a file that a plan has written")
    if not files.fits(found, {"preset": str, "keys": {str}}):
        raise ValueError(f"{argv[0]} is no preset: name a file that a plan has written with preset=FILE")
    return over([found["preset"], *argv[1:]], found["keys"])


def preset_of(argv: Sequence[str]) -> str:
    """The preset that a command begins with; empty if it names none."""
    named = bool(argv) and "=" not in argv[0] and not argv[0].startswith("-")
    return argv[0] if named else ""


def raw_values(argv: Sequence[str]) -> dict[str, str]:
    """The text behind each key of a command, as it was typed; an empty one, if a word has no `=`."""
    pairs = (word.partition("=") for word in argv)
    return {key: value for key, _, value in pairs}


def over(argv: Sequence[str], defaults: Mapping[str, str], preset: str = "") -> list[str]:
    """The words of a command, as they were typed, and those of its defaults for what it does not name."""
    raw = raw_values(argv)
    added = [f"{key}={value}" for key, value in defaults.items() if key not in raw]
    first = [] if preset_of(argv) or not preset else [preset]
    return [*first, *argv, *added]


# --- a dataclass ------------------------------------------------------------------------------------------------------

class Option(NamedTuple):
    """One key as the help shows it; `kind` is int, float, bool or str."""

    name: str
    kind: str
    default: Any
    group: str
    about: str


def read_keys(argv: Sequence[str], kind: type[Kind], command: str) -> Kind:
    """The dataclass `kind` with what was typed over its defaults; paths in `kind.PATHS` count from here."""
    if any(word in HELP for word in argv):
        print(help_of(kind, command))
        raise SystemExit(0)
    keys = {option.name: option for option in options(kind)}
    return kind(**parsed(argv, keys, getattr(kind, "PATHS", ())))


def help_of(kind: type, command: str) -> str:
    """The text of `--help` of a command that has no presets: what it does, examples, and every key."""
    about = inspect.cleandoc(kind.__doc__ or "")
    return "\n".join([f"usage: {command} [key=value ...]", "", about, "", "examples:",
                      getattr(kind, "EXAMPLES", f"  {command}"), "", *key_lines(options(kind))])


def key_lines(keys: Iterable[Option]) -> list[str]:
    """The lines of the help that list every key with its default and its meaning, group by group."""
    lines = ["keys, with the values they have when nothing else is said:"]
    group = ""
    for option in keys:
        if option.group != group:
            group = option.group
            lines += ["", f"{group}:"]
        lines.append(f"  {option.name + '=' + written(option.default):<29} {option.about}")
    return lines


def options(kind: type) -> Iterator[Option]:
    """Every key with its group and meaning, as the comments of the dataclass give them; a command's own keys first."""
    found = {option.name: option for option in fields(kind)}
    for cls in kind.__mro__[:-1]:
        group = ""
        for line in _source(cls).splitlines():
            title, entry = TITLE.fullmatch(line), ENTRY.fullmatch(line)
            if title:
                group = title[1]
            elif entry and entry[1] in found:
                option = found.pop(entry[1])
                yield Option(option.name, str(option.type), option.default, group, about=entry[2])


def parsed(words: Sequence[str], keys: Mapping[str, Option],
           paths: Collection[str] = ()) -> dict[str, Any]:
    """The values of the keys that were typed, in the types of the keys; those of `paths` are made absolute."""
    found: dict[str, Any] = {}
    for word in words:
        key, text = _pair(word, keys)
        if key in found:
            raise ValueError(f"{key} is given twice: leave one of them out")
        value = _read(keys[key], text)
        found[key] = files.absolute(value) if key in paths and value else value
    return found


def nearest(word: str, names: Iterable[str]) -> str:
    """The question whether one of these names was meant; empty if none is like the word."""
    near = get_close_matches(word.lstrip("-"), list(names), n=1, cutoff=SIMILAR)
    return f"did you mean {near[0]}?" if near else ""


def check_name(name: str, names: Collection[str], kind: str) -> None:
    """Raise ValueError for a name that is none of `names`, which are of this kind."""
    if name not in names:
        raise ValueError(f"unknown {kind} {name}: {nearest(name, names) or 'choose one of ' + ', '.join(names)}")


def _pair(word: str, keys: Mapping[str, Option]) -> tuple[str, str]:
    """Key and value of a word; raises ValueError if it is no `key=value`, or the key is unknown."""
    key, equals, value = word.partition("=")
    name = key.lstrip("-")
    if not equals and name not in keys:
        raise ValueError(f'"{word}" is not key=value: a value with spaces goes in quotes, as "key=two words"')
    if not equals or not key:
        raise ValueError(f'"{word}" is not key=value: write {name or "key"}=VALUE, without spaces or dashes')
    if key.startswith("-"):
        raise ValueError(f"{key} has dashes: write {name}={value}")
    if files.HALF.search(value):
        raise ValueError(f"{key} has bytes that are not UTF-8: write it in UTF-8")
    if key not in keys:
        raise ValueError(f"unknown key {key}: {nearest(key, keys) or '--help shows them all'}")
    return key, value


def _read(option: Option, text: str) -> Any:
    """What a text says as the value of a key, in the type of the key; raises ValueError if it says nothing of it."""
    key, kind = option.name, option.kind
    try:
        if kind == "bool":
            return TRUTH[text.lower()]
        if kind in ("int", "float"):
            return integer(text) if kind == "int" else number(text)
    except (ValueError, KeyError):
        raise ValueError(f'{key}={text} is not {KINDS[kind]}: write for example '
                         f'{key}={written(option.default)}') from None
    return text


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- values -----------------------------------------------------------------------------------------------------------

# Python itself would take 1_000, digits of other scripts, blanks around, nan and inf
WHOLE = re.compile(r"-?[0-9]+")
POSITIVE = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
NUMBER = re.compile("-?" + POSITIVE)


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


class Form(NamedTuple):
    """The texts of one form: a pattern, what such a text is in words, and the ranges of the numbers in its groups."""

    pattern: str
    advice: str
    ranges: Sequence[Range] = ()

    def holds(self, text: str) -> bool:
        found = re.fullmatch(self.pattern, text)
        return found is not None and all(
            group is None or allowed.holds(float(group)) for group, allowed in zip(found.groups(), self.ranges))


def decimal(value: float) -> str:
    """A number as a person writes it, without an exponent."""
    return format(Decimal(str(value)), "f")


def outside(values: Mapping[str, Any], ranges: Mapping[str, Range | Form]) -> Iterator[str]:
    """What is wrong with the values of keys, each in a sentence that names the fix."""
    for name, allowed in ranges.items():
        if not allowed.holds(values[name]):
            yield f"{name}={values[name]} is not possible: give {allowed.advice}"


def unknown(values: Mapping[str, Any], choices: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Which keys have a value that is none of their choices, each in a sentence that names them."""
    for name, allowed in choices.items():
        if values[name] not in allowed:
            yield f"{name}={values[name]} is unknown: choose one of {', '.join(allowed)}"


def unwritable(values: Any, names: Iterable[str]) -> Iterator[str]:
    """Which of the files that a command shall write cannot be written."""
    for name in names:
        path = getattr(values, name)
        try:
            if path:
                files.check_output(path, f"choose another {name}=")
        except ValueError as error:
            yield str(error)


@dataclass(frozen=True)
class Checked:
    """Keys that are what the tables say and fit together, or ValueError with the first of their `problems`."""

    RANGES: ClassVar[Mapping[str, Range | Form]] = {}
    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = {}
    WRITES: ClassVar[Sequence[str]] = ()  # keys of files that will be written; that they can be is looked at last

    def __post_init__(self) -> None:
        problem = next(chain(self.problems(), unwritable(self, self.WRITES)), "")
        if problem:
            raise ValueError(problem)

    def problems(self) -> Iterator[str]:
        """What is wrong, each in a sentence that names the fix. A dataclass with more keys adds its own to these."""
        yield from outside(vars(self), self.RANGES)
        yield from unknown(vars(self), self.CHOICES)


def listed(text: str) -> tuple[str, ...]:
    """The words of a list with commas between."""
    words = map(str.strip, text.split(","))
    return tuple(filter(None, words))


def integer(text: str) -> int:
    """A whole number in plain digits; anything else is a ValueError."""
    if not WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is no whole number in plain digits")
    return int(text)


def number(text: str) -> float:
    """A number in plain digits; anything else is a ValueError. There is one zero, without a sign."""
    if not NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is no number in plain digits")
    return float(text) + 0.0
