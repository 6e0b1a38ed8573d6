"""Anthropic's protocol, `/v1/messages`: a body as a chat, and an answer as content blocks, whole or streamed."""
from __future__ import annotations

import json
from typing import Any, Iterable

from serve.answering import Facts
from serve.blocks import Block, Blocks, Named, call, function, items, moved
from serve.protocol import Refused

FIELDS = {"model": "model", "max_tokens": "max_tokens", "stop_sequences": "stop", "temperature": "temperature",
          "top_p": "top_p", "top_k": "top_k", "stream": "stream", "seed": "seed"}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
IGNORED = ("thinking", "redacted_thinking")
REASONS = {"stop": "end_turn", "length": "max_tokens"}


def as_chat(given: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat that asks the same."""
    if "max_tokens" not in given:
        raise Refused("max_tokens is missing: say how many tokens the answer may have", "max_tokens")
    body = moved(given, FIELDS)
    system = _text(given.get("system", ""), "system")
    messages = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(items(given.get("messages"), "messages")):
        messages += _messages(message, f"messages.{number}")
    body["messages"] = messages
    if given.get("tools"):
        body["tools"] = [function(tool, "input_schema") for tool in items(given["tools"], "tools")]
    choice = given.get("tool_choice")
    if isinstance(choice, dict):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        body["tool_choice"] = CHOICES.get(str(choice.get("type")), named)
        body["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    return body


def _messages(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The messages of a chat that one message is: results of tools first, then what was said."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    found, texts, calls = [], [], []
    for number, block in enumerate(items(content, f"{place}.content")):
        inside = f"{place}.content.{number}"
        if block.get("type") == "tool_result":
            result = _text(block.get("content", ""), f"{inside}.content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif block.get("type") == "tool_use":
            calls.append(call(block.get("name"), json.dumps(block.get("input", {})), block.get("id")))
        elif block.get("type") not in IGNORED:
            texts.append(_text([block], inside))
    said: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        said["tool_calls"] = calls
    return [*found, said] if texts or calls or not found else found


def _text(content: Any, place: str) -> str:
    """The words of a text or of text blocks."""
    if isinstance(content, str):
        return content
    blocks = items(content, place)
    if any(block.get("type") != "text" or not isinstance(block.get("text"), str) for block in blocks):
        raise Refused(f"{place} has a block that is no text, which is not supported: send text only", place,
                      "unsupported_parameter")
    return "".join(block["text"] for block in blocks)


def error_of(refused: Refused) -> Facts:
    """An error as Anthropic sends it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = "api_error" if refused.status >= 500 else kinds.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


class Message(Blocks):
    """An answer of Anthropic's form."""

    def whole(self) -> Facts:
        prompt, made = self.usage
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model,
                "content": [_content(block, block.text) for block in self.blocks], "stop_reason": self._reason,
                "stop_sequence": None, "usage": {"input_tokens": prompt, "output_tokens": made}}

    @property
    def _reason(self) -> str | None:
        if self.ended is None:
            return None
        return "tool_use" if self.calls and self.ended.finish_reason == "stop" else REASONS[self.ended.finish_reason]

    def begun(self) -> Iterable[Named]:
        return [("message_start", {"message": self.whole()})]

    def opened(self, number: int, block: Block) -> Iterable[Named]:
        return [("content_block_start", {"index": number, "content_block": _content(block, "")})]

    def added(self, number: int, block: Block, text: str) -> Iterable[Named]:
        delta = {"type": "text_delta", "text": text}
        if block.name:
            delta = {"type": "input_json_delta", "partial_json": text}
        return [("content_block_delta", {"index": number, "delta": delta})]

    def closed(self, number: int, block: Block) -> Iterable[Named]:
        return [("content_block_stop", {"index": number})]

    def over(self) -> Iterable[Named]:
        delta = {"stop_reason": self._reason, "stop_sequence": None}
        return [("message_delta", {"delta": delta, "usage": {"output_tokens": self.usage[1]}}), ("message_stop", {})]

    def error(self, refused: Refused) -> Named:
        return "error", error_of(refused)


def _content(block: Block, text: str) -> Facts:
    """A content block with this text."""
    if not block.name:
        return {"type": "text", "text": text}
    try:
        given = json.loads(text or "{}")
    except ValueError:  # the answer ended in its midst
        given = {}
    return {"type": "tool_use", "id": block.call, "name": block.name, "input": given}
