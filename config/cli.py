"""The command line: parse `[PRESET] key=value ...` into a checked `RunConfig` or a command's own `CommandKeys`.

This module knows the presets, the preset values that a given key overrides, and the names of drafts. `keys.py` parses
single words, `run_config.py` defines the options of a run.
"""
from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Collection, Iterator, Mapping, NamedTuple, Sequence, TypeVar, overload

from config.console import run
from config.drafts import ALONE, FOLDERS, HEAD_KEY, MODEL_KEY, MODELS_KEY, reads
from config.files import absolute
from config.keys import HELP, BoardKeys, Option, facts_by_name, in_full, key_lines, nearest, options, parsed
from config.methods import METHODS
from config.old_names import old_value_advice
from config.presets import PRESETS, ROOT, SMOLLM2, TOY_PRESET, under
from config.run_config import QUESTION_KEYS, RunConfig
from config.schema.untrusted import read_json
from config.values import listed

Keys = TypeVar("Keys", bound="CommandKeys")
Values = Mapping[str, Any]
DEFAULT_PRESET = TOY_PRESET  # where neither the words nor the caller name a preset
RUN_PIPE = os.environ.get("FLOWSPEC_RUN", "bash run_pipe.sh")  # the command that runs a pipeline, as messages name it
EXAMPLE_COMMAND = re.compile(r"bash run_\w+\.sh|python3 -m scripts\.\w+")  # as examples name it
SURE_SIMILARITY = 0.8  # of a word to a preset's name, from which it is a mistyped one, and no question
# The keys that some commands have in place of a key of a run that they refuse.
REPLACEMENT_KEYS = {"pipeline_type": "methods", "draft": "drafts", "temperature": "temperatures", "prompt_ids": "sets",
           "question_file": "sets"}
EXAMPLES = """\
  bash run_pipe.sh
  bash run_pipe.sh "What does a baker do?"
  cat question.txt | bash run_pipe.sh toy
  bash run_pipe.sh toy pipeline_type=naive temperature=1 seed=7 output=answer.json
  bash run_pipe.sh toy stages=0+1+1+5+1 trace=timeline
  bash run_pipe.sh model_dir=FOLDER prompt_ids=1,306,626 ignore_eos=true"""


# --- drafts -----------------------------------------------------------------------------------------------------------

class NamedDraft(NamedTuple):
    """A draft: its kind, a value of the key `draft`, and the folders of its head and of its model, if given."""

    kind: str
    head: str = ""
    model: str = ""


def parts(name: str) -> NamedDraft:
    """Parse the name of a draft, such as `model:DIR`. Raises ValueError for a folder that no source can use."""
    kind, folder_by_key = _with_folders(name, ALONE)
    return NamedDraft(kind, folder_by_key.get(HEAD_KEY, ""), folder_by_key.get(MODEL_KEY, ""))


def _with_folders(name: str, sources: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return a draft's kind, and the folders that its name gives to some of these sources, by the keys of folders."""
    source_kinds, folder_by_key = [], {}
    for part in name.split("+"):
        kind, colon, folder = part.partition(":")
        source_kinds.append(kind)
        if colon and kind not in sources:
            advice = old_value_advice("draft", kind) or f"write {kind}"
            raise ValueError(f"{part} names a folder, but only {', '.join(sources)} take one here: {advice}")
        if colon and not folder.strip():
            raise ValueError(f"{part} names no folder: write {kind}:DIR, or only {kind}")
        if colon:
            folder_by_key[FOLDERS[kind]] = _absolute_folder(folder) if kind in ALONE else folder

    return "+".join(source_kinds), folder_by_key


def _absolute_folder(folder: str) -> str:
    """Return the absolute path of a folder; the bundled models are found from every working directory."""
    bundled_folder = ROOT / folder
    if folder.startswith("toy/") and not os.path.isdir(folder) and bundled_folder.is_dir():
        return str(bundled_folder)
    return absolute(folder)


def headless(config: RunConfig) -> bool:
    """Return whether the model has no draft head, neither in rank 0's part of a split nor given for a new split."""
    if not config.model_dir:
        config_file = Path(config.base_dir or os.devnull) / "config.json"
        # layers that predict further tokens serve as a head
        has_layers = config_file.is_file() and read_json(config_file).get("num_nextn_predict_layers")
        return not config.eagle_dir and config_file.parent.is_dir() and not has_layers

    part_folder = config.first_folder  # exists on rank 0's board only
    return part_folder.is_dir() and not (part_folder / "eagle" / "config.json").is_file()


def needs_head(draft: str) -> bool:
    """Return whether the draft of this name needs the draft head of the split."""
    return HEAD_KEY in reads(draft)


def other_head(config: RunConfig) -> str:
    """Return the remedy that gives the model another draft head."""
    return "split the model again with --eagle DIR" if config.model_dir else "add eagle_dir=DIR"


def no_head(config: RunConfig) -> str:
    """Return the error message for a missing draft head, with the remedies."""
    model = config.model_dir or config.base_dir
    return (f"{model} has no draft head: take draft=suffix, which needs none, draft=model or draft=none, or "
            f"{other_head(config)}")


# --- keys -------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class CommandKeys(BoardKeys):
    """Base class of the keys of a command, in addition to those of a run; `--help` prints `EXAMPLES`."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}  # this command's defaults of keys of a run, where they differ
    UNSUPPORTED: ClassVar[Sequence[str]] = ()  # keys of a run that this command does not accept
    COMPARES: ClassVar[bool] = True  # whether it names its methods and drafts itself, so that they have no defaults

    run: RunConfig

    @classmethod
    def of(cls: type[Keys], **values: Any) -> Keys:
        """Create keys from these values and the defaults; the run's method is among `methods`, preferably drafting."""
        command_names = {key.name for key in fields(cls)}
        command_values = {name: values.pop(name) for name in command_names & values.keys()}

        method_names = listed(command_values.get("methods", getattr(cls, "methods", "")))
        known_methods = [name for name in method_names if name in METHODS]
        if known_methods and RunConfig.pipeline_type not in known_methods:
            drafting_methods = [name for name in known_methods if METHODS[name].draft != "none"]
            values = {"pipeline_type": (drafting_methods or known_methods)[0], **values}

        return cls(run=RunConfig(**{**cls.DEFAULTS, **values}), **command_values)

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The names of the methods to run; unknown ones are not refused yet."""
        return (self.run.pipeline_type,)

    @property
    def known_methods(self) -> tuple[str, ...]:
        """The chosen methods that exist."""
        return tuple(name for name in self.chosen_methods if name in METHODS)

    @property
    def asked_drafts(self) -> tuple[str, ...]:
        """The drafts that the command may run in addition to or instead of the key `draft`; empty: only that one."""
        return ()

    def method_problems(self) -> Iterator[str]:
        """Yield the problems of a run with each of the methods."""
        for method in self.known_methods:
            try:
                replace(self.run, pipeline_type=method)
            except ValueError as error:
                yield str(error)


def flat(config: CommandKeys | RunConfig) -> dict[str, Any]:
    """Return the values of all keys, including those of the run."""
    command_values = {key: value for key, value in vars(config).items() if key != "run"}
    return {**vars(config.run), **command_values}


# --- words ------------------------------------------------------------------------------------------------------------

def with_bare_question(argv: Sequence[str]) -> list[str]:
    """Return the words with those that are neither preset, path nor key as the question, in their order.

    A single word that is nearly a preset, or a key without a value, stays, and is refused; so do words beside a key
    with a question.
    """
    words = in_full(argv)
    if any(word.partition("=")[0] in QUESTION_KEYS for word in words):
        return words

    bare_words = [word for word in words if not ("=" in word or "/" in word or word.startswith("-") or word in PRESETS
                                                 or word in HELP or word.endswith(".json"))]
    first_word = bare_words[0] if bare_words else ""
    is_mistake = nearest(first_word, PRESETS, SURE_SIMILARITY) and first_word == words[0]
    if not bare_words or is_mistake or len(bare_words) == 1 and first_word in facts_by_name(RunConfig):
        return words
    return [*(word for word in words if word not in bare_words), f"prompt={' '.join(bare_words)}"]


@overload
def parse(argv: Sequence[str], command: str = RUN_PIPE, keys_class: None = None) -> RunConfig: ...


@overload
def parse(argv: Sequence[str], command: str = RUN_PIPE, *, keys_class: type[Keys]) -> Keys: ...


def parse(argv: Sequence[str], command: str = RUN_PIPE, keys_class: type[Any] | None = None) -> Any:
    """Parse the words of a command over its preset and the defaults; `keys_class` is that of a command's own keys."""
    if any(word in HELP for word in argv):
        print(help_text(command, keys_class, shows_all="all" in argv))
        raise SystemExit(0)

    # words
    argv = in_full(argv)
    keys = {option.name: option for option in all_options(keys_class)}
    has_preset = bool(argv) and "=" not in argv[0]
    preset = _preset(argv[0], keys) if has_preset else PRESETS[DEFAULT_PRESET]
    typed_values = _parsed(argv[1:] if has_preset else argv, keys)

    # configuration
    merged_values = {**_preset_values(preset, typed_values), **typed_values}
    if keys_class is None:
        config, draft_names = RunConfig(**merged_values), ()
    else:
        _check_refused(keys_class, typed_values, keys)
        config = keys_class.of(**merged_values)
        draft_names = config.asked_drafts
    _check_drafts(config.run, config.known_methods, draft_names, typed_values)
    return config


def all_options(keys_class: type[CommandKeys] | None) -> list[Option]:
    """Return every key of a command: its own, and those of a run with the command's defaults."""
    if keys_class is None:
        return [*options(RunConfig)]
    command_options = [*options(keys_class)]
    for option in options(RunConfig):
        default = keys_class.DEFAULTS.get(option.name, option.default)
        command_options.append(option._replace(default=default))
    return command_options


def _check_refused(keys_class: type[CommandKeys], typed_values: Values, keys: Mapping[str, Option]) -> None:
    """Raise ValueError for keys of a run that the command does not accept."""
    for name in keys_class.UNSUPPORTED:
        if name in typed_values:
            replacement = REPLACEMENT_KEYS.get(name, "")
            has_replacement = replacement in keys and replacement not in keys_class.UNSUPPORTED
            fix = f"write {replacement}=" if has_replacement else "leave it out"
            raise ValueError(f"{name} is a key of single runs: {fix}")


def _check_drafts(run: RunConfig, methods: Sequence[str], draft_names: Sequence[str], typed_values: Values) -> None:
    """Raise ValueError for a draft that the method does not use, and for small models or copies that nothing uses."""
    draft_kinds, targets = ({getattr(METHODS[name], part) for name in methods} for part in ("draft", "target"))
    ssm_methods = [name for name in methods if METHODS[name].draft == "ssm"]
    if ssm_methods and not draft_names and typed_values.get("draft", "ssm") != "ssm":
        raise ValueError(f"{ssm_methods[0]} drafts with the small models of ssm=DIR,DIR: leave "
                         f"draft={typed_values['draft']} out")

    if "eagle" in draft_kinds and needs_head(typed_values.get("draft", "")) and headless(run):
        raise ValueError(no_head(run))

    reads_small_models = MODELS_KEY in reads("+".join(draft_names or run.sources))
    if "ssm" in typed_values and not ssm_methods and not reads_small_models:
        raise ValueError(f"ssm={typed_values['ssm']} is ignored by pipeline_type={run.pipeline_type} with "
                         f"draft={run.draft}: add pipeline_type=specinfer or draft=ssm, or leave it out")

    if run.replicas != RunConfig.replicas and "replicas" not in targets:
        raise ValueError(f"replicas={run.replicas} is ignored by {', '.join(methods)}: take pipeline_type=dsi, or "
                         "leave it out")


def _parsed(words: Sequence[str], keys: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values of the typed keys, without the preset."""
    for word in words:
        if word in PRESETS:
            raise ValueError(f"the preset {word} is in the wrong place: write one preset, before all keys")

    values = parsed(words, keys)
    draft, folder_by_key = _with_folders(values.get("draft", ""), FOLDERS)
    for key in folder_by_key.keys() & values:
        raise ValueError(f"draft={values['draft']} and {key}={values[key]} both name folders: give one of them")
    if folder_by_key:
        values = {**values, **folder_by_key, "draft": draft}
    if "ssm" in values:
        folders = map(absolute, listed(values["ssm"]))
        values["ssm"] = ",".join(folders) or values["ssm"]
    for name in QUESTION_KEYS:
        if name in values and not values[name].strip():
            raise ValueError(f"{name} is empty: write the question after {name}=")
    return values


def _preset_values(preset: RunConfig, typed_values: Values) -> dict[str, Any]:
    """Return the values that a preset sets, without those that the typed keys discard."""
    if typed_values.get("models"):
        preset = under(preset, typed_values["models"])
    discarding_keys = [key for key, value in typed_values.items() if value != "none"]  # profile=none discards nothing
    preset_values, default_values = vars(preset), vars(RunConfig())

    kept_keys = [key for key, key_facts in facts_by_name(RunConfig).items()
                 if not set(key_facts.discarded_by).intersection(discarding_keys)]
    return {key: preset_values[key] for key in kept_keys if preset_values[key] != default_values[key]}


def help_text(command: str = RUN_PIPE, keys_class: type[CommandKeys] | None = None, shows_all: bool = True) -> str:
    """Return the text of `--help`: usage, presets, methods, and keys with their defaults and meanings.

    Groups of keys that few people need are left out unless `shows_all`.
    """
    lines = [f"usage: {command} [PRESET] [key=value ...]", "",
             f"PRESET names a model (default: {SMOLLM2}, or {DEFAULT_PRESET} if that cannot be downloaded).",
             "Words that are neither preset nor key are the question. Quote a key with its value if that has spaces.",
             "", "examples:", EXAMPLE_COMMAND.sub(command, getattr(keys_class, "EXAMPLES", EXAMPLES)), "",
             "presets:"]
    name_width = max(map(len, PRESETS))
    lines += [f"  {name:<{name_width}} {shown_path(preset.base_dir)}, stages {preset.stages}"
              for name, preset in PRESETS.items()]
    lines += ["", "methods (pipeline_type):"]
    lines += [f"  {name:<12} {method.about}" for name, method in METHODS.items()]

    refused_names = getattr(keys_class, "UNSUPPORTED", ())
    all_keys = [option for option in all_options(keys_class) if option.name not in refused_names]
    shown_keys = [option for option in all_keys if shows_all or not option.is_rare]
    lines += ["", *key_lines(shown_keys)]
    num_left_out = len(all_keys) - len(shown_keys)
    if num_left_out:
        lines += ["", f"{num_left_out} more keys, of trees and segments: {command} --help all"]
    return "\n".join(lines)


def _preset(name: str, keys: Mapping[str, Option]) -> RunConfig:
    if name in PRESETS:
        return PRESETS[name]
    if name.lstrip("-") in keys:
        raise ValueError(f"{name} has no value: write {name.lstrip('-')}=VALUE, without spaces")
    suggestion = nearest(name, PRESETS) or f"write a key as key=value, and a question of one word as prompt={name}"
    if name.endswith(".json"):
        suggestion = "files of presets are not read: write their keys as key=value"
    raise ValueError(f"unknown preset {name}: {suggestion} (the presets are {', '.join(PRESETS)})")


def shown_path(path: str) -> str:
    """Return a path for display, relative to the repository if it lies there."""
    return os.path.relpath(path, ROOT) if path.startswith(str(ROOT)) else path or "no model folder"


def main(argv: Sequence[str]) -> int:
    """Check the words of a run, for shell scripts; raises ValueError for a wrong one."""
    parse(argv)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
