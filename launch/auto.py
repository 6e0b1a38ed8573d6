"""`pipeline_type=auto`: a plan chooses the method at the first start, and later starts use its choice again.

A plan measures this machine, or takes the given profile. Plans are the work of a laboratory: a program that may make
them gives this module its `planner` (`eval/plan/auto.py`). The choice is stored in the user's cache, under a hash of
everything that it depends on: model, drafts, split, machine or profile, and the code.
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, Callable, Mapping, Optional, Type

import torch

from cluster.agreement import code_version
from cluster.board import is_one_rank
from config.cli import CommandKeys, parse
from config.console import Words, say
from config.drafts import MODEL_KEY, MODELS_KEY, reads
from config.files import cache_folder, fits, open_lock, read_json_file, write_json
from config.keys import preset_of, raw_values
from config.methods import METHODS
from config.presets import absent
from config.profiles import is_file
from config.run_config import DRAWN, RunConfig
from config.schema.untrusted import one_line
from launch.prepare import open_part
from model.weights.parts import plan_stages
from model.weights.unfold import Unfolded

SIZE_KEYS = ("init_depth", "expand_depth", "subseq_token", "lookahead", "init_topk_pipedec", "expansion")
PLANNED_KEYS = ("tp", "replicas", *SIZE_KEYS)  # keys that only the plan may choose
CHOICE_KEYS = ("pipeline_type", "draft", "stages", *PLANNED_KEYS)
UNPLANNED_WORDS = tuple(f"verify={rule}" for rule in DRAWN)  # keys of a few methods that no plan chooses
# Keys on which no choice depends: the requests, the outputs and the waiting times.
IGNORED_KEYS = frozenset({
    "prompt", "prompt_ids", "question_file", "questions", "seed", "verify", "max_new_tokens",
    "ignore_eos", "stop", "max_requests", "reuse", "link", "timeout", "wait", "master", "hosts", "time", "trace",
    "output", "debug", "answers"})
PLAN_INPUT_KEYS = {key.name for key in fields(RunConfig)}.difference(IGNORED_KEYS, CHOICE_KEYS)
RECORD_KEYS = {"questions": "1", "max_new_tokens": "32"}  # questions of each data set, and tokens of an answer
NUM_TRIALS = 3  # the number of best candidates that are tried on this machine
NO_PLANNER = ("pipeline_type=auto needs a plan, and this program makes none: call eval.plan.auto.allow_plans() before, "
              "or run bash run_pipe.sh with the same keys once")
DEFAULT_STAGES = "4"


def _is_choice(keys: Any) -> bool:
    """Whether these keys name a method, and have only values that a plan chooses."""
    return fits(keys, {str}) and keys.keys() <= set(CHOICE_KEYS) and keys.get("pipeline_type") in METHODS


FORM = {"keys": _is_choice,
        "kind": str, "tokens_per_second": float, "plain_tokens_per_second": float, "when": str}
Choice = Mapping[str, Any]  # of FORM
Planner = Callable[[Words], Choice]  # makes a plan from the words for its command; the choice has no `when`
Kind = Optional[Type[CommandKeys]]  # of the keys of a command; None: those of a run
planner: Planner | None = None  # None: this program uses remembered choices only


def checked(argv: Words) -> list[str]:
    """Return the words without method and draft, which a plan reads itself; ValueError if no plan is possible."""
    typed_keys = raw_values(argv)
    if is_one_rank(typed_keys.get("hosts", "")):
        raise ValueError("pipeline_type=auto plans for the ranks of one machine: type python3 -m scripts.plan "
                         "hosts=FILE preset=ours.json (docs/planner.md), and give ours.json on all boards")

    for key, value in typed_keys.items():
        if key in PLANNED_KEYS or f"{key}={value}" in UNPLANNED_WORDS:
            raise ValueError(f"{key}={value} is left to pipeline_type=auto: leave it out, or name the method")

    if "answers" in typed_keys:
        raise ValueError("answers=FILE is for drafts with suffix, and pipeline_type=auto may choose another: name "
                         "method and draft")

    draft_keys = ("pipeline_type", "draft", "draft_dir", "ssm")
    return [word for word in argv if word.partition("=")[0] not in draft_keys]


def planned(words: Words, config: RunConfig, kind: Kind = None) -> list[str]:
    """Return the words of a run with the method that a plan chose; `config` has all keys that no plan chooses.

    The choice and its reason are printed on stderr. Raises ValueError, with the fix, if no plan is possible.
    """
    if missing := absent(config):
        raise ValueError(missing)

    plan_argv = plan_words(words, config, _num_stages(config))
    path = _choice_path(plan_argv, words, config)
    with ExitStack() as lock_scope:
        with suppress(OSError):  # if its folder cannot be locked, do not wait
            _lock(lock_scope.enter_context(open_lock(f"{path}.lock")))

        choice = _remembered(path, words, kind)
        if choice is None:
            choice, storage = _make_choice(plan_argv, path, config)
        else:
            storage = f"remembered in {path} since {choice['when']}: delete it to plan again"

    keys = " ".join(f"{key}={value}" for key, value in choice["keys"].items())
    rate, ar_rate = choice["tokens_per_second"], choice["plain_tokens_per_second"]
    rates = f"{rate:.3g} tokens/s {choice['kind']}, {ar_rate:.3g} with ar"
    keeps_split = config.model_dir or "stages" in raw_values(words)
    split_note = "; the split stays as it is" if keeps_split else ""
    say(one_line(f"pipeline_type=auto chose {keys} ({rates}){split_note}; {storage}"))
    return with_chosen(words, choice["keys"])


def _make_choice(plan_argv: Words, path: Path, config: RunConfig) -> tuple[Choice, str]:
    """Make a plan and store its choice; return it, and a message that names its file or the reason why it has none."""
    if planner is None:
        raise ValueError(NO_PLANNER)

    times = "measured on this machine" if config.profile == "none" else f"of profile={config.profile}"
    say(one_line(f"pipeline_type=auto: the methods are simulated with times {times}, once for each model"))

    choice = {**planner(plan_argv), "when": time.strftime("%Y-%m-%d")}
    try:
        write_json(path, choice)
    except ValueError as error:
        return choice, f"not remembered, since {error}"
    return choice, f"remembered in {path}: delete it to plan again"


# --- the stored choice ------------------------------------------------------------------------------------------------

def _choice_path(plan_argv: Words, argv: Words, config: RunConfig) -> Path:
    """Return the file of a choice, named by a hash of everything on which the choice depends."""
    typed_keys = raw_values(argv)
    ssm_folders = (typed_keys.get("ssm") or config.ssm).split(",")
    draft_folders = [typed_keys.get("draft_dir", ""), *ssm_folders]
    folders = [config.model_dir, config.base_dir, config.eagle_dir, *map(os.path.expanduser, draft_folders)]

    files = []
    for folder in filter(None, folders):
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        states = [path.stat() for path in paths]
        files += [(str(path), state.st_size, state.st_mtime_ns) for path, state in zip(paths, states)]

    times = str(config.cluster) if config.cluster else _machine()
    dependencies = json.dumps([sorted(plan_argv), times, code_version(), files])
    digest = hashlib.sha256(dependencies.encode()).hexdigest()[:16]
    return cache_folder() / f"auto-{digest}.json"


def _machine() -> list[str]:
    """Return the properties of this machine on which its times depend."""
    num_cores, num_gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    return [platform.node(), platform.machine(), f"{num_cores}", f"{num_gpus}", torch.__version__]


def _lock(file: BinaryIO) -> None:
    """Allow one start at a time to look for this choice and plan: two that measure at once slow each other down."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("pipeline_type=auto: another start is planning; this one waits for it")
        fcntl.flock(file, fcntl.LOCK_EX)


def _remembered(path: Path, argv: Words, kind: Kind) -> Choice | None:
    """Return the choice that a file holds; None if the file is missing or holds none."""
    if not os.path.exists(path):  # Path.exists raises if a folder may not be searched
        return None
    try:
        choice: Choice = read_json_file(path, "delete it")
        if not fits(choice, FORM):
            raise ValueError(f"{path} holds no choice")
        parse(with_chosen(argv, choice["keys"]), kind=kind)
    except ValueError as error:
        say(f"{one_line(str(error))}; a new plan is made")
        return None
    return choice


# --- the plan ---------------------------------------------------------------------------------------------------------

def plan_words(argv: Words, config: RunConfig, num_boards: int) -> list[str]:
    """Return the words for the plan's command: the typed keys, as far as the choice depends on them.

    `num_boards` is the number of stages that the run has without a choice.
    """
    typed_keys = raw_values(argv)
    plan_keys = {key: value for key, value in typed_keys.items() if key in PLAN_INPUT_KEYS}
    plan_keys.update(RECORD_KEYS)

    # the split
    is_fixed = "stages" in typed_keys or bool(config.model_dir)
    plan_keys["splits"] = "given" if is_fixed else "first"
    if "stages" in typed_keys:
        plan_keys["stages"] = typed_keys["stages"]

    # the devices
    if config.profile == "none":
        plan_keys.update(measure="true", check=str(NUM_TRIALS))
    elif is_fixed or not is_file(config.profile):
        plan_keys["boards"] = str(num_boards)

    if "draft" in typed_keys:
        method_names = [name for name, method in METHODS.items() if method.draft != "ssm"]
        plan_keys.update(drafts=typed_keys["draft"], methods=",".join(method_names))

    preset = preset_of(argv)
    words = [f"{key}={value}" for key, value in plan_keys.items()]
    return [preset, *words] if preset else words


def with_chosen(argv: Words, chosen: Mapping[str, str]) -> list[str]:
    """Return the words of a run with the chosen keys, and without the folders of unused drafts."""
    method_draft = METHODS[chosen["pipeline_type"]].draft
    uses_ssm = method_draft == "ssm"
    draft = method_draft if uses_ssm else chosen.get("draft", raw_values(argv).get("draft", ""))

    unused_folders = {MODEL_KEY, MODELS_KEY} - reads(draft)
    dropped_keys = {*chosen, *unused_folders}
    if uses_ssm:
        dropped_keys.add("draft")

    kept_words = [word for word in argv if word.partition("=")[0] not in dropped_keys]
    chosen_words = [f"{key}={value}" for key, value in chosen.items()]
    return [*kept_words, *chosen_words]


def _num_stages(config: RunConfig) -> int:
    """Return the number of stages that the run has without a choice."""
    if not config.model_dir:
        stages = plan_stages(config.stages or DEFAULT_STAGES, Unfolded(config.base_dir)) if config.base_dir else []
        return max(1, len(stages) - 1)

    part = open_part(Path(config.model_dir), 0)
    if len(part.stages) == 1 or len(part.shares) > 1:
        raise ValueError(f"{config.model_dir} is split as {part.form}, with ranks that share layers, and "
                         "pipeline_type=auto plans for pipelines: name the method")
    return len(part.stages) - 1
