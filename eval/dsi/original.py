"""The command line of the published simulator: `python -m dsi [type=NAME] [simul.KEY=VALUE] [heatmap.KEY=VALUE]`."""
from __future__ import annotations

import shlex
from typing import Sequence

from config.console import command, say
from config.dialect import as_keys
from config.keys import HELP, check_name
from eval.dsi.command import main as simulate
from eval.dsi.keys import COMMAND

COMMANDS = {"sanity": ["offline", "accounting=original"], "heatmap": ["heatmap", "accounting=original"],
            "table": ["paper"]}


def words_of(argv: Sequence[str]) -> list[str]:
    """Return the command of this project with its keys; raises ValueError for another type."""
    type_name, key_words = "sanity", []
    for word in as_keys(argv):
        key_name, equals, value = word.partition("=")
        key_name = key_name.rpartition(".")[2]
        if key_name == "type":
            type_name = value
        else:
            key_words.append(f"{key_name}{equals}{'0' if value == 'None' else value}")

    check_name(type_name, COMMANDS, "type")
    return [*COMMANDS[type_name], *key_words]


@command
def main(argv: Sequence[str]) -> int:
    words = list(HELP[:1]) if {*HELP}.intersection(argv) else words_of(argv)
    say(f"this is {COMMAND} {shlex.join(words)}")
    return simulate(words)
