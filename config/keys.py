"""Parse the words of a command, `[PRESET] key=value ...`, into a dataclass, and check its values.

The dataclass defines the keys: a field is `name: TYPE = key(DEFAULT, MEANING, ALLOWED)`, where TYPE is int, float, bool
or str. Whatever else is true of the key stands there, too, as `KeyFacts`. A mistake of the user raises a ValueError,
with a sentence that names the fix.
"""
from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import chain
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, NamedTuple, Sequence, TypeVar

from config import files
from config.dialect import as_keys, is_question
from config.old_names import advice_for
from config.values import Allowed, TextForm, integer, number

Config = TypeVar("Config")
MIN_SIMILARITY = 0.5  # difflib ratio from which a name is suggested
TYPE_NOUNS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
LOCAL, SHARED = "local", "shared"  # scopes of a key, see `KeyFacts`
TRUTH = {"true": True, "1": True, "false": False, "0": False}
HELP = ("-h", "--help", "help")
HELP_WORDS = ("", *HELP)  # first words that request the help of a command with subcommands


# --- words ------------------------------------------------------------------------------------------------------------

def in_full(argv: Sequence[str]) -> list[str]:
    """Return the words of a command in full: `--key value` becomes a key, a question a `prompt=`."""
    words = as_keys(argv)
    questions = [f"prompt={word}" for word in words if is_question(word)]
    return [*(word for word in words if not is_question(word)), *questions]  # a preset may follow its question


def preset_of(argv: Sequence[str]) -> str:
    """Return the preset with which a command begins, or an empty text."""
    has_preset = bool(argv) and "=" not in argv[0] and not argv[0].startswith("-")
    return argv[0] if has_preset else ""


def raw_values(argv: Sequence[str]) -> dict[str, str]:
    """Return the typed text of each key's value; empty for a word without `=`."""
    pairs = (word.partition("=") for word in argv)
    return {key_name: raw_value for key_name, _, raw_value in pairs}


def with_defaults(argv: Sequence[str], defaults: Mapping[str, str], preset: str = "") -> list[str]:
    """Return the words of a command, with the default preset and the default values of keys that it does not give."""
    typed_keys = raw_values(argv)
    default_words = [f"{name}={value}" for name, value in defaults.items() if name not in typed_keys]
    preset_words = [] if preset_of(argv) or not preset else [preset]
    return [*preset_words, *argv, *default_words]


# --- a dataclass ------------------------------------------------------------------------------------------------------

class KeyFacts(NamedTuple):
    """All that is true of one key besides its type and its default."""

    about: str  # its meaning, for `--help`
    allowed: Allowed | None = None  # its values; None: all of its type
    heading: str = ""  # begins a new group of keys in `--help`
    is_rare: bool = False  # of a key with a heading: only `--help all` lists its group
    # LOCAL: of one board, or of rank 0, which gets the requests. SHARED: all boards must agree, and a worker takes the
    # value of rank 0 unless the key names a file. Empty: of a command that runs on one machine.
    scope: str = ""
    per_answer: bool = False  # each answer of a running pipeline may have another value
    names_file: bool | Callable[[str], bool] = False  # which values are paths of files or folders, to be made absolute
    is_output: bool = False  # it names a file that the command writes
    discarded_by: Sequence[str] = ()  # typed keys that discard a preset's value of this key, which belongs to theirs
    divides_model: bool = False  # it says how a model is divided, so that one machine has stages, too
    sizes_tree: bool = False  # of trees that `streaming` does not draft: a command that gives it runs `continuous`
    emulates: bool = False  # only an emulated cluster may have another value than the default


def key(default: Config, about: str, allowed: Allowed | None = None, **other_facts: Any) -> Config:
    """Return a field of a dataclass for one key: its default, and the `KeyFacts` about it."""
    return field(default=default, metadata={"facts": KeyFacts(about, allowed, **other_facts)})


def local_key(default: Config, about: str, allowed: Allowed | None = None, **other_facts: Any) -> Config:
    """Return a key in which boards may differ."""
    return key(default, about, allowed, scope=LOCAL, **other_facts)


def shared_key(default: Config, about: str, allowed: Allowed | None = None, **other_facts: Any) -> Config:
    """Return a key in which all boards must agree."""
    return key(default, about, allowed, scope=SHARED, **other_facts)


def facts_by_name(config_class: type) -> dict[str, KeyFacts]:
    """Return the facts of each key of the dataclass."""
    return {key_field.name: key_field.metadata["facts"] for key_field in fields(config_class) if key_field.metadata}


def keys_with(config_class: type, fact: str, value: Any = True) -> frozenset[str]:
    """Return the names of the keys of the dataclass that have this value of a fact of `KeyFacts`."""
    return frozenset(name for name, key_facts in facts_by_name(config_class).items()
                     if getattr(key_facts, fact) == value)


class Option(NamedTuple):
    """One key of a command; `type_name` is int, float, bool or str."""

    name: str
    type_name: str
    default: Any
    group: str  # its heading in `--help`
    is_rare: bool  # whether only `--help all` lists the group
    facts: KeyFacts


def read_keys(argv: Sequence[str], config_class: type[Config], command: str) -> Config:
    """Create a dataclass from the typed words, or print its help and end."""
    if any(word in HELP for word in argv):
        print(help_of(config_class, command))
        raise SystemExit(0)
    keys_by_name = {option.name: option for option in options(config_class)}
    return config_class(**parsed(argv, keys_by_name))


def help_of(config_class: type, command: str) -> str:
    """Return the text of `--help` for a command without presets: its purpose, examples, and every key."""
    about = inspect.cleandoc(config_class.__doc__ or "")
    return "\n".join([f"usage: {command} [key=value ...]", "", about, "", "examples:",
                      getattr(config_class, "EXAMPLES", f"  {command}"), "", *key_lines(options(config_class))])


def key_lines(keys: Iterable[Option]) -> list[str]:
    """Return the lines of the help that list every key with its default and meaning, group by group."""
    help_lines = ["keys, with their defaults:"]
    last_group = ""

    for option in keys:
        if option.group != last_group:
            last_group = option.group
            help_lines += ["", f"{option.group}:"]
        help_lines.append(f"  {option.name + '=' + written(option.default):<29} {option.facts.about}")

    return help_lines


def options(config_class: type) -> Iterator[Option]:
    """Yield every key of the dataclass with its group and facts; those of subclasses come first."""
    key_fields = {key_field.name: key_field for key_field in fields(config_class) if key_field.metadata}

    for base_class in config_class.__mro__:
        group, is_rare = "", False
        for key_name in vars(base_class).get("__annotations__", ()):
            if key_name in key_fields:
                key_field = key_fields.pop(key_name)
                key_facts = key_field.metadata["facts"]
                if key_facts.heading:
                    group, is_rare = key_facts.heading, key_facts.is_rare
                yield Option(key_name, str(key_field.type), key_field.default, group, is_rare, key_facts)


def allowed_values(config_class: type) -> dict[str, Allowed]:
    """Return the allowed values of each key of the dataclass that does not take all values."""
    return {name: key_facts.allowed for name, key_facts in facts_by_name(config_class).items()
            if key_facts.allowed is not None}


def parsed(words: Sequence[str], keys_by_name: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values of the typed keys in the types of the keys; paths, from this folder, become absolute."""
    key_values: dict[str, Any] = {}
    for word in words:
        key_name, raw_value = _pair(word, keys_by_name)
        if key_name in key_values:
            raise ValueError(f"{key_name} is given twice: leave one of them out")

        value, names_file = _read(keys_by_name[key_name], raw_value), keys_by_name[key_name].facts.names_file
        is_path = value and (names_file(value) if callable(names_file) else names_file)
        key_values[key_name] = files.absolute(value) if is_path else value
    return key_values


def nearest(word: str, names: Iterable[str], min_similarity: float = MIN_SIMILARITY) -> str:
    """Return the question whether the most similar name was meant, or an empty text if none is similar."""
    close_names = get_close_matches(word.lstrip("-").lower(), list(names), n=1, cutoff=min_similarity)
    return f"did you mean {close_names[0]}?" if close_names else ""


def check_name(name: str, names: Collection[str], noun: str) -> None:
    """Raise ValueError for a name that is not among `names`; `noun` says what they name."""
    if name not in names:
        raise ValueError(f"unknown {noun} {name}: {nearest(name, names) or 'choose one of ' + ', '.join(names)}")


def _pair(word: str, keys_by_name: Mapping[str, Option]) -> tuple[str, str]:
    """Split a word into key and value. Raises ValueError if it is not `key=value`, or the key is unknown."""
    key_name, equals, raw_value = word.partition("=")
    bare_name = key_name.lstrip("-")

    if not equals and bare_name not in keys_by_name:
        raise ValueError(f'"{word}" is not key=value: put a value with spaces in quotes, as in "key=two words"')
    if not equals or not key_name:
        raise ValueError(f'"{word}" is not key=value: write {bare_name or "key"}=VALUE, without spaces or dashes')
    if key_name.startswith("-"):
        raise ValueError(f"{key_name} has dashes: write {bare_name}={raw_value}")
    if files.SURROGATE.search(raw_value):
        raise ValueError(f"{key_name} has bytes that are not UTF-8: write it in UTF-8")

    if key_name not in keys_by_name:
        hint = advice_for(key_name, keys_by_name) or nearest(key_name, keys_by_name) or "--help shows them all"
        raise ValueError(f"unknown key {key_name}: {hint}")
    return key_name, raw_value


def _read(option: Option, raw_value: str) -> Any:
    """Convert a text to the type of the key. Raises ValueError if that is impossible."""
    try:
        return PARSERS[option.type_name](raw_value)
    except (ValueError, KeyError):
        raise ValueError(f"{option.name}={raw_value} is not {TYPE_NOUNS[option.type_name]}: write for example "
                         f"{option.name}={written(option.default)}") from None


def _truth(raw_value: str) -> bool:
    return TRUTH[raw_value.lower()]


PARSERS: Mapping[str, Callable[[str], Any]] = {"int": integer, "float": number, "bool": _truth, "str": str}


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- checks -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Checked:
    """Base class of checked keys: raises ValueError, on creation, with the first of its `problems`."""

    def __post_init__(self) -> None:
        problem = next(chain(self.problems(), self._unwritable_files()), "")
        if problem:
            raise ValueError(problem)

    def problems(self) -> Iterator[str]:
        """Yield the problems of the keys, one sentence each, with the fix. Subclasses add their own."""
        for key_name, allowed in allowed_values(type(self)).items():
            value = getattr(self, key_name)
            is_given = value != "" or not isinstance(allowed, TextForm)
            if is_given and not allowed.holds(value):
                yield allowed.refusal(key_name, value)

    def _unwritable_files(self) -> Iterator[str]:
        """Yield a sentence for each output file that cannot be written; they are checked last."""
        for key_name in sorted(keys_with(type(self), "is_output")):
            path = getattr(self, key_name)
            try:
                if path:
                    files.check_output(path, f"choose another {key_name}=")
            except ValueError as error:
                yield str(error)


@dataclass(frozen=True)
class BoardKeys(Checked):
    """Base class of the keys of commands that run on several boards: each of these keys has a scope."""

    def __init_subclass__(cls) -> None:
        for name, value in vars(cls).items():
            if getattr(value, "metadata", {}) and not value.metadata["facts"].scope:
                raise TypeError(f"{cls.__name__}.{name} has no scope: declare it with shared_key or local_key")
