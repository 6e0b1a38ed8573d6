"""Anthropic's protocol, `/v1/messages`: bodies as chats, and answers as content blocks, whole or streamed."""
from __future__ import annotations

import json
from typing import Any

from serve.answering import AnswerForm, ChoiceAnswer, ContentBlock, event_of, typed
from serve.protocol import Facts, Refused
from serve.text_chunks import Piece
from serve.translation import Wording, call, checked_items, object_of

PATH = "/v1/messages"
SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed")
WORDING = Wording(
    fields={"stop_sequences": "stop", **{name: name for name in SAME}},
    system="system", form="output_config", part="block", texts=("text",),
    roles=("user", "assistant", "system"), tools=("custom", None), schema="input_schema")
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
IGNORED = ("thinking", "redacted_thinking")
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {  # of errors, by HTTP status
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error"}


def as_chat(given: Facts) -> Facts:
    """Return the equivalent body of /v1/chat/completions."""
    if "max_tokens" not in given:
        raise Refused("max_tokens is missing: give the largest number of tokens of the answer", "max_tokens")
    body = WORDING.chat(given)
    for number, message in enumerate(checked_items(given.get("messages"), "messages")):
        body["messages"] += _messages(message, f"messages.{number}")
    choice = object_of(given, "tool_choice")
    if choice:
        body["tool_choice"] = _choice(choice)
        body["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    return body


def _choice(choice: Facts) -> Any:
    """Return the chat's `tool_choice` for a message's."""
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    if kind not in [*CHOICES]:
        raise Refused(f"tool_choice.type is invalid: send {', '.join(CHOICES)}, or tool with a name",
                      "tool_choice")
    return CHOICES[kind]


def _messages(message: Facts, place: str) -> list[Facts]:
    """Return the chat messages for one message: first the tool results, then its text and tool calls."""
    said: Facts = {"role": WORDING.role(message, place), "content": "", "tool_calls": []}
    content, found = message.get("content"), []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for number, block in enumerate(checked_items(content, f"{place}.content")):
        kind, inside = block.get("type"), f"{place}.content.{number}"
        if kind == "tool_result":
            result = WORDING.text(block.get("content") or "", f"{inside}.content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input", {}))
            said["tool_calls"].append(call(block, arguments, block.get("id")))
        elif kind not in IGNORED:
            said["content"] += WORDING.text([block], inside)
    return [*found, said] if said["content"] or said["tool_calls"] or not found else found


def error_of(refused: Refused) -> Facts:
    """Return an error in Anthropic's format."""
    kind = "api_error" if refused.status >= 500 else KINDS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


class MessageAnswer(AnswerForm):
    """The answer of /v1/messages."""

    def facts(self) -> Facts:
        [said] = self.said
        usage = self.usage
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model,
                "content": [_content(block) for block in said.blocks], **_stop(said),
                "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}}

    def begun(self) -> bytes:
        return typed("message_start", message=self.facts())

    def opened(self, said: ChoiceAnswer) -> bytes:
        return typed("content_block_start", index=said.place, content_block=_content(said.block))

    def added(self, said: ChoiceAnswer, new: Piece) -> bytes:
        delta = {"type": "text_delta", "text": new.text}
        if said.block.name:
            delta = {"type": "input_json_delta", "partial_json": new.text}
        return typed("content_block_delta", index=said.place, delta=delta)

    def closed(self, said: ChoiceAnswer) -> bytes:
        return typed("content_block_stop", index=said.place)

    def ended(self, said: ChoiceAnswer) -> bytes:
        used = {"output_tokens": self.usage["completion_tokens"]}
        return typed("message_delta", delta=_stop(said), usage=used) + typed("message_stop")

    def failed(self, refused: Refused) -> bytes:
        return event_of(error_of(refused), "error")


def _stop(said: ChoiceAnswer) -> Facts:
    """Return the stop reason of a choice, None as long as it is under way."""
    if said.ended and said.ended.stopped:
        return {"stop_reason": "stop_sequence", "stop_sequence": said.ended.stopped}
    return {"stop_reason": said.reason and REASONS[said.reason], "stop_sequence": None}


def _content(block: ContentBlock) -> Facts:
    """Return a content block, as far as it is generated."""
    if not block.name:
        return {"type": "text", "text": block.text}
    try:
        given = json.loads(block.text or "{}")
    except (ValueError, RecursionError):  # the answer was cut off here, or is nested too deeply
        given = {}
    return {"type": "tool_use", "id": block.call, "name": block.name, "input": given}
