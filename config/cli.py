"""The command line: `[PRESET] key=value ...` becomes a checked `RunConfig`; the help teaches every key.

It knows the keys only from the dataclass. What a person got wrong is a `ValueError` whose sentence names the fix.
"""
from __future__ import annotations

import difflib
import inspect
import os
import re
from dataclasses import fields
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from config.files import HALF
from config.methods import METHODS
from config.presets import PRESETS, ROOT, under
from config.ranges import number, whole
from config.run_config import RunConfig

DEFAULT_PRESET = "toy"
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
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
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


def parse(argv: Sequence[str], command: str = "bash run_pipe.sh", kind: type[RunConfig] = RunConfig) -> RunConfig:
    """The configuration that `argv` asks for; `--help` prints the help of `command` and ends the program.

    `kind` may be a dataclass that adds keys, with values of their own for some of RunConfig's.
    """
    if any(word in ("-h", "--help", "help") for word in argv):
        print(help_text(command, kind))
        raise SystemExit(0)
    words = list(argv)
    keys = {option.name: option for option in options(kind)}
    preset = _preset(words.pop(0), keys) if words and "=" not in words[0] else PRESETS[DEFAULT_PRESET]
    given: dict[str, Any] = {}
    for word in words:
        key, value = _pair(word, keys)
        if key in given:
            raise ValueError(f"{key} is given twice: leave one of them out")
        given[key] = _read(keys[key], value)
    if given.get("models"):
        preset = under(preset, given["models"])
    taken = {other for key in given for other in TAKES_BACK.get(key, ())}
    if given.get("profile", keys["profile"].default) != "none":
        taken.update(TUNED)  # they suit this machine, not one that is emulated
    plain = RunConfig()
    chosen = {key: getattr(preset, key) for key in _names(RunConfig) if getattr(preset, key) != getattr(plain, key)}
    return kind(**{**{key: value for key, value in chosen.items() if key not in taken}, **given})


def options(kind: type[RunConfig] = RunConfig) -> Iterator[Option]:
    """Every key with its group and meaning, as the comments of the dataclass tell them; a command's own keys first."""
    found = {option.name: option for option in fields(kind)}
    for cls in kind.__mro__[:-1]:
        yield from _options(cls, found)


def _options(cls: type, found: dict[str, Any]) -> Iterator[Option]:
    group = ""
    for line in inspect.getsource(cls).splitlines():
        if title := re.fullmatch(r"    # (.+)", line):
            group = title[1]
        elif (entry := re.fullmatch(r"    (\w+): \w+ = .+?  # (.+)", line)) and entry[1] in found:
            option = found.pop(entry[1])
            yield Option(option.name, str(option.type), option.default, group, entry[2])


def help_text(command: str = "bash run_pipe.sh", kind: type[RunConfig] = RunConfig) -> str:
    """All that can be said at the command line."""
    lines = [f"usage: {command} [PRESET] [key=value ...]", "",
             f"PRESET names a model ({DEFAULT_PRESET} if left out). A value with spaces goes in quotes with its key.",
             "", "examples:", getattr(kind, "EXAMPLES", EXAMPLES).replace("bash run_pipe.sh", command), "",
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
    raise ValueError(f"{name} is no preset{_nearest(name, PRESETS)} (there are: {', '.join(PRESETS)}; a key is written "
                     "key=value, without spaces)")


def _pair(word: str, keys: Mapping[str, Option]) -> Sequence[str]:
    """Key and value of `key=value`."""
    key, equals, value = word.partition("=")
    if key in PRESETS and not equals:
        raise ValueError(f"the preset {key} is in the wrong place: it goes first and there is only one")
    if not equals and key.lstrip("-") not in keys:
        raise ValueError(f'"{word}" is not key=value: a value with spaces goes in quotes, as "prompt=Who are you?"')
    if not equals or not key:
        raise ValueError(f'"{word}" is not key=value: write {key.lstrip("-") or "key"}=VALUE, without spaces or dashes')
    if key.startswith("-"):
        raise ValueError(f"{key} has dashes: write {key.lstrip('-')}={value}")
    if HALF.search(value):
        raise ValueError(f"{key} has bytes that are not UTF-8: write it in UTF-8")
    if key not in keys:
        raise ValueError(f"{key} is no key{_nearest(key, keys)} (--help shows them all)")
    return key, value


def _read(option: Option, text: str) -> Any:
    """The value of a key, of the type that the dataclass names."""
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
        raise ValueError(f"{key} is empty: write what is asked behind the {key}=")
    return os.path.abspath(os.path.expanduser(text)) if key in PATHS and text else text


def _names(kind: type[RunConfig]) -> list[str]:
    return [option.name for option in fields(kind)]


def _nearest(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lstrip("-"), list(names), n=3, cutoff=0.5)
    return f", did you mean {' or '.join(near)}?" if near else ""


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(path: str) -> str:
    """A path as short as it can be said."""
    return os.path.relpath(path, ROOT) if path.startswith(str(ROOT)) else path or "no model folder"
