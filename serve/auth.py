"""Access control: clients with the key if there is one, else only programs and pages of this machine.

A stranger's page in a local browser could reach a server at loopback, but the browser sends the page's origin.
"""
from __future__ import annotations

import hmac
import json
from typing import Any, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response

from config.serve_config import ServeConfig, is_address, is_loopback
from serve import anthropic
from serve.page_files import FILES
from serve.protocol import JsonObject, Refused

# the page, which asks for the key; the API's root, which leads there; the pipeline's state
KEYLESS_PATHS = (*FILES, "/v1", "/v1/", "/health", "/readyz", "/livez")


class Framing:
    """Middleware that refuses a body with two lengths, since a proxy in front may use the other one.

    What the client sends after it is not read. This middleware has to be the outermost one.
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
    """Middleware that refuses requests which the application must not receive."""

    def __init__(self, app: Any, config: ServeConfig) -> None:
        self._app = app
        self._api_key, self._origins = config.api_key, config.origins
        self._is_local, self._host_names = is_loopback(config.host), config.names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = self._refused(scope) if scope["type"] == "http" else None
        next_app = self._app if refused is None else refusal(refused, scope["path"])
        await next_app(scope, receive, send)

    def _refused(self, scope: Any) -> Refused | None:
        """Return why a request is refused; None if it is not."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._allows_host(host):
            host_advice = "127.0.0.1 or localhost" if self._is_local else "the server's address"
            return Refused(f"without a key the host must be {host_advice}, not {host or 'empty'}: use that address, or "
                           "start it with api_key=SECRET", code="host", status=403)

        if not self._allows_origin(host, headers.get("origin")):
            return Refused("pages of other origins have no access: start the server with cors=ORIGIN", code="origin",
                           status=403)

        if not self._api_key or scope["path"] in KEYLESS_PATHS:
            return None
        scheme, _, bearer_key = headers.get("authorization", "").partition(" ")
        sent_keys = [bearer_key if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        api_key = self._api_key.encode()
        if any(hmac.compare_digest(key.strip().encode("latin-1"), api_key) for key in sent_keys):
            return None
        return Refused("the key is missing or invalid: send it as Authorization: Bearer KEY, or as x-api-key",
                       code="invalid_api_key", status=401)

    def _allows_host(self, host: str) -> bool:
        """Whether a request may give this host.

        Without a key, a foreign name that resolves to this machine shows that a stranger's page sends the request. So
        at loopback only loopback's own names are accepted, and elsewhere also addresses and the server's own names.
        """
        try:
            host_name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # an incomplete address
            return False
        is_own_name = host_name in self._host_names or is_address(host_name)
        return bool(self._api_key) or is_loopback(host_name) or (is_own_name and not self._is_local)

    def _allows_origin(self, host: str, origin: str | None) -> bool:
        """Whether the request comes from no page, from a page of this server, or from an allowed origin."""
        try:
            page_host = urlsplit(origin or "").netloc
        except ValueError:
            return False
        is_allowed = "*" in self._origins or origin in self._origins
        return origin is None or is_allowed or page_host == host


def refusal(refused: Refused, path: str, **headers: str) -> Response:
    """Return an error in the format of this path's protocol."""
    if refused.retry:
        headers["Retry-After"] = str(refused.retry)
    facts = anthropic.error_of(refused) if path.startswith(anthropic.PATH) else refused.body
    return as_json(facts, refused.status, headers)


def as_json(facts: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an object as a JSON response; in ASCII, so that a lone surrogate in it does no harm."""
    return Response(json.dumps(facts), status, headers, media_type="application/json")
