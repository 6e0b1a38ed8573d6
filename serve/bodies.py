"""Bodies of requests: small ones are read at once, large ones by another process, so that they delay no answer."""
from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

from config.console import say
from config.schema.untrusted import one_line
from config.serve_config import ServeConfig
from model.sandbox import Sandbox
from serve.protocol import Choice, Refused, Translate, body_of, read_body, small_body

MAX_SMALL_BYTES = 100_000  # of a body that is read at once, within about 0.05 s
READ_SECONDS = 10.0  # that reading a large one may take
GROWTH = 4  # the characters of a body that was read, at most, for a byte of what was sent


class BodyReader:
    """A reader of bodies for one event loop."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config.run
        self._sandbox = Sandbox(partial(small_body, config.run), max_output=int(GROWTH * 1e6 * config.body_mb))
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def read(self, data: bytes, body_class: type[Any], translate: Translate) -> tuple[Any, list[Choice]]:
        """Return a body as `read_body` does, with its choices; report tools that were left out."""
        if len(data) <= MAX_SMALL_BYTES:
            body = read_body(data, body_class, translate)
            choices = body.choices(self._config)
        else:
            loop = asyncio.get_running_loop()
            body, choices = await loop.run_in_executor(self._thread, self._read_apart, data, body_class, translate)

        for tool_type in getattr(body, "provider_tools", ()):
            _report_left_out(one_line(tool_type))
        return body, choices

    def _read_apart(self, data: bytes, body_class: type[Any], translate: Translate) -> tuple[Any, list[Choice]]:
        try:
            small_text = self._sandbox.call(READ_SECONDS, data, body_class, translate)
        except (TimeoutError, ValueError) as error:
            raise Refused(f"the body cannot be read ({error}): send a simpler one", code="body_too_large",
                          status=413) from None

        body = body_of(small_text, body_class)
        return body, body.choices(self._config)


@lru_cache(maxsize=100)
def _report_left_out(tool_type: str) -> None:
    """Print a line about tools of a type, once for each of the last hundred types."""
    say(f"tools of the type {tool_type} are left out of requests, since only their provider can run them")
