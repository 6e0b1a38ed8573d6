"""One request of HTTP while it is answered: its jobs, what they report, and the bodies and chunks made of that.

It knows the shapes of OpenAI's answers, and nothing about sockets.
"""
from __future__ import annotations

import json
import secrets
import time
from typing import Any, AsyncIterator, Callable, Dict, NamedTuple, Sequence

from launch.asynchronous import Reports
from model.text import TokenText
from serve.engine import Ended, Engine, Event, Job
from serve.protocol import Choice, Refused
from serve.text_chunks import Piece, Token
from serve.tools import CallPart, CallReader, Dialect, calls_in

Facts = Dict[str, Any]  # of JSON


class Asking(Reports):
    """The jobs of one request, and what they report: pairs of a choice's number and its event."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], watched: bool = False) -> None:
        super().__init__(engine, [Job(choice, watched=watched) for choice in choices])
        self.open = len(choices)  # choices that have not ended
        self.ended: list[Ended] = []  # of those that have

    async def next(self) -> tuple[int, Event]:
        """The next news; raises Refused if an answer has failed."""
        number, event = await super().next()
        if isinstance(event, Ended):
            self.open -= 1
            self.ended.append(event)
        return number, event

    @property
    def usage(self) -> Facts:
        """The tokens of all choices; a prompt of several choices counts once for each prompt."""
        prompts = {tuple(job.ids) for job in self.jobs}
        prompt = sum(map(len, prompts))
        completion = sum(one.completion for one in self.ended)
        guesses = {"accepted_prediction_tokens": sum(one.accepted for one in self.ended),
                   "rejected_prediction_tokens": sum(one.rejected for one in self.ended)}
        cached = {"cached_tokens": max((one.cached for one in self.ended), default=0)}
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
                "prompt_tokens_details": cached, "completion_tokens_details": guesses}


# --- tokens -----------------------------------------------------------------------------------------------------------

def in_chat(tokens: Sequence[Token]) -> Facts:
    """As a chat's choice or chunk has them."""
    content = [{**_entry(token.spelled, token.logprob),
                "top_logprobs": [_entry(*one) for one in token.likeliest]} for token in tokens]
    return {"content": content, "refusal": None}


def in_completion(tokens: Sequence[Token]) -> Facts:
    """As a completion's choice or chunk has them."""
    return {"tokens": [_name(token.spelled) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": [token.offset for token in tokens]}


def _entry(spelled: TokenText, logprob: float | None) -> Facts:
    data = None if spelled.data is None else list(spelled.data)
    return {"token": spelled.name, "logprob": logprob, "bytes": data}


def _likeliest(token: Token) -> dict[str, float] | None:
    """The likeliest tokens by their names, and the token itself even if it is none of them."""
    if token.logprob is None:
        return None
    others = {_name(other): value for other, value in token.likeliest}
    return {**others, _name(token.spelled): token.logprob}


def _name(spelled: TokenText) -> str:
    return spelled.name if spelled.whole else f"bytes:{spelled.name}"


# --- answers ----------------------------------------------------------------------------------------------------------

class Form(NamedTuple):
    """How one endpoint writes its answers."""

    whole: str  # the kind of a whole answer
    chunk: str  # and of a part
    prefix: str  # of its id
    said: Callable[[str], Facts]  # where a whole choice has its text
    added: Callable[[str], Facts]  # what a chunk adds
    begun: Facts  # what a chunk adds that comes before the text; empty: there is none
    over: Facts  # what the last chunk of a choice adds
    tokens: Callable[[Sequence[Token]], Facts]  # how log-probabilities are sent


COMPLETION = Form(
    "text_completion", "text_completion", "cmpl",
    said=lambda text: {"text": text},
    added=lambda text: {"text": text},
    begun={}, over={"text": ""}, tokens=in_completion)
CHAT = Form(
    "chat.completion", "chat.completion.chunk", "chatcmpl",
    said=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    added=lambda text: {"delta": {"content": text}},
    begun={"delta": {"role": "assistant", "content": ""}},
    over={"delta": {}}, tokens=in_chat)


def _calling(text: str, calls: Sequence[tuple[str, str]]) -> Facts:
    """A choice whose message may call tools."""
    message: Facts = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if calls:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        message["tool_calls"] = [{"id": call_id(), "type": "function", "function": one} for one in functions]
    return {"message": message}


def _added_call(part: CallPart) -> Facts:
    """What a chunk adds to a call of a tool."""
    function = {"name": part.name, "arguments": ""} if part.name else {"arguments": part.arguments}
    begun = {"id": call_id(), "type": "function"} if part.name else {}
    return {"delta": {"tool_calls": [{"index": part.number, **begun, "function": function}]}}


def call_id() -> str:
    """A name for a call of a tool, which its result repeats."""
    return f"call_{secrets.token_hex(12)}"


def reason_of(reason: str, calls: int) -> str:
    """Why an answer with so many calls has ended."""
    return "tool_calls" if calls and reason == "stop" else reason


class Written:
    """An answer in the form of its endpoint, whole or in chunks; `wants_logprobs`: with log-probabilities.

    With a `dialect` calls of tools are no text, but what OpenAI makes of them.
    """

    def __init__(self, form: Form, model: str, wants_logprobs: bool,
                 dialect: Dialect | None = None) -> None:
        self.form, self._wants_logprobs, self._dialect = form, wants_logprobs, dialect
        self._readers: dict[int, CallReader] = {}  # by choice, of a stream
        self._head = {"id": f"{form.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def body(self, pieces: Sequence[Piece], reasons: Sequence[str], usage: Facts) -> Facts:
        """A whole answer."""
        choices = []
        for number, (piece, reason) in enumerate(zip(pieces, reasons)):
            said = self.form.said(piece.text)
            if self._dialect:
                text, calls = calls_in(piece.text, self._dialect)
                said, reason = _calling(text, calls), reason_of(reason, len(calls))
            facts = {"logprobs": self._logprobs(piece.tokens), "finish_reason": reason}
            choices.append({"index": number, **said, **facts})
        return {**self._head, "object": self.form.whole, "choices": choices, "usage": usage}

    def chunks(self, number: int, event: Piece | Ended) -> list[Facts]:
        """The chunks that say what is new of one choice."""
        form = self.form
        if self._dialect is None:
            if isinstance(event, Piece):
                return [self.part(number, form.added(event.text), tokens=event.tokens)]
            return [self.part(number, form.over, event.finish_reason)]
        reader = self._readers.setdefault(number, CallReader(self._dialect))
        parts = reader.read(event.text) if isinstance(event, Piece) else reader.finish()
        added = [form.added(part) if isinstance(part, str) else _added_call(part) for part in parts]
        found = [self.part(number, one) for one in added]
        if isinstance(event, Ended):
            reason = reason_of(event.finish_reason, reader.calls)
            found.append(self.part(number, form.over, reason))
        return found

    def part(self, number: int, added: Facts, reason: str | None = None, tokens: Sequence[Token] = ()) -> Facts:
        """A chunk of one choice."""
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": number, **added, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": self.form.chunk, "choices": [choice]}

    def last(self, usage: Facts) -> Facts:
        """The chunk that has the usage."""
        return {**self._head, "object": self.form.chunk, "choices": [], "usage": usage}

    def _logprobs(self, tokens: Sequence[Token]) -> Facts | None:
        return self.form.tokens(tokens) if self._wants_logprobs else None


async def whole(asking: Asking, written: Written) -> Facts:
    """The body of an answer that is not streamed."""
    pieces = [Piece("", []) for _ in asking.jobs]
    reasons = [""] * len(asking.jobs)
    while asking.open:
        number, event = await asking.next()
        if isinstance(event, Piece):
            pieces[number] = pieces[number].followed(event)
        else:
            reasons[number] = event.finish_reason
    return written.body(pieces, reasons, asking.usage)


async def events(asking: Asking, written: Written, first: tuple[int, Event], with_usage: bool
                 ) -> AsyncIterator[bytes]:
    """An answer as server-sent events; `first` is the news that came before the first byte.

    An error in its midst is the last event. Who reads this closes the asking.
    """
    try:
        begun = written.form.begun
        for number in range(len(asking.jobs) if begun else 0):
            yield event_of(written.part(number, begun), with_usage)
        yield _chunk(written, first, with_usage)
        while asking.open:
            yield _chunk(written, await asking.next(), with_usage)
        if with_usage:
            yield event_of(written.last(asking.usage))
        yield b"data: [DONE]\n\n"
    except Refused as refused:
        yield event_of(refused.body)


def _chunk(written: Written, news: tuple[int, Event], with_usage: bool) -> bytes:
    number, event = news
    if isinstance(event, dict):
        return b"event: tree\n" + event_of({"index": number, **event})
    return b"".join(event_of(chunk, with_usage) for chunk in written.chunks(number, event))


def event_of(facts: Facts, with_usage: bool = False) -> bytes:
    """One server-sent event. Where a stream has its usage at the end, the other chunks have none."""
    data = json.dumps({**facts, "usage": None} if with_usage else facts)
    return f"data: {data}\n\n".encode()
