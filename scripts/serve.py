"""Serve a model that is split over a pipeline: OpenAI's protocol over HTTP, several users at a time.

Usage: bash run_server.sh [PRESET] [key=value ...]; --help shows all keys.
"""
from __future__ import annotations

import gc
import os
import sys
from typing import Sequence

from config.console import command, die
from config.keys import raw_values
from launch.run import TOKENIZERS_ONLY
from serve import running
from serve.engine import Engine

KEY = "FLOWSPEC_API_KEY"


def keyed(argv: Sequence[str]) -> list[str]:
    """Return the typed words, with the key of the environment if none was typed."""
    key = os.environ.pop(KEY, "")
    return [*argv, f"api_key={key}"] if key and "api_key" not in raw_values(argv) else [*argv]


def build(argv: Sequence[str]) -> tuple[Engine, running.Listener]:
    """Build the engine and the listener for these words; neither of them runs yet."""
    return running.build(keyed(argv))


@command
def main(argv: Sequence[str]) -> int:
    """Serve until the end; return the exit code."""
    engine, listener = build(argv)
    gc.freeze()  # full collections free the memory of answers; without imported objects they come more often
    return running.run(engine, listener)


if __name__ == "__main__":
    os.environ.update(TOKENIZERS_ONLY)
    if exit_code := main(sys.argv[1:]):
        die(exit_code)  # a stage's thread may still load
