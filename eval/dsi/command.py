"""Speculative decoding by formulas, events and measurements, as the paper on DSI compares it (docs/dsi.md).

Usage: python -m scripts.simulate COMMAND [key=value ...]

cases FILE  computes the reference cases of a file, those of the paper's offline simulator and of its analysis, and
            says how many agree
heatmap     where SI, DSI and pipelines are faster than what, as maps and a table
offline     what a text costs by plain, speculative and distributed decoding and by pipelines of the same devices, by
            counting forwards: exactly, and over texts that are drawn or made of recorded matches
paper       Table 2 of the paper, recomputed by three accountings
acceptance  how often a drafter foresees the next token of a target, measured with both models on data sets
latency     how long a model takes for its first token, for each later one, and for m tokens at once
table       both of these for pairs of models, and what follows for plain decoding, SI and DSI by formulas
online      SI and DSI by events with modelled acceptance, on a virtual clock
predict     how fast dsi, serial and the pipelines are, in the virtual time of a profile, emulated, and by formulas
"""
from __future__ import annotations

from importlib import import_module
from typing import Sequence

from config.keys import ASKS, check_name
from launch.console import command

COMMANDS = ("cases", "heatmap", "offline", "paper", "acceptance", "latency", "table", "online", "predict")  # modules


@command
def main(argv: Sequence[str]) -> int:
    name = "".join(argv[:1])
    if name in ASKS:
        print(__doc__)
        return 0
    check_name(name, COMMANDS, "command")
    code: int = import_module(f"eval.dsi.{name}").main(argv[1:])
    return code
