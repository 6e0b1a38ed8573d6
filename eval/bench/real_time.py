"""Methods on this machine without emulation: speed over plain decoding, first token, and memory, by stages."""
from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Iterator, Sequence

from config.cli import parse
from config.keys import raw_values, with_defaults
from config.presets import SMOLLM2
from eval.bench import QUESTIONS, decoders_of, process_tree, request, speed
from eval.tables import in_columns
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from pipeline.decode import Answer

SPLITS = ("1", "2", "4")  # stages
METHODS = ("ar", "continuous", "streaming")
TURNS = 3  # of all methods; in each turn a method begins with what it has learned removed
ASKED = 3  # questions in a turn
HEAD = ("stages", "method", "tokens/s", "over ar", "first token, s", "memory, MB")


def real_time(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench real_time`; return its exit code."""
    words = with_defaults(argv, {"max_new_tokens": "128", "ignore_eos": "true"}, SMOLLM2)
    parse(words, "python3 -m scripts.bench real_time")  # reports errors before anything starts
    preset, *keys = words
    options = raw_values(keys)
    if {"stages", "profile", "pipeline_type"} & options.keys():
        raise ValueError("this compares methods and splits on the machine as it is: leave stages, profile and "
                         "pipeline_type out")
    rows: list[Sequence[str]] = []
    for stages in ProgressBar(SPLITS, unit="split"):
        with Pipeline.open(preset, **options, stages=stages) as pipeline:
            answers = _by_turns(pipeline)
            megabytes = sum(map(_memory, process_tree(os.getpid())))
            rows += _rows(stages, answers, f"{megabytes:.0f}")
    print(in_columns(HEAD, rows, names=2))
    return 0


def _by_turns(pipeline: Pipeline) -> dict[str, list[Answer]]:
    """Return the answers of each method, which alternate."""
    decoders = decoders_of(pipeline, METHODS)
    decoders["ar"].complete(request(pipeline, QUESTIONS[0]))  # warms up
    answers: dict[str, list[Answer]] = {method: [] for method in METHODS}
    for _ in range(TURNS):
        for method, decoder in decoders.items():
            pipeline.reset_measurements()
            answers[method] += [decoder.complete(request(pipeline, question)) for question in QUESTIONS[:ASKED]]
    return answers


def _rows(stages: str, answers: dict[str, list[Answer]], megabytes: str) -> Iterator[Sequence[str]]:
    plain = speed(answers["ar"])
    for method, made in answers.items():
        first = median(answer.prefill_seconds for answer in made)
        ratio = speed(made) / plain
        yield stages, method, f"{speed(made):.2f}", f"{ratio:.3f}", f"{first:.3f}", megabytes


def _memory(process: int) -> float:
    """Return the megabytes of a process; shared memory is divided among its processes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    taken = next(line for line in lines if line.startswith("Pss:"))
    return int(taken.split()[1]) * 1024 / 1e6
