"""Compare speculative decoding methods by formulas, events and measurements, as the DSI paper does (docs/dsi.md).

Usage: python3 -m scripts.simulate COMMAND [key=value ...]

cases FILE  recompute the reference cases of a file, from the paper's offline simulator and analysis, and count those
            that agree
heatmap     draw maps of the speed-ups of SI and DSI, and write a table
offline     compute the cost of a text by plain decoding, SI and DSI, by counting forwards: exactly, and over sampled
            texts
paper       recompute the tables of the paper, Table 2 by three accountings
acceptance  measure with both models, on data sets, how often a drafter predicts the next token of a target
latency     measure the time of a model to its first token, and for each later one
table       measure both for pairs of models, and predict plain decoding, SI and DSI from them by formulas
online      simulate SI and DSI by events with modelled acceptance, on a virtual clock
"""
from __future__ import annotations

from importlib import import_module
from typing import Sequence

from config.console import command
from config.keys import HELP_WORDS, check_name, preset_of, read_keys
from eval.dsi.keys import COMMAND

# by the name of a command, which is that of its module, the class of its keys there
COMMANDS = {"cases": "Cases", "heatmap": "Heatmap", "offline": "Offline", "paper": "Paper",
            "acceptance": "AcceptanceConfig", "latency": "LatencyConfig", "table": "TableConfig", "online": "Online"}


@command
def main(argv: Sequence[str]) -> int:
    name = "".join(argv[:1])
    if name in HELP_WORDS:
        print(__doc__)
        return 0
    check_name(name, COMMANDS, "command")

    module = import_module(f"eval.dsi.{name}")
    words = argv[1:]
    if name == "cases" and preset_of(words) not in HELP_WORDS:
        words = [f"file={words[0]}", *words[1:]]

    code: int = module.main(read_keys(words, getattr(module, COMMANDS[name]), f"{COMMAND} {name}"))
    return code
