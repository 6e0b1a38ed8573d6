"""Bodies of requests: small ones are read at once, large ones by another process, so that they delay no answer."""
from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

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
        """Return a body as `read_body` does, with its choices."""
        if len(data) <= MAX_SMALL_BYTES:
            body = read_body(data, body_class, translate)
            return body, body.choices(self._config)

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._read_apart, data, body_class, translate)

    def _read_apart(self, data: bytes, body_class: type[Any], translate: Translate) -> tuple[Any, list[Choice]]:
        try:
            small_text = self._sandbox.call(READ_SECONDS, data, body_class, translate)
        except (TimeoutError, ValueError) as error:
            raise Refused(f"the body cannot be read ({error}): send a simpler one", code="body_too_large",
                          status=413) from None

        body = body_of(small_text, body_class)
        return body, body.choices(self._config)
