"""The best candidates of a plan on this machine itself: what a simulation cannot know is in what they take there.

The stages of a measurement were timed one after the other, while the ranks of one machine share its cores.
"""
from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any, NamedTuple, Sequence

from tqdm import tqdm

from config.run_config import RunConfig
from eval.plan.candidates import PLAIN, Candidate
from eval.plan.keys import PlanConfig
from eval.plan.record import Book, Written
from eval.plan.trial import values
from launch.pipeline import Pipeline
from model.sample import Sampler
from pipeline.decode import Decoder, Request
from pipeline.failure import PeerLost

ANSWERS, TOKENS = 3, 24  # how much of the record is answered
ROUNDS = 2  # of each answer, of which the shorter counts


class Checked(NamedTuple):
    """A candidate, and the tokens per second with which it answered here, prefill included."""

    candidate: Candidate
    speed: float


def check(config: PlanConfig, book: Book, candidates: Sequence[Candidate]) -> list[Checked]:
    """Let candidates answer the first recorded questions in pipelines of this machine.

    One that does not run here, as for want of memory, is left out; plain decoding raises what is wrong.
    """
    found = []
    for one in tqdm(candidates, desc="check", unit="candidate", leave=False, file=sys.stderr):
        try:
            found.append(Checked(one, _speed(config, book, one)))
        except (ValueError, PeerLost):
            if one.method == PLAIN:
                raise
    return found


def _speed(config: PlanConfig, book: Book, one: Candidate) -> float:
    answers = book.answers[:ANSWERS]
    with opened(config.single(**values(one.keys))) as pipeline:
        rounds = [seconds(pipeline.decoder, book, answers, TOKENS) for _ in range(ROUNDS)]
    tokens = sum(min(TOKENS, len(answer.text)) for answer in answers)
    return tokens / sum(map(min, zip(*rounds)))


def seconds(decoder: Decoder, book: Book, answers: Sequence[Written], tokens: int) -> list[float]:
    """Seconds of each of these answers of at most so many tokens, prefill included."""
    ends = frozenset(book.ends)
    made = (decoder.whole(Request(one.prompt, Sampler(), tokens, ends)) for one in answers)
    return [answer.prefill_seconds + answer.decode_seconds for answer in made]


def opened(run: RunConfig, **more: Any) -> Pipeline:
    """A pipeline of these keys, whatever a preset says."""
    usual = RunConfig()
    differ = {key.name: getattr(run, key.name) for key in fields(RunConfig)
              if getattr(run, key.name) != getattr(usual, key.name)}
    if "ssm" not in run.sources:
        differ.pop("ssm", None)
    return Pipeline.open("toy", **{**differ, **more})
