"""The options of the server, in addition to those of a run, and the options of a run that it does not accept.

It knows nothing about HTTP.
"""
from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Iterator, Sequence
from urllib.parse import urlsplit

from config.cli import CommandKeys
from config.keys import Range, listed

ORIGIN = re.compile(r"\*|https?://[^\s/,]+")
URL = re.compile(r"https?://[^\s/]+")
ANY = ("0.0.0.0", "::", "")  # all addresses of this machine


@dataclass(frozen=True)
class ServeConfig(CommandKeys):
    """The keys of a server, which keeps a pipeline running and listens at an address."""

    RANGES = {"port": Range(1, 65535, {0: "any that is free"}), "queue": Range(0, 100_000),
              "queue_seconds": Range(1, 86_400), "body_mb": Range(0.001, 1024)}
    DEFAULTS = {"max_requests": 4, "reuse": True}
    # given by each request, or not needed since answers are sent back
    UNSUPPORTED: ClassVar[Sequence[str]] = ("prompt", "prompt_ids", "question_file", "questions", "output")

    # The server
    host: str = "127.0.0.1"  # address to listen on; one that other machines can reach needs api_key or open=true
    port: int = 8000  # port to listen on; 0: any free one
    api_key: str = ""  # key that clients must send as `Authorization: Bearer KEY`; default: $FLOWSPEC_API_KEY
    open: bool = False  # accept requests without api_key from every machine that reaches host
    cors: str = ""  # origins of pages that may send requests, as http://a.example,http://b.example; *: all
    model_name: str = ""  # the model's name in the API; empty: as the preset or the model's folder
    queue: int = 64  # requests that may wait for a place; more are refused with HTTP status 429
    queue_seconds: float = 300.0  # seconds that a request may wait for a place
    body_mb: float = 4.0  # largest body of a request in megabytes
    restart: bool = True  # restart the whole pipeline when a rank is lost

    EXAMPLES = """\
  bash run_server.sh
  bash run_server.sh port=8080 max_requests=8
  bash run_server.sh vicuna-7b host=0.0.0.0 api_key=SECRET
  curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Who are you?"}]}'"""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        wrong = [origin for origin in self.origins if not ORIGIN.fullmatch(origin)]
        if wrong:
            yield f"cors={self.cors} has {wrong[0]}, which is not an origin: write http://NAME or http://NAME:PORT"
        yield from self._exposed()

    def _exposed(self) -> Iterator[str]:
        if not self.api_key and not self.open and not is_loopback(self.host):
            yield f"host={self.host} can be reached by other machines: add api_key=SECRET, or open=true if everybody " \
                  "there may send requests, or leave host out"

    @property
    def names(self) -> tuple[str, ...]:
        """The host names, in lower case, that a request to an open server may give instead of an address."""
        here = socket.gethostname()
        return tuple(name.lower() for name in (self.host, here, f"{here}.local"))

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of the key `cors`."""
        return listed(self.cors)


@dataclass(frozen=True)
class WorkerConfig(ServeConfig):
    """The keys of a FastChat worker: the same pipeline, which receives requests through a controller."""

    # FastChat
    controller: str = ""  # address of the controller, as http://127.0.0.1:21001
    worker: str = ""  # address at which a controller reaches this worker; empty: http://HOST:PORT as configured

    # The server
    open: bool = False  # accept requests of any machine that reaches host, since FastChat's protocol has no key
    port: int = 21002  # port to listen on; 0: any free one

    EXAMPLES = """\
  python3 -m serve.fastchat controller=http://127.0.0.1:21001
  python3 -m serve.fastchat vicuna-7b controller=http://10.0.0.1:21001 host=10.0.0.2 open=true"""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not URL.fullmatch(self.controller):
            yield f"controller={self.controller} is not an address of a controller: write http://NAME:PORT"
        if self.worker and not URL.fullmatch(self.worker):
            yield f"worker={self.worker} is not an address: write http://NAME:PORT"
        if self.api_key:
            yield "api_key does not exist in FastChat: leave it out, and choose a host that only trusted machines reach"
        if self.run.uses_jinja:
            yield f"template={self.run.template} cannot be passed to FastChat, which wraps prompts itself: use " \
                  "template=vicuna, template=llama-2 or template=none"

    def _exposed(self) -> Iterator[str]:
        if not is_loopback(self.host) and not self.open:
            yield f"host={self.host} can be reached by other machines, and FastChat's protocol has no key: add " \
                  "open=true if the network is yours, or leave host out"
        if self.host in ANY and not self.worker:
            yield f"host={self.host} is not an address for a controller to connect to: add worker=http://NAME:PORT"

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, urlsplit(self.worker).hostname or "")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Return whether this is an IP address, which no name service can redirect."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
