"""Measurements at the start: rows of a segment, guesses of a verification of DSI, and the cost of an OPT-Tree level.

If a stage's time hardly depends on its rows, a large segment verifies more guesses at no cost. If it does, or a link is
slow, small segments return sooner. It knows nothing about strategies.
"""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, Mapping, NamedTuple, Sequence

from config.methods import METHODS
from config.run_config import RunConfig
from config.trees import Growth, RoundCosts, TreeConfig
from model.drafts.draft import Passes
from model.drafts.mixture import Mixture
from model.drafts.network import Network, at_once
from model.sample import Sampler
from model.tree import TokenTree, verify
from pipeline.requests import Ring
from pipeline.target_options import TargetOptions

SIZES = (16, 32, 64)  # rows
FLAT_RATIO = 1.1  # up to this many times the time of the fewest rows, a pass counts as equally long
TIMED_GUESSES = 8  # guesses that are timed, and tokens of the text before them
TIMED_CONTEXT = 2 * TIMED_GUESSES + 2  # tokens of a context in which levels can be timed
NUM_TOGETHER = 4  # segments that leave together, to find the slowest wire
ROUND_TRIPS = 3  # of which the fastest counts
SEARCH_ROUNDS = 3  # rounds in which the rows of a verification are searched
ROUNDING_ERROR = 1e-9  # relative; up to it a quotient counts as an integer
MAX_ROWS = 64  # of a verification, and of guesses for it


def sized(config: RunConfig, measure_costs: Callable[[], RoundCosts],
          measure_segment_rows: Callable[[], int]) -> TreeConfig:
    """Return the trees of a run, with what its method needs to be measured: costs of rounds, rows of a segment."""
    tree, method = config.tree, METHODS[config.pipeline_type]
    if tree.thrifty and method.falls_back:
        tree = replace(tree, costs=measure_costs())
    if method.measured and not config.subseq_token:
        tree = tree.in_segments(measure_segment_rows())
    return tree


def segment_seconds(ring: Ring, context: int) -> dict[int, float]:
    """Return the seconds of segments by their rows, numbers of `SIZES` that fit into a context.

    The first that takes longer than the fewest is the last, since more rows take no less.
    """
    row_counts = [num_rows for num_rows in SIZES if num_rows <= context] or [context]
    _pass_seconds(ring, row_counts[0])  # warms up

    seconds_by_rows: dict[int, float] = {}
    for num_rows in row_counts:
        seconds_by_rows[num_rows] = _pass_seconds(ring, num_rows)
        if seconds_by_rows[num_rows] > FLAT_RATIO * seconds_by_rows[row_counts[0]]:
            break
    return seconds_by_rows


def learn_slowest_wire(ring: Ring, num_rows: int, context: int) -> None:
    """Measure the seconds between segments of this many rows that leave together, if a context has room for them."""
    if NUM_TOGETHER * num_rows > context:
        return

    seconds_until_back = _seconds_until_back(ring, num_rows, NUM_TOGETHER)
    mean_interval = (seconds_until_back[-1] - seconds_until_back[0]) / (NUM_TOGETHER - 1)
    ring.pacing.times.learn_interval(num_rows, mean_interval)


def segment_rows(seconds: Mapping[int, float]) -> int:
    """Return the most rows that take hardly longer than the fewest, from the seconds of some numbers of rows."""
    assert min(seconds.values()) > 0, seconds
    max_seconds = FLAT_RATIO * seconds[min(seconds)]
    return max(num_rows for num_rows in seconds if seconds[num_rows] <= max_seconds)


def round_trip(ring: Ring, num_rows: int = 1) -> float:
    """Return the seconds that a few rows take once round the ring, after hardly any text."""
    return min(_pass_seconds(ring, num_rows) for _ in range(ROUND_TRIPS))


def batch_seconds(ring: Ring, max_running: int, context: int) -> dict[int, float]:
    """Return the seconds of a token of each of several requests, by their number: 2, 4, ... and `max_running`."""
    most_rows = min(max_running, context)
    doubled = (1 << power for power in range(1, most_rows.bit_length()))
    return {num_rows: round_trip(ring, num_rows) for num_rows in sorted({*doubled, most_rows} - {1})}


def level_seconds(ring: Ring, networks: Sequence[Network], passes: Passes, growth: Growth) -> float:
    """Return the seconds of a level by all networks of a draft, the fastest of as many as of a round trip."""
    return sum(_guess_seconds(ring, network, passes, growth, ROUND_TRIPS) for network in networks)


def _pass_seconds(ring: Ring, num_rows: int) -> float:
    """Return the seconds that this many rows take once round the ring."""
    return _seconds_until_back(ring, num_rows, 1)[0]


def _seconds_until_back(ring: Ring, num_rows: int, num_segments: int) -> list[float]:
    """Send segments of this many rows together; return the seconds after which each is back."""
    num_tokens = num_segments * num_rows
    tree = TokenTree([0] * num_tokens, num_tokens, ring.ids)
    target = ring.open(tree, Sampler())

    begin = ring.clock.now()
    while tree.unsent_text:
        target.send(tree.cut(None, num_rows))

    seconds_until_back: list[float] = []
    while target.in_flight and len(seconds_until_back) < num_segments:  # replicas all read it: the first counts
        for _ in target.wait():
            ring.listen()
        seconds_until_back.append(ring.clock.now() - begin)
    target.close()
    return seconds_until_back


class Latencies(NamedTuple):
    """The latencies of DSI in seconds: a verification with its catch-up, and a guess."""

    verification: float
    guess: float

    def needs(self, lookahead: int) -> int:
        """Return the number of concurrent verifications with which none has to wait (DSI, Eq. 1)."""
        return _ceil_ratio(self.verification, lookahead * self.guess)

    def least(self, servers: int) -> int:
        """Return the fewest guesses in a verification with which none waits for one of `servers` servers (Eq. 1)."""
        return min(MAX_ROWS, _ceil_ratio(self.verification, servers * self.guess))


def _ceil_ratio(longer: float, shorter: float) -> int:
    return max(1, math.ceil(longer / shorter * (1 - ROUNDING_ERROR)))


def latencies(ring: Ring, networks: Sequence[Network], passes: Passes, context: int) -> Latencies:
    """Measure the latencies of DSI at temperature 0, with the fewest guesses per verification by Eq. 1.

    While a replica verifies for T seconds, others receive the later guesses, of d seconds each. So its next one must
    catch up with about T / d of them. That lengthens T, which changes their number: a few rounds come close enough.
    """
    guess_seconds = max(sum(_guess_seconds(ring, network, passes) for network in networks), 1e-6)
    max_rows = min(MAX_ROWS, context)
    _pass_seconds(ring, 1)  # warms up
    latest = Latencies(_pass_seconds(ring, 1), guess_seconds)

    for _ in range(SEARCH_ROUNDS):
        num_catch_up = math.ceil(min(latest.verification / guess_seconds, max_rows))
        num_rows = min(max_rows, num_catch_up + latest.least(ring.depth))
        latest = Latencies(_pass_seconds(ring, num_rows), guess_seconds)
    return latest


def level_share(ring: Ring, network: Network, passes: Passes, growth: Growth, context: int) -> float:
    """Return the time of a tree's level as a share of the time in which the target verifies the tree; from 0 to 1.

    A level that brings more accepted guesses than that is worth its time (OPT-Tree, section 3.2: the least threshold).
    """
    num_rows = min(growth.nodes + 1, context)
    _pass_seconds(ring, num_rows)  # warms up
    level_seconds = _guess_seconds(ring, network, passes, replace(growth, gain=0.0))
    return min(1.0, level_seconds / _pass_seconds(ring, num_rows))


def _guess_seconds(ring: Ring, network: Network, passes: Passes, growth: Growth = TreeConfig.chain,
                   num_compared: int | None = None) -> float:
    """Return the seconds of the fastest level of a tree, or guess of a chain; 0 if the network guesses nothing.

    Only the first `num_compared` count, by default all.
    """
    # a text with the target's features
    tree = TokenTree([0] * TIMED_GUESSES, TIMED_CONTEXT, ring.ids)
    target = ring.open(tree, Sampler(), TargetOptions(network.inner))
    network.begin(Sampler())
    target.send(tree.cut())
    for _ in target.wait():
        ring.listen()
    verify(tree)

    # levels, of which the first also reads the text
    moments = [ring.clock.now()]
    draft = network if network.by_level else Mixture([network])
    while at_once(draft.grow(tree, growth), passes):
        moments.append(ring.clock.now())
    target.close()
    network.reset()

    seconds_of_levels = [after - before for before, after in zip(moments[1:], moments[2:])]
    return min(seconds_of_levels[:num_compared], default=0.0)
