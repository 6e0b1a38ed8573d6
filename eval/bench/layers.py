"""The parts of a layer's time on a processor: kernels, torch's dispatch of them, and our Python between them.

torch's own profiler distinguishes operators that compute from those that only arrange (views, allocation, and operators
that call others). The rest of a layer's time is Python. All times are of one thread. The least time of each operator
counts, since other programs may interrupt any of them.
"""
from __future__ import annotations

import os
from argparse import Namespace
from contextlib import contextmanager
from typing import Iterator, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from config.dialect import OptionParser
from eval.bench import cost, number
from eval.bench.stage import Form, FormStage, build
from eval.tables import in_columns
from launch.progress import ProgressBar

WIDTHS = {  # -> width of the MLP, heads of the attention
    576: (1536, 9), 2048: (5504, 32), 4096: (11008, 32)}
ROWS = (1, 16)
CONTEXT = 512
LAYERS = 4
FORMS = (Form(torch.float32, "none"),
         Form(torch.bfloat16, "none"), Form(torch.bfloat16, "int4"))
ARRANGING = frozenset(
    "view as_strided slice transpose t select narrow split split_with_sizes chunk linear matmul to _to_copy empty "
    "empty_strided empty_like reshape flatten unsqueeze expand detach resolve_conj scaled_dot_product_attention "
    "_unsafe_view alias contiguous".split())  # torch's operators that compute nothing themselves
HEAD = ("width, form", "rows", "ms a layer", "kernels", "dispatch", "Python")


def layers(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench layers`."""
    parser = OptionParser(prog="python3 -m scripts.bench layers")
    parser.add_argument("--widths", type=int, choices=WIDTHS, nargs="+", default=[*WIDTHS], metavar="N",
                        help=f"of the layers: {', '.join(map(str, WIDTHS))} (all)")
    parser.add_argument("--repeats", type=number, default=20, metavar="N", help="segments per figure (20)")
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    made = [row for width in ProgressBar(args.widths, leave=False)
            for row in measured(width, args.repeats)]
    print(f"processor time of one thread, minimum of {args.repeats}, {CONTEXT} tokens of context")
    print(in_columns(HEAD, made, names=0))
    return 0


def measured(width: int, repeats: int) -> list[Sequence[str]]:
    """Return the rows of the table for layers of one width."""
    intermediate, heads = WIDTHS[width]
    sizes = Namespace(layers=LAYERS, hidden=width, intermediate=intermediate, heads=heads, context=CONTEXT,
                      rows=ROWS, device="cpu")
    made: list[Sequence[str]] = []
    for form, stage in build(sizes, FORMS).items():
        for rows in ROWS:
            whole = min(cost(stage.segment, rows).processor for _ in range(repeats + 1))
            kernels, dispatch = _operators(stage, rows, repeats)
            parts = kernels, dispatch, max(0.0, whole - kernels - dispatch)
            cells = (f"{1e3 * whole / LAYERS:.3f}", *(f"{1e3 * part / LAYERS:.3f}" for part in parts))
            made.append((f"{width}, {form}", str(rows), *cells))
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output of torch's profiler on stderr, for which it has no setting."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _operators(stage: FormStage, rows: int, repeats: int) -> tuple[float, float]:
    """Return the seconds of a segment in operators that compute, and in those that only arrange."""
    least: dict[tuple[str, int], float] = {}  # by name and number of calls
    for _ in range(repeats):
        with _quiet(), profile(activities=[ProfilerActivity.CPU]) as seen:
            stage.segment(rows)
        for event in seen.key_averages():
            key = event.key, event.count
            least[key] = min(least.get(key, float("inf")), event.self_cpu_time_total)
    arranging = {key for key in least if key[0].partition("::")[2] in ARRANGING}
    dispatch = sum(least[key] for key in arranging)
    return 1e-6 * (sum(least.values()) - dispatch), 1e-6 * dispatch
