"""The server's HTTP endpoints: their requests and responses.

This module does not know how answers are computed: the engine does that on its own thread.
"""
from __future__ import annotations

import asyncio
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
from serve.auth import Framing, Guard, as_json, refusal
from serve.bodies import BodyReader
from serve.completions import ChatAnswer, CompletionAnswer
from serve.engine import UNAVAILABLE, Engine
from serve.protocol import Body, Chat, Choice, Completion, JsonObject, Refused, ToTokenize, Translate
from serve.start_line import start_lines
from serve.text_chunks import prompt_ids

NOT_FOUND = 404  # HTTP status of an unknown path
CLIENT_GONE = 499  # HTTP status for a client that has left; nobody receives it
BODY_SECONDS = 60.0  # seconds within which a body must arrive


async def _refuse(request: Request, error: Refused) -> Response:
    return refusal(error, request.url.path)


async def _refuse_route(request: Request, error: NotServed) -> Response:
    path = request.url.path
    advice = "; addresses of the API begin with /v1/, as /v1/models" if error.status_code == NOT_FOUND else ""
    refused = Refused(f"{request.method} {path} is not served: {error.detail}{advice}", code="not_served",
                      status=error.status_code)
    return refusal(refused, path, **error.headers or {})


async def _report_failure(request: Request, error: Exception) -> Response:
    return refusal(Refused("the server has failed: see its output", code="failed", status=500), request.url.path)


def _as_chat_to_count(message_body: JsonObject) -> JsonObject:
    return anthropic.as_chat({"max_tokens": 1, **message_body})


class Server:
    """The endpoints of OpenAI's and Anthropic's protocols, and a chat page."""

    GETS = {**dict.fromkeys(page_files.FILES, "page"), **dict.fromkeys(("/v1", "/v1/"), "to_page"),
            "/livez": "liveness", **dict.fromkeys(("/readyz", "/health"), "readiness"), "/metrics": "metrics",
            "/cluster": "cluster", **dict.fromkeys(("/v1/models", "/v1/models/"), "list_models"),
            "/v1/models/{name:path}": "show_model"}
    ANSWERS: Mapping[str, tuple[type[Body], Translate, type[AnswerForm]]] = {  # body, translation into it, answer
        "/v1/chat/completions": (Chat, dict, ChatAnswer),
        "/v1/completions": (Completion, dict, CompletionAnswer),
        "/v1/responses": (Chat, responses.as_chat, responses.ResponseAnswer),
        anthropic.PATH: (Chat, anthropic.as_chat, anthropic.MessageAnswer)}
    POSTS = {**dict.fromkeys(ANSWERS, "reply"), f"{anthropic.PATH}/count_tokens": "count_tokens",
             "/tokenize": "tokenize"}
    ERRORS: Mapping[Any, Any] = {Refused: _refuse, NotServed: _refuse_route, Exception: _report_failure}

    def __init__(self, engine: Engine, config: ServeConfig, model_name: str) -> None:
        self.engine, self.config, self.model_name = engine, config, model_name
        self._body_reader = BodyReader(config)
        self._unannounced_urls: list[str] = []  # the server's address, until it was printed

    @property
    def app(self) -> FastAPI:
        """The application, for uvicorn."""
        config = self.config
        cors = Middleware(CORSMiddleware, allow_origins=list(config.origins), allow_methods=["GET", "POST"],
                          allow_headers=["*"], expose_headers=["Retry-After"])
        guard = Middleware(Guard, config=config)
        middlewares = [Middleware(Framing), *([cors] if config.origins else []), guard]  # the outermost first
        app = FastAPI(title="FlowSpec", docs_url=None, redoc_url=None, openapi_url=None, middleware=middlewares,
                      exception_handlers=dict(self.ERRORS))

        for http_methods, routes in ((["GET", "HEAD"], self.GETS), (["POST"], self.POSTS)):
            for path, method_name in routes.items():
                app.add_api_route(path, getattr(self, method_name), methods=http_methods)
        return app

    def listens(self, url: str) -> None:
        """Announce the address at which the server now listens, once the pipeline is ready."""
        self._unannounced_urls = [url]
        self.announce()

    def announce(self) -> None:
        """Print the lines of a start, once, if the server listens and its pipeline is ready."""
        facts = self.engine.facts
        with suppress(IndexError):  # not yet, or already
            if facts is not None:
                print(start_lines(self._unannounced_urls.pop(), self.model_name, facts), flush=True)

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

    def cluster(self) -> Response:
        """Return the state of the pipeline and what is known of its boards; on a thread, since the planner is asked."""
        health, overview = self.engine.health, self.engine.overview
        boards = overview.as_json() if overview else {"boards": []}
        return as_json({"status": health.status, "reason": health.reason, "model": self.model_name, **boards})

    async def metrics(self) -> Response:
        return Response(self.engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def list_models(self) -> Response:
        """Return the list of the one model; fails until /health is 200, so that clients can wait for either."""
        self.engine.check_healthy()
        return as_json({"object": "list", "data": [self._model_facts]})

    async def show_model(self, name: str) -> Response:
        self.engine.check_healthy()
        if name != self.model_name:
            raise Refused(f"no model has this name: use {self.model_name}", "model", "model_not_found", 404)
        return as_json(self._model_facts)

    @property
    def _model_facts(self) -> JsonObject:
        facts = self.engine.facts
        return {"id": self.model_name, "object": "model", "created": 0, "owned_by": "flowspec",
                "max_model_len": self.config.run.max_length, "flowspec": facts._asdict() if facts else {}}

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or of messages."""
        _, choices = await self.read(request, ToTokenize)
        token_ids = await self.prompt_ids(choices[0])
        return as_json({"count": len(token_ids), "max_model_len": self.config.run.max_length, "tokens": token_ids})

    # --- answers ------------------------------------------------------------------------------------------------------

    async def reply(self, request: Request) -> Response:
        body_class, translate, answer_class = self.ANSWERS[request.url.path]
        body, choices = await self.read(request, body_class, translate)
        return await self.answer(request, answer_class(self.engine, body, choices, self.model_name))

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens in the prompt of a body of /v1/messages."""
        _, choices = await self.read(request, Chat, _as_chat_to_count)
        return as_json({"input_tokens": len(await self.prompt_ids(choices[0]))})

    # --- bodies -------------------------------------------------------------------------------------------------------

    async def read(self, request: Request, body_class: type[Any], translate: Translate = dict
                   ) -> tuple[Any, list[Choice]]:
        """Return the body of a request, and its choices; the configuration limits its megabytes."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise Refused(f"the body is compressed (Content-Encoding: {encoding}): send it as it is", code="encoding",
                          status=415)

        try:
            data = await asyncio.wait_for(self._body_bytes(request), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Refused(f"the body did not arrive within {BODY_SECONDS:g} s: send it faster", code="body_too_slow",
                          status=408) from None
        except ClientDisconnect:
            raise Refused("the client left before its body had arrived", status=CLIENT_GONE) from None
        return await self._body_reader.read(data, body_class, translate)

    async def _body_bytes(self, request: Request) -> bytes:
        max_megabytes, data = self.config.body_mb, bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > int(max_megabytes * 1e6):
                raise Refused(f"the body has more than {max_megabytes:g} MB: send less", code="body_too_large",
                              status=413)
        return bytes(data)

    async def answer(self, request: Request, answer: AnswerForm) -> Response:
        """Return an answer, whole or as a stream; it is no longer computed once the client leaves."""
        with ExitStack() as exit_stack:
            exit_stack.enter_context(closing(answer))
            if not answer.body.stream:
                return as_json(await unless_gone(request, answer.whole_body()))
            first_event = await unless_gone(request, answer.next())
            exit_stack.pop_all()  # the stream closes it
        return EventStream(answer, first_event)

    async def prompt_ids(self, choice: Choice) -> list[int]:
        """Return the token ids of a choice's prompt."""
        async def read_prompt() -> list[int]:
            engine = self.engine
            submitted = engine.call(lambda pipeline: engine.prompt_thread.submit(prompt_ids, choice, pipeline))
            reading = await asyncio.wrap_future(submitted)
            return await asyncio.wrap_future(reading)

        self.engine.check_ready()
        try:
            return await asyncio.wait_for(read_prompt(), self.config.queue_seconds)
        except ValueError as error:
            raise Refused(str(error), choice.field) from None
        except asyncio.TimeoutError:
            raise Refused("the pipeline is busy: try later", code="waited_too_long", status=429, retry=10) from None


class EventStream(StreamingResponse):
    """A stream of events. Its answer is cancelled if the client leaves, even before the first event is sent."""

    def __init__(self, answer: AnswerForm, first_event: Any) -> None:
        super().__init__(answer.stream(first_event), media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with closing(self._answer):
            await super().__call__(scope, receive, send)


async def unless_gone(request: Request, work: Any) -> Any:
    """Return the result of `work`; raise Refused if the client leaves first."""
    work_task = asyncio.ensure_future(work)
    leave_task = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait([work_task, leave_task], return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise Refused("the client left before its answer was ready", status=CLIENT_GONE)
    finally:
        work_task.cancel()
        leave_task.cancel()


async def _wait_until_gone(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
