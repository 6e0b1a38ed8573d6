"""Keys that the words of a command leave open, settled before anything starts.

The template is that of the model's tokenizer, and without a draft head `suffix` drafts. For `pipeline_type=auto` a plan
chooses the method at the first start, and later starts remember.

A plan measures this machine, or takes the given profile, in a process of its own. Its choice is kept in the user's
cache, under a name made of all that it depends on: model, drafts, split, machine or profile, and the code.
"""
from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Mapping, Optional, Type

import torch

from config.auto import CHOSEN, is_asked, problems, question, relevant, rest, with_chosen
from config.cli import parse
from config.command import CommandKeys, headless
from config.files import fits, open_lock, whole, write_json
from config.keys import HELP, opened, preset_of, typed
from config.methods import METHODS
from config.presets import absent
from config.ranges import listed
from config.run_config import RunConfig
from config.schema.untrusted import plain
from launch.console import INTERRUPTED, LOST, Words, say
from launch.folder import private_folder
from launch.hosts.agreement import code_version
from launch.hosts.board import is_one_rank
from launch.models import with_model
from launch.prepare import open_part
from model.text import AUTO, OWN, VOCABULARIES, chosen
from model.weights.checkpoint import Checkpoint
from model.weights.parts import plan_stages
from pipeline.failure import PeerLost

PLAN = "scripts.plan"  # the command that makes plans
OURS = "flowspec: "  # begins a sentence of it
JUDGED = ("model_dir", "base_dir", "eagle_dir", "models", "template")  # keys by which left_open judges
WITHOUT = ("has no draft head, which guesses words that the text does not have yet, too: python -m scripts.train_eagle "
           "makes one (docs/training.md)")
USUAL = "4"  # stages, if nothing says how many
FORM = {"keys": lambda keys: isinstance(keys, dict) and fits(list(keys.values()), [str]),
        "kind": str, "tokens_per_second": float, "plain_tokens_per_second": float, "when": str}
Choice = Mapping[str, Any]  # of FORM
Kind = Optional[Type[CommandKeys]]  # of the keys of a command; None: those of a run


def settled(argv: Words, kind: Kind = None) -> list[str]:
    """The words of a command, with words for the keys that they leave open; pipeline_type=auto makes room for a plan's.

    What a plan chooses, and why, is printed on stderr. Raises ValueError, with the fix, where nothing can be planned.
    """
    argv = with_model(argv)
    words = opened(argv)
    planned = is_asked(words)
    compares = hasattr(kind, "methods")  # several methods, which are named
    if any(word in HELP for word in words) or (planned and compares):
        return list(argv)
    added = left_open(words, kind)
    if not planned:
        return [*argv, *added]
    words += added
    if is_one_rank(typed(words).get("hosts", "")):
        raise ValueError("pipeline_type=auto plans for the ranks of one machine: type python -m scripts.plan "
                         "hosts=FILE preset=ours.json (docs/planner.md), and give ours.json on all boards")
    config = _checked(words, kind)
    path = _place(words, config)
    with ExitStack() as alone:
        with suppress(OSError):  # where its folder takes no lock, nothing is waited for
            _take(alone.enter_context(open_lock(f"{path}.lock")))
        choice = _remembered(path, words, kind)
        if choice is None:
            asked = question(words, config, *_split(config))
            say(_beginning(config))
            choice = {**_planned(asked), "when": time.strftime("%Y-%m-%d")}
            kept = _kept(path, choice)
        else:
            kept = f"remembered in {path} since {choice['when']}: delete it to plan again"
    say(_sentence(words, config, choice, kept))
    return with_chosen(words, choice["keys"])


def left_open(words: Words, kind: Kind = None) -> dict[str, str]:
    """Words for the template and the draft, if these leave them open, and why, if that may surprise a person.

    Both are judged by the files of the model, as far as they are here.
    """
    given, preset = typed(words), preset_of(words)
    own = [word for word in words if word.partition("=")[0] in JUDGED]
    config = parse([preset, *own] if preset else own)
    model = plain(config.model_dir or config.base_dir)
    folder, found = config.first_folder, {}
    here = any((folder / name).is_file() for name in VOCABULARIES)
    if config.template == AUTO and "prompt_ids" not in given and here:
        name = chosen(AUTO, folder)
        has = "a chat template" if name == OWN else "no chat template"
        is_named = not given.keys().isdisjoint({"model_dir", "base_dir"})
        found[f"template={name}"] = f"the tokenizer of {model} has {has}" if is_named else ""
    methods = given.get("methods", getattr(kind, "methods", ""))
    names = listed(methods or given.get("pipeline_type", RunConfig.pipeline_type))
    guesses = any(METHODS[name].draft == "eagle" for name in names if name in METHODS)
    if guesses and headless(config) and not {"draft", "drafts"} & given.keys():
        found["draft=suffix"] = f"{model} {WITHOUT}"
    return found


def report_left_open(argv: Words) -> None:
    """Say on stderr what `settled` adds to the words of a command for a model that they name, and why."""
    reasons = [f"{word}, since {why}" for word, why in left_open(opened(argv)).items() if why]
    if reasons and os.environ.get("RANK", "0") == "0":
        say(plain("; ".join(reasons)))


def _checked(argv: Words, kind: Kind) -> RunConfig:
    """What a run has for all keys that no plan chooses. Raises ValueError for what cannot be planned for, or run."""
    if problem := next(problems(argv), ""):
        raise ValueError(problem)
    config = parse(rest(argv), kind=kind).run
    if missing := absent(config):
        raise ValueError(missing)
    return config


# --- what is printed --------------------------------------------------------------------------------------------------

def _beginning(config: RunConfig) -> str:
    if config.profile == "none":
        return ("pipeline_type=auto: the pipeline is measured on this machine, the methods are simulated, and the best "
                "answer some questions; this is done once for model and machine")
    return (f"pipeline_type=auto: the methods are simulated for profile={plain(config.profile)}; this is done once for "
            "model and profile")


def _sentence(argv: Words, config: RunConfig, choice: Choice, kept: str) -> str:
    keys = " ".join(f"{key}={value}" for key, value in choice["keys"].items())
    ours, theirs = choice["tokens_per_second"], choice["plain_tokens_per_second"]
    against = "which nothing beats" if choice["keys"]["pipeline_type"] == "ar" else f"{theirs:.3g} with ar"
    stays = ""
    if config.model_dir or "stages" in typed(argv):
        stays = "; the split stays, so no other number of stages was planned for"
    return plain(f"pipeline_type=auto is {keys} ({ours:.3g} tokens/s {choice['kind']}, {against}){stays}; {kept}")


# --- what is remembered -----------------------------------------------------------------------------------------------

def _place(argv: Words, config: RunConfig) -> Path:
    about = {**relevant(argv, config), "code": code_version(), "files": list(_files(argv, config)),
             "machine": _machine() if config.profile == "none" else []}
    content = json.dumps(about, sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "flowspec" / f"auto-{digest}.json"


def _take(lock: BinaryIO) -> None:
    """Let one start at a time look for this choice and plan it: two that measure at once slow each other down."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("pipeline_type=auto: another start is planning; this one waits for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _files(argv: Words, config: RunConfig) -> Iterator[tuple[str, int, int]]:
    given = typed(argv)
    drafts = given.get("draft_dir", ""), *(given.get("ssm") or config.ssm).split(",")
    folders = config.model_dir, config.base_dir, config.eagle_dir, *map(os.path.expanduser, drafts)
    for folder in filter(None, folders):
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            about = path.stat()
            yield str(path), about.st_size, about.st_mtime_ns


def _machine() -> list[str]:
    cores = len(os.sched_getaffinity(0))
    return [platform.node(), platform.machine(), str(cores), str(torch.cuda.device_count()), torch.__version__]


def _remembered(path: Path, argv: Words, kind: Kind) -> Choice | None:
    """The choice that a file holds; None if there is no such file, or if it holds none."""
    if not os.path.exists(path):  # Path.exists raises where a folder may not be searched
        return None
    try:
        found = whole(path, "delete it")
        keys = found["keys"].keys() if fits(found, FORM) else set()
        if "pipeline_type" not in keys or not keys <= {*CHOSEN}:
            raise ValueError(f"{path} holds no choice")
        if found["keys"]["pipeline_type"] not in METHODS:
            raise ValueError(f"{path} names no method")
        parse(with_chosen(argv, found["keys"]), kind=kind)
    except ValueError as error:
        say(f"{plain(str(error))}; a new plan is made")
        return None
    choice: Choice = found
    return choice


def _kept(path: Path, choice: Choice) -> str:
    try:
        write_json(path, choice)
    except ValueError as error:
        return f"not remembered, since {error}"
    return f"remembered in {path}: delete it to plan again"


# --- the plan ---------------------------------------------------------------------------------------------------------

def _split(config: RunConfig) -> tuple[int, str]:
    """How many stages the run has as it is, and the drafts that its split brings; empty: all that the keys name.

    Raises ValueError for a split whose ranks share layers, which no plan can keep.
    """
    if not config.model_dir:
        stages = plan_stages(config.stages or USUAL, Checkpoint(config.base_dir)) if config.base_dir else []
        return max(1, len(stages) - 1), ""
    part = open_part(Path(config.model_dir), 0)
    if len(part.stages) == 1 or len(part.shares) > 1:
        raise ValueError(f"{config.model_dir} is split as {part.form}, whose ranks share layers, and "
                         "pipeline_type=auto plans for pipelines: name the method")
    drafts = "" if part.eagle else "suffix,model,model+suffix" if config.draft_dir else "suffix"
    return len(part.stages) - 1, drafts


def _planned(words: Words) -> dict[str, Any]:
    """What a plan chooses, made by a process of its own, whose progress is passed on."""
    with private_folder() as folder:
        path = Path(folder) / "chosen.json"
        command = [sys.executable, "-m", PLAN, *words, f"preset={path}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            sentence = _followed(process)
        if process.returncode == INTERRUPTED:
            raise KeyboardInterrupt
        if process.returncode:
            reason = sentence or f"the plan ended with exit code {process.returncode}"
            raise PeerLost(reason) if process.returncode == LOST else ValueError(f"pipeline_type=auto: {reason}")
        if sentence:
            say(sentence)
        chosen: dict[str, Any] = whole(path, "name the method")["chosen"]
    return chosen


def _followed(process: subprocess.Popen[bytes]) -> str:
    """Pass on what a plan prints while it works; its sentence at the end, if it has one."""
    assert process.stderr is not None
    sentence = ""
    for line in io.TextIOWrapper(process.stderr, errors="replace", newline=""):  # a carriage return ends one, too
        if line.startswith(OURS):
            sentence = line[len(OURS):].strip()
        else:
            print(line, end="", file=sys.stderr, flush=True)
    return sentence
