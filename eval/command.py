"""The evaluation of methods on data sets at several temperatures, with tables and plots at the end.

Usage: python3 -m scripts.evaluate PROTOCOL [PRESET] [key=value ...], which run_eval.sh and others call; --help lists
all keys, docs/evaluation.md describes the output.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Sequence

from cluster.board import BOARD_VARIABLE, COMMAND_VARIABLE, find_board
from config.cli import parts
from config.console import ended_by, say, shell_code
from config.files import check_folder
from config.keys import HELP_WORDS
from eval.evaluation import Evaluation, all_questions
from eval.keys import PROTOCOLS, EvalConfig, first, words
from eval.observe.span_sums import Tally
from eval.report import report
from eval.results import Results
from launch.pipeline import Pipeline
from launch.run import Command, run
from launch.trace import open_trace
from launch.words import resolve, with_model
from pipeline.trace import Clock, NoTrace

DEFAULT_PROTOCOL = "emulated"  # the default protocol, for the default model of all commands
OTHER_RESULTS = "choose another results="
SWEEP_POINT = "FLOWSPEC_SWEEP_POINT"  # in the environment of an evaluation that is a point of a sweep


def answer_all(pipeline: Pipeline, config: EvalConfig) -> None:
    """Answer, on rank 0, all questions with each method that this start of the pipeline serves."""
    if _one_rank_per_host(config):
        announce(config)

    evaluation, split_id = Evaluation(config, pipeline), pipeline.spec.part.split_id
    with closing(Results(config.results).open(config, pipeline.config.slowdown, split_id)) as results:
        evaluation.run(config.questions_by_set, results)


def tallied(config: EvalConfig, rank: int, clock: Clock) -> NoTrace:
    """Return the tally of a rank's times, which also feeds its trace if one is requested.

    A tally supports one request at a time, so with several at once there is only the trace.
    """
    trace = open_trace(config.run, rank, clock)
    if config.concurrency > 1:
        _tally_dir(config).mkdir(parents=True, exist_ok=True)  # starts are numbered by these folders
        return trace
    return Tally(_tally_dir(config), rank, trace, clock)


def _tally_dir(config: EvalConfig) -> Path:
    """Return the folder into which the ranks of this start write their tallies."""
    return Path(config.results) / "tally" / config.launch


START = Command("scripts.evaluate start", answer_all, EvalConfig, tallied)


def announce(config: EvalConfig) -> None:
    """Print the plan of the evaluation, but not in a sweep. Raise ValueError if it cannot be executed."""
    run, questions_by_set, results = config.run, config.questions_by_set, Results(config.results)

    # checks
    _check_drafts(config)
    check_folder(config.results, OTHER_RESULTS)
    results.check(config)

    # figures of the plan
    questions = all_questions(config, questions_by_set, config.chosen_methods)
    num_existing = len(questions.keys() & results.texts.keys())
    existing_text = f", of which {num_existing} exist" if num_existing else ""
    set_sizes = [f"{name} ({len(chosen)})" for name, chosen in questions_by_set.items()]

    plan = {
        "times": f"{run.kind}, profile {run.profile}",
        "model": run.model_dir or run.base_dir,
        "methods": ", ".join(config.chosen_methods),
        "drafts": ", ".join(config.asked_drafts),
        "template": run.template,
        "questions": ", ".join(set_sizes),
        "from": config.folder,
        "temperatures": config.temperatures,
        "seed": run.seed,
        "repeats": config.repeats,
        "at once": config.concurrency,
        "answers": f"{len(questions)} of at most {run.max_new_tokens} tokens a turn{existing_text}",
        "results": os.path.abspath(config.results)}

    if SWEEP_POINT not in os.environ:
        lines = [f"  {name:<14}{value}" for name, value in plan.items()]
        print("\n".join(["evaluation", *lines]), flush=True)


def _check_drafts(config: EvalConfig) -> None:
    """Raise ValueError if a draft's folder does not exist."""
    for draft in filter(None, [*config.asked_drafts, config.baseline_draft]):
        for folder in filter(None, parts(draft)[1:]):
            if not Path(folder).is_dir():
                raise ValueError(f"{draft}: there is no folder {folder}: give that of a draft head or a small model")


def _one_rank_per_host(config: EvalConfig) -> bool:
    """Whether each rank is on its own host; then only the host of rank 0 has the results."""
    return bool(config.run.hosts or os.environ.get(BOARD_VARIABLE))


def evaluate(protocol: str, argv: Sequence[str]) -> int:
    """Execute the command and return its exit code. Each group of methods has its own start of the pipeline."""
    if protocol in HELP_WORDS:
        print(f"{__doc__}\nPROTOCOL is one of {', '.join(PROTOCOLS)}")
        return 0

    try:
        if protocol == DEFAULT_PROTOCOL:
            argv = with_model(argv)
        argv, config = _read(words(protocol, argv))
        find_board(config.run, os.environ)
    except (ValueError, OSError) as error:
        return ended_by(error)

    results = Results(config.results)
    argv = [word for word in argv if not word.startswith(("draft=", "max_requests="))]
    exit_code = 0
    for start_method in map(first, config.groups):
        start_keys = [f"pipeline_type={start_method}", f"launch={results.starts}-{start_method}",
                      f"draft={config.first_draft}", f"max_requests={config.concurrency}"]
        exit_code = _start(config, [*argv, *start_keys])
        if exit_code:
            break

    return _conclude(results, exit_code)


def _read(argv: Sequence[str]) -> tuple[list[str], EvalConfig]:
    """Return the arguments and the keys of the whole evaluation; announce it unless rank 0 does that elsewhere."""
    if any(word.startswith("pipeline_type=") for word in argv):
        raise ValueError("pipeline_type is a key of single runs: write methods=NAME,NAME")

    resolved = resolve(argv, EvalConfig, os.environ.get(COMMAND_VARIABLE, "bash run_eval.sh"))
    config: EvalConfig = resolved.keys

    if _one_rank_per_host(config):
        check_folder(config.results, OTHER_RESULTS)  # for the tally of this host
    else:
        announce(config)

    return resolved.words, config


def _conclude(results: Results, exit_code: int) -> int:
    """Write tables of the existing answers, even if the pipeline ended too early; return the exit code."""
    if not results.has_answers:
        return exit_code

    try:
        screen = None if SWEEP_POINT in os.environ else sys.stdout  # a sweep shows one table of all points
        print(f"\ntables and plots: {report(results.folder, screen)}")
    except (ValueError, OSError) as error:
        exit_code = exit_code or ended_by(error)

    if exit_code:
        say("the answers so far are kept; the same command continues from there")
    return exit_code


def _start(config: EvalConfig, argv: Sequence[str]) -> int:
    """Start the pipeline once; return its exit code. On several hosts a child process becomes this host's rank."""
    if not _one_rank_per_host(config):
        return run(START, argv)

    rank_process = subprocess.Popen([sys.executable, "-m", *START.module.split(), *argv])
    former_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the child, which ends all ranks
    try:
        exit_code = rank_process.wait()
    finally:
        signal.signal(signal.SIGINT, former_handler)

    return shell_code(exit_code)


def main(argv: list[str]) -> int:
    """Execute the command, or one rank of it."""
    name, *words = argv or [""]
    return run(START, words) if name == "start" else evaluate(name, words)
