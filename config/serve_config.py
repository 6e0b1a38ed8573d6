"""Every option of the server, beside those of a run; what the server must not be given.

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
    """A server: a pipeline that stays, and the address at which it is asked."""

    RANGES = {"port": Range(1, 65535, {0: "any that is free"}), "queue": Range(0, 100_000),
              "queue_seconds": Range(1, 86_400), "body_mb": Range(0.001, 1024)}
    USUAL = {"max_requests": 4, "reuse": True}
    # what requests bring, and where answers go
    REFUSED: ClassVar[Sequence[str]] = ("prompt", "prompt_ids", "question_file", "questions", "output")

    # The server
    host: str = "127.0.0.1"  # address to listen at; one that other machines reach needs api_key, or open=true
    port: int = 8000  # and its port; 0: any that is free
    api_key: str = ""  # what clients must say as `Authorization: Bearer KEY`; also FLOWSPEC_API_KEY in the environment
    open: bool = False  # without api_key, let every machine ask that reaches host
    cors: str = ""  # origins whose pages a browser lets ask, as http://a.example,http://b.example; *: all
    model_name: str = ""  # what the model is called; empty: as the preset or the model's folder
    queue: int = 64  # requests that may wait for a place; later ones are asked to come again (429)
    queue_seconds: float = 300.0  # seconds that a request may wait for a place
    body_mb: float = 4.0  # megabytes that a request may have
    restart: bool = True  # when a rank is lost, bring the whole pipeline up again

    EXAMPLES = """\
  bash run_server.sh
  bash run_server.sh port=8080 max_requests=8
  bash run_server.sh vicuna-7b host=0.0.0.0 api_key=SECRET
  curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Who are you?"}]}'"""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        wrong = [origin for origin in self.origins if not ORIGIN.fullmatch(origin)]
        if wrong:
            yield f"cors={self.cors} has {wrong[0]}, which is no origin: write http://NAME or http://NAME:PORT"
        yield from self._exposed()

    def _exposed(self) -> Iterator[str]:
        if not self.api_key and not self.open and not is_loopback(self.host):
            yield f"host={self.host} can be reached by other machines: add api_key=SECRET, or open=true if everybody " \
                  "there may ask, or leave host out"

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which an open server is asked, beside addresses, in lower case."""
        here = socket.gethostname()
        return tuple(name.lower() for name in (self.host, here, f"{here}.local"))

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins that the key `cors` lists."""
        return listed(self.cors)


@dataclass(frozen=True)
class WorkerConfig(ServeConfig):
    """A worker of FastChat: the same pipeline, asked by those whom a controller sends."""

    # FastChat
    controller: str = ""  # address of the controller, as http://127.0.0.1:21001
    worker: str = ""  # address at which this worker is reached; empty: http://HOST:PORT as listened at

    # The server
    open: bool = False  # let every machine ask that reaches host, since FastChat's protocol has no key
    port: int = 21002  # port to listen at; 0: any that is free

    EXAMPLES = """\
  python -m serve.fastchat controller=http://127.0.0.1:21001
  python -m serve.fastchat vicuna-7b controller=http://10.0.0.1:21001 host=10.0.0.2 open=true"""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not URL.fullmatch(self.controller):
            yield f"controller={self.controller} is no address of a controller: write http://NAME:PORT"
        if self.worker and not URL.fullmatch(self.worker):
            yield f"worker={self.worker} is no address: write http://NAME:PORT"
        if self.api_key:
            yield "api_key is not known to FastChat: leave it out, and keep host where only the controller's users are"
        if self.run.uses_jinja:
            yield f"template={self.run.template} cannot be passed to FastChat, which wraps prompts itself: use " \
                  "template=vicuna, template=llama-2 or template=none"

    def _exposed(self) -> Iterator[str]:
        if not is_loopback(self.host) and not self.open:
            yield f"host={self.host} can be reached by other machines, and FastChat's protocol has no key: add " \
                  "open=true if the network is yours, or leave host out"
        if self.host in ANY and not self.worker:
            yield f"host={self.host} is no address at which a controller finds this worker: add worker=http://NAME:PORT"

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, urlsplit(self.worker).hostname or "")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether this is an address, which no name service can lead elsewhere."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
