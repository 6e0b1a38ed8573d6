"""The options of a request's target."""
from __future__ import annotations

from typing import NamedTuple

from config.trees import RoundCosts
from model.sample import LogprobRequest


class TargetOptions(NamedTuple):
    """The options of a request's target."""

    inner: bool = False  # whether the draft needs inner features, the inputs of some layers
    prunes: bool = True  # whether dead guesses are dropped in flight, or only after they came back
    thrifty: bool = True  # whether to draft and send only guesses that pay
    costs: RoundCosts = RoundCosts()  # by which requests fall back to plain decoding
    segment_rows: int | None = None  # the most rows of a segment of a single request; None: no bound
    priority: float = 1.0  # the weight of its guesses compared with other requests'
    logprobs: LogprobRequest | None = None


DEFAULT_OPTIONS = TargetOptions()
