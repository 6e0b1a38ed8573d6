"""The command line of a run: `[PRESET] key=value ...` becomes a checked `RunConfig`; the help teaches every key.

It knows presets, and what a key takes back of one; the keys themselves it leaves to `keys.py`.
"""
from __future__ import annotations

import os
from typing import Any, Mapping, Sequence, TypeVar, overload

from config.command import CommandKeys, headless, needs_head, no_head
from config.files import absolute
from config.keys import HELP, Option, given, key_lines, nearest, opened, options
from config.methods import METHODS
from config.presets import PRESETS, ROOT, SMOLLM2, TOY_PRESET, under
from config.profiles import is_file
from config.ranges import listed
from config.run_config import RunConfig

Keys = TypeVar("Keys", bound=CommandKeys)
Names = Sequence[str]
Values = Mapping[str, Any]
DEFAULT_PRESET = TOY_PRESET  # of a command that brings no model
COMMAND = "bash run_pipe.sh"
PATHS = ("model_dir", "base_dir", "eagle_dir", "draft_dir", "models", "question_file", "trace", "output",
         "data", "results", "hosts", "traces", "measured", "preset", "write_hosts", "write_cluster")
QUESTIONS = ("prompt", "prompt_ids", "question_file")
TUNED = ("min_probability", "expand_depth", "ablate")  # what a preset chooses for its model alone
# A key that is given takes back what the preset says for these: they would mean something else beside it.
TAKES_BACK = {
    "model_dir": ("base_dir", "eagle_dir", "ssm", "stages", "draft", *TUNED),
    "base_dir": ("model_dir", "eagle_dir", "ssm", "stages", "draft", *TUNED),
    **dict.fromkeys(QUESTIONS, QUESTIONS),
}
# What a command that refuses a key of a run may have in its place.
INSTEAD = {"pipeline_type": "methods", "draft": "drafts", "temperature": "temperatures", "prompt_ids": "sets",
           "question_file": "sets"}
FORMER = {  # keys of earlier versions, and what to write
    **dict.fromkeys(("init_topk", "expand_topk", "stream_topk"), "write width=N"),
    **dict.fromkeys(("init_subseq_token", "expand_subseq_token", "stream_subseq_token"), "write subseq_token=N"),
    **{key: f"write ablate={key} where it was false" for key in ("expand", "none_expand", "score_order", "prune")},
    "stream_thrift": "write ablate=thrift where it was false", "tp_type": "write pipeline_type=tp or galaxy",
    **dict.fromkeys(("none_expand_size", "none_expand_depth", "stream_total_token"), "leave it out, it is fixed"),
    **dict.fromkeys(("master_addr", "master_port"), "write master=HOST:PORT"),
    "rate_mbps": "write wires=MBPS", "delay_ms": "write wires=,MS", "replica_stages": "write replicas=COPIESxSTAGES",
}
EXAMPLES = """\
  bash run_pipe.sh
  bash run_pipe.sh "prompt=What does a baker do?"
  bash run_pipe.sh toy pipeline_type=naive temperature=1 seed=7 output=answer.json
  bash run_pipe.sh stages=0+1+1+5+1 trace=timeline
  bash run_pipe.sh model_dir=FOLDER prompt_ids=1,306,626 ignore_eos=true"""


@overload
def parse(argv: Sequence[str], command: str = COMMAND, kind: None = None) -> RunConfig: ...


@overload
def parse(argv: Sequence[str], command: str = COMMAND, *, kind: type[Keys]) -> Keys: ...


def parse(argv: Sequence[str], command: str = COMMAND, kind: type[Any] | None = None) -> Any:
    """The configuration that `argv` asks for: what was typed, over the preset, over the defaults of the keys.

    `kind` are the keys of a command that has its own. `--help` prints the help of `command` and ends the program.
    """
    if any(word in HELP for word in argv):
        print(help_text(command, kind))
        raise SystemExit(0)
    argv = opened(argv)
    keys = {option.name: option for option in all_options(kind)}
    named = bool(argv) and "=" not in argv[0]
    preset = _preset(argv[0], keys) if named else PRESETS[DEFAULT_PRESET]
    typed = _given(argv[1:] if named else argv, keys)
    values = {**_chosen(preset, typed), **typed}
    if kind is None:
        config = RunConfig(**values)
        methods, drafts = (config.pipeline_type,), ()
    else:
        _check_refused(kind, typed, keys)
        config = kind.of(**values)
        methods, drafts = config.asked_methods, config.asked_drafts
    _check_drafts(config.run, methods, drafts, typed)
    return config


def all_options(kind: type[CommandKeys] | None) -> list[Option]:
    """Every key of a command: its own, and those of a run with the defaults that they have there."""
    if kind is None:
        return [*options(RunConfig)]
    found = [*options(kind)]
    for option in options(RunConfig):
        default = kind.USUAL.get(option.name, option.default)
        found.append(option._replace(default=default))
    return found


def _check_refused(kind: type[CommandKeys], typed: Values, keys: Mapping[str, Option]) -> None:
    """Refuse keys of a run that a command has no use for."""
    for key in kind.REFUSED:
        if key in typed:
            instead = INSTEAD.get(key, "")
            fix = f"write {instead}=" if instead in keys and instead not in kind.REFUSED else "leave it out"
            raise ValueError(f"{key} is of a single run: {fix}")


def _check_drafts(run: RunConfig, methods: Names, drafts: Names, typed: Values) -> None:
    """Refuse a draft that was named beside a method with another one, and small models that nobody asks."""
    own = [name for name in methods if METHODS[name].draft == "ssm"]
    if own and not drafts and typed.get("draft", "ssm") != "ssm":
        raise ValueError(f"{own[0]} drafts with the small models of ssm=DIR,DIR: leave draft={typed['draft']} out")
    guesses = any(METHODS[name].draft == "eagle" for name in methods)
    if guesses and needs_head(typed.get("draft", "")) and headless(run):
        raise ValueError(no_head(run))
    named = "ssm" in (drafts or run.sources)
    if "ssm" in typed and not own and not named:
        raise ValueError(f"ssm={typed['ssm']} is ignored by pipeline_type={run.pipeline_type} with "
                         f"draft={run.draft}: add pipeline_type=specinfer or draft=ssm, or leave it out")
    guess = any(METHODS[name].draft != "none" for name in methods)
    if run.ssm_ranks and not own and not (named and guess):
        raise ValueError(f"ssm_ranks=true has no meaning for {', '.join(methods)} with draft={run.draft}, where no "
                         "small models draft: take pipeline_type=specinfer, or leave it out")


def _given(words: Sequence[str], keys: Mapping[str, Option]) -> dict[str, Any]:
    """The values of the keys that were typed behind the preset, if there was one."""
    for word in words:
        if word in PRESETS:
            raise ValueError(f"the preset {word} is in the wrong place: it goes first and there is only one")
        name = word.partition("=")[0].lstrip("-")
        if name in FORMER:
            raise ValueError(f"there is no key {name} any more: {FORMER[name]}")
    found = given(words, keys, PATHS)
    if "ssm" in found:
        folders = map(absolute, listed(found["ssm"]))
        found["ssm"] = ",".join(folders) or found["ssm"]
    if is_file(found.get("profile", "")):
        found["profile"] = absolute(found["profile"])
    for key in QUESTIONS:
        if key in found and not found[key].strip():
            raise ValueError(f"{key} is empty: write the question behind {key}=")
    return found


def _chosen(preset: RunConfig, typed: Mapping[str, Any]) -> dict[str, Any]:
    """What a preset chooses, without what the given keys take back."""
    if typed.get("models"):
        preset = under(preset, typed["models"])
    taken = {other for key in typed for other in TAKES_BACK.get(key, ())}
    if typed.get("profile", "none") != "none":
        taken.update(TUNED)  # they suit this machine, not one that is emulated
    values, usual = vars(preset), vars(RunConfig())
    chosen = values.keys() - taken
    return {key: values[key] for key in chosen if values[key] != usual[key]}


def help_text(command: str = COMMAND, kind: type[CommandKeys] | None = None) -> str:
    """The text of `--help`: usage, presets, methods, and every key with its default and its meaning."""
    lines = [f"usage: {command} [PRESET] [key=value ...]", "",
             f"PRESET names a model (if left out: {SMOLLM2}, or {DEFAULT_PRESET} where that cannot be fetched).",
             "A value with spaces goes in quotes with its key.",
             "", "examples:", getattr(kind, "EXAMPLES", EXAMPLES).replace(COMMAND, command), "",
             "presets:"]
    lines += [f"  {name:<12} {_shown(preset.base_dir)}, stages {preset.stages}" for name, preset in PRESETS.items()]
    lines += ["", "methods (pipeline_type):"]
    lines += [f"  {name:<12} {method.about}" for name, method in METHODS.items()]
    refused = getattr(kind, "REFUSED", ())
    keys = [option for option in all_options(kind) if option.name not in refused]
    return "\n".join([*lines, "", *key_lines(keys)])


def _preset(name: str, keys: Mapping[str, Option]) -> RunConfig:
    if name in PRESETS:
        return PRESETS[name]
    if name.lstrip("-") in keys:
        raise ValueError(f"{name} has no value: write {name.lstrip('-')}=VALUE, without spaces or dashes")
    meant = nearest(name, PRESETS) or "a key is written key=value, without spaces"
    raise ValueError(f"unknown preset {name}: {meant} (the presets are {', '.join(PRESETS)})")


def _shown(path: str) -> str:
    """A path as short as it can be said."""
    return os.path.relpath(path, ROOT) if path.startswith(str(ROOT)) else path or "no model folder"
