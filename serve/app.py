"""The server's HTTP endpoints: their requests and responses.

This module does not know how answers are computed: the engine does that on its own thread.
"""
from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, closing, suppress
from typing import Any, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.middleware import Middleware
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import RedirectResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as NotServed
from starlette.requests import ClientDisconnect

from config.serve_config import ServeConfig
from serve import anthropic, page_files, responses
from serve.answering import AnswerForm
from serve.auth import Framing, Guard, refusal
from serve.completions import ChatAnswer, CompletionAnswer
from serve.engine import UNAVAILABLE, Engine
from serve.protocol import Body, Chat, Completion, Facts, Refused, Renamed, ToTokenize, read_body
from serve.start_line import start_lines
from serve.text_chunks import prompt_ids

CLIENT_GONE = 499  # HTTP status for a client that has left; nobody receives it
BODY_SECONDS = 60.0  # seconds within which a body must arrive


async def _refuse(request: Request, error: Refused) -> Response:
    return refusal(error, request.url.path)


async def _not_served(request: Request, error: NotServed) -> Response:
    path = request.url.path
    refused = Refused(f"{request.method} {path} is not served: {error.detail}", code="not_served",
                      status=error.status_code)
    return refusal(refused, path, **error.headers or {})


async def _failed(request: Request, error: Exception) -> Response:
    return refusal(Refused("the server has failed: see its output", code="failed", status=500), request.url.path)


class Server:
    """The endpoints of OpenAI's and Anthropic's protocols, and a chat page."""

    GETS = {**dict.fromkeys(page_files.FILES, "page"), **dict.fromkeys(("/v1", "/v1/"), "to_page"),
            "/livez": "liveness", **dict.fromkeys(("/readyz", "/health"), "readiness"), "/metrics": "metrics",
            "/v1/models": "models", "/v1/models/{name:path}": "one_model"}
    ANSWERS: Mapping[str, tuple[type[Body], Renamed, type[AnswerForm]]] = {  # body, translation into it, answer
        "/v1/chat/completions": (Chat, dict, ChatAnswer),
        "/v1/completions": (Completion, dict, CompletionAnswer),
        "/v1/responses": (Chat, responses.as_chat, responses.ResponseAnswer),
        anthropic.PATH: (Chat, anthropic.as_chat, anthropic.MessageAnswer)}
    POSTS = {**dict.fromkeys(ANSWERS, "reply"), f"{anthropic.PATH}/count_tokens": "count", "/tokenize": "tokenize"}
    ERRORS: Mapping[Any, Any] = {Refused: _refuse, NotServed: _not_served, Exception: _failed}

    def __init__(self, engine: Engine, config: ServeConfig, model: str) -> None:
        self.engine, self.config, self.model = engine, config, model
        self._unannounced: list[str] = []  # the server's address, until it was printed

    @property
    def app(self) -> FastAPI:
        """The application, for uvicorn."""
        config = self.config
        cors = Middleware(CORSMiddleware, allow_origins=list(config.origins), allow_methods=["GET", "POST"],
                          allow_headers=["*"], expose_headers=["Retry-After"])
        guard = Middleware(Guard, config=config)
        around = [Middleware(Framing), *([cors] if config.origins else []), guard]  # the outermost first
        app = FastAPI(title="FlowSpec", docs_url=None, redoc_url=None, openapi_url=None, middleware=around,
                      exception_handlers=dict(self.ERRORS))
        for methods, names in ((["GET", "HEAD"], self.GETS), (["POST"], self.POSTS)):
            for path, name in names.items():
                app.add_api_route(path, getattr(self, name), methods=methods)
        return app

    def listens(self, url: str) -> None:
        """Announce the address at which the server now listens, once the pipeline is ready."""
        self._unannounced = [url]
        self.announce()

    def announce(self) -> None:
        """Print the lines of a start, once, if the server listens and its pipeline is ready."""
        facts = self.engine.facts
        with suppress(IndexError):  # not yet, or already
            if facts is not None:
                print(start_lines(self._unannounced.pop(), self.model, facts), flush=True)

    # --- the pipeline -------------------------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """Return a file of the chat page, which sends requests to this server only."""
        file = page_files.FILES[request.url.path]
        return Response(file.read_bytes(), media_type=page_files.MEDIA_TYPES[file.suffix], headers=page_files.HEADERS)

    async def to_page(self) -> Response:
        """Lead a person who opens the address of the API to the page."""
        return RedirectResponse("/")

    async def readiness(self) -> Response:
        """Return status 200 if the ring can answer now, else 503 with the reason."""
        return self._health(self.engine.health.status == "ready")

    async def liveness(self) -> Response:
        """Return status 503 if only a restart of the server helps, else 200: also while it loads or recovers."""
        return self._health(self.engine.is_alive)

    def _health(self, is_well: bool) -> Response:
        health = self.engine.health
        facts = {"status": "ok" if health.status == "ready" else health.status, "reason": health.reason}
        response = as_json(facts, 200 if is_well else UNAVAILABLE)
        if not is_well and health.retry_seconds:
            response.headers["Retry-After"] = str(health.retry_seconds)
        return response

    async def metrics(self) -> Response:
        return Response(self.engine.figures.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """Return the list of the one model; fails until /health is 200, so that clients can wait for either."""
        self.engine.check_healthy()
        return as_json({"object": "list", "data": [self._model]})

    async def one_model(self, name: str) -> Response:
        self.engine.check_healthy()
        if name != self.model:
            raise Refused(f"no model has this name: use {self.model}", "model", "model_not_found", 404)
        return as_json(self._model)

    @property
    def _model(self) -> Facts:
        facts = self.engine.facts
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "flowspec",
                "max_model_len": self.config.run.max_length, "flowspec": facts._asdict() if facts else {}}

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or of messages."""
        ids = await self.ids(await self.read(request, ToTokenize))
        return as_json({"count": len(ids), "max_model_len": self.config.run.max_length, "tokens": ids})

    # --- answers ------------------------------------------------------------------------------------------------------

    async def reply(self, request: Request) -> Response:
        kind, renamed, form = self.ANSWERS[request.url.path]
        return await self.answer(request, await self.read(request, kind, renamed), form)

    async def count(self, request: Request) -> Response:
        """Return the number of tokens in the prompt of a body of /v1/messages."""
        body = await self.read(request, Chat, lambda given: anthropic.as_chat({"max_tokens": 1, **given}))
        return as_json({"input_tokens": len(await self.ids(body))})

    # --- bodies -------------------------------------------------------------------------------------------------------

    async def read(self, request: Request, kind: type[Any], renamed: Renamed = dict) -> Any:
        """Return the body of a request, parsed by `read_body`; the configuration limits its megabytes."""
        try:
            data = await asyncio.wait_for(self._body(request), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Refused(f"the body did not arrive within {BODY_SECONDS:g} s: send it faster", code="body_too_slow",
                          status=408) from None
        except ClientDisconnect:
            raise Refused("the client left before its body had arrived", status=CLIENT_GONE) from None
        return read_body(data, kind, renamed)

    async def _body(self, request: Request) -> bytes:
        megabytes, data = self.config.body_mb, bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > int(megabytes * 1e6):
                raise Refused(f"the body has more than {megabytes:g} MB: send less", code="body_too_large", status=413)
        return bytes(data)

    async def answer(self, request: Request, body: Body, form: type[AnswerForm]) -> Response:
        """Return the answer to a body, whole or as a stream; it is no longer computed once the client leaves."""
        answer = form(self.engine, body, body.choices(self.config.run), self.model)
        with ExitStack() as held:
            held.enter_context(closing(answer))
            if not body.stream:
                return as_json(await unless_gone(request, answer.whole()))
            first = await unless_gone(request, answer.next())
            held.pop_all()  # the stream closes it
        return EventStream(answer, first)

    async def ids(self, body: Body) -> list[int]:
        """Return the token ids of a body's only prompt."""
        [choice] = body.asked(self.config.run)

        async def read() -> list[int]:
            engine = self.engine
            begun = engine.call(lambda pipeline: engine.prompts.submit(prompt_ids, choice, pipeline))
            reading = await asyncio.wrap_future(begun)
            return await asyncio.wrap_future(reading)

        self.engine.check_ready()
        try:
            return await asyncio.wait_for(read(), self.config.queue_seconds)
        except ValueError as error:
            raise Refused(str(error), choice.field) from None
        except asyncio.TimeoutError:
            raise Refused("the pipeline is busy: try later", code="waited_too_long", status=429, retry=10) from None


class EventStream(StreamingResponse):
    """A stream of events. Its answer is cancelled if the client leaves, even before the first event is sent."""

    def __init__(self, answer: AnswerForm, first: Any) -> None:
        super().__init__(answer.events(first), media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with closing(self._answer):
            await super().__call__(scope, receive, send)


async def unless_gone(request: Request, work: Any) -> Any:
    """Return the result of `work`; raise Refused if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Refused("the client left before its answer was ready", status=CLIENT_GONE)
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_json(facts: Facts, status: int = 200) -> Response:
    """Return an object as a JSON response, in ASCII like that of `refusal`."""
    return Response(json.dumps(facts), status, media_type="application/json")
