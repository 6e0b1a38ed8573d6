"""A server from its arguments to its exit code: the engine on its own thread, and a listener of uvicorn.
"""
from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

import uvicorn

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

COMMAND = "bash run_server.sh"
PATIENCE = 10.0  # seconds for the pipeline to close
LEAVE = 3  # seconds for answers under way once the server shuts down
REPORT = 5  # seconds more to send the error of the shutdown to the other clients


class Listener(uvicorn.Server):
    """A uvicorn server that calls `listens` with its address, as other devices can open it, once it listens.

    When it shuts down, it calls `ending`: at once if nothing is under way, else after at most `LEAVE` seconds.
    """

    def __init__(self, app: Any, config: ServeConfig, listens: Callable[[str], Any],
                 ending: Callable[[], Any]) -> None:
        most, backlog = connection_limits(config)
        connection: Any = partial(Connection, most)
        super().__init__(uvicorn.Config(
            app, config.host, config.port, http=connection, ws="none", backlog=backlog,
            timeout_graceful_shutdown=LEAVE + REPORT, log_level="error"))  # its warnings are of clients' errors
        self._listens, self._ending = listens, ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().set_exception_handler(LoopErrorHandler())
        addresses = [bound.getsockname() for server in self.servers for bound in server.sockets]
        for host, port, *_ in addresses[:1]:  # a name may have two, one of each protocol
            self._listens(reachable_url(host, port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        leaving = asyncio.get_running_loop().call_later(LEAVE, self._ending)
        await super().shutdown(sockets)
        leaving.cancel()
        self._ending()

    def bound(self) -> list[socket.socket]:
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
    sockets = [bound.dup() for bound in server.sockets]
    server.close()
    return sockets


def build(argv: Sequence[str]) -> tuple[Engine, Listener]:
    """Return the engine and the listener for these arguments; neither runs yet.

    Arguments that are not the server's own go to the pipeline. The model's name is `model_name` if given, else that of
    its folder if given, else that of the preset.
    """
    resolved = resolve(argv, ServeConfig, COMMAND)
    resolved.report()
    config, run = resolved.keys, resolved.keys.run
    preset = preset_of(resolved.words)
    keys: dict[str, Any] = raw_values(resolved.words)
    for own in (preset, *(key.name for key in fields(config))):
        keys.pop(own, None)
    keys.update(max_requests=run.max_requests, reuse=run.reuse)
    limits = ServerLimits(run.max_requests, config.queue, config.queue_seconds, config.restart)
    engine = Engine(partial(Pipeline.open, preset, **keys), limits)
    typed = raw_values(argv)
    folder = Path(typed.get("model_dir") or typed.get("base_dir") or "").name
    served = Server(engine, config, config.model_name or folder or preset_of(argv) or preset or DEFAULT_PRESET)
    engine.on_ready = served.announce
    return engine, Listener(served.app, config, served.listens, engine.stop)


def run(engine: Engine, listener: Listener) -> int:
    """Serve until Ctrl-C, SIGTERM, or SIGHUP without nohup, which have the same effect; return the exit code."""
    sockets = listener.bound()
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))  # which uvicorn listens to
    thread = threading.Thread(target=_work, args=(engine, listener), daemon=True)
    thread.start()
    interrupted = False
    try:
        listener.run(sockets)
    except KeyboardInterrupt:
        interrupted = True
    engine.stop()
    _join(thread, engine)
    if interrupted:
        say("stopped", "\n")
        if thread.is_alive():  # torch does not end a thread that waits for other ranks
            die(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    if engine.error is not None:
        raise engine.error
    return EXIT_LOST if engine.health.status == "lost" else 0


def _join(thread: threading.Thread, engine: Engine) -> None:
    """Wait for the engine's thread. Ranks that are loading receive no messages, so they are killed to end it."""
    if engine.health.status in ("ready", "stopped"):
        thread.join(PATIENCE)
        return
    deadline = time.monotonic() + LEAVE
    while thread.is_alive() and time.monotonic() < deadline:
        kill_all()
        thread.join(POLL_SECONDS)


def _work(engine: Engine, listener: Listener) -> None:
    """Run the engine, on its thread; end the listener after an error without a pipeline."""
    try:
        engine.run()
    except BaseException as error:  # which the engine does not handle
        engine.error = engine.error or error
    if engine.error is not None:
        listener.should_exit = True
