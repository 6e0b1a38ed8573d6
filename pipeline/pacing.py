"""Pacing: when a segment leaves, which rows it has, and whether to draft a level before the next answer.

Its inputs are the sent segments, the computing times of stages and the probabilities of guesses. It knows nothing
about strategies, or about how guesses are made. The questions, in the order in which a request meets them:

1. Does it guess at all? `Fallback`: not while plain decoding has proved faster for a single request.
2. Does it draft one more level? `DraftGate.is_worth_drafting`: if the level brings more than would settle meanwhile.
3. Do waiting nodes leave before that level, or with it? `DraftGate.is_worth_waiting`.
4. Is there room? `FirstStage`: a segment leaves shortly before the first stage is free.
5. Which rows leave? `RowAllocator`: text, then the best guesses of all requests that pay, by `StageTimes`.
6. With which others? `Batcher`: the first waiting segments of all requests leave in one message, the second ones in the
   next.
"""
from __future__ import annotations

from pipeline.allocation import Batcher, RowAllocator
from pipeline.gates import DraftGate, Fallback
from pipeline.stage_times import FirstStage, StageTimes


class Pacing:
    """The pacing of one ring, which is filled by `depth` segments."""

    def __init__(self, depth: int) -> None:
        self.first_stage = FirstStage(1 / max(1, depth - 1))
        self.times = StageTimes()
        self.rows = RowAllocator(depth - 1, self.times)
        self.batcher = Batcher()
        self.gate = DraftGate()
        self.fallback = Fallback()
