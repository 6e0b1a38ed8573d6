"""How trees of guesses are grown and sent: what strategies and drafts read, and the shapes of fixed trees.

It knows nothing about keys: `run_config.py` makes these values of them.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Tuple

ENDLESS = 1 << 30  # no bound: more guesses, or levels, than any context holds
MOST_GUESSES = 65536  # guesses in a tree
WIDTHS = re.compile(r"[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*")
FIXED = ("static", "expansion")  # policies by which a tree has its shape before anything is guessed
GAIN = 0.5  # of a level of policy=opt, until it is measured how much pays
LEAST_SCORE = -8.0  # log-probability of a path below which streaming drafts nothing
Shape = Tuple[Tuple[int, ...], ...]  # level by level, how many children each node of the level before has, in order

# EAGLE-1's tree: of 25 guesses, the likeliest of a node first. Nodes that a level leaves out have no children.
STATIC: Shape = (
    (4,),
    (3, 2, 2, 1),
    (3, 2, 2, 1),
    (3,),
    (2,),
)


@dataclass(frozen=True)
class Growth:
    """How a draft grows a tree: the best `nodes` guesses stay, in `depth` levels after the first.

    The best `width` guesses of a level get `width` children each. A segment has at most `segment` rows (None: there is
    no bound). With a `shape` the tree has this shape instead, whatever its guesses are worth.
    """

    nodes: int
    depth: int
    width: int
    segment: int | None = None
    least_score: float = -math.inf  # log-probability of a path, from the tip, below which a guess is not worth its row
    anywhere: bool = False  # whether the likeliest guesses are read wherever they stand, or level by level
    outcome_levels: int = 0  # below the likeliest outcome of what was sent, fewer below others; 0: no bound
    shape: Shape = ()
    gain: float = 0.0  # expected accepted guesses that a level must bring for another one to be drafted (OPT-Tree)

    @property
    def nothing(self) -> Growth:
        """No tree: it has no nodes and no levels."""
        return replace(self, nodes=0, depth=0)

    @property
    def young(self) -> Growth:
        """The same tree before it is deep: of three levels, at most."""
        return replace(self, depth=min(self.depth, 2))

    def deeper(self, more: Growth) -> Growth:
        """The same tree with this many nodes and levels more; a shape stays as it is."""
        if self.shape:
            return self
        return replace(self, nodes=self.nodes + more.nodes, depth=self.depth + more.depth)

    def shaped(self, shape: Shape) -> Growth:
        """A tree of this shape, in segments of the same size."""
        nodes, width = sum(map(sum, shape)), max(map(max, shape))
        levels = len(shape)
        return replace(self, nodes=nodes, depth=levels - 1, width=width, shape=shape)


def by_policy(growth: Growth, policy: str, expansion: str, threshold: float) -> Growth:
    """A tree that is grown by a policy, with the key `expansion` and the X of `policy=opt:X`."""
    if policy == "opt":  # OPT-Tree's frontier is as wide as the tree, and deepens while that pays
        return replace(growth, width=growth.nodes, gain=threshold or GAIN)
    if policy not in FIXED:
        return growth
    return growth.shaped(STATIC if policy == "static" else expanded(expansion))


def expanded(expansion: str) -> Shape:
    """SpecInfer's tree by its widths, as 1,1,3: in each step every node of the last level gets so many children."""
    shape, nodes = [], 1
    for width in map(int, expansion.split(",")):
        shape.append((width,) * nodes)
        nodes *= width
    return tuple(shape)


def wrong_widths(expansion: str) -> str:
    """What is wrong with widths that a person wrote, and the fix; empty if nothing is."""
    if not WIDTHS.fullmatch(expansion):
        return "is no list of widths: write numbers with commas between, as 1,1,3,1,1,1,1,1"
    nodes, level = 0, 1
    for width in map(int, expansion.split(",")):
        level *= width
        nodes += level
        if nodes > MOST_GUESSES:
            return f"makes a tree of more than {MOST_GUESSES} guesses: give smaller widths"
    return ""


@dataclass(frozen=True)
class TreeConfig:
    """The hyperparameters that strategies and drafts read."""

    init: Growth = Growth(80, 6, 10, 16)  # at the start, and after a miss
    expand: Growth = Growth(64, 6, 10, 16)  # of continuous after a hit
    idle: Growth = Growth(48, 1, 10)  # what continuous adds when a segment came back and settled nothing
    layer: Growth = Growth(ENDLESS, ENDLESS, 16, 16)  # one more layer of PipeDec
    chain: Growth = Growth(ENDLESS, ENDLESS, 1)  # one more guess of a chain, as PipeInfer's and PEARL's
    stream: Growth = Growth(1024, ENDLESS, 10, 16, LEAST_SCORE, anywhere=True)  # of streaming
    run: int = 4  # guesses of `chain` in a segment
    coupled: Growth = Growth(ENDLESS, ENDLESS, 1, anywhere=True)  # one more guess of DSI's chain, which knows the noise
    lookahead: int = 1  # guesses of `coupled` in a verification
    chunk: int = 64  # the most rows of unsent text in one segment
    best_first: bool = True  # whether guesses are sent best first, or in the order in which they were drafted
    prunes: bool = True  # whether what died on its way is dropped, or computed to its end all the same
    forced: bool = True  # whether tokens that a grammar forces are guessed by a source of their own
    thrifty: bool = True  # whether only what pays is sent and drafted, by recent measurements
    plain_seconds: float = 0.0  # seconds of a token by plain decoding, to which thrift falls back; 0: never

    def in_segments(self, rows: int) -> TreeConfig:
        """The same trees, which go in segments of so many rows at most."""
        init, expand, stream = (replace(growth, segment=rows) for growth in (self.init, self.expand, self.stream))
        return replace(self, init=init, expand=expand, stream=stream)

    @property
    def outcomes(self) -> Growth:
        """The tree of ssd: that of streaming below each outcome of what was sent, as deep as a first tree."""
        return replace(self.stream, outcome_levels=self.init.depth + 1)
