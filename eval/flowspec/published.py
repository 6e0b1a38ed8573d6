"""The published figures of the FlowSpec paper (version 3): xi in tokens/s, and SR over Chunk-PP.

Four models, each with up to five methods at temperature 0 and 1 on six data sets; the bandwidth of the wires; the
depths of the first and of later trees. Names of methods and sets are those of this project.
"""
from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path
from typing import Iterator, NamedTuple

HERE = Path(__file__).parent
PROFILES = {"7b": "jetson-7b", "13b": "jetson-13b"}  # size of a model -> the emulated cluster of its devices


class PublishedCell(NamedTuple):
    """One cell of the main table."""

    model: str
    temperature: float
    method: str
    data_set: str
    xi: float
    sr: float

    @property
    def size(self) -> str:
        """The size of the model: a key of `PROFILES`."""
        return self.model.rpartition("-")[2]


def main_table() -> list[PublishedCell]:
    """Return the 192 cells of the main table."""
    return [PublishedCell(model, float(temperature), method, data_set, float(xi), float(sr))
            for model, temperature, method, data_set, xi, sr in _rows_of("published.csv")]


def bandwidth_table() -> dict[tuple[str, str], float]:
    """Return xi by method and Mbit/s: LLaMA-2-Chat 7B, MT-bench, temperature 0."""
    return {(method, mbps): float(xi) for mbps, method, xi in _rows_of("published_bandwidth.csv")}


def depth_table(model: str) -> dict[tuple[int, int], float]:
    """Return xi by `init_depth` and `expand_depth`: a 7B model, MT-bench, temperature 0."""
    return {(int(init_depth), int(expand_depth)): float(xi)
            for model_name, init_depth, expand_depth, xi in _rows_of("published_depths.csv") if model_name == model}


def known_reasons() -> dict[tuple[str, str], str]:
    """Return, by size and method, why the figures here differ; each begins with `measured` or `untested`."""
    return {(size, method): reason for size, method, reason in _rows_of("reasons.csv")}


def _rows_of(file_name: str) -> Iterator[list[str]]:
    """Yield the cells of each row below the heading."""
    with open(HERE / file_name, encoding="utf-8", newline="") as csv_file:
        yield from islice(csv.reader(csv_file), 1, None)
