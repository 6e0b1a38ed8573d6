"""One stage of random layers on one device: its sizes, a check that they fit this machine, and its segments."""
from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from config.dialect import OptionParser
from eval.bench import number
from launch.memory import GB, free
from launch.progress import ProgressBar
from launch.spec import device_named
from launch.timing import computed_rows, random_stage
from model.llama import LlamaConfig
from pipeline.stage import Stage

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


class FormStage(NamedTuple):
    """A stage in one form, which holds a text of `context` tokens, and rows for it."""

    stage: Stage
    context: int
    x_TD: Tensor

    def segment(self, rows: int) -> Tensor:
        """Return the outputs `[T, D]` of the layers for this many rows."""
        nodes = range(self.context, self.context + rows)
        return computed_rows(self.stage, 0, nodes, self.x_TD)


def size_of(module: Any) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


# --- sizes ------------------------------------------------------------------------------------------------------------

def read(argv: Sequence[str], forms: int) -> Namespace:
    """Return the sizes of a stage, held in this many forms. Raise ValueError if it does not fit this machine."""
    parser = OptionParser(usage="python3 -m scripts.bench stages [--help] [--NAME VALUE ...]")
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

def build(args: Namespace, forms: Sequence[Form]) -> dict[Form, FormStage]:
    """Return the same random layers in every form, with the same random text of `--context` tokens in their caches."""
    context, text = 2 * args.context + max(args.rows), list(range(args.context))
    head_dim = args.hidden // args.heads
    sizes = LlamaConfig(args.hidden, args.layers, args.heads, args.heads, head_dim, args.intermediate,
                        vocab=1, context=context, eps=1e-6, theta=1e4)
    x_TD = torch.randn(max(args.rows), args.hidden)
    made: dict[Form, FormStage] = {}
    for form in ProgressBar(forms, desc="quantizing", leave=False):
        like = torch.empty(0, dtype=form.dtype, device=args.device)
        stage = random_stage(sizes, args.layers, like, form.kind, context)
        torch.manual_seed(1)  # after random draws of the layers' trials
        cache = stage.cache(0)
        cache.admit(text, [0, *text[:-1]], args.context)
        for stored in cache.slots[0].tensors:
            stored.copy_(torch.randn(stored.shape))
        made[form] = FormStage(stage, args.context, x_TD.to(like))
    return made
