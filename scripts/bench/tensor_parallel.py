"""What sharing layers costs where there is nobody to share them with, and how often members meet in each layer.

It knows nothing about links: sums and tiles that nobody waits for are counted, and times are those of one device.
"""
from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor
from tqdm import tqdm

from scripts.bench.forms import Form, build
from scripts.bench.sizes import Size, read
from tp.comm import COMMS, Megatron
from tp.group import Table, ThreadGroup, Wait
from tp.layers import ShardedSlice

PLAIN = Form(torch.float32, "none")
SIZES = (Size("layers", 8, "layers of the stage"), Size("hidden", 512, "its width"),
         Size("intermediate", 1376, "width of the MLP"), Size("heads", 8, "heads of the attention"),
         Size("context", 128, "tokens that are settled"), Size("repeats", 101, "segments per median"))


class Counting(ThreadGroup):
    """A member of `size` whose others are not there: what it asks of them is counted, and is done at once."""

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


def alone(args: argparse.Namespace) -> None:
    """A sharded stage of one member beside the same stage as it is, by turns."""
    whole, shared = build(args, [PLAIN])[PLAIN], build(args, [PLAIN])[PLAIN]
    shared = shared._replace(body=ShardedSlice(shared.body, Megatron(Counting(1), args.hidden)))  # type: ignore[arg-type]
    took: dict[int, list[tuple[float, float]]] = {rows: [] for rows in args.rows}
    for repeat in tqdm(range(args.repeats + 1), desc="segments", leave=False):
        for rows, pairs in took.items():
            if repeat % 2:  # who comes second finds the caches of the processor warm
                pairs.append((whole.seconds(rows), shared.seconds(rows)))
            else:
                second = shared.seconds(rows)
                pairs.append((whole.seconds(rows), second))
    print("one member beside the unsharded stage: median milliseconds, and the median of the ratios")
    for rows, pairs in took.items():
        plain, sharded = (1e3 * statistics.median(column) for column in zip(*pairs[1:]))
        ratio = statistics.median(second / first for first, second in pairs[1:])
        print(f"  {rows:>4} rows{plain:10.3f}{sharded:10.3f}{ratio:9.3f}x")


def count(args: argparse.Namespace, size: int = 4) -> None:
    """What a member of several asks of the others in a layer."""
    rows = max(args.rows)
    print(f"a layer of one of {size} members, {rows} rows")
    for name in ("tp", "galaxy"):
        stage, group = build(args, [PLAIN])[PLAIN], Counting(size)
        comm = COMMS[name](group, args.hidden)
        stage._replace(body=ShardedSlice(stage.body, comm)).segment(rows)  # type: ignore[arg-type]
        print(f"  {name:<8}{group.sums / args.layers:6.2f} sums{group.tiles / args.layers:8.2f} tiles sent")
