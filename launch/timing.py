"""The time of a stage by rows and context; as a program on a board, the time of layers there, for a plan.

`python3 -m launch.timing` reads a line of JSON from standard input that specifies the layers, and replies with a
line of JSON; until then it prints an empty line every second, as a heartbeat. The weights are random, since they do not
change the time of a pass; so a board needs no part of the model. Every further line is answered by an empty one at
once, which is how the wire is timed.
"""
from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.agreement import code_version
from config.console import run
from config.failure import guarded
from config.files import fits
from config.schema.untrusted import parse_json
from launch.available import available
from launch.spec import device_named, number_type
from model.llama import LlamaConfig, Slice, fill
from model.native.compiler import reason_against_library
from model.native.layers import NativeSlice, reason_against
from model.weights.blocks import QUANTIZERS, quantize
from model.weights.quant import BLOCKS, kind_on
from model.weights.quant_layers import compress, fuse, pack, probe
from pipeline.messages import Reset, Segment
from pipeline.stage import Stage

ROWS = (1, 16, 32, 64, 128)
CONTEXTS = (16, 512)  # tokens of text before the rows
REPETITIONS = 4  # of each pass, of which the shortest counts
USUAL_BLOCKS = "Q4_1"  # type of the blocks that stand for those of a GGUF file
BEAT_SECONDS = 1.0  # between two heartbeats
REQUEST_FORM = {"config": dict, "layers": int, "dtype": str, "device": str, "quant": str, "threads": int,
                "context": int, "kernel": str, "seconds": float}
Send = Callable[[str], None]  # a line


class Passed(NamedTuple):
    """The time of a pass through a stage, in milliseconds, scaled to the whole model."""

    rows: int
    context: int
    took: float


def inputs(sizes: LlamaConfig, like: Tensor) -> Tensor:
    """Return rows for a stage, `[T, D]`. All differ, as equal ones would all go through the same experts."""
    return random_tensor(np.random.default_rng(0), max(*ROWS, *CONTEXTS), sizes.hidden).to(like)


def random_tensor(numbers: np.random.Generator, *shape: int) -> Tensor:
    """Return normal float32 numbers; torch's own generators need what `config/lean_torch.py` leaves out."""
    return torch.from_numpy(numbers.standard_normal(shape, np.float32))


def passes(stage: Stage, inputs: Tensor, scale: float, max_tokens: int) -> Iterator[Passed]:
    """Yield the passes of a stage after short and long texts, as far as `max_tokens` hold them.

    `inputs` has the rows for the stage. The model takes `scale` times as long as the stage.
    """
    contexts = [context for context in CONTEXTS if context + max(ROWS) < max_tokens]
    for request, context in enumerate(contexts):
        _apply(stage, request, range(context), inputs, num_text_rows=context)

        for num_rows in (ROWS[0], *ROWS):  # the first pass warms up
            pass_seconds = []
            for _ in range(REPETITIONS):
                begin = time.perf_counter()
                computed_rows(stage, request, range(context, context + num_rows), inputs)
                pass_seconds.append(time.perf_counter() - begin)
            yield Passed(num_rows, context, 1e3 * scale * min(pass_seconds))

        stage.apply(Reset(request))


def computed_rows(stage: Stage, request: int, nodes: range, inputs: Tensor) -> Tensor:
    """Compute guesses that follow the text one after another, and drop them; return the outputs `[T, D]`."""
    computed_segment = _apply(stage, request, nodes, inputs)
    stage.cache(request).drop()
    return computed_segment.x


def _apply(stage: Stage, request: int, nodes: range, inputs: Tensor, num_text_rows: int = 0) -> Segment:
    """Apply a segment, which begins with rows of text; the stage returns once its device has finished."""
    node_ids = list(nodes)
    parents = [max(0, node - 1) for node in node_ids]
    computed = stage.apply(Segment(request, node_ids, parents, node_ids, num_text_rows, inputs[:len(node_ids)]))
    assert isinstance(computed, Segment)
    return computed


# --- a board ----------------------------------------------------------------------------------------------------------

def random_stage(sizes: LlamaConfig, num_layers: int, like: Tensor, quant: str, context: int,
                 kernel: str = "torch") -> Stage:
    """Build a stage of this many layers with random weights, without the embedding and the final norm."""
    sizes_with_ends = replace(sizes, layers=num_layers + 2, vocab=1)  # the slice is neither the first nor the last
    body = Slice(sizes_with_ends, 1, 1 + num_layers)
    kind, weights = kind_on(like.device, quant), random_weights(body)
    probe(kind, like.dtype, like.device)
    stage_layers: Slice | NativeSlice = body

    is_native = kernel == "native" and not reason_against_library()
    if is_native and not reason_against(sizes, like.dtype, like.device, kind):
        block_type = USUAL_BLOCKS if kind == BLOCKS else kind
        is_matrix = {name: block_type in QUANTIZERS and weight.dim() == 2 for name, weight in weights.items()}
        stored_weights = {name: quantize(block_type, weight) if is_matrix[name] else weight
                          for name, weight in weights.items()}
        stage_layers = NativeSlice(body, stored_weights, torch.get_num_threads())
    else:
        fill(body, weights, like.dtype, like.device)
        compress(body, kind, like.dtype)
        fuse(body)
        pack(body)
    return Stage(stage_layers, lambda: sizes_with_ends.cache(num_layers, context, like))


def random_weights(body: Slice) -> dict[str, Tensor]:
    """Return weights for layers, always the same: norms of ones, and matrices that roughly keep a row's length."""
    numbers = np.random.default_rng(1)
    weights_by_name = {}
    for name, parameter in body.named_parameters():
        shape = parameter.shape
        is_norm = len(shape) == 1
        if is_norm:
            weights_by_name[name] = torch.ones(shape)
        else:
            weights_by_name[name] = random_tensor(numbers, *shape) / shape[-1] ** 0.5
    return weights_by_name


def measure(request: Any) -> dict[str, Any]:
    """Return the requested times. Raises ValueError for an invalid request, or one that cannot be computed here."""
    if not fits(request, REQUEST_FORM):
        raise ValueError("the board received an unknown request: bring one version of the program to all boards, as "
                         "bash scripts/push.sh code=true does")

    torch.set_grad_enabled(False)
    torch.set_num_threads(request["threads"] or os.cpu_count() or 1)
    device = device_named(request["device"])
    like = torch.empty(0, dtype=number_type(request["dtype"], device), device=device)

    sizes = LlamaConfig.read(request["config"])
    num_layers, context = request["layers"], request["context"]
    stage = random_stage(sizes, num_layers, like, request["quant"], context, request["kernel"])
    hidden_rows = inputs(sizes, like)
    all_passes = passes(stage, hidden_rows, sizes.layers / num_layers, context)
    deadline = time.monotonic() + request["seconds"]
    timed_passes = [next(all_passes), *takewhile(lambda _: time.monotonic() < deadline, all_passes)]
    return {"passes": timed_passes, "free": available() / 1e9, "code": code_version()}


def _beat(is_over: threading.Event, send: Send) -> None:
    while not is_over.wait(BEAT_SECONDS):
        send("")


def answer(lines: Iterator[str], send: Send) -> None:
    """Answer the request in the first line, and then every further line."""
    request = parse_json(next(lines, ""), "what the board is asked", "start it by python3 -m scripts.plan")
    is_over = threading.Event()
    heartbeat = guarded("heartbeat", partial(_beat, is_over, send), lambda thread, error: None)
    try:
        times = measure(request)
    finally:
        is_over.set()
        heartbeat.join()
    send(json.dumps(times))

    for _ in lines:
        send("")


def main(argv: Sequence[str]) -> int:
    """Answer what comes on standard input."""
    answer(iter(sys.stdin), partial(print, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
