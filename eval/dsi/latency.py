"""The latency of a model: to its first token, and for each later one.

A time ends when the chosen tokens are on the CPU, which waits for the device. Models that are compared are measured
alternately. The first turn warms up and does not count.
"""
from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from itertools import islice, product
from typing import Iterator, Sequence

import numpy as np
import torch

from config.keys import key
from config.values import Range
from eval.dsi.keys import COMMAND
from eval.metrics import Interval
from eval.pair_keys import TARGET, MeasureKeys
from eval.pairs import Model, check_sets, open_model, prompts_of, sampler_of
from eval.tables import NAME_WIDTH, short
from launch.progress import ProgressBar
from model.whole import Whole


@dataclass(frozen=True)
class Timed(MeasureKeys):
    """The keys of every measurement of times."""

    repeats: int = key(5, "measured turns, after one to warm up", Range(1, 1_000_000), heading="Timing")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.max_new_tokens < 2:
            yield "max_new_tokens=1 leaves no token after the first to time: give 2 or more"


@dataclass(frozen=True)
class LatencyConfig(Timed):
    """Measure a model's latency: to the first token (TTFT), and per later token (TPOT)."""

    EXAMPLES = f"""\
  {COMMAND} latency
  {COMMAND} latency model=toy/draft_a sets=sum max_new_tokens=20 repeats=3
  {COMMAND} latency model=DIR device=cuda dtype=bfloat16"""
    ASKED = "model"

    model: str = key(TARGET, "folder of a model in Hugging Face format", heading="Model", names_file=True)


def spread_of(seconds: Sequence[float]) -> Interval:
    """Return the median, with the quartiles as its bounds, in milliseconds, of times in seconds."""
    low, median, high = 1e3 * np.percentile(seconds, [25, 50, 75])
    return Interval(float(median), float(low), float(high))


def paces(models: Sequence[Whole], prompts: Sequence[Sequence[int]],
          config: Timed) -> list[tuple[Interval, Interval]]:
    """Return, for each model, the time to the first token (TTFT) and the time per later token (TPOT), in milliseconds.

    Answers continue after an end token, so that all have the same length. TPOT is one figure per answer: the time after
    its first token, divided by the number of later tokens.
    """
    sampler, num_new = sampler_of(config), config.max_new_tokens
    seconds_by_model: list[tuple[list[float], list[float]]] = [([], []) for _ in models]
    for turn, prompt in product(range(1 + config.repeats), prompts):
        for model, (first_seconds, later_seconds) in zip(models, seconds_by_model):
            token_ids = islice(model.generate(prompt, model.cache(len(prompt) + num_new), sampler), num_new)

            start_time = time.perf_counter()
            next(token_ids)
            first_time = time.perf_counter()
            list(token_ids)
            end_time = time.perf_counter()

            if turn:
                first_seconds.append(first_time - start_time)
                later_seconds.append((end_time - first_time) / (num_new - 1))
    return [(spread_of(first_seconds), spread_of(later_seconds)) for first_seconds, later_seconds in seconds_by_model]


def main(config: LatencyConfig) -> int:
    check_sets(config.chosen_sets, config)

    model = open_model(config.model, config)
    print(f"{config.model} in {str(model.whole.dtype)[len('torch.'):]}, {device_name(model)}; "
          f"{config.max_new_tokens} tokens per answer, {config.repeats} turns; ms: median, quartiles\n")

    for name in ProgressBar(config.chosen_sets, desc="sets", leave=False):
        prompts = prompts_of(name, config, [model])
        [spreads] = paces([model.whole], prompts, config)
        first_token, later_tokens = (f"{median:9.3f}  [{low:.3f}, {high:.3f}]" for median, low, high in spreads)
        ProgressBar.write(f"{short(name):<{NAME_WIDTH}}  TTFT {first_token}   TPOT {later_tokens}  "
                          f"n={len(prompts) * config.repeats}")
    return 0


def device_name(model: Model) -> str:
    """Return a description of a model's device."""
    if model.whole.device.type == "cuda":
        return torch.cuda.get_device_name(model.whole.device)
    return f"{platform.machine()} processor, {torch.get_num_threads()} threads"
