"""OpenAI's newer protocol, `/v1/responses`: bodies as chats, and answers as output items; nothing is stored."""
from __future__ import annotations

from functools import cached_property
from itertools import count
from typing import Any, Iterator

from serve.answering import AnswerForm, ChoiceAnswer, ContentBlock, typed_event
from serve.protocol import JsonObject, Refused
from serve.text_chunks import Piece
from serve.translation import Wording, checked_items, object_of, tool_call

WORDING = Wording(
    fields={"max_output_tokens": "max_tokens", "stop": "stop", "parallel_tool_calls": "parallel_tool_calls"},
    system_field="instructions", format_field="text", part_word="part",
    text_types=("input_text", "output_text", "text", "reasoning_text"),
    roles=("user", "assistant", "system", "developer"),
    tool_types=("function",), schema_field="parameters")
CUT_OFF = {"reason": "max_output_tokens"}
STORED_FIELDS = ("previous_response_id", "conversation", "background", "prompt")


def as_chat(response_body: JsonObject) -> JsonObject:
    """Return the equivalent body of /v1/chat/completions."""
    for name in STORED_FIELDS:
        if response_body.get(name):
            raise Refused(f"{name} is not supported, since nothing is stored here: send the whole conversation as "
                          "input", name, "unsupported_parameter")
    if response_body.get("top_logprobs"):
        raise Refused("top_logprobs is not supported here: leave it out, or request a chat", "top_logprobs",
                      "unsupported_parameter")
    if "input" not in response_body:
        raise Refused("input is missing: send a text or a list of items", "input")

    chat_body = WORDING.chat(response_body)
    input_items = response_body["input"]
    if isinstance(input_items, str):
        input_items = [{"role": "user", "content": input_items}]
    for number, item in enumerate(checked_items(input_items, "input")):
        _add_item(chat_body["messages"], item, f"input.{number}")

    tool_choice: Any = response_body.get("tool_choice") or "auto"
    if isinstance(tool_choice, dict):
        if tool_choice.get("type", "function") != "function":
            raise Refused("tool_choice.type is not function, and other tools are left out: send auto, or a function",
                          "tool_choice", "unsupported_parameter")

        tool_choice = {"type": "function", "function": {"name": tool_choice.get("name")}}
    chat_body["tool_choice"] = tool_choice
    chat_body["reasoning_effort"] = object_of(response_body, "reasoning").get("effort")
    return chat_body


def _add_item(messages: list[JsonObject], item: JsonObject, field: str) -> None:
    """Add an item of the input to the messages of a chat.

    Calls join the assistant's last message, and its text joins the thoughts before it.
    """
    kind = item.get("type", "message")
    last_message = messages[-1] if messages else {"role": ""}
    if kind == "function_call":
        if last_message["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        tool_calls = messages[-1].setdefault("tool_calls", [])
        tool_calls.append(tool_call(item.get("name"), item.get("arguments", "{}"), item.get("call_id")))

    elif kind == "function_call_output":
        content = WORDING.text(item.get("output") or "", f"{field}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})

    elif kind == "message":
        role, content = WORDING.role(item, field), WORDING.text(item.get("content") or "", f"{field}.content")
        if role == "assistant" and last_message.keys() == {"role", "content", "reasoning_content"}:
            last_message["content"] += content
        else:
            messages.append({"role": role, "content": content})

    elif kind == "reasoning":
        parts = [part for part in checked_items(item.get("content") or [], f"{field}.content") if "text" in part]
        if parts:
            thoughts = WORDING.text(parts, f"{field}.content")
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})

    else:
        raise Refused(f"{field}.type is not supported: send messages, function calls and their outputs", field,
                      "unsupported_parameter")


class ResponseAnswer(AnswerForm):
    """The answer of /v1/responses, with numbered events."""

    @cached_property
    def _event_numbers(self) -> Iterator[int]:
        return count()

    def body_facts(self) -> JsonObject:
        [answer] = self.choice_answers
        final_status = _final_status(answer)

        output_items = []
        for block in answer.blocks:
            output_items.append(_output_item(block, final_status if block is answer.last_block else "completed"))

        return {"id": f"resp_{self.id}", "object": "response", "created_at": self.created_at, "model": self.model,
                "status": final_status if answer.end else "in_progress",
                "error": None, "instructions": None, "metadata": {}, "tools": [],
                "incomplete_details": CUT_OFF if final_status == "incomplete" else None, "tool_choice": "auto",
                "parallel_tool_calls": True, "temperature": None, "top_p": None,
                "output": output_items,
                "usage": self._usage() if answer.end else None}

    def _usage(self) -> JsonObject:
        usage = self.usage
        return {"input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"]}

    def stream_start(self) -> bytes:
        response = self.body_facts()
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def block_start(self, answer: ChoiceAnswer) -> bytes:
        item = _output_item(answer.last_block, "in_progress")
        if answer.last_block.tool_name:
            return self._event("output_item.added", output_index=answer.block_index, item=item)

        item["content"] = []
        item_event = self._event("output_item.added", output_index=answer.block_index, item=item)
        empty_part = _text_part(ContentBlock(is_thoughts=answer.last_block.is_thoughts))
        return item_event + self._block_event("content_part.added", answer, content_index=0, part=empty_part)

    def block_delta(self, answer: ChoiceAnswer, piece: Piece) -> bytes:
        if answer.last_block.tool_name:
            return self._block_event("function_call_arguments.delta", answer, delta=piece.text)
        if answer.last_block.is_thoughts:
            return self._block_event("reasoning_text.delta", answer, content_index=0, delta=piece.text)
        return self._block_event("output_text.delta", answer, content_index=0, delta=piece.text, logprobs=[])

    def block_stop(self, answer: ChoiceAnswer) -> bytes:
        block = answer.last_block
        if block.tool_name:
            events = self._block_event(
                "function_call_arguments.done", answer, name=block.tool_name, arguments=block.text)
        else:
            text_part = _text_part(block)
            logprobs: JsonObject = {} if block.is_thoughts else {"logprobs": []}
            events = self._block_event(
                f"{text_part['type']}.done", answer, content_index=0, text=block.text, **logprobs)
            events += self._block_event("content_part.done", answer, content_index=0, part=text_part)

        item = _output_item(block, _final_status(answer))
        return events + self._event("output_item.done", output_index=answer.block_index, item=item)

    def choice_end(self, answer: ChoiceAnswer) -> bytes:
        response = self.body_facts()
        return self._event(response["status"], response=response)

    def stream_error(self, refused: Refused) -> bytes:
        return typed_event("error", sequence_number=next(self._event_numbers), code=refused.code,
                           message=refused.message, param=refused.param)

    def _event(self, kind: str, /, **facts: Any) -> bytes:
        return typed_event(f"response.{kind}", sequence_number=next(self._event_numbers), **facts)

    def _block_event(self, kind: str, answer: ChoiceAnswer, /, **facts: Any) -> bytes:
        """Return an event of the last block of a choice."""
        return self._event(kind, item_id=_item_id(answer.last_block), output_index=answer.block_index, **facts)


def _item_id(block: ContentBlock) -> str:
    return f"{'fc' if block.tool_name else 'rs' if block.is_thoughts else 'msg'}_{block.id}"


def _final_status(answer: ChoiceAnswer) -> str:
    """Return the status of the answer once it has ended, which is also that of its last item."""
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _text_part(block: ContentBlock) -> JsonObject:
    if block.is_thoughts:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _output_item(block: ContentBlock, status: str) -> JsonObject:
    """Return an item of the output."""
    if block.tool_name:
        call_status = "incomplete" if block.is_cut_off and status == "completed" else status
        return {"type": "function_call", "id": _item_id(block), "call_id": block.call_id, "name": block.tool_name,
                "arguments": block.text, "status": call_status}
    if block.is_thoughts:
        return {"type": "reasoning", "id": _item_id(block), "summary": [], "status": status,
                "content": [_text_part(block)]}
    return {"type": "message", "id": _item_id(block), "role": "assistant", "status": status,
            "content": [_text_part(block)]}
