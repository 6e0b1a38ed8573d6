"""What is measured at the start: rows of a segment, guesses of a verification of DSI, what a level of OPT-Tree costs.

Where a stage's time is flat, rows are free and a large segment brings more guesses; where it is sloped, or a link is
slow, small ones come back sooner. It knows nothing about strategies.
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
from pipeline.pacing import Terms
from pipeline.requests import RequestTarget, Ring

SIZES = (16, 32, 64)  # rows
FLAT = 1.1  # a pass that takes at most so many times as long as one of the fewest rows counts as just as long
GUESSED = 8  # guesses whose time is taken, and tokens of the text before them
TRIPS = 3  # of which the fastest counts
ROUNDS = 3  # in which the rows of a verification are found
SLACK = 1e-9  # relative: a quotient that is whole but for rounding counts as whole
MOST = 64  # rows of a verification, and guesses for it, at most


def sized(config: RunConfig, plain: Callable[[], float],
          rows: Callable[[], int]) -> TreeConfig:
    """The trees of a run. What its method needs is measured: seconds of a plain round, rows of a segment."""
    tree, method = config.tree, METHODS[config.pipeline_type]
    if tree.thrifty and method.falls_back:
        tree = replace(tree, plain_seconds=plain())
    if method.measured and not config.subseq_token:
        tree = tree.in_segments(rows())
    return tree


def segment_rows(ring: Ring, context: int) -> int:
    """The most rows, of `SIZES`, whose pass takes hardly longer than that of the fewest; a few passes to find out."""
    sizes = [size for size in SIZES if size <= context] or [context]
    _pass(ring, sizes[0])  # warms up
    takes = {size: _pass(ring, size) for size in sizes}
    assert min(takes.values()) > 0, takes
    longest = FLAT * takes[sizes[0]]
    return max(size for size in sizes if takes[size] <= longest)


def round_trip(ring: Ring) -> float:
    """The seconds that one row takes once round the ring, where hardly any text stands before it."""
    return min(_pass(ring, 1) for _ in range(TRIPS))


def _pass(ring: Ring, rows: int) -> float:
    """The seconds that so many rows take once round the ring."""
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
    """What DSI is made of, in seconds: a verification with its catch-up, and a guess."""

    verification: float
    guess: float

    def needs(self, lookahead: int) -> int:
        """The verifications under way at once with which none waits (DSI, Eq. 1)."""
        return _times(self.verification, lookahead * self.guess)

    def least(self, servers: int) -> int:
        """The fewest guesses in a verification with which none of them waits for one of so many servers (Eq. 1)."""
        return min(MOST, _times(self.verification, servers * self.guess))


def _times(longer: float, shorter: float) -> int:
    return max(1, math.ceil(longer / shorter * (1 - SLACK)))


def latencies(ring: Ring, networks: Sequence[Network], passes: Passes, context: int) -> Latencies:
    """The latencies of DSI at temperature 0, with as few guesses in a verification as Eq. 1 wants, but at most `MOST`.

    While a replica verifies, others are sent the guesses after its own. So the next one has to catch up with about
    T / d of them, which lengthens T, which changes how many they are: a few rounds come close enough.
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
    """What a level of a tree takes, in the time in which the target verifies that tree; from 0 to 1.

    A level that brings more accepted guesses than that is worth its time (OPT-Tree, section 3.2: the least threshold).
    """
    rows = min(growth.nodes + 1, context)
    _pass(ring, rows)  # warms up
    level = _guess(ring, network, passes, replace(growth, gain=0.0))
    return min(1.0, level / _pass(ring, rows))


def _guess(ring: Ring, network: Network, passes: Passes, growth: Growth = TreeConfig.chain) -> float:
    """The seconds of one more level of a tree, or guess of a chain; 0 if the network guesses nothing."""
    tree = TokenTree([0] * GUESSED, 2 * GUESSED + 2, ring.ids)
    target = ring.open(tree, Sampler(), Terms(network.inner))
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
