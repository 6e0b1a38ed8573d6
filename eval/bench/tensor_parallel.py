"""What sharing layers costs where there is nobody to share them with, and how often members meet in each layer.

Sums and tiles that nobody waits for are counted, and times are those of one device.
"""
from __future__ import annotations

import argparse
from statistics import median

import torch
from torch import Tensor

from eval.bench.stage import Form, Stage, build, read, segment_times
from tp.comm import COMMS
from tp.group import Table, ThreadGroup, Wait
from tp.layers import ShardedSlice

PLAIN = Form(torch.float32, "none")
SIZES = 8, 512, 1376, 8, 128, 101
MEMBERS = 4


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


def _sharded(args: argparse.Namespace, group: Counting, method: str) -> Stage:
    """A stage of random layers as a member of this group holds it."""
    stage = build(args, [PLAIN])[PLAIN]
    comm = COMMS[method](group, args.hidden)
    return stage._replace(body=ShardedSlice(stage.body, comm))


def alone(args: argparse.Namespace) -> None:
    """Print the times of a sharded stage of one member and of the same stage as it is."""
    stages = {"whole": build(args, [PLAIN])[PLAIN], "sharded": _sharded(args, Counting(1), "tp")}
    took = segment_times(stages, args)
    print("one member beside the unsharded stage: median milliseconds, and the median of the ratios")
    for rows in args.rows:
        whole, sharded = took["whole", rows], took["sharded", rows]
        ratio = median(after / before for before, after in zip(whole, sharded))
        print(f"  {rows:>4} rows{1e3 * median(whole):10.3f}{1e3 * median(sharded):10.3f}{ratio:9.3f}x")


def count(args: argparse.Namespace) -> None:
    """Print how often one of several members needs the others in a layer."""
    rows = max(args.rows)
    print(f"a layer of one of {MEMBERS} members, {rows} rows")
    for method in ("tp", "galaxy"):
        group = Counting(MEMBERS)
        _sharded(args, group, method).segment(rows)
        sums, tiles = group.sums / args.layers, group.tiles / args.layers
        print(f"  {method:<8}{sums:6.2f} sums{tiles:8.2f} tiles sent")
