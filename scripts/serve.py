"""Serve a model that is split over a pipeline: OpenAI's protocol over HTTP, several users at a time.

Usage: bash run_server.sh [PRESET] [key=value ...]; --help shows all keys.
"""
from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any, Sequence

import uvicorn

from config.cli import DEFAULT_PRESET, parse
from config.serve_config import ServeConfig, of_the_run
from config.words import preset_of, typed
from launch.auto import settled
from launch.interrupt import interrupt
from launch.pipeline import Pipeline
from launch.processes import INTERRUPTED, LOST, WRONG
from pipeline.loss import PeerLost, explain, foreseen, guarded
from serve.app import Server
from serve.engine import Engine, Limits

COMMAND = "bash run_server.sh"
KEY = "FLOWSPEC_API_KEY"
PATIENCE = 10.0  # seconds for the pipeline to end in good order
LEAVE = 3  # seconds for answers under way, once the server is to end


class Listener(uvicorn.Server):
    """Uvicorn, which tells where it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for bound in server.sockets:
                host, port = bound.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                print(f"flowspec: http://{shown}:{port}/v1", flush=True)


def read(argv: Sequence[str]) -> ServeConfig:
    """The configuration that was typed, with a key out of the environment if none was."""
    words = list(argv)
    key = os.environ.pop(KEY, "")
    if key and "api_key" not in typed(argv):
        words.append(f"api_key={key}")
    config = parse(words, COMMAND, ServeConfig)
    assert isinstance(config, ServeConfig)
    return config


def opener(argv: Sequence[str], config: ServeConfig) -> Any:
    """A function that opens the pipeline of these words."""
    words = of_the_run(argv)
    keys: dict[str, Any] = {**typed(words), "max_requests": config.max_requests,
                            "reuse": config.reuse}
    preset = preset_of(words)
    keys.pop(preset, None)
    return partial(Pipeline.open, preset or DEFAULT_PRESET, **keys)


def name_of(argv: Sequence[str], config: ServeConfig) -> str:
    """What the model is called: as its folder, if one was given, and else as the preset."""
    keys = typed(argv)
    folder = keys.get("model_dir") or keys.get("base_dir") or ""
    return config.model_name or Path(folder).name or preset_of(argv) or DEFAULT_PRESET


def build(argv: Sequence[str]) -> tuple[Engine, Listener]:
    """The engine and the listener of these words; neither of them runs yet."""
    config = read(argv)
    limits = Limits(config.max_requests, config.queue, config.queue_seconds, config.restart)
    engine = Engine(opener(argv, config), limits)
    server = Server(engine, config, name_of(argv, config))
    listening = uvicorn.Config(server.app, config.host, config.port, log_level="warning",
                               timeout_graceful_shutdown=LEAVE)
    return engine, Listener(listening)


def serve(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C, or SIGTERM, which does the same. The exit code."""
    engine, listener = build(argv)
    signal.signal(signal.SIGTERM, interrupt)
    thread = guarded("engine", partial(work, engine, listener), partial(_died, engine, listener))
    interrupted = False
    try:
        listener.run()
    except KeyboardInterrupt:
        interrupted = True
    engine.stop()
    thread.join(PATIENCE)
    if engine.error is not None:
        raise engine.error
    if interrupted:
        print("\nflowspec: stopped", file=sys.stderr)
    elif engine.health.status == "lost":
        return LOST
    return INTERRUPTED if interrupted else 0


def _died(engine: Engine, listener: uvicorn.Server, _: str, error: BaseException) -> None:
    """The engine's thread has died of an error that it does not know."""
    engine.error = engine.error or error
    listener.should_exit = True


def work(engine: Engine, listener: uvicorn.Server) -> None:
    """The engine's thread: without a pipeline there is nothing to serve."""
    engine.run()
    if engine.error is not None:
        listener.should_exit = True


def main(argv: Sequence[str]) -> int:
    """The command. What a person got wrong is one sentence."""
    try:
        return serve(settled(argv, ServeConfig))
    except Exception as error:
        if not foreseen(error):
            raise
        print(f"flowspec: {explain(error)}", file=sys.stderr)
        return LOST if isinstance(error, PeerLost) else WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
