"""A FastChat worker: `python3 -m serve.fastchat controller=URL` adds the pipeline to a controller as a model.

The worker reports itself and the length of its queue to the controller. Prompts come through the controller, already
wrapped in their template. A stream is JSON objects with the whole text so far, each followed by a zero byte. The worker
uses the same engine as the server, and the fields of `protocol`.
"""
from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Sequence

import httpx
from fastapi import Request, Response
from fastchat.constants import WORKER_HEART_BEAT_INTERVAL, ErrorCode

from config.files import fits
from config.serve_config import WorkerConfig
from launch import console
from model.text import conversation_of
from serve import running
from serve.answering import AnswerForm, ChoiceAnswer
from serve.app import Service, as_json
from serve.completions import completion_logprobs
from serve.engine import Engine
from serve.protocol import Completion, Facts, Refused
from serve.running import Listener
from serve.text_chunks import Piece

COMMAND = "python3 -m serve.fastchat"
RETRY = 5.0  # seconds after which a controller that did not answer is tried again
LOOK = 1.0  # seconds between two looks at a pipeline that is not ready
PATIENCE = 5.0  # seconds for a response of the controller
FIELDS = {"temperature": 1.0, "max_new_tokens": 256, "echo": True}  # defaults of FastChat's workers
HEARD = {"exist": bool}  # the response to a heartbeat
CODES = {429: ErrorCode.ENGINE_OVERLOADED, 503: ErrorCode.INTERNAL_ERROR, 500: ErrorCode.INTERNAL_ERROR}


def error_of(refused: Refused) -> Facts:
    """Return an error in FastChat's format."""
    code = CODES.get(refused.status, ErrorCode.PARAM_OUT_OF_RANGE)
    if refused.code == "context_length_exceeded":
        code = ErrorCode.CONTEXT_OVERFLOW
    return {"text": refused.message, "error_code": int(code)}


async def _refuse(request: Request, error: Refused) -> Response:
    """Return an error with HTTP status 200, since FastChat reads it from the body."""
    body = _part(error_of(error)) if _is_stream(request) else json.dumps(error_of(error))
    return Response(body, media_type=WorkerAnswer.MEDIA)


def _is_stream(request: Request) -> bool:
    return request.url.path.endswith("_stream")


def _part(facts: Facts) -> bytes:
    """Return one part of a stream."""
    return json.dumps(facts).encode() + b"\0"


class WorkerAnswer(AnswerForm):
    """The answer of a worker; each part of its stream repeats the text so far."""

    MEDIA = "application/octet-stream"

    def facts(self) -> Facts:
        [said] = self.said
        logprobs = completion_logprobs(said.tokens) if said.choice.wants_logprobs else None
        facts = {"text": said.text, "logprobs": logprobs, "error_code": 0, "finish_reason": said.reason}
        return {**facts, "usage": self.usage} if said.ended else facts

    def added(self, said: ChoiceAnswer, new: Piece) -> bytes:
        return _part(self.facts())

    def ended(self, said: ChoiceAnswer) -> bytes:
        return _part(self.facts())

    def failed(self, refused: Refused) -> bytes:
        return _part(error_of(refused))


class Worker(Service):
    """The endpoints of a worker, and its reports to the controller."""

    POSTS = {"/worker_generate_stream": "generate", "/worker_generate": "generate", "/worker_get_status": "state",
             "/count_token": "count", "/worker_get_conv_template": "conversation", "/model_details": "details"}
    ERRORS = {Refused: _refuse}
    config: WorkerConfig
    _heartbeat: asyncio.Task[None]  # the only reference to this task

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Facts:
        """The name of the model, and the number of answers under way or waiting."""
        return {"model_names": [self.model], "speed": 1, "queue_length": len(self.engine.jobs)}

    async def state(self) -> Response:
        return as_json(self.status)

    async def details(self) -> Response:
        return as_json({"context_length": self.config.run.max_length})

    async def conversation(self) -> Response:
        """Return the template in which FastChat wraps messages."""
        return as_json({"conv": asdict(conversation_of(self.config.run.template))})

    # --- answers ------------------------------------------------------------------------------------------------------

    async def count(self, request: Request) -> Response:
        ids = await self.ids(await self._body_of(request))
        return as_json({"count": len(ids), "error_code": 0})

    async def generate(self, request: Request) -> Response:
        """Return an answer, as a stream or whole."""
        return await self.answer(request, await self._body_of(request), WorkerAnswer)

    async def _body_of(self, request: Request) -> Completion:
        body: Completion = await self.read(request, Completion, _as_completion)
        if len(body.prompts) * body.n > 1:
            raise Refused("a worker answers one prompt at a time: send one", "prompt")
        body.stream = _is_stream(request)
        return body

    # --- the controller -----------------------------------------------------------------------------------------------

    def begun(self, url: str) -> None:
        """Begin to report this worker, at this address, to the controller."""
        address = self.config.worker or url
        print(f"flowspec: a worker of {self.config.controller} at {address}", flush=True)
        self._heartbeat = asyncio.get_running_loop().create_task(self.beat(address))

    async def beat(self, address: str, interval: float = WORKER_HEART_BEAT_INTERVAL, retry: float = RETRY) -> None:
        """Report this worker to the controller every `interval` seconds, as long as the pipeline is ready.

        Register again if the controller has forgotten it; if the controller does not answer, retry after `retry`.
        """
        known, lost = False, False
        async with httpx.AsyncClient(base_url=self.config.controller, timeout=PATIENCE) as client:
            while True:
                if self.engine.health.status != "ready":
                    await asyncio.sleep(min(LOOK, retry))
                    continue
                try:
                    known, lost = await self._announce(client, address, known), False
                except (httpx.HTTPError, ValueError) as error:
                    if not lost:
                        print(f"flowspec: the controller at {self.config.controller} does not answer "
                              f"({type(error).__name__}); trying again", file=sys.stderr, flush=True)
                    known, lost = False, True
                    await asyncio.sleep(retry)
                if known:
                    await asyncio.sleep(interval)

    async def _announce(self, client: httpx.AsyncClient, address: str, known: bool) -> bool:
        """Register, or send a heartbeat if the worker is `known`; return whether the controller has it then."""
        if not known:
            facts = {"worker_name": address, "check_heart_beat": True, "worker_status": self.status,
                    "multimodal": False}
            (await client.post("/register_worker", json=facts)).raise_for_status()
            return True
        beat = {"worker_name": address, "queue_length": self.status["queue_length"]}
        answer = (await client.post("/receive_heart_beat", json=beat)).raise_for_status().json()
        if not fits(answer, HEARD):
            raise ValueError("the controller's response to a heartbeat is invalid")
        return bool(answer["exist"])


def _as_completion(given: Facts) -> Facts:
    given = {**FIELDS, **given, "flowspec_tree": False}
    given["max_tokens"] = given.pop("max_new_tokens")
    return given


def build(argv: Sequence[str]) -> tuple[Engine, Listener]:
    """Return the engine and the listener for these arguments; neither runs yet."""
    return running.build(argv, COMMAND, WorkerConfig, Worker)


def serve(argv: Sequence[str]) -> int:
    """Serve until the end; return the exit code."""
    return running.run(*build(argv))


if __name__ == "__main__":
    sys.exit(console.run(serve, sys.argv[1:]))
