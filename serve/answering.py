"""One HTTP request while it is answered: its jobs, the events they report, and the body or stream made of these.

Each protocol has its own subclass of `AnswerForm`: see `completions`, `responses` and `anthropic`.
"""
from __future__ import annotations

import asyncio
import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, AsyncIterator, Iterator, Sequence

from model.markup import AnswerPart, CallPart, CallReader, Thought
from serve.engine import AnswerJob, Ended, Engine, Event
from serve.protocol import Body, Choice, JsonObject, Refused
from serve.text_chunks import Echo, Piece, Token


@dataclass
class ContentBlock:
    """A text or thoughts with their tokens if requested, or the arguments of a tool call, which has a `tool_name`."""

    tool_name: str = ""
    is_thoughts: bool = False
    texts: list[str] = field(default_factory=list)  # the pieces of its text
    tokens: list[Token] = field(default_factory=list)
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def call_id(self) -> str:
        """The id of a tool call, which its result repeats: nine letters and digits, as Mistral's templates demand."""
        return self.id[:9]

    @property
    def is_cut_off(self) -> bool:
        """Whether this is a tool call whose arguments do not end."""
        try:
            return bool(self.tool_name) and not isinstance(json.loads(self.text), dict)
        except (ValueError, RecursionError):
            return True


class ChoiceAnswer:
    """One choice of an answer, as far as it is generated: thoughts, texts and tool calls, in order."""

    def __init__(self, number: int, job: AnswerJob) -> None:
        self.number, self.choice, self._job = number, job.choice, job
        self.blocks: list[ContentBlock] = []
        self.num_calls = 0  # blocks that are tool calls
        self.end: Ended | None = None
        self._unsent_tokens: list[Token] = []  # of texts that are not read yet

    @cached_property
    def _reader(self) -> CallReader | None:
        """The reader of the answer, created once its job has begun."""
        dialect = self.choice.dialect
        return CallReader(dialect, self.choice.tools, self._job.in_thoughts) if dialect else None

    @property
    def last_block(self) -> ContentBlock:
        return self.blocks[-1]

    @property
    def block_index(self) -> int:
        """The index of the last block."""
        return len(self.blocks) - 1

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if not block.tool_name and not block.is_thoughts)

    @property
    def thoughts(self) -> str:
        return "".join(block.text for block in self.blocks if block.is_thoughts)

    @property
    def tokens(self) -> list[Token]:
        return [token for block in self.blocks for token in block.tokens]

    @property
    def call_blocks(self) -> list[ContentBlock]:
        """The blocks that are tool calls."""
        return [block for block in self.blocks if block.tool_name]

    @property
    def finish_reason(self) -> str | None:
        """Why the choice has ended, in OpenAI's terms: stop, length or tool_calls; None as long as it is generated.

        A call that a stop text cuts off is none to make.
        """
        if self.end is None:
            return None
        reason = self.end.finish_reason
        return "tool_calls" if reason == "stop" and self.num_calls and not self.last_block.is_cut_off else reason

    def parts(self, event: Piece | Ended) -> Sequence[AnswerPart]:
        """Return what an event adds: pieces of text and of thoughts, and parts of tool calls."""
        if isinstance(event, Piece):
            self._unsent_tokens += event.tokens
        if self._reader:
            return self._reader.read(event.text) if isinstance(event, Piece) else self._reader.finish()
        return [event.text] if isinstance(event, Piece) else []

    def piece_of(self, answer_part: AnswerPart) -> Piece:
        """Return a part of the answer as text, with the tokens up to it."""
        if isinstance(answer_part, CallPart):
            return Piece(answer_part.arguments)
        tokens, self._unsent_tokens = self._unsent_tokens, []
        return Piece(answer_part.text if isinstance(answer_part, Thought) else answer_part, tokens)


class AnswerForm:
    """An answer in the form of its protocol, as one body or as a stream; nothing is computed for it once it is closed.

    A subclass returns the whole body in `body_facts`. Its methods that return bytes produce the stream: at the start,
    when the last block of a choice begins, grows and ends, at the end of a choice, and at the end of the stream.
    """

    def __init__(self, engine: Engine, body: Body, choices: Sequence[Choice], model: str) -> None:
        sends_snapshots = body.stream and body.flowspec_tree
        self.jobs = [AnswerJob(choice, sends_snapshots=sends_snapshots) for choice in choices]
        self.choice_answers = [ChoiceAnswer(number, job) for number, job in enumerate(self.jobs)]
        self.model, self.body = model, body
        self.id, self.created_at = secrets.token_hex(12), int(time.time())

        self._engine, self._event_loop = engine, asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        for number, job in enumerate(self.jobs):
            job.report = partial(self._queue, number)
        engine.submit(self.jobs)

    # --- the form -----------------------------------------------------------------------------------------------------

    def body_facts(self) -> JsonObject:
        """Return the body of the answer, as far as it is generated."""
        raise NotImplementedError

    def stream_start(self) -> bytes:
        return b""

    def block_start(self, answer: ChoiceAnswer) -> bytes:
        return b""

    def block_delta(self, answer: ChoiceAnswer, piece: Piece) -> bytes:
        raise NotImplementedError

    def block_stop(self, answer: ChoiceAnswer) -> bytes:
        return b""

    def choice_end(self, answer: ChoiceAnswer) -> bytes:
        raise NotImplementedError

    def stream_end(self) -> bytes:
        return b""

    def stream_error(self, refused: Refused) -> bytes:
        """Return the event of an error, with which a stream ends."""
        raise NotImplementedError

    # --- events of the engine -----------------------------------------------------------------------------------------

    def _queue(self, number: int, event: Event) -> None:
        """Called on the pipeline's thread."""
        with suppress(RuntimeError):  # the event loop is closed, so nobody reads
            self._event_loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

    async def next(self) -> tuple[int, Event]:
        """Return the number of a choice and its next event; raise Refused if the answer has failed."""
        number, event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Echo):  # spelling a long prompt must delay no other answer
            event = await asyncio.to_thread(event.piece)
        return number, event

    def close(self) -> None:
        """Give up what is not answered yet."""
        self._engine.cancel(self.jobs)

    @property
    def usage(self) -> JsonObject:
        """The token counts of all choices; a prompt that several choices share counts once."""
        ends = [answer.end for answer in self.choice_answers if answer.end]
        num_prompt_tokens = sum(map(len, {tuple(job.prompt_ids) for job in self.jobs}))
        num_completion_tokens = sum(end.num_tokens for end in ends)

        guess_counts = {"accepted_prediction_tokens": sum(end.num_accepted for end in ends),
                        "rejected_prediction_tokens": sum(end.num_rejected for end in ends)}
        cache_counts = {"cached_tokens": max((end.num_cached for end in ends), default=0)}
        return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_completion_tokens,
                "total_tokens": num_prompt_tokens + num_completion_tokens,
                "prompt_tokens_details": cache_counts, "completion_tokens_details": guess_counts}

    @property
    def _is_running(self) -> bool:
        return not all(answer.end for answer in self.choice_answers)

    async def whole_body(self) -> JsonObject:
        """Return the body once all choices have ended; raise Refused if the answer has failed."""
        while self._is_running:
            self._event_bytes(*await self.next())
        return self.body_facts()

    async def stream(self, first_event: tuple[int, Event]) -> AsyncIterator[bytes]:
        """Yield the stream; `first_event`, with the number of its choice, arrived before the stream began."""
        try:
            yield self.stream_start()
            yield self._event_bytes(*first_event)
            while self._is_running:
                yield self._event_bytes(*await self.next())
            yield self.stream_end()
        except Refused as refused:
            yield self.stream_error(refused)

    def _event_bytes(self, number: int, event: Event) -> bytes:
        """Add an event to its choice, and return the bytes that a stream sends for it."""
        if isinstance(event, dict):  # a snapshot of the guesses
            return event_bytes({"index": number, **event}, "tree")
        return b"".join(self._added(self.choice_answers[number], event))

    def _added(self, answer: ChoiceAnswer, event: Piece | Ended) -> Iterator[bytes]:
        """Add an event to a choice, and yield the bytes of each change of its blocks."""
        blocks = answer.blocks
        for part in answer.parts(event):
            tool_name = part.name if isinstance(part, CallPart) else ""
            is_thoughts = isinstance(part, Thought)

            # a block begins with each call, with thoughts, and with the text after these
            last_block = blocks[-1] if blocks else None
            continues_call = isinstance(part, CallPart) and not tool_name
            continues_text = last_block and not last_block.tool_name and last_block.is_thoughts == is_thoughts
            if tool_name or not (continues_call or continues_text):
                if last_block:
                    yield self.block_stop(answer)
                blocks.append(ContentBlock(tool_name, is_thoughts))
                answer.num_calls += bool(tool_name)
                yield self.block_start(answer)

            piece = answer.piece_of(part)
            if piece.text:
                answer.last_block.texts.append(piece.text)
                answer.last_block.tokens += piece.tokens
                yield self.block_delta(answer, piece)

        if isinstance(event, Ended):
            answer.end = event
            if blocks:
                yield self.block_stop(answer)
            yield self.choice_end(answer)


def event_bytes(facts: JsonObject, name: str = "") -> bytes:
    """Return a server-sent event, with an optional name."""
    name_line = f"event: {name}\n" if name else ""
    return f"{name_line}data: {json.dumps(facts)}\n\n".encode()


def typed_event(kind: str, /, **facts: Any) -> bytes:
    """Return a server-sent event with a name, which its data repeats as `type`."""
    return event_bytes({"type": kind, **facts}, kind)
