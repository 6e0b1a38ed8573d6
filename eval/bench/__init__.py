"""Measurements of one machine: the cost of models, and the effect of accidents.

This module has their common parts: questions, the decoders of methods, the speed of answers, and the cost of a call.
"""
from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from launch.pipeline import Pipeline
from pipeline.answers import Answer, Request
from pipeline.decode import Decoder

MAX_SIZE = 1 << 40  # more than memory allows
QUESTIONS = ("What does a baker do?", "Write a Python function that adds two numbers.", "Name three animals that swim.",
             "Tell me about a town by the sea.", "How much is 12 times 7? Explain the steps.")


def request(pipeline: Pipeline, question: str) -> Request:
    """Return the request for a question."""
    config = pipeline.config
    return pipeline.request(pipeline.prompt_ids(question, config.template), config, config.stop)


def decoders_of(pipeline: Pipeline, methods: Iterable[str]) -> dict[str, Decoder]:
    """Return the decoders of these methods on one pipeline."""
    runs = {method: replace(pipeline.config, pipeline_type=method) for method in methods}
    return {method: pipeline.decoder_for(run) for method, run in runs.items()}


def speed(answers: Sequence[Answer]) -> float:
    """Return the tokens per second of these answers, including the prefill."""
    seconds = sum(answer.seconds for answer in answers)
    return sum(answer.new_tokens for answer in answers) / seconds


class Cost(NamedTuple):
    """The elapsed and the processor seconds of a call."""

    wall: float
    processor: float


def cost(call: Callable[..., object], *args: Any) -> Cost:
    """Return the cost of a call."""
    begun_at, used_before = time.perf_counter(), time.process_time()
    call(*args)
    return Cost(time.perf_counter() - begun_at, time.process_time() - used_before)


def whole_number(text: str) -> int:
    """Return a whole number from 1 on, for argparse."""
    is_number = text.isascii() and text.isdigit()
    if not is_number or not 1 <= int(text[:20]) <= MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not possible: give a whole number, 1 to {MAX_SIZE}")
    return int(text)
