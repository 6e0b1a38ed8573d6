"""Measurements of one machine: the cost of models, and the effect of accidents.

This module has their common parts: questions, the decoders of methods, the speed of answers, and the cost of a call.
"""
from __future__ import annotations

import argparse
import re
import time
from dataclasses import replace
from operator import sub
from pathlib import Path
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import torch

from launch.pipeline import Pipeline
from pipeline.answers import Answer, Request
from pipeline.decode import Decoder

WHOLE_NUMBER = re.compile("[1-9][0-9]{0,11}")  # up to more than memory allows
QUESTIONS = ("What does a baker do?", "Write a Python function that adds two numbers.", "Name three animals that swim.",
             "Tell me about a town by the sea.", "How much is 12 times 7? Explain the steps.")


def request_for(pipeline: Pipeline, question: str) -> Request:
    """Return the request for a question."""
    config = pipeline.config
    return pipeline.request(pipeline.prompt_ids(question, config.template), config, config.stop)


def decoders_of(pipeline: Pipeline, methods: Iterable[str]) -> dict[str, Decoder]:
    """Return the decoders of these methods on one pipeline."""
    return {method: pipeline.decoder_for(replace(pipeline.config, pipeline_type=method)) for method in methods}


def speed(answers: Sequence[Answer]) -> float:
    """Return the tokens per second of these answers, including the prefill."""
    total_seconds = sum(answer.seconds for answer in answers)
    return sum(answer.new_tokens for answer in answers) / total_seconds


def transformers_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model of transformers with the weights of a GGUF file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)


class Cost(NamedTuple):
    """Elapsed seconds, and seconds of this process on a processor."""

    wall: float
    processor: float


class Stopwatch:
    """What has passed since it was made."""

    def __init__(self) -> None:
        self._cost_before = self._whole_cost()

    @staticmethod
    def _whole_cost() -> Cost:
        return Cost(time.perf_counter(), time.process_time())

    def read(self) -> Cost:
        """Return the elapsed and the processor seconds so far."""
        return Cost(*map(sub, self._whole_cost(), self._cost_before))


def cost(call: Callable[..., object], *args: Any) -> Cost:
    """Return the cost of a call."""
    stopwatch = Stopwatch()
    call(*args)
    return stopwatch.read()


def whole_number(text: str) -> int:
    """Return a whole number from 1 on, for argparse."""
    if not WHOLE_NUMBER.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not possible: give a number from 1, of at most 12 digits")
    return int(text)
