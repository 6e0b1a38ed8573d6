"""Parse the words of a command, `[PRESET] key=value ...`, into a dataclass, and check its values.

The dataclass defines the keys: a field is `name: TYPE = DEFAULT  # MEANING`, where TYPE is int, float, bool or str, and
a comment of its own begins each group. A mistake of the user raises a ValueError, with a sentence that names the fix.
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
from config.dialect import as_keys, is_question
from config.old_names import advice_for

Kind = TypeVar("Kind")
SIMILAR = 0.5  # difflib ratio from which a name is suggested
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
TITLE = re.compile(r"    # (.+)")  # the line of a dataclass that begins a group of keys
ENTRY = re.compile(r"    (\w+): \w+ = .+?  # (.+)")  # the line that defines a key
TRUTH = {"true": True, "1": True, "false": False, "0": False}
HELP = ("-h", "--help", "help")
ENDING = ".json"  # of a file in place of a preset
_source = lru_cache(maxsize=None)(inspect.getsource)  # which parses the whole file again for each class
HELP_WORDS = ("", *HELP)  # first words that request the help of a command with subcommands


# --- layers -----------------------------------------------------------------------------------------------------------

def opened(argv: Sequence[str]) -> list[str]:
    """Return the words of a command in full: `--key value` becomes a key, a question a `prompt=`, a file its content.

    The file {"preset": NAME, "keys": {KEY: VALUE}} stands in place of a preset.
    """
    argv = as_keys(argv)
    questions = [f"prompt={word}" for word in argv if is_question(word)]
    argv = [*(word for word in argv if not is_question(word)), *questions]  # a preset may follow its question
    if not argv or "=" in argv[0] or not argv[0].endswith(ENDING):
        return list(argv)
    found = files.read_json_file(os.path.expanduser(argv[0]), "name a preset, or a file that a plan has written")
    if not files.fits(found, {"preset": str, "keys": {str}}):
        raise ValueError(f"{argv[0]} is not a preset: name a file that a plan has written with preset=FILE")
    return with_defaults([found["preset"], *argv[1:]], found["keys"])


def preset_of(argv: Sequence[str]) -> str:
    """Return the preset with which a command begins, or an empty text."""
    named = bool(argv) and "=" not in argv[0] and not argv[0].startswith("-")
    return argv[0] if named else ""


def raw_values(argv: Sequence[str]) -> dict[str, str]:
    """Return the typed text of each key's value; empty for a word without `=`."""
    pairs = (word.partition("=") for word in argv)
    return {key: value for key, _, value in pairs}


def with_defaults(argv: Sequence[str], defaults: Mapping[str, str],
                  preset: str = "") -> list[str]:
    """Return the words of a command, with the default preset and the default values of keys that it does not give."""
    raw = raw_values(argv)
    added = [f"{key}={value}" for key, value in defaults.items() if key not in raw]
    first = [] if preset_of(argv) or not preset else [preset]
    return [*first, *argv, *added]


# --- a dataclass ------------------------------------------------------------------------------------------------------

class Option(NamedTuple):
    """One key with its entry in `--help`; `kind` is int, float, bool or str."""

    name: str
    kind: str
    default: Any
    group: str
    about: str


def read_keys(argv: Sequence[str], kind: type[Kind], command: str) -> Kind:
    """Create the dataclass `kind` from the typed words; the paths of `kind.PATHS` are relative to this folder."""
    if any(word in HELP for word in argv):
        print(help_of(kind, command))
        raise SystemExit(0)
    keys = {option.name: option for option in options(kind)}
    return kind(**parsed(argv, keys, getattr(kind, "PATHS", ())))


def help_of(kind: type, command: str) -> str:
    """Return the text of `--help` for a command without presets: its purpose, examples, and every key."""
    about = inspect.cleandoc(kind.__doc__ or "")
    return "\n".join([f"usage: {command} [key=value ...]", "", about, "", "examples:",
                      getattr(kind, "EXAMPLES", f"  {command}"), "", *key_lines(options(kind))])


def key_lines(keys: Iterable[Option]) -> list[str]:
    """Return the lines of the help that list every key with its default and meaning, group by group."""
    lines = ["keys, with their defaults:"]
    group = ""
    for option in keys:
        if option.group != group:
            group = option.group
            lines += ["", f"{group}:"]
        lines.append(f"  {option.name + '=' + written(option.default):<29} {option.about}")
    return lines


def options(kind: type) -> Iterator[Option]:
    """Yield every key with its group and meaning, from the comments of the dataclass; subclasses come first."""
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
    """Return the values of the typed keys in the types of the keys; those in `paths` become absolute."""
    found: dict[str, Any] = {}
    for word in words:
        key, text = _pair(word, keys)
        if key in found:
            raise ValueError(f"{key} is given twice: leave one of them out")
        value = _read(keys[key], text)
        found[key] = files.absolute(value) if key in paths and value else value
    return found


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the question whether the most similar name was meant, or an empty text if none is similar."""
    near = get_close_matches(word.lstrip("-"), list(names), n=1, cutoff=SIMILAR)
    return f"did you mean {near[0]}?" if near else ""


def check_name(name: str, names: Collection[str], kind: str) -> None:
    """Raise ValueError for a name that is not among `names`; `kind` is the noun for them."""
    if name not in names:
        raise ValueError(f"unknown {kind} {name}: {nearest(name, names) or 'choose one of ' + ', '.join(names)}")


def _pair(word: str, keys: Mapping[str, Option]) -> tuple[str, str]:
    """Split a word into key and value. Raises ValueError if it is not `key=value`, or the key is unknown."""
    key, equals, value = word.partition("=")
    name = key.lstrip("-")
    if not equals and name not in keys:
        raise ValueError(f'"{word}" is not key=value: put a value with spaces in quotes, as in "key=two words"')
    if not equals or not key:
        raise ValueError(f'"{word}" is not key=value: write {name or "key"}=VALUE, without spaces or dashes')
    if key.startswith("-"):
        raise ValueError(f"{key} has dashes: write {name}={value}")
    if files.HALF.search(value):
        raise ValueError(f"{key} has bytes that are not UTF-8: write it in UTF-8")
    if key not in keys:
        hint = advice_for(key, keys) or nearest(key, keys) or "--help shows them all"
        raise ValueError(f"unknown key {key}: {hint}")
    return key, value


def _read(option: Option, text: str) -> Any:
    """Convert a text to the type of the key. Raises ValueError if that is impossible."""
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

# Python itself would also accept 1_000, digits of other scripts, surrounding blanks, nan and inf
WHOLE = re.compile(r"-?[0-9]+")
POSITIVE = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
NUMBER = re.compile("-?" + POSITIVE)


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, and the special numbers `besides`, each with its meaning."""

    least: float
    most: float
    besides: Mapping[float, str] = field(default_factory=dict)

    def holds(self, value: float) -> bool:
        """Return whether the number is in the range; NaN never is."""
        return value in self.besides or self.least <= value <= self.most

    @property
    def advice(self) -> str:
        """The allowed values in words."""
        words = [f"{value} for {meaning}" for value, meaning in self.besides.items()]
        return " or ".join([*words, f"a number from {decimal(self.least)} to {decimal(self.most)}"])


class TextForm(NamedTuple):
    """Texts of one form: their pattern, their description, and the ranges of the numbers in the pattern's groups."""

    pattern: str
    advice: str
    ranges: Sequence[Range] = ()

    def holds(self, text: str) -> bool:
        found = re.fullmatch(self.pattern, text)
        return found is not None and all(
            group is None or allowed.holds(float(group)) for group, allowed in zip(found.groups(), self.ranges))


def decimal(value: float) -> str:
    """Format a number without an exponent."""
    return format(Decimal(str(value)), "f")


def outside(values: Mapping[str, Any], ranges: Mapping[str, Range | TextForm]) -> Iterator[str]:
    """Yield a sentence with the fix for each key with a value out of its range or form."""
    for name, allowed in ranges.items():
        if not allowed.holds(values[name]):
            yield f"{name}={values[name]} is not possible: give {allowed.advice}"


def unknown(values: Mapping[str, Any], choices: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a sentence with the choices for each key with a value that is not among them."""
    for name, allowed in choices.items():
        if values[name] not in allowed:
            yield f"{name}={values[name]} is unknown: choose one of {', '.join(allowed)}"


def unwritable(values: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each output file that cannot be written; `names` are the keys of these files."""
    for name in names:
        path = getattr(values, name)
        try:
            if path:
                files.check_output(path, f"choose another {name}=")
        except ValueError as error:
            yield str(error)


@dataclass(frozen=True)
class Checked:
    """Base class of checked keys: raises ValueError, on creation, with the first of its `problems`."""

    RANGES: ClassVar[Mapping[str, Range | TextForm]] = {}
    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = {}
    WRITES: ClassVar[Sequence[str]] = ()  # keys of output files, which are checked last

    def __post_init__(self) -> None:
        problem = next(chain(self.problems(), unwritable(self, self.WRITES)), "")
        if problem:
            raise ValueError(problem)

    def problems(self) -> Iterator[str]:
        """Yield the problems of the keys, one sentence each, with the fix. Subclasses add their own."""
        yield from outside(vars(self), self.RANGES)
        yield from unknown(vars(self), self.CHOICES)


def listed(text: str) -> tuple[str, ...]:
    """Split a comma-separated list; empty entries are ignored."""
    words = map(str.strip, text.split(","))
    return tuple(filter(None, words))


def integer(text: str) -> int:
    """Parse a whole number in plain digits. Raises ValueError for anything else."""
    if not WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number in plain digits")
    return int(text)


def number(text: str) -> float:
    """Parse a number in plain digits; -0 becomes 0. Raises ValueError for anything else."""
    if not NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a number in plain digits")
    return float(text) + 0.0
