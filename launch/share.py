"""Share out a model's layers among boards that are here: measure the boards, and take the planner's split.

A plan by `scripts.plan` also tries methods and drafts, and loads the whole model; this one takes seconds.
"""
from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Iterator, NamedTuple, Sequence

import torch

from cluster.agreement import code_version
from cluster.board import Line
from cluster.lobby import Guest
from config.console import aligned, say
from config.profiles import Profile
from config.run_config import RunConfig
from launch.measure import layer_times, wire_times
from launch.memory import GB, cached, loaded
from launch.prepare import open_part
from launch.spec import codes_of, device_named, dropping_windows, number_type
from launch.splits import Split, best_splits
from model.llama import LlamaConfig
from model.native.layers import reason_against
from model.native.structures import reason_against_numbers
from model.weights.blocks import QUANTIZERS
from model.weights.parts import check_model, plan_stages, read_sizes
from model.weights.quant import BLOCKS, Recast, kind_on
from model.weights.unfold import Unfolded

TIMING_SECONDS = 1.0  # for the passes through a layer
FREE_SHARE = 0.8  # of a board's free memory, for layers with their keys and values
COLUMNS = "board", "address", "layers", "GB free", "ms a layer", "ms away", "Mbit/s"


class Measured(NamedTuple):
    """A board, and what was measured of it."""

    board: Guest
    layer_ms: float  # of a row
    free_gigabytes: float
    latency: float  # ms of a message
    mbps: float

    def as_line(self, num_layers: int) -> Line:
        """Return it as a line of a hosts file, with the layers that it holds."""
        return self.board.with_layers(num_layers)._replace(wire=f"{self.mbps:.0f},{self.latency:.1f}")


class ModelShape(NamedTuple):
    """What matters of a model for its shares."""

    config: dict[str, Any]
    sizes: LlamaConfig
    like: torch.Tensor  # an empty one of its number type
    quant: str
    layer_bytes: float  # of weights, keys, values and states

    @staticmethod
    def of(config: RunConfig) -> ModelShape:
        """Read the model's folder; raises ValueError for a model that is not supported."""
        source = Unfolded(config.base_dir)
        check_model(source)
        sizes = read_sizes(source).within(config.max_length)
        device = device_named(config.device)
        like = torch.empty(0, dtype=number_type(config.dtype, device))

        # kinds of weights
        names = {name: name for name in source.names() if ".layers." in name}
        weight_type = kind_on(device, "none" if config.quant == "auto" else config.quant)
        reads_blocks = config.kernel != "torch" and not reason_against_numbers(like.dtype, device, BLOCKS, sizes.hidden)
        keeps_blocks = reads_blocks and (config.quant == "auto" or weight_type in QUANTIZERS)
        forms = Recast(source, names, weight_type, keeps_blocks).forms
        is_in_blocks = keeps_blocks and weight_type == "none" and any(map(source.is_in_blocks, names))
        quant = BLOCKS if is_in_blocks else weight_type

        # what they keep of texts
        is_native = config.kernel == "native" and not reason_against(sizes, like.dtype, device, quant)
        windows = dropping_windows(config, sizes, range(sizes.layers))
        code_type = codes_of(config.quant_kv, is_native)
        request_bytes = sum(cached(sizes, enumerate(windows), sizes.context, like, code_type))

        all_bytes = loaded(forms, like) + request_bytes * config.max_requests
        return ModelShape(source.config, sizes, like, quant, all_bytes / sizes.layers)


def fixed_stages(config: RunConfig, has_stages: bool) -> list[int]:
    """Return the layers of each rank if the user has given them; empty if the boards decide.

    Raises ValueError for a run without a model, or one that shares out something else than layers.
    """
    if config.unpiped or config.replicated or config.tp != "0":
        raise ValueError("hosts=auto shares out layers: leave tp and replicas out, and choose a method with a "
                         "pipeline; or write a hosts file")
    if config.model_dir:
        return list(open_part(Path(config.model_dir), 0).stages)
    if not config.base_dir:
        raise ValueError("there is no model to share out: give model=NAME, or a preset")
    return plan_stages(config.stages, Unfolded(config.base_dir)) if has_stages else []


def proposal(config: RunConfig, shape: ModelShape, boards: Sequence[Guest]) -> list[Line]:
    """Measure the boards; print and return the lines of those that get layers. Raises ValueError if they lack room."""
    measured_boards = measured(config, shape, boards)
    num_layers = shape.sizes.layers
    max_layers = [min(num_layers, int(FREE_SHARE * GB * board.free_gigabytes / shape.layer_bytes))
                  for board in measured_boards]
    wires = [(board.latency, board.mbps) for board in measured_boards]
    site = site_of(shape.sizes, shape.like, [board.layer_ms for board in measured_boards], wires)
    splits = best_splits(site, max_layers, num_layers, num_rows=1)
    if not splits:
        rooms = ", ".join(f"{each.board.name} {count}" for each, count in zip(measured_boards, max_layers))
        raise ValueError(f"the model has {num_layers} layers of {shape.layer_bytes / GB:.2g} GB, and these boards have "
                         f"room for fewer: {rooms}; start more boards, free memory there, or give a smaller max_length")

    split = min(splits, key=attrgetter("guessing_time"))
    print("\n".join(table(split, measured_boards)), file=sys.stderr)
    return [measured_boards[number - 1].as_line(count) for number, count in zip(split.boards, split.layers)]


def measured(config: RunConfig, shape: ModelShape, boards: Sequence[Guest]) -> list[Measured]:
    """Measure layers on all boards at once, then one wire after the other.

    Boards of other code, and those that fail, are named and left out; raises ValueError if none is left.
    """
    say("measuring a layer on each, and the wires")
    request = {"config": shape.config, "layers": 1, "dtype": config.dtype, "device": config.device,
               "quant": shape.quant, "threads": config.threads_per_rank, "context": shape.sizes.context,
               "kernel": config.kernel, "seconds": TIMING_SECONDS}

    with ThreadPoolExecutor(len(boards)) as pool:
        pending_times = [pool.submit(layer_times, board, request) for board in boards]

    measured_boards = []
    for board, pending in zip(boards, pending_times):
        try:
            passes, free_gigabytes, code = pending.result()
            if code != code_version():
                raise ValueError(f"it has other code than rank 0 ({code}, not {code_version()}): bring one version to "
                                 "all boards")
            layer_ms = min(passed.took for passed in passes[:2]) / shape.sizes.layers  # the first two have a row each
            measured_boards.append(Measured(board, layer_ms, free_gigabytes, *wire_times(board)))
        except (ValueError, OSError) as problem:
            say(f"{board.name} ({board.address}) is left out: {problem}")

    if not measured_boards:
        raise ValueError("no board can hold layers, for the reasons above")
    return measured_boards


def site_of(sizes: LlamaConfig, like: torch.Tensor, layer_times: Sequence[float],
            wires: Sequence[tuple[float, float]]) -> Profile:
    """Return boards as a planner sees them, by the ms of a layer of each, whatever the rows.

    Wires, from rank 0 to each, have the ms of a message and Mbit/s; two boards are as far apart as usual.
    """
    fastest_ms = min(layer_times)
    latency, mbps = map(median, zip(*wires))
    factors = tuple(layer_ms / fastest_ms for layer_ms in layer_times)
    links = tuple((0, rank, *wire) for rank, wire in enumerate(wires, 1))

    row_bytes = sizes.hidden * like.element_size()
    return Profile("", sizes.layers, row_bytes, model=fastest_ms * sizes.layers, row=0.0, free=1, token=0.0,
                   level=0.0, verdict=0.0, latency=latency, mbps=mbps, step=latency,
                   factors=factors, links=links)


def table(split: Split, measured_boards: Sequence[Measured]) -> Iterator[str]:
    """Yield the lines about a split: a row for each board, with its layers, and the expected speed."""
    layers_of = dict(zip(split.boards, split.layers))
    rows: list[Sequence[str]] = [COLUMNS]
    for number, (board, *figures) in enumerate(measured_boards, 1):
        layer_ms, free_gigabytes, latency, mbps = figures
        rows.append((board.name, board.address, str(layers_of.get(number, "none")), f"{free_gigabytes:.1f}",
                     f"{layer_ms:.2f}", f"{latency:.1f}", f"{mbps:.0f}"))

    yield from aligned(rows)
    plain_speed, guessing_speed = 1e9 / split.round_time, 2e9 / split.guessing_time
    yield (f"expected: {plain_speed:.1f} tokens/s without guesses, {guessing_speed:.1f} if every second guess is right "
           "(an estimate)")
