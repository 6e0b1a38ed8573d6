"""How many rows a segment should hold: measured, by how much longer a pass of the pipeline takes with more rows.

Where a stage's time is flat, rows are free and a large segment brings more guesses; where it is sloped, or a link is
slow, small ones come back sooner. It knows nothing about strategies.
"""
from __future__ import annotations

from model.sample import Sampler
from model.tree import TokenTree
from pipeline.clock import REAL
from pipeline.interfaces import Clock
from pipeline.target import Ring

SIZES = (16, 32, 64)  # rows
FLAT = 1.1  # a pass that takes at most so many times as long as one of the fewest rows counts as just as long


def segment_rows(ring: Ring, context: int, clock: Clock = REAL) -> int:
    """The most rows, of `SIZES`, whose pass takes hardly longer than that of the fewest; a few passes to find out."""
    sizes = [size for size in SIZES if size <= context] or [context]
    _pass(ring, sizes[0], clock)  # warms up
    takes = {size: _pass(ring, size, clock) for size in sizes}
    assert min(takes.values()) > 0, takes
    longest = FLAT * takes[sizes[0]]
    return max(size for size in sizes if takes[size] <= longest)


def _pass(ring: Ring, rows: int, clock: Clock) -> float:
    """The seconds that so many rows take once round the ring."""
    tree = TokenTree([0] * rows, rows, ring.ids)
    target = ring.open(tree, Sampler())
    start = clock.now()
    target.send(tree.cut())
    for _ in target.wait():
        ring.listen()
    seconds = clock.now() - start
    target.close()
    return seconds
