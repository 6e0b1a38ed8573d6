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
from pipeline.answers import Answer

STAGE_COUNTS = ("1", "2", "4")
METHODS = ("ar", "continuous", "streaming")
NUM_TURNS = 3  # of all methods; in each turn a method begins with what it has learned removed
QUESTIONS_PER_TURN = 3
TABLE_HEADING = ("stages", "method", "tokens/s", "over ar", "first token, s", "memory, MB")


def real_time(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench real_time`; return its exit code."""
    words = with_defaults(argv, {"max_new_tokens": "128", "ignore_eos": "true"}, SMOLLM2)
    parse(words, "python3 -m scripts.bench real_time")  # reports errors before anything starts

    preset, *key_words = words
    options = raw_values(key_words)
    if {"stages", "profile", "pipeline_type"} & options.keys():
        raise ValueError("this compares methods and splits on the machine as it is: leave stages, profile and "
                         "pipeline_type out")

    table_rows: list[Sequence[str]] = []
    for num_stages in ProgressBar(STAGE_COUNTS, unit="split"):
        with Pipeline.open(preset, **options, stages=num_stages) as pipeline:
            answers = _answers_by_method(pipeline)
            megabytes = sum(map(_memory, process_tree(os.getpid())))
            table_rows += _rows(num_stages, answers, f"{megabytes:.0f}")

    print(in_columns(TABLE_HEADING, table_rows, names=2))
    return 0


def _answers_by_method(pipeline: Pipeline) -> dict[str, list[Answer]]:
    """Return the answers of each method, which alternate."""
    decoders = decoders_of(pipeline, METHODS)
    decoders["ar"].complete(request(pipeline, QUESTIONS[0]))  # warms up

    answers: dict[str, list[Answer]] = {method: [] for method in METHODS}
    for _ in range(NUM_TURNS):
        for method, decoder in decoders.items():
            pipeline.reset_measurements()
            for question in QUESTIONS[:QUESTIONS_PER_TURN]:
                answers[method].append(decoder.complete(request(pipeline, question)))
    return answers


def _rows(num_stages: str, answers: dict[str, list[Answer]], megabytes: str) -> Iterator[Sequence[str]]:
    plain_speed = speed(answers["ar"])
    for method, method_answers in answers.items():
        method_speed = speed(method_answers)
        first_seconds = median(answer.prefill_seconds for answer in method_answers)
        yield (num_stages, method, f"{method_speed:.2f}", f"{method_speed / plain_speed:.3f}", f"{first_seconds:.3f}",
               megabytes)


def _memory(process: int) -> float:
    """Return the megabytes of a process; shared memory is divided among its processes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    memory_line = next(line for line in lines if line.startswith("Pss:"))
    return int(memory_line.split()[1]) * 1024 / 1e6
