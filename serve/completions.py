"""OpenAI's chats and completions: answers as choices, whole or in chunks, with log-probabilities."""
from __future__ import annotations

from typing import Sequence

from model.text import TokenText
from serve.answering import AnswerForm, ChoiceAnswer, ContentBlock, event_of
from serve.protocol import Facts, Refused
from serve.text_chunks import Piece, Token


class CompletionAnswer(AnswerForm):
    """The answer of /v1/completions."""

    WHOLE = CHUNK = "text_completion"  # kinds of objects
    ID = "cmpl"

    def facts(self) -> Facts:
        choices = []
        for said in self.said:
            tokens = said.tokens if said.choice.wants_logprobs else None
            choices.append(self._choice(said, self.message(said), tokens))
        return {**self._head(self.WHOLE, choices), "usage": self.usage}

    def added(self, said: ChoiceAnswer, new: Piece) -> bytes:
        return self._chunk(said, self.delta(said, new.text), new.tokens or None)

    def ended(self, said: ChoiceAnswer) -> bytes:
        return self._chunk(said, self.delta(said, ""))

    def over(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if self.body.stream_options.include_usage:
            return event_of({**self._head(self.CHUNK, []), "usage": self.usage}) + done
        return done

    def failed(self, refused: Refused) -> bytes:
        return event_of(refused.body)

    def message(self, said: ChoiceAnswer) -> Facts:
        """Return the field of a whole choice that holds its text."""
        return {"text": said.text}

    def delta(self, said: ChoiceAnswer, text: str) -> Facts:
        """Return the field of a chunk that holds the added text."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[Token]) -> Facts:
        return completion_logprobs(tokens)

    def _choice(self, said: ChoiceAnswer, added: Facts, tokens: Sequence[Token] | None) -> Facts:
        logprobs = None if tokens is None else self.logprobs(tokens)
        return {"index": said.number, **added, "logprobs": logprobs, "finish_reason": said.reason}

    def _chunk(self, said: ChoiceAnswer, added: Facts, tokens: Sequence[Token] | None = None) -> bytes:
        """Return a chunk of one choice. In a stream that ends with its usage, the other chunks have a null there."""
        facts = self._head(self.CHUNK, [self._choice(said, added, tokens)])
        if self.body.stream_options.include_usage:
            facts["usage"] = None
        return event_of(facts)

    def _head(self, kind: str, choices: list[Facts]) -> Facts:
        return {"id": f"{self.ID}-{self.id}", "created": self.made, "model": self.model, "object": kind,
                "choices": choices}


class ChatAnswer(CompletionAnswer):
    """The answer of /v1/chat/completions, which may call tools."""

    WHOLE, CHUNK, ID = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def begun(self) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(said, role) for said in self.said)

    def opened(self, said: ChoiceAnswer) -> bytes:
        if not said.block.name:
            return b""
        return self._chunk(said, _part_of_call(said, _call(said.block, "")))

    def ended(self, said: ChoiceAnswer) -> bytes:
        return self._chunk(said, {"delta": {}})

    def message(self, said: ChoiceAnswer) -> Facts:
        message: Facts = {"role": "assistant", "content": said.text, "refusal": None}
        if said.calls:
            message["content"] = said.text or None
            message["tool_calls"] = [_call(block, block.text) for block in said.calls]
        return {"message": message}

    def delta(self, said: ChoiceAnswer, text: str) -> Facts:
        if said.block.name:
            return _part_of_call(said, {"function": {"arguments": text}})
        return {"delta": {"content": text}}

    def logprobs(self, tokens: Sequence[Token]) -> Facts:
        content = [{**_entry(token.spelled, token.logprob),
                    "top_logprobs": [_entry(*one) for one in token.likeliest]} for token in tokens]
        return {"content": content, "refusal": None}


def _call(block: ContentBlock, arguments: str) -> Facts:
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.call, "type": "function", "function": function}


def _part_of_call(said: ChoiceAnswer, part: Facts) -> Facts:
    """Return what a chunk adds to the last tool call."""
    number = len(said.calls) - 1
    return {"delta": {"tool_calls": [{"index": number, **part}]}}


# --- log-probabilities ------------------------------------------------------------------------------------------------

def completion_logprobs(tokens: Sequence[Token]) -> Facts:
    """Return the log-probabilities of tokens in the format of /v1/completions."""
    return {"tokens": [_name(token.spelled) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": [token.offset for token in tokens]}


def _entry(spelled: TokenText, logprob: float | None) -> Facts:
    data = None if spelled.data is None else list(spelled.data)
    return {"token": spelled.name, "logprob": logprob, "bytes": data}


def _likeliest(token: Token) -> dict[str, float] | None:
    """Return the likeliest tokens by name, and the token itself even if it is not among them."""
    if token.logprob is None:
        return None
    others = {_name(other): value for other, value in token.likeliest}
    return {**others, _name(token.spelled): token.logprob}


def _name(spelled: TokenText) -> str:
    return spelled.name if spelled.whole else f"bytes:{spelled.name}"
