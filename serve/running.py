"""A server from its arguments to its exit code: the engine on its own thread, and a listener of uvicorn."""
from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

import uvicorn

from cluster.board import COMMAND_VARIABLE
from cluster.processes import POLL_SECONDS, kill_all
from config.cli import DEFAULT_PRESET
from config.console import EXIT_INTERRUPTED, EXIT_LOST, die, interrupt, say
from config.keys import preset_of, raw_values
from config.serve_config import ServeConfig
from launch.pipeline import Pipeline
from launch.words import resolve
from serve.app import Server
from serve.connections import Connection, LoopErrorHandler, connection_limits
from serve.engine import Engine, ServerLimits
from serve.start_line import reachable_url

COMMAND = os.environ.get(COMMAND_VARIABLE, "bash run_server.sh")
CLOSE_SECONDS = 10.0  # seconds for the pipeline to close
LEAVE_SECONDS = 3  # seconds for answers under way once the server shuts down
REPORT_SECONDS = 5  # seconds more to send the error of the shutdown to the other clients


class Listener(uvicorn.Server):
    """A uvicorn server that calls `on_listening` with its address, as other devices can open it, once it listens.

    When it shuts down, it calls `on_shutdown`: at once if nothing is under way, else after at most `LEAVE_SECONDS`.
    """

    def __init__(self, app: Any, config: ServeConfig, on_listening: Callable[[str], Any],
                 on_shutdown: Callable[[], Any]) -> None:
        max_connections, backlog = connection_limits(config)
        connection_class: Any = partial(Connection, max_connections)
        super().__init__(uvicorn.Config(
            app, config.host, config.port, http=connection_class, ws="none", backlog=backlog,
            timeout_graceful_shutdown=LEAVE_SECONDS + REPORT_SECONDS,
            log_level="error"))  # its warnings are of clients' errors
        self._on_listening, self._on_shutdown = on_listening, on_shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().set_exception_handler(LoopErrorHandler())
        addresses = [bound_socket.getsockname() for server in self.servers for bound_socket in server.sockets]
        for host, port, *_ in addresses[:1]:  # a name may have two, one of each protocol
            self._on_listening(reachable_url(host, port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        shutdown_timer = asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._on_shutdown)
        await super().shutdown(sockets)
        shutdown_timer.cancel()
        self._on_shutdown()

    def bound_sockets(self) -> list[socket.socket]:
        """Return sockets bound to the address, for `run`; raise ValueError before anything is loaded if it is taken."""
        host, port = self.config.host, self.config.port
        try:
            return asyncio.run(_bind(host, port))
        except OSError as error:
            raise ValueError(f"cannot listen at host={host} port={port} ({error.strerror}): give another host or "
                             "port, or end the program that listens there") from None


async def _bind(host: str, port: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    sockets = [bound_socket.dup() for bound_socket in server.sockets]
    server.close()
    return sockets


def build(argv: Sequence[str]) -> tuple[Engine, Listener]:
    """Return the engine and the listener for these arguments; neither runs yet.

    Arguments that are not the server's own go to the pipeline. The model's name is `model_name` if given, else that of
    its folder if given, else that of the preset.
    """
    resolved = resolve(argv, ServeConfig, COMMAND)
    resolved.report()
    config, run_config = resolved.keys, resolved.keys.run

    # keys of the pipeline
    preset = preset_of(resolved.words)
    pipeline_keys: dict[str, Any] = raw_values(resolved.words)
    for server_key in (preset, *(field.name for field in fields(config))):
        pipeline_keys.pop(server_key, None)
    pipeline_keys.update(max_requests=run_config.max_requests, reuse=run_config.reuse)

    # engine
    limits = ServerLimits(run_config.max_requests, config.queue, config.queue_seconds, config.restart)
    engine = Engine(partial(Pipeline.open, preset, **pipeline_keys), limits)

    # server
    typed_values = raw_values(argv)
    folder_name = Path(typed_values.get("model_dir") or typed_values.get("base_dir") or "").name
    model_name = config.model_name or folder_name or preset_of(argv) or preset or DEFAULT_PRESET
    server = Server(engine, config, model_name)
    engine.on_ready = server.announce
    return engine, Listener(server.app, config, server.listens, engine.stop)


def run(engine: Engine, listener: Listener) -> int:
    """Serve until Ctrl-C, SIGTERM, or SIGHUP without nohup, which have the same effect; return the exit code."""
    sockets = listener.bound_sockets()
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))  # which uvicorn listens to

    thread = threading.Thread(target=_run_engine, args=(engine, listener), daemon=True)
    thread.start()

    is_interrupted = False
    try:
        listener.run(sockets)
    except KeyboardInterrupt:
        is_interrupted = True
    engine.stop()
    _join_engine(thread, engine)

    if is_interrupted:
        say("stopped", "\n")
        if thread.is_alive():  # torch does not end a thread that waits for other ranks
            die(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    if engine.error is not None:
        raise engine.error
    return EXIT_LOST if engine.health.status == "lost" else 0


def _join_engine(thread: threading.Thread, engine: Engine) -> None:
    """Wait for the engine's thread. Ranks that are loading receive no messages, so they are killed to end it."""
    if engine.health.status in ("ready", "stopped"):
        thread.join(CLOSE_SECONDS)
        return
    deadline = time.monotonic() + LEAVE_SECONDS
    while thread.is_alive() and time.monotonic() < deadline:
        kill_all()
        thread.join(POLL_SECONDS)


def _run_engine(engine: Engine, listener: Listener) -> None:
    """Run the engine, on its thread; end the listener after an error without a pipeline."""
    try:
        engine.run()
    except BaseException as error:  # which the engine does not handle
        engine.error = engine.error or error
    if engine.error is not None:
        listener.should_exit = True
