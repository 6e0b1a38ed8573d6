"""OpenAI's chats and completions: answers as choices, whole or in chunks, with log-probabilities."""
from __future__ import annotations

from typing import Sequence

from model.text import TokenText
from serve.answering import AnswerForm, ChoiceAnswer, event_bytes
from serve.protocol import JsonObject, Refused
from serve.text_chunks import Piece, Token
from serve.translation import tool_call


class CompletionAnswer(AnswerForm):
    """The answer of /v1/completions."""

    WHOLE_KIND = CHUNK_KIND = "text_completion"  # kinds of objects
    ID_PREFIX = "cmpl"

    def body_facts(self) -> JsonObject:
        choices = []
        for answer in self.choice_answers:
            tokens = answer.tokens if answer.choice.wants_logprobs else None
            choices.append(self._choice_facts(answer, self.message(answer), tokens))
        return {**self._head(self.WHOLE_KIND, choices), "usage": self.usage}

    def block_delta(self, answer: ChoiceAnswer, piece: Piece) -> bytes:
        return self._chunk(answer, self.text_delta(answer, piece.text), piece.tokens or None)

    def choice_end(self, answer: ChoiceAnswer) -> bytes:
        return self._chunk(answer, self.text_delta(answer, ""))

    def stream_end(self) -> bytes:
        done_line = b"data: [DONE]\n\n"
        if not self.body.stream_options.include_usage:
            return done_line
        usage_chunk = {**self._head(self.CHUNK_KIND, []), "usage": self.usage}
        return event_bytes(usage_chunk) + done_line

    def stream_error(self, refused: Refused) -> bytes:
        return event_bytes(refused.body)

    def message(self, answer: ChoiceAnswer) -> JsonObject:
        """Return the field of a whole choice that holds its text."""
        return {"text": answer.text}

    def text_delta(self, answer: ChoiceAnswer, text: str) -> JsonObject:
        """Return the field of a chunk that holds the added text."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[Token]) -> JsonObject:
        return {"tokens": [_token_name(token.spelled) for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [_top_logprobs(token) for token in tokens],
                "text_offset": [token.offset for token in tokens]}

    def _choice_facts(self, answer: ChoiceAnswer, text_facts: JsonObject, tokens: Sequence[Token] | None) -> JsonObject:
        logprobs = None if tokens is None else self.logprobs(tokens)
        return {"index": answer.number, **text_facts, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _chunk(self, answer: ChoiceAnswer, text_facts: JsonObject, tokens: Sequence[Token] | None = None) -> bytes:
        """Return a chunk of one choice. In a stream that ends with its usage, the other chunks have a null there."""
        facts = self._head(self.CHUNK_KIND, [self._choice_facts(answer, text_facts, tokens)])
        if self.body.stream_options.include_usage:
            facts["usage"] = None
        return event_bytes(facts)

    def _head(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        return {"id": f"{self.ID_PREFIX}-{self.id}", "created": self.created_at, "model": self.model, "object": kind,
                "choices": choices}


class ChatAnswer(CompletionAnswer):
    """The answer of /v1/chat/completions, which may call tools."""

    WHOLE_KIND, CHUNK_KIND, ID_PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def stream_start(self) -> bytes:
        role_delta = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(answer, role_delta) for answer in self.choice_answers)

    def block_start(self, answer: ChoiceAnswer) -> bytes:
        block = answer.last_block
        if not block.tool_name:
            return b""
        return self._chunk(answer, _call_delta(answer, tool_call(block.tool_name, "", block.call_id)))

    def choice_end(self, answer: ChoiceAnswer) -> bytes:
        return self._chunk(answer, {"delta": {}})

    def message(self, answer: ChoiceAnswer) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.call_blocks:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                tool_call(block.tool_name, block.text, block.call_id) for block in answer.call_blocks]
        if answer.thoughts:
            message["reasoning_content"] = answer.thoughts
        return {"message": message}

    def text_delta(self, answer: ChoiceAnswer, text: str) -> JsonObject:
        if answer.last_block.tool_name:
            return _call_delta(answer, {"function": {"arguments": text}})
        return {"delta": {"reasoning_content" if answer.last_block.is_thoughts else "content": text}}

    def logprobs(self, tokens: Sequence[Token]) -> JsonObject:
        content = []
        for token in tokens:
            likeliest = [_logprob_entry(other, logprob) for other, logprob in token.likeliest]
            content.append({**_logprob_entry(token.spelled, token.logprob), "top_logprobs": likeliest})
        return {"content": content, "refusal": None}


def _call_delta(answer: ChoiceAnswer, part: JsonObject) -> JsonObject:
    """Return what a chunk adds to the last tool call."""
    return {"delta": {"tool_calls": [{"index": answer.num_calls - 1, **part}]}}


# --- log-probabilities ------------------------------------------------------------------------------------------------

def _logprob_entry(spelled: TokenText, logprob: float | None) -> JsonObject:
    byte_values = None if spelled.data is None else list(spelled.data)
    return {"token": spelled.name, "logprob": logprob, "bytes": byte_values}


def _top_logprobs(token: Token) -> dict[str, float] | None:
    """Return the likeliest tokens by name, and the token itself even if it is not among them."""
    if token.logprob is None:
        return None
    by_name = {_token_name(other): logprob for other, logprob in token.likeliest}
    return {**by_name, _token_name(token.spelled): token.logprob}


def _token_name(spelled: TokenText) -> str:
    return spelled.name if spelled.whole else f"bytes:{spelled.name}"
