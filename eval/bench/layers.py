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

LAYER_SIZES = {  # -> width of the MLP, heads of the attention
    576: (1536, 9), 2048: (5504, 32), 4096: (11008, 32)}
SEGMENT_ROWS = (1, 16)
CONTEXT = 512
NUM_LAYERS = 4
FORMS = (Form(torch.float32, "none"),
         Form(torch.bfloat16, "none"), Form(torch.bfloat16, "int4"))
ARRANGING = frozenset(
    "view as_strided slice transpose t select narrow split split_with_sizes chunk linear matmul to _to_copy empty "
    "empty_strided empty_like reshape flatten unsqueeze expand detach resolve_conj scaled_dot_product_attention "
    "_unsafe_view alias contiguous".split())  # torch's operators that compute nothing themselves
TABLE_HEADING = ("width, form", "rows", "ms a layer", "kernels", "dispatch", "Python")


def layers(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench layers`."""
    parser = OptionParser(prog="python3 -m scripts.bench layers")
    parser.add_argument("--widths", type=int, choices=LAYER_SIZES, nargs="+", default=[*LAYER_SIZES], metavar="N",
                        help=f"of the layers: {', '.join(map(str, LAYER_SIZES))} (all)")
    parser.add_argument("--repeats", type=number, default=20, metavar="N", help="segments per figure (20)")
    args = parser.parse_args(argv)

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    table_rows: list[Sequence[str]] = []
    for width in ProgressBar(args.widths, leave=False):
        table_rows += measured(width, args.repeats)

    print(f"processor time of one thread, minimum of {args.repeats}, {CONTEXT} tokens of context")
    print(in_columns(TABLE_HEADING, table_rows, names=0))
    return 0


def measured(width: int, repeats: int) -> list[Sequence[str]]:
    """Return the rows of the table for layers of one width."""
    intermediate, num_heads = LAYER_SIZES[width]
    sizes = Namespace(layers=NUM_LAYERS, hidden=width, intermediate=intermediate, heads=num_heads, context=CONTEXT,
                      rows=SEGMENT_ROWS, device="cpu")

    table_rows: list[Sequence[str]] = []
    for form, stage in build(sizes, FORMS).items():
        for num_rows in SEGMENT_ROWS:
            total_seconds = min(cost(stage.segment, num_rows).processor for _ in range(repeats + 1))
            kernels, dispatch = _operator_seconds(stage, num_rows, repeats)
            python_seconds = max(0.0, total_seconds - kernels - dispatch)

            times = (total_seconds, kernels, dispatch, python_seconds)
            cells = [f"{1e3 * seconds / NUM_LAYERS:.3f}" for seconds in times]
            table_rows.append((f"{width}, {form}", str(num_rows), *cells))
    return table_rows


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output of torch's profiler on stderr, for which it has no setting."""
    stderr_copy = os.dup(2)
    with open(os.devnull, "wb") as null_file:
        os.dup2(null_file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


def _operator_seconds(stage: FormStage, num_rows: int, repeats: int) -> tuple[float, float]:
    """Return the seconds of a segment in operators that compute, and in those that only arrange."""
    least_times: dict[tuple[str, int], float] = {}  # microseconds, by name and number of calls
    for _ in range(repeats):
        with _quiet(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            stage.segment(num_rows)
        for event in profiler.key_averages():
            key = event.key, event.count
            least_times[key] = min(least_times.get(key, float("inf")), event.self_cpu_time_total)

    arranging = {key for key in least_times if key[0].partition("::")[2] in ARRANGING}
    dispatch_time = sum(least_times[key] for key in arranging)
    kernel_time = sum(least_times.values()) - dispatch_time
    return 1e-6 * kernel_time, 1e-6 * dispatch_time
