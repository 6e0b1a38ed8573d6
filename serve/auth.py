"""Who may ask: a key where there is one, and else programs and pages of this machine alone.

A page of a stranger, open in a browser here, could reach a server at loopback: its browser says where the page is from.
"""
from __future__ import annotations

import hmac
import json
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response

from config.serve_config import ServeConfig, is_address, is_loopback
from serve import anthropic
from serve.protocol import Refused

OPEN = ("/", "/health")  # addresses that need no key: the page, which asks for it, and how the pipeline is


class Framing:
    """Middleware that refuses a body whose end is given twice, since a proxy in front may see another one.

    What the client sends behind it is not read. It has to be the outermost.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else ()
        if "content-length" not in headers or "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        refused = Refused("the request has two lengths: leave out Content-Length or Transfer-Encoding", code="framing")
        await refusal(refused, scope["path"], Connection="close")(scope, receive, send)


class Guard:
    """Middleware that answers for the application where it may not be asked."""

    def __init__(self, app: Any, config: ServeConfig) -> None:
        self._app = app
        self._key, self._origins = config.api_key, config.origins
        self._local, self._names = is_loopback(config.host), config.names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = self._refused(scope) if scope["type"] == "http" else None
        answer = self._app if refused is None else refusal(refused, scope["path"])
        await answer(scope, receive, send)

    def _refused(self, scope: Any) -> Refused | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._named(host):
            called = "127.0.0.1 or localhost" if self._local else "its address"
            return Refused(f"without a key this server is asked as {called}, not as {host or 'nothing'}: ask it so, or "
                           "start it with api_key=SECRET", code="host", status=403)
        if not self._from_here(host, headers.get("origin")):
            return Refused("pages of other origins may not ask: start the server with cors=ORIGIN", code="origin",
                           status=403)
        if not self._key or scope["path"] in OPEN:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        key = self._key.encode()
        if any(hmac.compare_digest(one.strip().encode("latin-1"), key) for one in given):
            return None
        return Refused("the key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key",
                       code="invalid_api_key", status=401)

    def _named(self, host: str) -> bool:
        """Whether the server may be asked by this name.

        Without a key, a stranger's name that leads here shows that a stranger's page asks: only loopback's own names
        may be used there, and those of an open server.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # half an address
            return False
        own = name in self._names or is_address(name)
        return bool(self._key) or is_loopback(name) or (own and not self._local)

    def _from_here(self, host: str, origin: str | None) -> bool:
        """Whether no page asks, or one of this server or of an origin that may."""
        try:
            page = urlsplit(origin or "").netloc
        except ValueError:
            return False
        return origin is None or "*" in self._origins or origin in self._origins or page == host


def refusal(refused: Refused, path: str, **headers: str) -> Response:
    """An error as the protocol of this path sends it; in ASCII, so that half a character in it does no harm."""
    if refused.retry:
        headers["Retry-After"] = str(refused.retry)
    facts = anthropic.error_of(refused) if path.startswith(anthropic.PATH) else refused.body
    return Response(json.dumps(facts), refused.status, headers, media_type="application/json")
