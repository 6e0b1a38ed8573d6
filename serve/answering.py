"""One HTTP request while it is answered: its jobs, the events they report, and the body or stream made of these.

Each protocol has its own subclass of `AnswerForm`: see `completions`, `responses` and `anthropic`.
"""
from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Iterator, Sequence

from launch.asynchronous import Reports
from serve.engine import AnswerJob, Ended, Engine, Event
from serve.protocol import Body, Choice, Facts, Refused
from serve.text_chunks import Piece, Token
from serve.tools import CallPart, CallReader


@dataclass
class ContentBlock:
    """A text with its tokens if they were requested, or the arguments of a tool call, which has a `name`."""

    name: str = ""
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def call(self) -> str:
        """The id of a tool call, which its result repeats."""
        return f"call_{self.id}"


class ChoiceAnswer:
    """One choice of an answer, as far as it is generated: texts and tool calls, in order."""

    def __init__(self, number: int, choice: Choice) -> None:
        self.number, self.choice = number, choice
        self.blocks: list[ContentBlock] = []
        self.ended: Ended | None = None
        self._reader = CallReader(choice.dialect) if choice.dialect else None

    @property
    def block(self) -> ContentBlock:
        """The last block."""
        return self.blocks[-1]

    @property
    def place(self) -> int:
        """The index of the last block."""
        return len(self.blocks) - 1

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if not block.name)

    @property
    def tokens(self) -> list[Token]:
        return [token for block in self.blocks for token in block.tokens]

    @property
    def calls(self) -> list[ContentBlock]:
        return [block for block in self.blocks if block.name]

    @property
    def reason(self) -> str | None:
        """Why the choice has ended, in OpenAI's terms: stop, length or tool_calls; None while it is under way."""
        reason = self.ended and self.ended.finish_reason
        return "tool_calls" if reason == "stop" and self.calls else reason

    def parts(self, event: Piece | Ended) -> Iterator[Piece | CallPart]:
        """Yield what an event adds: pieces of text, or parts of tool calls."""
        if self._reader is None:
            yield from [event] if isinstance(event, Piece) else []
            return
        parts = self._reader.read(event.text) if isinstance(event, Piece) else self._reader.finish()
        for part in parts:
            yield Piece(part) if isinstance(part, str) else part


class AnswerForm(Reports):
    """An answer in the form of its protocol, as one body or as a stream; nothing is computed for it once it is closed.

    A subclass returns the whole body in `facts`. Its methods that return bytes produce the stream: at the start, when
    the last block of a choice is opened, extended and closed, at the end of a choice, and at the end of the stream.
    """

    def __init__(self, engine: Engine, body: Body, choices: Sequence[Choice], model: str) -> None:
        watched = body.stream and body.flowspec_tree
        super().__init__(engine, [AnswerJob(choice, watched=watched) for choice in choices])
        self.said = [ChoiceAnswer(number, choice) for number, choice in enumerate(choices)]
        self.model, self.body = model, body
        self.id, self.made = secrets.token_hex(12), int(time.time())

    # --- the form -----------------------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """Return the body of the answer, as far as it is generated."""
        raise NotImplementedError

    def begun(self) -> bytes:
        return b""

    def opened(self, said: ChoiceAnswer) -> bytes:
        return b""

    def added(self, said: ChoiceAnswer, new: Piece) -> bytes:
        raise NotImplementedError

    def closed(self, said: ChoiceAnswer) -> bytes:
        return b""

    def ended(self, said: ChoiceAnswer) -> bytes:
        raise NotImplementedError

    def over(self) -> bytes:
        return b""

    def failed(self, refused: Refused) -> bytes:
        """Return the event of an error, with which a stream ends."""
        raise NotImplementedError

    # --- what is reported ---------------------------------------------------------------------------------------------

    @property
    def usage(self) -> Facts:
        """The token counts of all choices; a prompt that several choices share counts once."""
        ended = [said.ended for said in self.said if said.ended]
        prompt = sum(map(len, {tuple(job.ids) for job in self.jobs}))
        completion = sum(one.completion for one in ended)
        guesses = {"accepted_prediction_tokens": sum(one.accepted for one in ended),
                   "rejected_prediction_tokens": sum(one.rejected for one in ended)}
        cached = {"cached_tokens": max((one.cached for one in ended), default=0)}
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
                "prompt_tokens_details": cached, "completion_tokens_details": guesses}

    @property
    def _open(self) -> bool:
        return not all(said.ended for said in self.said)

    async def whole(self) -> Facts:
        """Return the body once all choices have ended; raise Refused if the answer has failed."""
        while self._open:
            self._sent(*await self.next())
        return self.facts()

    async def events(self, first: tuple[int, Event]) -> AsyncIterator[bytes]:
        """Yield the stream; `first` is the number and event of a choice that arrived before the stream began."""
        try:
            yield self.begun()
            yield self._sent(*first)
            while self._open:
                yield self._sent(*await self.next())
            yield self.over()
        except Refused as refused:
            yield self.failed(refused)

    def _sent(self, number: int, event: Event) -> bytes:
        """Add an event to its choice, and return the bytes that a stream sends for it."""
        if isinstance(event, dict):  # the guesses under way
            return event_of({"index": number, **event}, "tree")
        return b"".join(self._take(self.said[number], event))

    def _take(self, said: ChoiceAnswer, event: Piece | Ended) -> Iterator[bytes]:
        blocks = said.blocks
        for part in said.parts(event):
            name = part.name if isinstance(part, CallPart) else ""
            if name or not blocks or (isinstance(part, Piece) and blocks[-1].name):
                if blocks:
                    yield self.closed(said)
                blocks.append(ContentBlock(name))
                yield self.opened(said)
            new = part if isinstance(part, Piece) else Piece(part.arguments)
            if new.text:
                said.block.text += new.text
                said.block.tokens += new.tokens
                yield self.added(said, new)
        if isinstance(event, Ended):
            said.ended = event
            if blocks:
                yield self.closed(said)
            yield self.ended(said)


def event_of(facts: Facts, name: str = "") -> bytes:
    """Return a server-sent event, with an optional name."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(facts)}\n\n".encode()


def typed(kind: str, /, **facts: Any) -> bytes:
    """Return a server-sent event with a name, which its data repeats as `type`."""
    return event_of({"type": kind, **facts}, kind)
