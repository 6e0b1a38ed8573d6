"""Measurements of one machine: what the pipeline costs beside the model, and how well a draft guesses.

Here is what they share: questions, the decoders of methods, how fast answers come, and the processes of a run.
"""
from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Sequence

from launch.pipeline import Pipeline
from pipeline.decode import Answer, Decoder, Request

MIB = 1024.0  # KiB
QUESTIONS = ("What does a baker do?", "Write a Python function that adds two numbers.", "Name three animals that swim.",
             "Tell me about a town by the sea.", "How much is 12 times 7? Explain the steps.")


def request(pipeline: Pipeline, question: str) -> Request:
    """The request of a question; of `prompt_ids`, if the pipeline was started with these."""
    config = pipeline.config
    ids = pipeline.prompt_ids(question, config.template) if pipeline.text else list(config.ids)
    return pipeline.request(ids, config, config.stop)


def decoders_of(pipeline: Pipeline, methods: Iterable[str], **changed: Any) -> dict[str, Decoder]:
    """The decoders of these methods over one pipeline, with these keys `changed`."""
    runs = {method: replace(pipeline.config, pipeline_type=method, **changed) for method in methods}
    return {method: pipeline.decoder_for(run) for method, run in runs.items()}


def speed(answers: Sequence[Answer]) -> float:
    """Tokens per second of these answers, prefill included."""
    seconds = sum(answer.seconds for answer in answers)
    return sum(answer.new_tokens for answer in answers) / seconds


def process_tree(process: int) -> list[int]:
    """A process, and all that it and they have started."""
    found = [process]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def of_one(process: int) -> tuple[float, int, int]:
    """What a process holds: MiB of memory, open files and threads."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    said = dict(line.split(":", 1) for line in lines)
    files = len(os.listdir(f"/proc/{process}/fd"))
    return int(said["VmRSS"].split()[0]) / MIB, files, int(said["Threads"])
