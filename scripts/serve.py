"""Serve a model that is split over a pipeline: OpenAI's protocol over HTTP, several users at a time.

Usage: bash run_server.sh [PRESET] [key=value ...]; --help shows all keys.
"""
from __future__ import annotations

import gc
import os
import sys
from typing import Sequence

from config.cli import parse
from config.serve_config import ServeConfig
from config.typed import typed
from launch import console
from launch.auto import report_left_open, settled
from serve.app import Server
from serve.engine import Engine
from serve.running import Listener, engine_of, name_of, run

COMMAND = "bash run_server.sh"
KEY = "FLOWSPEC_API_KEY"


def read(argv: Sequence[str]) -> ServeConfig:
    """The configuration that was typed, with a key out of the environment if none was."""
    words = list(argv)
    key = os.environ.pop(KEY, "")
    if key and "api_key" not in typed(argv):
        words.append(f"api_key={key}")
    return parse(words, COMMAND, kind=ServeConfig)


def build(argv: Sequence[str]) -> tuple[Engine, Listener]:
    """The engine and the listener of these words; neither of them runs yet."""
    words = settled(argv, ServeConfig)
    config = read(words)
    engine = engine_of(words, config)
    server = Server(engine, config, name_of(argv, config))
    report_left_open(argv)
    return engine, Listener(server.app, config, _begun, engine.stop)


def _begun(url: str) -> None:
    print(f"flowspec: {url}/v1", flush=True)


def serve(argv: Sequence[str]) -> int:
    """Serve until the end; the exit code."""
    engine, listener = build(argv)
    gc.freeze()  # a full collection frees what answers leave behind; without what is imported it comes sooner
    return run(engine, listener)


def main(argv: Sequence[str]) -> int:
    """The command."""
    return console.run(serve, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
