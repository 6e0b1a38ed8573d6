"""Passes of the networks that draft: what a request wants read, and one pass for what several requests want.

A draft asks by yielding a `Reading`, and is sent what was `Read`: so one who runs several drafts lets a network read
for all of them at once. It knows nothing about trees or how a network guesses.

Shapes: T rows that are read, A of them about which is asked, D what a draft makes of a row, V its vocabulary.
"""
from __future__ import annotations

from typing import Any, Callable, Generator, List, NamedTuple, Sequence, TypeVar

import torch
from torch import Tensor

from model.cache import together

Result = TypeVar("Result")


class Reading(NamedTuple):
    """Rows that were admitted to the cache of a draft, and how many of the last of them logits are wanted of."""

    draft: Any  # a TreeDraft (model/drafts/network.py)
    token_T: Tensor
    feature_TD: Tensor
    pos_T: Tensor
    asked: int


class Read(NamedTuple):
    """What was made of the rows, and the logits of those that were asked about."""

    out_TD: Tensor
    logits_AV: Tensor


Steps = Generator[Any, Any, Result]  # yields a Reading, and is sent what was Read
Passes = Callable[[Sequence[Reading]], List[Read]]


def read_all(readings: Sequence[Reading]) -> list[Read]:
    """What was read, in the order of the readings; each network makes one pass."""
    found: dict[int, Read] = {}
    for places in by_network(readings):
        group = [readings[place] for place in places]
        found.update(zip(places, _pass(group)))
    return [found[place] for place in range(len(readings))]


def by_network(readings: Sequence[Reading]) -> list[list[int]]:
    """The places of the readings, those of one network together."""
    groups: dict[int, list[int]] = {}
    for place, reading in enumerate(readings):
        groups.setdefault(id(reading.draft.network), []).append(place)
    return list(groups.values())


def _pass(group: Sequence[Reading]) -> list[Read]:
    """One pass for the rows of several requests."""
    draft = group[0].draft
    counts = [len(reading.token_T) for reading in group]
    caches = together([reading.draft.cache for reading in group], counts)
    token_T = _joined([reading.token_T for reading in group])
    feature_TD = _joined([reading.feature_TD for reading in group])
    pos_T = _joined([reading.pos_T for reading in group])
    out_TD = draft.read(token_T, feature_TD, pos_T, caches)
    outs = out_TD.split(counts)
    asked = [reading.asked for reading in group]
    last = _joined([out[len(out) - wanted:] for out, wanted in zip(outs, asked)])
    logits_AV = draft.logits(last) if sum(asked) else last
    return [Read(*each) for each in zip(outs, logits_AV.split(asked))]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several requests, one behind the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def at_once(steps: Steps[Result], passes: Passes = read_all) -> Result:
    """The result of a draft's steps that nobody else shares passes with."""
    said: Read | None = None
    while True:
        try:
            reading = steps.send(said)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        said, = passes([reading])
