"""One stage of random layers on one device: its sizes, a check that they fit this machine, and its segments."""
from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from eval.bench import number
from launch.hosts.timing import random_stage
from launch.memory import GB, free
from launch.spec import device_named
from model.cache import TreeCache
from model.llama import LlamaConfig

ROWS = [1, 16, 64]  # of a segment, by default
PYTHON = 50_000  # bytes of a layer's objects
SIZES = {  # as in a 7B model
    "layers": (1, "layers of the stage"), "hidden": (4096, "its width"), "intermediate": (11008, "width of the MLP"),
    "heads": (32, "heads of the attention"), "context": (512, "tokens that are settled"),
    "repeats": (9, "segments per figure")}


class Form(NamedTuple):
    """The type of the computation, and the kind of the layers' weights."""

    dtype: torch.dtype
    kind: str

    def __str__(self) -> str:
        name = str(self.dtype)[len("torch."):]
        return name if self.kind == "none" else f"{name}, {self.kind}"


class Stage(NamedTuple):
    """Layers in one form, their cache, and their input."""

    body: Any  # a Slice
    cache: TreeCache
    x_TD: Tensor

    def segment(self, rows: int) -> Tensor:
        """Return the outputs `[T, D]` of the layers for this many rows, each of which continues the one before.

        The rows are dropped from the cache afterwards.
        """
        nodes = list(range(1 << 20, (1 << 20) + rows))
        self.cache.admit(nodes, [0, *nodes[:-1]], 0)
        pos_T = torch.arange(rows, device=self.x_TD.device) + self.cache.settled
        with torch.inference_mode():
            out: Tensor = self.body(self.x_TD[:rows], pos_T, self.cache)
        self.cache.drop()
        return out

    def compute(self, rows: int) -> None:
        """Compute a segment, and wait for the device."""
        self.segment(rows)[-1, -1].item()


def size_of(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


# --- sizes ------------------------------------------------------------------------------------------------------------

def read(argv: Sequence[str], forms: int) -> Namespace:
    """Return the sizes of a stage, held in this many forms. Raise ValueError if it does not fit this machine."""
    parser = argparse.ArgumentParser(usage="python3 -m scripts.bench stages [--help] [--NAME VALUE ...]")
    for name, (default, about) in SIZES.items():
        parser.add_argument(f"--{name}", type=number, metavar="N", default=default, help=f"{about} ({default})")
    parser.add_argument("--rows", type=number, nargs="+", metavar="N", default=ROWS,
                        help=f"rows of a segment ({' '.join(map(str, ROWS))})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    args = parser.parse_args(argv)
    device = device_named(args.device, "--device ")
    if args.hidden % (2 * args.heads):
        raise ValueError(f"--hidden {args.hidden} is not possible with --heads {args.heads}: give a multiple of "
                         f"{2 * args.heads}, since positions turn pairs of numbers in each head")
    need = _bytes(args, forms)
    for place in {torch.device("cpu"), device}:
        if need > free(place):
            raise ValueError(f"such a stage needs {need / GB:,.1f} GB in {forms} forms, and {place} has "
                             f"{free(place) / GB:,.1f} GB free: give smaller sizes")
    return args


def _bytes(args: Namespace, forms: int) -> int:
    """Return an upper bound for the memory of the stage in all of its forms, with each number as a float32."""
    hidden, intermediate, rows = args.hidden, args.intermediate, max(args.rows)
    positions = 2 * args.context + rows
    layer = 4 * hidden * (4 * hidden + 3 * intermediate) + PYTHON
    caches_and_tables = 8 * (args.layers + 1) * positions * hidden
    scores = 2 * args.heads * (args.context + rows)
    segment = 4 * rows * (8 * hidden + 3 * intermediate + scores)
    need: int = (forms + 2) * args.layers * layer + forms * caches_and_tables + segment
    return need


# --- layers -----------------------------------------------------------------------------------------------------------

def build(args: Namespace, forms: Sequence[Form]) -> dict[Form, Stage]:
    """Return the same random layers in every form, with the same random text of `--context` tokens in their caches."""
    context, text = 2 * args.context + max(args.rows), list(range(args.context))
    head_dim = args.hidden // args.heads
    sizes = LlamaConfig(args.hidden, args.layers, args.heads, args.heads, head_dim, args.intermediate,
                        vocab=1, context=context, eps=1e-6, theta=1e4)
    x_TD = torch.randn(max(args.rows), args.hidden)
    made: dict[Form, Stage] = {}
    for form in tqdm(forms, desc="quantizing", leave=False):
        like = torch.empty(0, dtype=form.dtype, device=args.device)
        body = random_stage(sizes, args.layers, like, form.kind, context).part
        torch.manual_seed(1)  # after random draws of the layers' trials
        cache = sizes.cache(args.layers, context, like)
        cache.admit(text, [0, *text[:-1]], args.context)
        for stored in cache.slots[0].held:
            stored.copy_(torch.randn(stored.shape))
        made[form] = Stage(body, cache, x_TD.to(like))
    return made
