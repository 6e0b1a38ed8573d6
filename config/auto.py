"""`pipeline_type=auto`: what a plan for a run is asked, and the words of the run that it chooses.

It knows nothing about how a plan is made (`eval/plan/command.py`), nor where a choice is kept (`launch/auto.py`).
"""
from __future__ import annotations

from dataclasses import fields
from typing import Any, Iterator, Mapping, Sequence

from config.keys import preset_of, typed
from config.methods import METHODS
from config.profiles import is_file
from config.run_config import DRAWN, RunConfig

AUTO = "auto"
SIZES = ("init_depth", "expand_depth", "subseq_token", "lookahead", "run_pipeinfer", "init_topk_pipedec", "expansion")
LEFT = ("tp", "tp_shares", "replicas", *SIZES)  # to the plan, and not to be typed
CHOSEN = ("pipeline_type", "draft", "stages", *LEFT)
# What no choice depends on: what is asked, where an answer goes, and who waits how long.
APART = frozenset({
    "prompt", "prompt_ids", "question_file", "question_begin", "question_end", "seed", "verify", "max_new_tokens",
    "ignore_eos", "stop", "max_requests", "reuse", "processes", "timeout", "wait", "master", "hosts", "time", "trace",
    "output", "debug", "answers"})
KEPT = {key.name for key in fields(RunConfig)}.difference(APART, CHOSEN)
RECORD = {"question_end": "1", "max_new_tokens": "32"}  # of each data set, and tokens of an answer
CHECK = 3  # of the best candidates, those that answer on this machine


def is_asked(argv: Sequence[str]) -> bool:
    """Whether the words of a command leave the method to a plan."""
    return typed(argv).get("pipeline_type") == AUTO


def rest(argv: Sequence[str]) -> list[str]:
    """The words without those that a plan reads in a way of its own, so that the others can be checked."""
    own = ("pipeline_type", "draft", "draft_dir", "ssm", "answers")
    return [word for word in argv if word.partition("=")[0] not in own]


def problems(argv: Sequence[str]) -> Iterator[str]:
    """What a run with pipeline_type=auto must not be given, each in a sentence that names the fix."""
    given = typed(argv)
    for key in LEFT:
        if key in given:
            yield f"{key}={given[key]} is left to pipeline_type=auto: leave it out, or name the method"
    if "answers" in given:
        yield "answers=FILE is for drafts with suffix, which pipeline_type=auto may not choose: name method and draft"
    if given.get("ssm_ranks") == "true":
        yield "ssm_ranks=true is for specinfer alone: leave it out, or name the method in place of pipeline_type=auto"
    if given.get("verify") in DRAWN:
        yield (f"verify={given['verify']} works with few methods, among which pipeline_type=auto does not choose: name "
               "the method")


def relevant(argv: Sequence[str], config: RunConfig) -> dict[str, Any]:
    """All keys that a choice depends on, with the values that a run has for them."""
    given = typed(argv)
    own = {key: given.get(key, "") for key in ("draft", "draft_dir", "ssm")}
    values = {key: getattr(config, key) for key in KEPT}
    return {**values, **own, "stages": config.stages, "cluster": str(config.cluster)}


def question(argv: Sequence[str], config: RunConfig, boards: int, drafts: str) -> list[str]:
    """The words of the plan: what was typed, as far as the choice depends on it.

    `boards` is how many stages the run has if nothing is chosen, `drafts` the drafts that there are; empty: all that
    the plan finds.
    """
    given = typed(argv)
    said = {key: value for key, value in given.items() if key in KEPT}
    is_fixed = "stages" in given or bool(config.model_dir)
    said.update(RECORD, splits="given" if is_fixed else "first")
    if "stages" in given:
        said["stages"] = given["stages"]
    if config.profile == "none":
        said.update(measure="true", check=str(CHECK))
    elif is_fixed or not is_file(config.profile):
        said["boards"] = str(boards)
    if "draft" in given:
        drafts = given["draft"]
        named = (name for name, method in METHODS.items() if method.draft != "ssm")
        said["methods"] = ",".join(named)
    if drafts:
        said["drafts"] = drafts
    preset = preset_of(argv)
    words = [f"{key}={value}" for key, value in said.items()]
    return [preset, *words] if preset else words


def with_chosen(argv: Sequence[str], chosen: Mapping[str, str]) -> list[str]:
    """The words of a run with the chosen keys, and without folders of drafts that it does not read."""
    own = METHODS[chosen["pipeline_type"]].draft
    draft = own if own == "ssm" else chosen.get("draft", typed(argv).get("draft", ""))
    sources = draft.split("+")
    gone = set(chosen)
    folders = {"draft_dir": "model", "ssm": "ssm"}
    gone.update(key for key, source in folders.items() if source not in sources)
    if own == "ssm":
        gone.add("draft")
    left = [word for word in argv if word.partition("=")[0] not in gone]
    return [*left, *(f"{key}={value}" for key, value in chosen.items())]
