"""A live server of the bundled model for tests, and clients of it."""
from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from typing import Any, ContextManager, Iterator, NamedTuple

import httpx
import pytest

from scripts.serve import build
from serve.engine import Engine
from serve.running import Listener
from tests.saved import wait_until

QUESTION = "Tell me a short story about a curious fox called Maya."


class Live(NamedTuple):
    """A server that answers at `url`."""

    url: str
    engine: Engine
    client: httpx.Client
    door: Any  # the socket at which it listens

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, content=json.dumps(body))

    def chat(self, question: Any = QUESTION, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", **{"messages": user_says(question), **fields})

    def tokenize(self, **fields: Any) -> list[int]:
        """The ids of a prompt or of messages."""
        token_ids: list[int] = self.post("/tokenize", **fields).json()["tokens"]
        return token_ids


def user_says(content: Any = QUESTION) -> list[dict[str, Any]]:
    """The messages of a conversation that a user begins."""
    return [{"role": "user", "content": content}]


def text_of(response: httpx.Response) -> str:
    """What the first choice of a chat says."""
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def refusal(response: httpx.Response, field: str = "code") -> tuple[int, Any]:
    """The status of an error, and one of its fields."""
    return response.status_code, response.json()["error"][field]


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def live(*words: str) -> ContextManager[Live]:
    """A server that these words start, on a port of its own; ready when it is handed out."""
    return alive(*build(["port=0", "threads_per_rank=1", *words]))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server in one process, which makes two answers at once."""
    with live("link=threads", "max_requests=2", "ablate=thrift") as started:  # which always guesses
        yield started


@contextmanager
def alive(engine: Engine, listener: Listener) -> Iterator[Live]:
    """A server while it serves."""
    threads = [threading.Thread(target=engine.run), threading.Thread(target=listener.run)]
    for thread in threads:
        thread.start()
    try:
        assert wait_until(lambda: listener.started and engine.health.status != "loading", 120)
        door = listener.servers[0].sockets[0]
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        single_use = httpx.Limits(max_keepalive_connections=0)  # so that an idle connection is no open file
        with httpx.Client(base_url=url, timeout=600, limits=single_use) as client:
            yield Live(url, engine, client, door)
    finally:
        listener.should_exit = True
        engine.stop()
        for thread in threads:
            thread.join()
