"""How long a model takes: for its first token, for each later one, and for a pass over m tokens at once."""
from __future__ import annotations

import platform
from typing import Any

import torch
from tqdm import tqdm

from config.files import write_json
from config.keys import read_keys
from eval.columns import LONGEST, short
from eval.dsi.model_latency import Pace, Spread, paces, passes
from eval.pair_keys import LatencyConfig, Timed
from eval.pairs import Model, check_sets, open_model, prompts_of, sampler_of

COMMAND = "python -m scripts.simulate latency"


def main(argv: list[str]) -> int:
    config = read_keys(argv, LatencyConfig, COMMAND)
    check_sets(config.chosen_sets, config)
    sampler = sampler_of(config)
    model = open_model(config.model, config)
    check_context(model, config)
    print(f"{config.model} in {str(model.whole.dtype)[len('torch.'):]}, {place(model)}; {config.max_new_tokens} tokens "
          f"an answer, {config.repeats} turns; ms: median, quartiles\n")
    found: dict[str, Pace] = {}
    for name in tqdm(config.chosen_sets, desc="sets", leave=False):
        prompts = prompts_of(name, config, [model])
        [pace] = paces([model.whole], prompts, config.max_new_tokens, sampler, config.repeats)
        tqdm.write(f"{short(name):<{LONGEST}}  TTFT {pace.first}   TPOT {pace.later}")
        found[name] = pace
    took = passes(model.whole, config.chosen_rows, config.context, sampler, config.repeats)
    print(f"\nT(m) behind {config.context} tokens, and how many times as long as T({min(took)})")
    least = took[min(took)].median
    for size, spread in took.items():
        rows = f"m = {size}"
        print(f"{rows:<{LONGEST}}       {spread}   {spread.median / least:6.2f}x")
    if config.output:
        write_json(config.output, {**_about(model, config), **_figures(found, took)})
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


def _about(model: Model, config: LatencyConfig) -> dict[str, Any]:
    """What the file of figures says of what was measured."""
    dtype = str(model.whole.dtype)
    return {"model": config.model, "dtype": dtype, "place": place(model), "context": config.context}


def _figures(found: dict[str, Pace], took: dict[int, Spread]) -> dict[str, Any]:
    """The figures themselves, in milliseconds."""
    sets = {}
    for name, (first, later) in found.items():
        sets[name] = {"ttft": first._asdict(), "tpot": later._asdict()}
    passed = {size: spread._asdict() for size, spread in took.items()}
    return {"sets": sets, "passes": passed}
