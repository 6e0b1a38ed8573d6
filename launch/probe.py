"""Measurements at the start: rows of a segment, guesses of a verification of DSI, and the cost of an OPT-Tree level.

If a stage's time hardly depends on its rows, a large segment verifies more guesses at no cost. If it does, or a link is
slow, small segments return sooner. It knows nothing about strategies.
"""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, NamedTuple, Sequence

from config.methods import METHODS
from config.run_config import RunConfig
from config.trees import Growth, TreeConfig
from model.drafts.draft import Passes
from model.drafts.mixture import Mixture
from model.drafts.network import Network, at_once
from model.sample import Sampler
from model.tree import TokenTree, verify
from pipeline.pacing import TargetOptions
from pipeline.requests import RequestTarget, Ring

SIZES = (16, 32, 64)  # rows
FLAT = 1.1  # up to this many times the time of the fewest rows, a pass counts as equally long
GUESSED = 8  # guesses that are timed, and tokens of the text before them
TRIPS = 3  # round trips, of which the fastest counts
ROUNDS = 3  # rounds in which the rows of a verification are found
SLACK = 1e-9  # relative rounding error up to which a quotient counts as an integer
MOST = 64  # maximum of rows of a verification, and of guesses for it


def sized(config: RunConfig, plain: Callable[[], float],
          rows: Callable[[], int]) -> TreeConfig:
    """Return the trees of a run. If its method needs them, `plain` and `rows` measure a plain round and a segment."""
    tree, method = config.tree, METHODS[config.pipeline_type]
    if tree.thrifty and method.falls_back:
        tree = replace(tree, plain_seconds=plain())
    if method.measured and not config.subseq_token:
        tree = tree.in_segments(rows())
    return tree


def segment_rows(ring: Ring, context: int) -> int:
    """Return the most rows of `SIZES` that take hardly longer than the fewest, measured by a few passes."""
    sizes = [size for size in SIZES if size <= context] or [context]
    _pass(ring, sizes[0])  # warms up
    takes = {size: _pass(ring, size) for size in sizes}
    assert min(takes.values()) > 0, takes
    longest = FLAT * takes[sizes[0]]
    return max(size for size in sizes if takes[size] <= longest)


def round_trip(ring: Ring) -> float:
    """Return the seconds that one row takes once round the ring, after hardly any text."""
    return min(_pass(ring, 1) for _ in range(TRIPS))


def _pass(ring: Ring, rows: int) -> float:
    """Return the seconds that this many rows take once round the ring."""
    tree = TokenTree([0] * rows, rows, ring.ids)
    target = ring.open(tree, Sampler())
    start = ring.clock.now()
    _send(ring, tree, target)
    seconds = ring.clock.now() - start
    target.close()
    return seconds


def _send(ring: Ring, tree: TokenTree, target: RequestTarget) -> None:
    target.send(tree.cut())
    for _ in target.wait():
        ring.listen()


class Latencies(NamedTuple):
    """The latencies of DSI in seconds: a verification with its catch-up, and a guess."""

    verification: float
    guess: float

    def needs(self, lookahead: int) -> int:
        """Return the number of concurrent verifications with which none has to wait (DSI, Eq. 1)."""
        return _times(self.verification, lookahead * self.guess)

    def least(self, servers: int) -> int:
        """Return the fewest guesses in a verification with which none waits for one of `servers` servers (Eq. 1)."""
        return min(MOST, _times(self.verification, servers * self.guess))


def _times(longer: float, shorter: float) -> int:
    return max(1, math.ceil(longer / shorter * (1 - SLACK)))


def latencies(ring: Ring, networks: Sequence[Network], passes: Passes, context: int) -> Latencies:
    """Measure the latencies of DSI at temperature 0, with the fewest guesses per verification by Eq. 1, at most `MOST`.

    While a replica verifies for T seconds, others receive the later guesses, of d seconds each. So its next one must
    catch up with about T / d of them. That lengthens T, which changes their number: a few rounds come close enough.
    """
    guess = max(sum(_guess(ring, network, passes) for network in networks), 1e-6)
    room = min(MOST, context)
    _pass(ring, 1)  # warms up
    found = Latencies(_pass(ring, 1), guess)
    for _ in range(ROUNDS):
        behind = math.ceil(min(found.verification / guess, room))
        rows = min(room, behind + found.least(ring.depth))
        found = Latencies(_pass(ring, rows), guess)
    return found


def level_share(ring: Ring, network: Network, passes: Passes, growth: Growth, context: int) -> float:
    """Return the time of a tree's level as a share of the time in which the target verifies the tree; from 0 to 1.

    A level that brings more accepted guesses than that is worth its time (OPT-Tree, section 3.2: the least threshold).
    """
    rows = min(growth.nodes + 1, context)
    _pass(ring, rows)  # warms up
    level = _guess(ring, network, passes, replace(growth, gain=0.0))
    return min(1.0, level / _pass(ring, rows))


def _guess(ring: Ring, network: Network, passes: Passes, growth: Growth = TreeConfig.chain) -> float:
    """Return the seconds of one more level of a tree, or guess of a chain; 0 if the network guesses nothing."""
    tree = TokenTree([0] * GUESSED, 2 * GUESSED + 2, ring.ids)
    target = ring.open(tree, Sampler(), TargetOptions(network.inner))
    network.begin(Sampler())
    _send(ring, tree, target)
    verify(tree)
    moments = [ring.clock.now()]
    draft = network if network.by_level else Mixture([network])
    while at_once(draft.grow(tree, growth), passes):
        moments.append(ring.clock.now())
    target.close()
    network.reset()
    takes = (after - before for before, after in zip(moments[1:], moments[2:]))
    return min(takes, default=0.0)
