"""How long a model takes: for its first token, for each later one, and for a pass over m tokens at once."""
from __future__ import annotations

import json
import platform
import sys
from typing import Any

import torch
from tqdm import tqdm

from config.files import ROOM, write
from config.keys import read_keys
from config.measures import LatencyConfig, Timed
from eval.latency import Pace, Spread, paces, passes
from eval.pairs import Model, open_model, prompts_of, sampler_of

COMMAND = "python -m scripts.simulate latency"


def main(argv: list[str]) -> int:
    config = read_keys(argv, LatencyConfig, COMMAND)
    model = open_model(config.model, config)
    check_context(model, config)
    print(f"{config.model} in {str(model.whole.dtype)[len('torch.'):]}, {place(model)}; {config.max_new_tokens} tokens "
          f"an answer, {config.repeats} turns; ms: median, quartiles\n")
    found: dict[str, Pace] = {}
    for name in tqdm(config.chosen_sets, desc="sets", leave=False, file=sys.stderr):
        prompts = prompts_of(name, config, [model])
        [found[name]] = paces([model.whole], prompts, config.max_new_tokens, sampler_of(config), config.repeats)
        tqdm.write(f"{name[-20:]:<20}  TTFT {found[name].first}   TPOT {found[name].later}")
    took = passes(model.whole, config.chosen_rows, config.context, sampler_of(config), config.repeats)
    print(f"\nT(m) behind {config.context} tokens, and how many times as long as T({min(took)})")
    least = took[min(took)].median
    for size, spread in took.items():
        print(f"{f'm = {size}':<20}       {spread}   {spread.median / least:6.2f}x")
    if config.output:
        write(config.output, json.dumps(_figures(model, config, found, took), indent=1) + "\n", ROOM)
    return 0


def check_context(model: Model, config: Timed) -> None:
    """Raise ValueError for passes that do not fit into the model's context."""
    most = model.whole.config.context
    if config.context + max(config.chosen_rows) > most:
        raise ValueError(f"context={config.context} and {max(config.chosen_rows)} rows are more than the {most} "
                         f"positions of {model.name}: give context={max(0, most - max(config.chosen_rows))} or less")


def place(model: Model) -> str:
    """Where a model computes, in words."""
    if model.whole.device.type == "cuda":
        return torch.cuda.get_device_name(model.whole.device)
    return f"{platform.machine()} processor, {torch.get_num_threads()} threads"


def _figures(model: Model, config: LatencyConfig, found: dict[str, Pace], took: dict[int, Spread]) -> dict[str, Any]:
    """What the file of figures holds; milliseconds."""
    sets = {name: {"ttft": one.first._asdict(), "tpot": one.later._asdict()} for name, one in found.items()}
    return {"model": config.model, "dtype": str(model.whole.dtype), "place": place(model), "context": config.context,
            "sets": sets, "passes": {size: spread._asdict() for size, spread in took.items()}}
