"""The hyperparameters of trees of guesses, which strategies and drafts read, and the shapes of fixed trees.

It knows nothing about keys: `run_config.py` converts them to these values.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple, Tuple

from config.curves import extrapolated

NO_BOUND = 1 << 30  # no bound: more guesses or levels than any context holds
MAX_GUESSES = 65536  # guesses in a tree
WIDTHS_FORM = re.compile(r"[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*")
FIXED_POLICIES = ("static", "expansion")  # policies with a shape that does not depend on the guesses
DEFAULT_GAIN = 0.5  # of a level of policy=opt, until the best value is measured

# The log-probability of a path below which streaming drafts nothing. By trial: -8 cuts off long copies, which begin
# improbable; with -12 `suffix` alone is slower where an answer repeats its prompt.
MIN_SCORE = -10.0

TreeShape = Tuple[Tuple[int, ...], ...]  # by level, the number of children of each node of the level before, in order

# EAGLE-1's tree of 25 guesses; a node's likeliest child is first. Nodes that a level does not list have no children.
STATIC_SHAPE: TreeShape = (
    (4,),
    (3, 2, 2, 1),
    (3, 2, 2, 1),
    (3,),
    (2,),
)


@dataclass(frozen=True)
class Growth:
    """The size of a tree that a draft grows: the best `nodes` guesses, in `depth` levels after the first.

    The best `width` guesses of a level get `width` children each. A segment has at most `segment` rows (None: no
    bound). With a `shape`, the tree has this shape instead, whatever the scores of its guesses.
    """

    nodes: int
    depth: int
    width: int
    segment: int | None = None
    least_score: float = -math.inf  # log-probability of a path, from the tip, below which a guess is dropped
    anywhere: bool = False  # whether the likeliest guesses are read anywhere in the tree, instead of level by level
    outcome_levels: int = 0  # levels below the likeliest outcome of what was sent, fewer below others; 0: no bound
    shape: TreeShape = ()
    gain: float = 0.0  # expected accepted guesses that a level must bring before another one is drafted (OPT-Tree)

    @property
    def nothing(self) -> Growth:
        """The same growth without nodes and levels."""
        return replace(self, nodes=0, depth=0)

    @property
    def young(self) -> Growth:
        """The same growth with at most three levels."""
        return replace(self, depth=min(self.depth, 2))

    def deeper(self, added: Growth) -> Growth:
        """Return this growth with the nodes and levels of another one added; a shape stays as it is."""
        if self.shape:
            return self
        return replace(self, nodes=self.nodes + added.nodes, depth=self.depth + added.depth)

    def shaped(self, shape: TreeShape) -> Growth:
        """Return a growth of this shape, with segments of the same size."""
        num_nodes, width = sum(map(sum, shape)), max(map(max, shape))
        return replace(self, nodes=num_nodes, depth=len(shape) - 1, width=width, shape=shape)


def by_policy(growth: Growth, policy: str, expansion: str, threshold: float) -> Growth:
    """Return the growth under a policy, with the key `expansion` and the X of `policy=opt:X`."""
    if policy == "opt":  # OPT-Tree's frontier is as wide as the tree, and deepens while that pays
        return replace(growth, width=growth.nodes, gain=threshold or DEFAULT_GAIN)
    if policy not in FIXED_POLICIES:
        return growth
    return growth.shaped(STATIC_SHAPE if policy == "static" else expanded(expansion))


def expanded(expansion: str) -> TreeShape:
    """Return the shape of SpecInfer's tree from its widths, such as 1,1,3: the children per node of each level."""
    shape, level_nodes = [], 1
    for width in map(int, expansion.split(",")):
        shape.append((width,) * level_nodes)
        level_nodes *= width
    return tuple(shape)


def wrong_widths(expansion: str) -> str:
    """Return the problem of widths that a user wrote, with the fix; empty if they are valid."""
    if not WIDTHS_FORM.fullmatch(expansion):
        return "is not a list of widths: write numbers with commas between, as 1,1,3,1,1,1,1,1"
    num_nodes, level_nodes = 0, 1
    for width in map(int, expansion.split(",")):
        level_nodes *= width
        num_nodes += level_nodes
        if num_nodes > MAX_GUESSES:
            return f"gives a tree of more than {MAX_GUESSES} guesses: give smaller widths"
    return ""


class RoundCosts(NamedTuple):
    """Seconds that are measured at the start: of rows once round the ring, and of a level of the draft's networks."""

    seconds_by_rows: tuple[tuple[int, float], ...] = ()  # the fewest rows first; empty: nothing falls back
    level_seconds: float = 0.0  # on the cores of the stages; 0: a level takes no time from them

    def round_seconds(self, num_rows: int) -> float:
        """Return the seconds of this many rows, linear between measured numbers; beyond, the last slope is kept."""
        return extrapolated(self.seconds_by_rows, num_rows)


@dataclass(frozen=True)
class TreeConfig:
    """The hyperparameters that strategies and drafts read."""

    init: Growth = Growth(80, 6, 10, 16)  # at the start, and after a miss
    expand: Growth = Growth(64, 6, 10, 16)  # of continuous after a hit
    idle: Growth = Growth(48, 1, 10)  # added by continuous when a segment returned and settled nothing
    layer: Growth = Growth(NO_BOUND, NO_BOUND, 16, 16)  # one more layer of PipeDec
    chain: Growth = Growth(NO_BOUND, NO_BOUND, 1)  # one more guess of a chain, as in PipeInfer and PEARL
    stream: Growth = Growth(1024, NO_BOUND, 10, 16, MIN_SCORE, anywhere=True)  # of streaming
    run: int = 4  # rows of `chain` in a segment
    coupled: Growth = Growth(NO_BOUND, NO_BOUND, 1, anywhere=True)  # one more guess of DSI, drawn with the noise
    lookahead: int = 1  # guesses of `coupled` per verification
    chunk: int = 64  # the most rows of unsent text in one segment
    best_first: bool = True  # whether guesses are sent best first, instead of in the order of drafting
    prunes: bool = True  # whether dead guesses under way are dropped, instead of computed to the end
    forced: bool = True  # whether tokens that a grammar forces are guessed by a source of their own
    thrifty: bool = True  # whether only what pays, by recent measurements, is sent and drafted
    costs: RoundCosts = RoundCosts()  # by which `thrifty` falls back to plain decoding

    def in_segments(self, max_rows: int) -> TreeConfig:
        """Return the same trees with at most `max_rows` rows per segment."""
        init, expand, stream = (replace(growth, segment=max_rows) for growth in (self.init, self.expand, self.stream))
        return replace(self, init=init, expand=expand, stream=stream)

    @property
    def outcomes(self) -> Growth:
        """The tree of ssd: as streaming's, below each outcome of the sent guesses, as deep as `init`."""
        return replace(self.stream, outcome_levels=self.init.depth + 1)
