"""Emulation in real time compared with virtual time: the costs that the simulation leaves out, and its accuracy.

The same questions are answered by ranks that sleep, and on the virtual clock. Python's own time for a turn of rank 0, a
message and a segment is measured in the former, for plain decoding, and added to the model of the latter.
"""
from __future__ import annotations

import tempfile
from bisect import bisect
from dataclasses import replace
from statistics import median
from typing import Any, Dict, Sequence, Tuple

from tqdm import tqdm

from config.cli import parse
from config.keys import raw_values, with_defaults
from config.presets import TOY_PRESET
from config.profiles import Profile
from eval.bench import QUESTIONS, decoders_of, request, speed
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.virtual import as_virtual
from model.sample import Sampler
from pipeline.trace import read
from sim.cluster import NO_OVERHEAD, Overhead

METHODS = ("ar", "naive", "continuous", "streaming")
TEMPERATURES = (0.0, 1.0)
ASKED = 3  # questions
WARM = 8  # tokens of an answer that is not measured
Span = Dict[str, Any]
Place = Tuple[int, int]  # rank and node
Case = Tuple[float, str]  # temperature and method
Speeds = Dict[Case, float]


def clocks(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench clocks`; return its exit code."""
    preset, *words = with_defaults(argv, {"max_new_tokens": "48", "profile": "jetson-7b"}, TOY_PRESET)
    options = raw_values(words)
    if {"time", "trace"} & options.keys():
        raise ValueError("this compares both times and reads a trace of its own: leave time and trace out")
    config = parse([preset, *(f"{key}={value}" for key, value in options.items()), "time=virtual"])
    profile = config.cluster
    assert profile is not None, options
    folder = tempfile.mkdtemp(prefix="flowspec-")
    with Pipeline.open(preset, **options, trace=folder) as pipeline:
        emulated = _speeds(pipeline, "emulated")
    own = own_times(read(folder), profile)
    print(f"\n{config.profile}: Python's own time, measured: {1e3 * own.turn:.2f} ms a turn, "
          f"{1e3 * own.message:.2f} ms a message, {1e3 * own.segment:.2f} ms a segment")
    print("  tokens/s            emulated   simulated   with Python's time   simulated / emulated")
    simulated = []
    for each in (NO_OVERHEAD, own):
        with as_virtual(prepare(config), own=each) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
            simulated.append(_speeds(pipeline, "virtual"))
    for (temperature, method), real in emulated.items():
        without, own_too = (speeds[temperature, method] for speeds in simulated)
        print(f"  T={temperature:g} {method:<14}{real:10.2f}{without:12.2f}{own_too:21.2f}{own_too / real:23.3f}")
    return 0


def _speeds(pipeline: Pipeline, kind: str) -> Speeds:
    """Return the tokens/s of each method at each temperature over the questions."""
    decoders = decoders_of(pipeline, METHODS)
    for decoder in decoders.values():
        decoder.complete(replace(request(pipeline, QUESTIONS[0]), max_new_tokens=WARM))
    cases = [(temperature, method) for temperature in TEMPERATURES for method in METHODS]
    speeds = {}
    for temperature, method in tqdm(cases, unit="method", desc=kind):
        asked = [replace(request(pipeline, question), sampler=Sampler(temperature))
                 for question in QUESTIONS[:ASKED]]
        speeds[temperature, method] = speed(list(map(decoders[method].complete, asked)))
    return speeds


def own_times(spans: Sequence[Span], profile: Profile) -> Overhead:
    """Return the medians of Python's own time, in seconds, from segments of one row.

    A segment: from its receipt by a stage until it is passed on, without the layers. A message: from there to the next
    rank's inbox, without the modelled wire. A turn: from a verdict until the next send, without the modelled verdict.
    """
    world = 1 + max(span["rank"] for span in spans)
    came, computed, left = (_moments(spans, name) for name in ("recv", "forward", "send"))
    wire = profile.latency / 1e3 + profile.transfer(profile.row_bytes)
    segments = [left[place][1] - came[place][1] - (end - begin)
                for place, (begin, end) in computed.items() if place in left and place in came]
    messages = []
    for (rank, node), (_, moment) in left.items():
        after = (rank + 1) % world, node
        if after in came:
            messages.append(came[after][1] - moment - wire)
    sends = [span["t0"] for span in spans if span["name"] == "send" and "tokens" in span]
    turns = []
    for begin, _ in _moments(spans, "judge").values():
        following = bisect(sends, begin)
        if following < len(sends):
            turns.append(sends[following] - begin - profile.verdict / 1e3)
    return Overhead(*(max(0.0, median(each))
                      for each in (turns, messages, segments)))


def _moments(spans: Sequence[Span], name: str) -> dict[Place, tuple[float, float]]:
    """Return begin and end of the spans with this name and a single node, by rank and node."""
    alone = [span for span in spans if span["name"] == name
             and len(span.get("nodes", ())) == 1]
    return {(span["rank"], span["nodes"][0]): (span["t0"], span["t1"])
            for span in alone}
