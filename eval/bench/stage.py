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

DEFAULT_ROWS = [1, 16, 64]  # of a segment, by default
OBJECT_BYTES = 50_000  # of a layer's Python objects
DEFAULT_SIZES = {  # as in a 7B model
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

    def segment(self, num_rows: int) -> Tensor:
        """Return the outputs `[T, D]` of the layers for this many rows."""
        nodes = range(self.context, self.context + num_rows)
        return computed_rows(self.stage, 0, nodes, self.x_TD)


def size_of(module: Any) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


# --- sizes ------------------------------------------------------------------------------------------------------------

def read(argv: Sequence[str], num_forms: int) -> Namespace:
    """Return the sizes of a stage, held in this many forms. Raise ValueError if it does not fit this machine."""
    parser = OptionParser(usage="python3 -m scripts.bench stages [--help] [--NAME VALUE ...]")
    for name, (default, about) in DEFAULT_SIZES.items():
        parser.add_argument(f"--{name}", type=number, metavar="N", default=default, help=f"{about} ({default})")
    parser.add_argument("--rows", type=number, nargs="+", metavar="N", default=DEFAULT_ROWS,
                        help=f"rows of a segment ({' '.join(map(str, DEFAULT_ROWS))})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    args = parser.parse_args(argv)

    # checks
    device = device_named(args.device, "--device ")
    if args.hidden % (2 * args.heads):
        raise ValueError(f"--hidden {args.hidden} is not possible with --heads {args.heads}: give a multiple of "
                         f"{2 * args.heads}, since positions turn pairs of numbers in each head")
    needed_bytes = _max_bytes(args, num_forms)
    for used_device in {torch.device("cpu"), device}:
        free_bytes = free(used_device)
        if needed_bytes > free_bytes:
            raise ValueError(f"such a stage needs {needed_bytes / GB:,.1f} GB in {num_forms} forms, and {used_device} "
                             f"has {free_bytes / GB:,.1f} GB free: give smaller sizes")
    return args


def _max_bytes(args: Namespace, num_forms: int) -> int:
    """Return an upper bound for the memory of the stage in all of its forms, with each number as a float32."""
    hidden, intermediate, max_rows = args.hidden, args.intermediate, max(args.rows)
    num_positions = 2 * args.context + max_rows

    layer_bytes = 4 * hidden * (4 * hidden + 3 * intermediate) + OBJECT_BYTES
    cache_and_table_bytes = 8 * (args.layers + 1) * num_positions * hidden
    scores_per_row = 2 * args.heads * (args.context + max_rows)
    segment_bytes = 4 * max_rows * (8 * hidden + 3 * intermediate + scores_per_row)

    num_layers = (num_forms + 2) * args.layers
    total_bytes: int = num_layers * layer_bytes + num_forms * cache_and_table_bytes + segment_bytes
    return total_bytes


# --- layers -----------------------------------------------------------------------------------------------------------

def build(args: Namespace, forms: Sequence[Form]) -> dict[Form, FormStage]:
    """Return the same random layers in every form, with the same random text of `--context` tokens in their caches."""
    max_context = 2 * args.context + max(args.rows)
    text_nodes = list(range(args.context))
    head_dim = args.hidden // args.heads
    sizes = LlamaConfig(args.hidden, args.layers, args.heads, args.heads, head_dim, args.intermediate,
                        vocab=1, context=max_context, eps=1e-6, theta=1e4)
    x_TD = torch.randn(max(args.rows), args.hidden)

    stages: dict[Form, FormStage] = {}
    for form in ProgressBar(forms, desc="quantizing", leave=False):
        like = torch.empty(0, dtype=form.dtype, device=args.device)
        stage = random_stage(sizes, args.layers, like, form.kind, max_context)

        torch.manual_seed(1)  # after random draws of the layers' trials
        cache = stage.cache(0)
        cache.admit(text_nodes, [0, *text_nodes[:-1]], args.context)
        for stored in cache.slots[0].tensors:
            stored.copy_(torch.randn(stored.shape))
        stages[form] = FormStage(stage, args.context, x_TD.to(like))
    return stages
