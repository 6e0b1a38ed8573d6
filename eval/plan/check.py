"""The best candidates of a plan on this machine itself: what a simulation cannot know is in what they take there.

The stages of a measurement were timed one after the other, while the ranks of one machine share its cores.
"""
from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any, NamedTuple, Sequence

from tqdm import tqdm

from config.methods import METHODS
from config.run_config import RunConfig
from eval.plan.candidates import Candidate
from eval.plan.keys import PlanConfig
from eval.plan.record import Book
from eval.plan.search import PLAIN
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
    pipelines: dict[tuple[Any, ...], list[Candidate]] = {}
    for one in candidates:
        pipelines.setdefault((METHODS[one.method].target, one.groups, one.layers), []).append(one)
    found = []
    with tqdm(total=len(candidates), desc="check", unit="candidate", leave=False, file=sys.stderr) as bar:
        for together in pipelines.values():
            found += _checked(config, book, together)
            bar.update(len(together))
    return found


def _checked(config: PlanConfig, book: Book, together: Sequence[Candidate]) -> list[Checked]:
    """Candidates over one split; where one of them does not run, each runs alone."""
    try:
        return _spent(config, book, together)
    except (ValueError, PeerLost):
        if len(together) > 1:
            return [found for one in together for found in _checked(config, book, [one])]
        if together[0].method == PLAIN:
            raise
        return []


def opened(run: RunConfig, **more: Any) -> Pipeline:
    """A pipeline of these keys, whatever a preset says."""
    usual = RunConfig()
    differ = {key.name: getattr(run, key.name) for key in fields(RunConfig)
              if getattr(run, key.name) != getattr(usual, key.name)}
    if "ssm" not in run.sources:
        differ.pop("ssm", None)
    return Pipeline.open("toy", **{**differ, **more})


def _spent(config: PlanConfig, book: Book, candidates: Sequence[Candidate]) -> list[Checked]:
    """What candidates over one split take, each after the other in every round."""
    runs = [config.single(**values(one.keys)) for one in candidates]
    answers = book.answers[:ANSWERS]
    with opened(runs[0]) as pipeline:
        decoders = [pipeline.decoder_for(run) for run in runs]
        least = [[float("inf")] * len(answers) for _ in decoders]
        for _ in range(ROUNDS):
            for took, decoder in zip(least, decoders):
                took[:] = map(min, took, _round(decoder, book))
    tokens = sum(min(TOKENS, len(one.text)) for one in answers)
    return [Checked(one, tokens / sum(took)) for one, took in zip(candidates, least)]


def _round(decoder: Decoder, book: Book) -> list[float]:
    """Seconds of each answer."""
    ends = frozenset(book.ends)
    made = (decoder.whole(Request(one.prompt, Sampler(), TOKENS, ends)) for one in book.answers[:ANSWERS])
    return [answer.prefill_seconds + answer.decode_seconds for answer in made]
