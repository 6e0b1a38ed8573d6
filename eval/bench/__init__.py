"""Measurements of one machine: what models cost there, how well drafts guess, what becomes of accidents.

Here is what they share: questions, the decoders of methods, how fast answers come, what calls cost by turns, and the
processes of a run.
"""
from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Hashable, Iterable, Mapping, NamedTuple, Sequence, TypeVar

from tqdm import tqdm

from launch.pipeline import Pipeline
from pipeline.decode import Answer, Decoder, Request

MIB = 1024.0  # KiB
LARGEST = 1 << 40  # what is more is no size, and memory would be short before
QUESTIONS = ("What does a baker do?", "Write a Python function that adds two numbers.", "Name three animals that swim.",
             "Tell me about a town by the sea.", "How much is 12 times 7? Explain the steps.")
Key = TypeVar("Key", bound=Hashable)
Figure = TypeVar("Figure")


def request(pipeline: Pipeline, question: str | Sequence[str]) -> Request:
    """The request of a question, or of the last one of a conversation."""
    config = pipeline.config
    return pipeline.request(pipeline.prompt_ids(question, config.template), config, config.stop)


def decoders_of(pipeline: Pipeline, methods: Iterable[str],
                **changed: Any) -> dict[str, Decoder]:
    """The decoders of these methods over one pipeline, with these keys `changed`."""
    runs = {method: replace(pipeline.config, pipeline_type=method, **changed) for method in methods}
    return {method: pipeline.decoder_for(run) for method, run in runs.items()}


def speed(answers: Sequence[Answer]) -> float:
    """Tokens per second of these answers, prefill included."""
    seconds = sum(answer.seconds for answer in answers)
    return sum(answer.new_tokens for answer in answers) / seconds


class Cost(NamedTuple):
    """Seconds of a call, by the clock and of the processor."""

    wall: float
    processor: float


def cost(call: Callable[..., object], *args: Any) -> Cost:
    """What a call costs."""
    wall, processor = time.perf_counter(), time.process_time()
    call(*args)
    return Cost(time.perf_counter() - wall, time.process_time() - processor)


def by_turns(jobs: Mapping[Key, Callable[[], Figure]],
             repeats: int) -> dict[Key, list[Figure]]:
    """The figures of each job.

    They take turns, so that what disturbs one disturbs all. Every other turn has them in reverse, since who comes
    second finds the caches of the processor warm.
    """
    found: dict[Key, list[Figure]] = {key: [] for key in jobs}
    for turn in tqdm(range(repeats + 1), desc="turns", leave=False):
        for key in list(jobs)[::-1 if turn % 2 else 1]:
            found[key].append(jobs[key]())
    return {key: figures[1:] for key, figures in found.items()}  # the first turn warms up


def number(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    is_number = text.isascii() and text.isdigit()
    if not is_number or not 1 <= int(text[:20]) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not possible: give a whole number, 1 to {LARGEST}")
    return int(text)


def process_tree(process: int) -> list[int]:
    """A process, and all that it and they have started."""
    found = [process]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def status(process: int | str) -> dict[str, int]:
    """The numbers that Linux has of a process, or of this one (`self`), by name; sizes are in KiB."""
    text = Path(f"/proc/{process}/status").read_text()
    return {name: int(count) for name, count in re.findall(r"(\w+):[ \t]+(\d+)", text)}


def of_one(process: int) -> tuple[float, int, int]:
    """What a process holds: MiB of memory, open files and threads."""
    numbers = status(process)
    files = len(os.listdir(f"/proc/{process}/fd"))
    return numbers["VmRSS"] / MIB, files, numbers["Threads"]
