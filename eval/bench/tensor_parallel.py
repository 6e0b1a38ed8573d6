"""What sharing layers costs where there is nobody to share them with, and how often members meet in each layer.

It knows nothing about links: sums and tiles that nobody waits for are counted, and times are those of one device.
"""
from __future__ import annotations

import argparse
import statistics
from typing import Tuple

import torch
from torch import Tensor
from tqdm import tqdm

from eval.bench.forms import Form, Stage, build
from eval.bench.sizes import Size, read
from tp.comm import COMMS
from tp.group import Table, ThreadGroup, Wait
from tp.layers import ShardedSlice

Pair = Tuple[float, float]  # seconds of a segment: of the stage as it is, and of the sharded one
PLAIN = Form(torch.float32, "none")
SIZES = (
    Size("layers", 8, "layers of the stage"),
    Size("hidden", 512, "its width"),
    Size("intermediate", 1376, "width of the MLP"),
    Size("heads", 8, "heads of the attention"),
    Size("context", 128, "tokens that are settled"),
    Size("repeats", 101, "segments per median"))


class Counting(ThreadGroup):
    """A member of a group of `size` whose others are not there: what it asks of them is counted, and done at once."""

    def __init__(self, size: int) -> None:
        super().__init__(Table(size), 0)
        self.sums = self.tiles = 0

    def all_reduce(self, x: Tensor) -> None:
        self.sums += 1

    def send(self, x: Tensor) -> Wait:
        self.tiles += 1
        return lambda: None

    def recv(self, x: Tensor) -> Wait:
        def wait() -> None:
            x.zero_()
        return wait


def tensor_parallel(argv: list[str]) -> int:
    """The command `python -m scripts.bench tp`."""
    args = read("python -m scripts.bench tp", SIZES, argv, forms=2)
    torch.set_grad_enabled(False)
    alone(args)
    count(args)
    return 0


def build_sharded(args: argparse.Namespace, group: Counting, method: str) -> Stage:
    """A stage of random layers as a member of this group holds it."""
    stage = build(args, [PLAIN])[PLAIN]
    body = ShardedSlice(stage.body, COMMS[method](group, args.hidden))
    return stage._replace(body=body)  # type: ignore[arg-type]


def alone(args: argparse.Namespace) -> None:
    """Print the times of a sharded stage of one member and of the same stage as it is, measured by turns."""
    whole = build(args, [PLAIN])[PLAIN]
    sharded = build_sharded(args, Counting(1), "tp")
    took: dict[int, list[Pair]] = {rows: [] for rows in args.rows}
    for repeat in tqdm(range(args.repeats + 1), desc="segments", leave=False):
        for rows, pairs in took.items():
            if repeat % 2:  # who comes second finds the caches of the processor warm
                pairs.append((whole.seconds(rows), sharded.seconds(rows)))
            else:
                second = sharded.seconds(rows)
                pairs.append((whole.seconds(rows), second))
    print("one member beside the unsharded stage: median milliseconds, and the median of the ratios")
    for rows, pairs in took.items():
        measured = pairs[1:]  # the first round warms up
        first, second = (1e3 * statistics.median(column) for column in zip(*measured))
        ratio = statistics.median(after / before for before, after in measured)
        print(f"  {rows:>4} rows{first:10.3f}{second:10.3f}{ratio:9.3f}x")


def count(args: argparse.Namespace, size: int = 4) -> None:
    """Print how often one of `size` members needs the others in a layer."""
    rows = max(args.rows)
    print(f"a layer of one of {size} members, {rows} rows")
    for method in ("tp", "galaxy"):
        group = Counting(size)
        build_sharded(args, group, method).segment(rows)
        sums, tiles = group.sums / args.layers, group.tiles / args.layers
        print(f"  {method:<8}{sums:6.2f} sums{tiles:8.2f} tiles sent")
