"""Anthropic's protocol, `/v1/messages`: a body as a chat, and an answer as content blocks, whole or streamed."""
from __future__ import annotations

import json
from typing import Any, Iterable

from serve.answering import Facts
from serve.blocks import Block, Blocks, Named, call, format_of, function, items, moved, object_of, role_of, text_of
from serve.protocol import Refused

PATH = "/v1/messages"
FIELDS = {"model": "model", "max_tokens": "max_tokens", "stop_sequences": "stop", "temperature": "temperature",
          "top_p": "top_p", "top_k": "top_k", "stream": "stream", "seed": "seed"}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
ROLES = ("user", "assistant", "system")
IGNORED = ("thinking", "redacted_thinking")
REASONS = {"stop": "end_turn", "length": "max_tokens"}


def as_chat_to_count(given: dict[str, Any]) -> dict[str, Any]:
    """The same for a prompt whose tokens are counted."""
    return as_chat({"max_tokens": 1, **given})


def as_chat(given: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat that asks the same."""
    if "max_tokens" not in given:
        raise Refused("max_tokens is missing: say how many tokens the answer may have", "max_tokens")
    body = {**moved(given, FIELDS), **format_of(given, "output_config")}
    system = _text(given.get("system") or "", "system")
    messages = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(items(given.get("messages"), "messages")):
        messages += _messages(message, f"messages.{number}")
    body["messages"] = messages
    if given.get("tools"):
        body["tools"] = [function(tool, f"tools.{number}", ("custom", None), "input_schema")
                         for number, tool in enumerate(items(given["tools"], "tools"))]
    choice = object_of(given, "tool_choice")
    if choice:
        body["tool_choice"] = _choice(choice)
        body["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    return body


def _choice(choice: dict[str, Any]) -> Any:
    """Which tools are called, as a chat says it."""
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    if kind not in [*CHOICES]:
        raise Refused(f"tool_choice.type is none of {', '.join(CHOICES)}, nor tool with a name: send one of them",
                      "tool_choice")
    return CHOICES[kind]


def _messages(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The messages of a chat that one message is: results of tools first, then what was said."""
    role, content = role_of(message, place, ROLES), message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    found, texts, calls = [], [], []
    for number, block in enumerate(items(content, f"{place}.content")):
        inside = f"{place}.content.{number}"
        if block.get("type") == "tool_result":
            result = _text(block.get("content") or "", f"{inside}.content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif block.get("type") == "tool_use":
            arguments = json.dumps(block.get("input", {}))
            calls.append(call(block.get("name"), arguments, block.get("id")))
        elif block.get("type") not in IGNORED:
            texts.append(_text([block], inside))
    said: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        said["tool_calls"] = calls
    return [*found, said] if texts or calls or not found else found


def _text(content: Any, place: str) -> str:
    return text_of(content, place, ("text",), "block")


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
                "content": [_content(block) for block in self.blocks], "stop_reason": self._reason,
                "stop_sequence": None, "usage": {"input_tokens": prompt, "output_tokens": made}}

    @property
    def _reason(self) -> str | None:
        if self.ended is None:
            return None
        return "tool_use" if self.calls and self.ended.finish_reason == "stop" else REASONS[self.ended.finish_reason]

    def begun(self) -> Iterable[Named]:
        return [("message_start", {"message": self.whole()})]

    def opened(self, number: int, block: Block) -> Iterable[Named]:
        return [("content_block_start", {"index": number, "content_block": _content(block)})]

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


def _content(block: Block) -> Facts:
    """A content block, as far as it is made."""
    if not block.name:
        return {"type": "text", "text": block.text}
    try:
        given = json.loads(block.text or "{}")
    except ValueError:  # the answer ended in its midst
        given = {}
    return {"type": "tool_use", "id": block.call, "name": block.name, "input": given}
