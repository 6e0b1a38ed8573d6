"""What the measurements of one stage take: its sizes and its device, and whether they fit this machine.

It knows nothing about what is measured.
"""
from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Callable, NamedTuple, Sequence

import torch

from launch.memory import GB, free
from launch.spec import usable

MOST = 1 << 40  # what is more is no size, and memory would be short before
ROWS = [1, 16, 64]  # of a segment, if nothing is said
PYTHON = 50_000  # bytes of a layer's objects


class Size(NamedTuple):
    """A number that may be given."""

    name: str
    default: int
    about: str


def from_least(least: int) -> Callable[[str], int]:
    """A number of at least so much, for argparse."""
    def number(text: str) -> int:
        is_number = text.isascii() and text.isdigit()
        if not is_number or not least <= int(text[:20]) <= MOST:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not possible: give a whole number, {least} to {MOST}")
        return int(text)

    return number


def read(prog: str, sizes: Sequence[Size], argv: Sequence[str], forms: int) -> Namespace:
    """The sizes of a stage that is held in so many forms. Raises ValueError for one that this machine cannot hold."""
    parser = argparse.ArgumentParser(prog=prog, usage="%(prog)s [--help] [--NAME VALUE ...]")
    for size in sizes:
        parser.add_argument(f"--{size.name}", type=from_least(1), metavar="N", default=size.default,
                            help=f"{size.about} ({size.default})")
    parser.add_argument("--rows", type=from_least(1), nargs="+", metavar="N", default=ROWS,
                        help=f"rows of a segment ({' '.join(map(str, ROWS))})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    args = parser.parse_args(argv)
    _check(args, forms)
    return args


def _check(args: Namespace, forms: int) -> None:
    """Raise ValueError for what this machine does not have."""
    device = usable(args.device, "--device ")
    if args.hidden % (2 * args.heads):
        raise ValueError(f"--hidden {args.hidden} is not possible with --heads {args.heads}: give a multiple of "
                         f"{2 * args.heads}, since positions turn pairs of numbers in each head")
    need = _bytes(args, forms)
    for place in {torch.device("cpu"), device}:
        if need > free(place):
            raise ValueError(f"such a stage needs {need / GB:,.1f} GB in {forms} forms, and {place} has "
                             f"{free(place) / GB:,.1f} GB free: give smaller sizes")


def _bytes(args: Namespace, forms: int) -> int:
    """The memory of the stage in all of its forms, estimated from above as if each number were a float32."""
    hidden, intermediate, rows = args.hidden, args.intermediate, max(args.rows)
    positions = 2 * args.context + rows
    layer = 4 * hidden * (4 * hidden + 3 * intermediate) + PYTHON
    caches = 8 * args.layers * positions * hidden
    tables = 8 * positions * hidden
    scores = 2 * args.heads * (args.context + rows)
    segment = 4 * rows * (8 * hidden + 3 * intermediate + scores)
    need: int = (forms + 2) * args.layers * layer + forms * (caches + tables) + segment
    return need
