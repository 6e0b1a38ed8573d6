"""Simulation by counting forwards: one text along given draws, or many at once with drawn or recorded acceptance.

One text is counted window by window, as the offline simulator published with the paper does it. Many texts are counted
round by round or run by run (`cost_model.py`), all configurations and repeats in step.
"""
from __future__ import annotations

import math
from itertools import chain, repeat
from typing import Callable, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
import numpy.typing as npt

from config.files import fits, whole
from config.schema.untrusted import Name
from eval.dsi.cost_model import Decoding
from eval.dsi.formulas import SLACK, Array, Numbers, check_accounting

Positions = npt.NDArray[np.int64]
Matches = npt.NDArray[np.bool_]
Ahead = Callable[[Positions], Positions]  # at positions [C, R]: the drafts that are right from there on, [C, R]
MOST = 1 << 40  # drafts that are right in a row


class Counted(NamedTuple):
    """What a text costs, and its verifications."""

    cost: float
    iterations: int


class Times(NamedTuple):
    """What a forward of the target and of the drafter costs, in one unit."""

    target: float
    drafter: float


# --- one text ---------------------------------------------------------------------------------------------------------

def count_si(times: Times, lookahead: int, tokens: int, draws: Iterable[int],
             padding: int = 0) -> Counted:
    """SI along `draws`: how many drafts each round would accept; `padding` once there are no more.

    A round drafts as many tokens as the text needs before its last one. A draw beyond them ends the text.
    """
    left, cost, iterations = tokens, 0.0, 0
    accepted = chain(draws, repeat(padding))
    while left > 0:
        cost += min(lookahead, left - 1) * times.drafter + times.target
        left -= next(accepted) + 1
        iterations += 1
    return Counted(cost, iterations)


def count_dsi(times: Times, lookahead: int, tokens: int, draws: Iterable[int], padding: int = 0,
              accounting: str = "original") -> Counted:
    """DSI along `draws`: how many drafts of each window are accepted; `padding` once there are no more.

    A run costs its windows and one forward of the target, or plain decoding if that is less. The windows of a run are
    those with an accepted draft, since the verification before shows a rejected first draft; `original` counts the
    last window all the same. A run without an accepted draft costs one forward in both, since plain decoding does.
    """
    check_accounting(accounting)
    accepted = chain(draws, repeat(padding))
    done, cost, iterations = 0, 0.0, 0
    while done < tokens:
        new, run, ends = 0, 0.0, False
        while not ends:
            window = min(lookahead, tokens - 1 - done - new)
            right = min(window, next(accepted))
            if right > 0 or accounting == "original":
                run += window * times.drafter
            new += right
            ends = window == 0 or right < window
            iterations += 1
        cost += min(run + times.target, (new + 1) * times.target)
        done += new + 1
    return Counted(cost, iterations)


def settled(times: Times, lookahead: int, moment: float, right: bool,
            servers: float = math.inf) -> dict[str, int]:
    """The tokens that plain decoding, SI and DSI have at a moment, if all drafts are right or none is (Figure 1).

    DSI verifies without drafts at once, and then after every `lookahead` drafts, on the server that is free first.
    """
    span = moment * (1 + SLACK)
    plain = int(span // times.target)
    each = lookahead + 1 if right else 1
    si = int(span // (lookahead * times.drafter + times.target)) * each
    if not right:
        return {"nonsi": plain, "si": si, "dsi": plain}
    ends: list[float] = []
    while not ends or ends[-1] <= span:
        drafted = len(ends) * lookahead * times.drafter
        free = ends[len(ends) - int(servers)] if len(ends) >= servers else 0.0
        ends.append(max(drafted, free) + times.target)
    verified = len(ends) - 1  # one ends too late; the first has no drafts
    dsi = 1 + (verified - 1) * lookahead if verified else 0
    return {"nonsi": plain, "si": si, "dsi": dsi}


def published_draws(acceptance: float, lookahead: int, tokens: int, seed: int) -> Iterator[list[int]]:
    """The draws of text after text, as the simulator published with the paper makes them out of the same seed.

    Where the acceptance is 0 or 1, every draw is 0 or the lookahead.
    """
    rng = np.random.RandomState(seed)
    while True:
        if acceptance in (0, 1):
            yield [int(acceptance) * lookahead] * tokens
        else:
            accepted = rng.geometric(1 - acceptance, size=tokens) - 1
            yield np.minimum(accepted, lookahead).tolist()


# --- many texts -------------------------------------------------------------------------------------------------------

class Sample(NamedTuple):
    """Costs and iterations [C, R] of C configurations, R repeats each."""

    costs: Array
    iterations: Array


def drawn(acceptance: Numbers, seed: int) -> Ahead:
    """Drafts that are right by chance, each with `acceptance` (a number or [C]) and independent of all others."""
    rng = np.random.default_rng(seed)
    a = np.reshape(acceptance, (-1, 1)).astype(np.float64)

    def ahead(positions: Positions) -> Positions:
        if np.all((a == 0) | (a == 1)):
            return np.broadcast_to(np.where(a == 1, MOST, 0), positions.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            right = np.log(1 - rng.random(positions.shape)) / np.log(a)  # a = 1: -0 or infinite, replaced below
        counted = np.minimum(np.nan_to_num(right), MOST)
        return np.where(a == 1, MOST, counted).astype(np.int64)

    return ahead


def recorded(matches: Matches) -> Ahead:
    """Drafts that are right as in `matches` [R, positions]: whether the draft for a position is the target's token."""
    repeats, length = matches.shape
    right = np.zeros((repeats, length + 1), dtype=np.int64)
    for position in range(length - 1, -1, -1):
        longer = right[:, position + 1] + 1
        right[:, position] = np.where(matches[:, position], longer, 0)
    rows = np.arange(repeats)

    def ahead(positions: Positions) -> Positions:
        return right[rows, np.minimum(positions, length)]

    return ahead


def simulate(decoding: Decoding, ahead: Ahead, tokens: int, repeats: int) -> Sample:
    """What texts of so many tokens cost, for every configuration of `decoding` and so many repeats."""
    shape = (decoding.drafter.shape[0], repeats)
    done = np.zeros(shape, dtype=np.int64)
    costs, iterations = np.zeros(shape), np.zeros(shape)
    while True:
        going = done < tokens
        if not going.any():
            return Sample(costs, iterations)
        left = np.maximum(tokens - done, 1)
        most = np.minimum(decoding.most, left - 1).astype(np.int64)
        accepted = np.minimum(ahead(done), most)
        costs += np.where(going, decoding.cost(left, accepted), 0.0)
        iterations += np.where(going, decoding.iterations(left, accepted), 0.0)
        done += np.where(going, accepted + 1, 0)


def read_traces(path: Name) -> list[list[bool]]:
    """The recorded matches of each text in a JSON file, empty ones left out. Raises ValueError if it holds none."""
    found = whole(path)
    if not fits(found, [[lambda value: value in (0, 1)]]) or not any(found):
        raise ValueError(f"{path} holds no matches: write a JSON list with a list of 0 and 1 for each text, "
                         "as [[1, 1, 0, 1], [0, 1]]")
    return [list(map(bool, text)) for text in found if text]


def resampled(traces: Sequence[Matches], block: int, tokens: int, repeats: int, seed: int) -> Matches:
    """Texts [repeats, tokens] put together from blocks of recorded ones (circular block bootstrap).

    A block is `block` neighbours of one trace, from a position drawn among all, and goes on at the beginning of its
    trace where that ends: so every position is as likely. Within a block, what one match says of the next is kept.
    Raises ValueError if no trace has a position.
    """
    starts = [(trace, place) for trace in traces for place in range(len(trace))]
    if not starts:
        raise ValueError("there is no recorded position to draw from: give traces with at least one match or mismatch")
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(starts), size=(repeats, -(-tokens // block)))
    texts = np.empty((*chosen.shape, block), dtype=np.bool_)
    for index in np.ndindex(chosen.shape):
        trace, place = starts[chosen[index]]
        texts[index] = trace[(place + np.arange(block)) % len(trace)]
    return texts.reshape(repeats, -1)[:, :tokens]
