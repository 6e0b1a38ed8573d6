"""Pacing: when a segment leaves, which rows it has, and whether to draft a level before the next answer.

Its inputs are the sent segments and settled tokens, the times of stages and levels, and the probabilities of guesses.
`streaming` asks in this order, each time that it can act:

1. Did a segment come back? Then it is verified; nothing is asked here.
2. Is the first stage free (`FirstStage.ready_at`), with the tip to send? `DraftGate.is_worth_waiting`: whether to draft
   a level first.
3. Is it free? `RowAllocator.share`: how many guesses leave with the text, by `StageTimes`. `Batcher` joins the segments
   of several requests.
4. Does nothing leave? `DraftGate.is_worth_drafting`: whether a level is drafted before the next answer.
5. Is none worth it? It waits for an answer, or until the first stage is free.

A draft that is to grow asks `Fallback`, which is one for all requests, before 2 and 4. `continuous` asks `Fallback`
only; segments of several requests wait for the first stage and the `Batcher` with every strategy round the ring.
"""
from __future__ import annotations

from pipeline.allocation import Batcher, RowAllocator
from pipeline.gates import DraftGate, Fallback
from pipeline.stage_times import FirstStage, StageTimes


class Pacing:
    """The pacing of one ring, of which these `times` are known so far."""

    def __init__(self, times: StageTimes) -> None:
        self.times = times
        self.first_stage = FirstStage(self.times)
        self.rows = RowAllocator(self.times)
        self.batcher = Batcher()
        self.gate = DraftGate()
        self.fallback = Fallback()
