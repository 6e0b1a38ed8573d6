"""Anthropic's protocol, `/v1/messages`: bodies as chats, and answers as content blocks, whole or streamed."""
from __future__ import annotations

import json
from typing import Any

from serve.answering import AnswerForm, ChoiceAnswer, ContentBlock, event_bytes, typed_event
from serve.protocol import JsonObject, Refused
from serve.text_chunks import Piece
from serve.translation import Wording, checked_items, object_of, tool_call

PATH = "/v1/messages"
WORDING = Wording(
    fields={"stop_sequences": "stop", "max_tokens": "max_tokens"},
    system_field="system", format_field="output_config", part_word="block", text_types=("text",),
    roles=("user", "assistant", "system"), tool_types=("custom", None), schema_field="input_schema")
TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
IGNORED_BLOCKS = ("redacted_thinking",)
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_KINDS = {  # of errors, by HTTP status
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error"}


def as_chat(message_body: JsonObject) -> JsonObject:
    """Return the equivalent body of /v1/chat/completions."""
    if "max_tokens" not in message_body:
        raise Refused("max_tokens is missing: give the largest number of tokens of the answer", "max_tokens")

    chat_body = WORDING.chat(message_body)
    for number, message in enumerate(checked_items(message_body.get("messages"), "messages")):
        chat_body["messages"] += _chat_messages(message, f"messages.{number}")

    tool_choice = object_of(message_body, "tool_choice")
    if tool_choice:
        chat_body["tool_choice"] = _chat_tool_choice(tool_choice)
        chat_body["parallel_tool_calls"] = not tool_choice.get("disable_parallel_tool_use", False)
    return chat_body


def _chat_tool_choice(tool_choice: JsonObject) -> Any:
    """Return the chat's `tool_choice` for a message's."""
    kind, name = tool_choice.get("type"), tool_choice.get("name")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    if kind not in [*TOOL_CHOICES]:
        raise Refused(f"tool_choice.type is invalid: send {', '.join(TOOL_CHOICES)}, or tool with a name",
                      "tool_choice")
    return TOOL_CHOICES[kind]


def _chat_messages(message: JsonObject, field: str) -> list[JsonObject]:
    """Return the chat messages for one message: first the tool results, then its text and tool calls."""
    chat_message: JsonObject = {"role": WORDING.role(message, field), "tool_calls": [], "reasoning_content": ""}
    tool_results: list[JsonObject] = []
    texts: list[str] = []
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]

    for number, block in enumerate(checked_items(content, f"{field}.content")):
        kind, block_field = block.get("type"), f"{field}.content.{number}"
        if kind == "tool_result":
            result_text = WORDING.text(block.get("content") or "", f"{block_field}.content")
            tool_results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result_text})
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input", {}))
            chat_message["tool_calls"].append(tool_call(block.get("name"), arguments, block.get("id")))
        elif kind == "thinking":
            thoughts = WORDING.text([{"type": "text", "text": block.get("thinking")}], block_field)
            chat_message["reasoning_content"] += thoughts
        elif kind not in IGNORED_BLOCKS:
            texts.append(WORDING.text([block], block_field))

    chat_message["content"] = "".join(texts)
    only_results = tool_results and not chat_message["content"] and not chat_message["tool_calls"]
    return tool_results if only_results else [*tool_results, chat_message]


def error_of(refused: Refused) -> JsonObject:
    """Return an error in Anthropic's format."""
    kind = "api_error" if refused.status >= 500 else ERROR_KINDS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


class MessageAnswer(AnswerForm):
    """The answer of /v1/messages."""

    def body_facts(self) -> JsonObject:
        [answer] = self.choice_answers
        usage = self.usage
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model,
                "content": [_content(block) for block in answer.blocks], **_stop_facts(answer),
                "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}}

    def stream_start(self) -> bytes:
        return typed_event("message_start", message=self.body_facts())

    def block_start(self, answer: ChoiceAnswer) -> bytes:
        return typed_event("content_block_start", index=answer.block_index, content_block=_content(answer.last_block))

    def block_delta(self, answer: ChoiceAnswer, piece: Piece) -> bytes:
        delta = {"type": "text_delta", "text": piece.text}
        if answer.last_block.is_thoughts:
            delta = {"type": "thinking_delta", "thinking": piece.text}
        if answer.last_block.tool_name:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        return typed_event("content_block_delta", index=answer.block_index, delta=delta)

    def block_stop(self, answer: ChoiceAnswer) -> bytes:
        return typed_event("content_block_stop", index=answer.block_index)

    def choice_end(self, answer: ChoiceAnswer) -> bytes:
        usage = {"output_tokens": self.usage["completion_tokens"]}
        return typed_event("message_delta", delta=_stop_facts(answer), usage=usage) + typed_event("message_stop")

    def stream_error(self, refused: Refused) -> bytes:
        return event_bytes(error_of(refused), "error")


def _stop_facts(answer: ChoiceAnswer) -> JsonObject:
    """Return the stop reason of a choice, None as long as it is generated."""
    if answer.end and answer.end.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.end.stop_text}
    stop_reason = answer.finish_reason and STOP_REASONS[answer.finish_reason]
    return {"stop_reason": stop_reason, "stop_sequence": None}


def _content(block: ContentBlock) -> JsonObject:
    """Return a content block, as far as it is generated."""
    if block.is_thoughts:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if not block.tool_name:
        return {"type": "text", "text": block.text}
    try:
        tool_input = json.loads(block.text or "{}")
    except (ValueError, RecursionError):  # the answer was cut off here, or is nested too deeply
        tool_input = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.tool_name, "input": tool_input}
