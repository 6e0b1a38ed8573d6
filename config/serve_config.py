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

from config.cli import CommandKeys
from config.keys import shared_key
from config.values import Range, listed

ORIGIN = re.compile(r"\*|https?://[^\s/,]+")


@dataclass(frozen=True)
class ServeConfig(CommandKeys):
    """The keys of a server, which keeps a pipeline running and listens at an address."""

    DEFAULTS = {"max_requests": 4, "reuse": True}
    COMPARES = False
    UNSUPPORTED: ClassVar[Sequence[str]] = ("prompt", "prompt_ids", "question_file", "questions", "output", "live")

    host: str = shared_key(
        "127.0.0.1", "address to listen on; one that other machines can reach needs api_key or open=true",
        heading="The server")
    port: int = shared_key(8000, "port to listen on; 0: any free one", Range(1, 65535, {0: "any that is free"}))
    api_key: str = shared_key(
        "", "key that clients must send as `Authorization: Bearer KEY`; default: $FLOWSPEC_API_KEY")
    open: bool = shared_key(False, "accept requests without api_key from every machine that reaches host")
    cors: str = shared_key("", "origins of pages that may send requests, as http://a.example,http://b.example; *: all")
    model_name: str = shared_key("", "the model's name in the API; empty: as the preset or the model's folder")
    queue: int = shared_key(
        64, "requests that may wait for a place; more are refused with HTTP status 429", Range(0, 100_000))
    queue_seconds: float = shared_key(300.0, "seconds that a request may wait for a place", Range(1, 86_400))
    body_mb: float = shared_key(4.0, "largest body of a request in megabytes", Range(0.001, 1024))
    restart: bool = shared_key(True, "restart the whole pipeline when a rank is lost")

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
        if not is_known(self.host):
            yield f"host={self.host} is no address, and no name that this machine can look up: give its own address"
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


def is_known(host: str) -> bool:
    """Return whether this is an address, or a name that has one; an empty text means all addresses."""
    if not host or is_address(host):
        return True
    with suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None))
    return False


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Return whether this is an IP address, which no name service can redirect."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
