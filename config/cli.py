"""The command line: `[PRESET] key=value ...` becomes a checked `RunConfig`; the help teaches every key.

It knows the keys only from the dataclass. What a person got wrong is a `ValueError` whose sentence names the fix.
"""
from __future__ import annotations

import inspect
import os
import re
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from config.files import HALF
from config.methods import METHODS
from config.presets import PRESETS, ROOT, under
from config.ranges import number, whole
from config.run_config import RunConfig

DEFAULT_PRESET = "toy"
COMMAND = "bash run_pipe.sh"
PATHS = ("model_dir", "base_dir", "eagle_dir", "draft_dir", "models", "question_file", "trace", "output",
         "data", "results", "hosts")
QUESTIONS = ("prompt", "prompt_ids", "question_file")
TUNED = ("min_probability", "expand_depth", "none_expand")  # what a preset chooses for its model alone
# A key that is given takes back what the preset says for these: they would mean something else beside it.
TAKES_BACK = {
    "model_dir": ("base_dir", "eagle_dir", "stages", *TUNED),
    "base_dir": ("model_dir", "eagle_dir", "stages", *TUNED),
    **dict.fromkeys(QUESTIONS, QUESTIONS),
}
REPLICATED = [method for method in METHODS.values() if method.target == "replicas"]
ALIKE, SIMILAR = 0.85, 0.5  # difflib ratios from which a name is surely, or perhaps, what was meant
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
TITLE = re.compile(r"    # (.+)")  # a line of the dataclass that begins a group of keys
ENTRY = re.compile(r"    (\w+): \w+ = .+?  # (.+)")  # and one that is a key
TRUTH = {"true": True, "1": True, "false": False, "0": False}
EXAMPLES = """\
  bash run_pipe.sh
  bash run_pipe.sh "prompt=What does a baker do?"
  bash run_pipe.sh toy pipeline_type=naive temperature=1 seed=7 output=answer.json
  bash run_pipe.sh stages=0+1+1+5+1 trace=timeline
  bash run_pipe.sh model_dir=FOLDER prompt_ids=1,306,626 ignore_eos=true"""


class Option(NamedTuple):
    """One key as the help shows it; `kind` is int, float, bool or str."""

    name: str
    kind: str
    default: Any
    group: str
    about: str


def parse(argv: Sequence[str], command: str = COMMAND, kind: type[RunConfig] = RunConfig) -> RunConfig:
    """The configuration that `argv` asks for: what was typed, over the preset, over the defaults of the keys.

    `kind` may be a dataclass that adds keys, with values of their own for some of RunConfig's. `--help` prints the help
    of `command` and ends the program.
    """
    if any(word in ("-h", "--help", "help") for word in argv):
        print(help_text(command, kind))
        raise SystemExit(0)
    keys = {option.name: option for option in options(kind)}
    named = bool(argv) and "=" not in argv[0]
    preset = _preset(argv[0], keys) if named else PRESETS[DEFAULT_PRESET]
    given = _given(argv[1:] if named else argv, keys)
    return kind(**{**_chosen(preset, given), **given})


def _given(words: Sequence[str], keys: Mapping[str, Option]) -> dict[str, Any]:
    """The values of the keys that were typed."""
    given: dict[str, Any] = {}
    for word in words:
        key, value = _pair(word, keys)
        if key in given:
            raise ValueError(f"{key} is given twice: leave one of them out")
        given[key] = _read(keys[key], value)
    return given


def _chosen(preset: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a preset chooses, without what the given keys take back."""
    if given.get("models"):
        preset = under(preset, given["models"])
    taken = {other for key in given for other in TAKES_BACK.get(key, ())}
    if given.get("profile", "none") != "none":
        taken.update(TUNED)  # they suit this machine, not one that is emulated
    if METHODS.get(given.get("pipeline_type", "")) in REPLICATED:
        taken.add("stages")  # a replica is the whole model, unless somebody says otherwise
    values, usual = vars(preset), vars(RunConfig())
    chosen = values.keys() - taken
    return {key: values[key] for key in chosen if values[key] != usual[key]}


def options(kind: type[RunConfig] = RunConfig) -> Iterator[Option]:
    """Every key with its group and meaning, as the comments of the dataclass tell them; a command's own keys first."""
    found = {option.name: option for option in fields(kind)}
    for cls in kind.__mro__[:-1]:
        yield from _options(cls, found)


def _options(cls: type, found: dict[str, Any]) -> Iterator[Option]:
    group = ""
    for line in inspect.getsource(cls).splitlines():
        title, entry = TITLE.fullmatch(line), ENTRY.fullmatch(line)
        if title:
            group = title[1]
        elif entry and entry[1] in found:
            option = found.pop(entry[1])
            kind = str(option.type)
            yield Option(option.name, kind, option.default, group, about=entry[2])


def help_text(command: str = COMMAND, kind: type[RunConfig] = RunConfig) -> str:
    """The text of `--help`: usage, presets, methods, and every key with its default and its meaning."""
    lines = [f"usage: {command} [PRESET] [key=value ...]", "",
             f"PRESET names a model ({DEFAULT_PRESET} if left out). A value with spaces goes in quotes with its key.",
             "", "examples:", getattr(kind, "EXAMPLES", EXAMPLES).replace(COMMAND, command), "",
             "presets:"]
    lines += [f"  {name:<12} {_shown(preset.base_dir)}, stages {preset.stages}" for name, preset in PRESETS.items()]
    lines += ["", "methods (pipeline_type):"]
    lines += [f"  {name:<12} {method.about}" for name, method in METHODS.items()]
    lines += ["", "keys, with the values they have when nothing else is said:"]
    group = ""
    for option in options(kind):
        if option.group != group:
            group = option.group
            lines += ["", f"{group}:"]
        lines.append(f"  {option.name + '=' + _written(option.default):<29} {option.about}")
    return "\n".join(lines)


def _preset(name: str, keys: Mapping[str, Option]) -> RunConfig:
    if name in PRESETS:
        return PRESETS[name]
    if name.lstrip("-") in keys:
        raise ValueError(f"{name} has no value: write {name.lstrip('-')}=VALUE, without spaces or dashes")
    meant = _nearest(name, PRESETS) or "a key is written key=value, without spaces"
    raise ValueError(f"unknown preset {name}: {meant} (the presets are {', '.join(PRESETS)})")


def _pair(word: str, keys: Mapping[str, Option]) -> tuple[str, str]:
    """Key and value of a word; raises ValueError if it is no `key=value`, or the key is unknown."""
    key, equals, value = word.partition("=")
    name = key.lstrip("-")
    if key in PRESETS and not equals:
        raise ValueError(f"the preset {key} is in the wrong place: it goes first and there is only one")
    if not equals and name not in keys:
        raise ValueError(f'"{word}" is not key=value: a value with spaces goes in quotes, as "prompt=Who are you?"')
    if not equals or not key:
        raise ValueError(f'"{word}" is not key=value: write {name or "key"}=VALUE, without spaces or dashes')
    if key.startswith("-"):
        raise ValueError(f"{key} has dashes: write {name}={value}")
    if HALF.search(value):
        raise ValueError(f"{key} has bytes that are not UTF-8: write it in UTF-8")
    if key not in keys:
        raise ValueError(f"unknown key {key}: {_nearest(key, keys) or '--help shows them all'}")
    return key, value


def _read(option: Option, text: str) -> Any:
    """What a text says as the value of a key, in the type of the key; raises ValueError if it says nothing of it."""
    key, kind = option.name, option.kind
    try:
        if kind == "bool":
            return TRUTH[text.lower()]
        if kind in ("int", "float"):
            return whole(text) if kind == "int" else number(text)
    except (ValueError, KeyError):
        raise ValueError(f'{key}={text} is not {KINDS[kind]}: write for example '
                         f'{key}={_written(option.default)}') from None
    if key in QUESTIONS and not text.strip():
        raise ValueError(f"{key} is empty: write the question behind {key}=")
    return os.path.abspath(os.path.expanduser(text)) if key in PATHS and text else text


def _nearest(word: str, names: Iterable[str]) -> str:
    """The question whether one of these names was meant; empty if none is like the word."""
    word, known = word.lstrip("-"), list(names)
    near = get_close_matches(word, known, cutoff=ALIKE) or get_close_matches(word, known, cutoff=SIMILAR)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(path: str) -> str:
    """A path as short as it can be said."""
    return os.path.relpath(path, ROOT) if path.startswith(str(ROOT)) else path or "no model folder"
