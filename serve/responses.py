"""OpenAI's newer protocol, `/v1/responses`: a body as a chat, and an answer as output items; nothing is stored."""
from __future__ import annotations

import time
from itertools import count
from typing import Any, Iterable

from serve.answering import Asking, Facts
from serve.blocks import Block, Blocks, Named, call, format_of, function, items, moved, role_of, text_of
from serve.protocol import Refused

FIELDS = {"model": "model", "max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p",
          "stream": "stream", "parallel_tool_calls": "parallel_tool_calls", "seed": "seed", "stop": "stop",
          "top_k": "top_k"}
TEXTS = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
STORED = ("previous_response_id", "conversation", "background", "prompt")


def as_chat(given: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat that asks the same."""
    for name in STORED:
        if given.get(name):
            raise Refused(f"{name} is not supported, since nothing is stored here: send the whole conversation as "
                          "input", name, "unsupported_parameter")
    if "input" not in given:
        raise Refused("input is missing: send a text or a list of items", "input")
    body = {**moved(given, FIELDS), **format_of(given, "text")}
    said, instructions = given["input"], _text(given.get("instructions") or "", "instructions")
    body["messages"] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    for number, item in enumerate(items(said, "input")):
        _add(body["messages"], item, f"input.{number}")
    if given.get("tools"):
        body["tools"] = [function(tool, f"tools.{number}", ("function",), "parameters")
                         for number, tool in enumerate(items(given["tools"], "tools"))]
    choice: Any = given.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    body["tool_choice"] = choice
    return body


def _add(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    """Add an item of the input to the messages of a chat; a turn's calls belong to its text."""
    kind = item.get("type", "message")
    if kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append(call(item.get("name"), item.get("arguments", "{}"), item.get("call_id")))
    elif kind == "function_call_output":
        content = _text(item.get("output") or "", f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "message":
        role = role_of(item, place, ROLES)
        messages.append({"role": role, "content": _text(item.get("content") or "", f"{place}.content")})
    elif kind != "reasoning":
        raise Refused(f"{place}.type is not supported: send messages, calls of functions and their outputs", place,
                      "unsupported_parameter")


def _text(content: Any, place: str) -> str:
    return text_of(content, place, TEXTS, "part")


class Response(Blocks):
    """An answer of this form; its events are numbered."""

    def __init__(self, asking: Asking, model: str) -> None:
        super().__init__(asking, model)
        self._made, self._numbers = int(time.time()), count()

    def whole(self) -> Facts:
        prompt, made = self.usage
        cut = self.ended is not None and self.ended.finish_reason == "length"
        status = "in_progress" if self.ended is None else "incomplete" if cut else "completed"
        usage = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": self._cached},
                 "output_tokens": made, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + made}
        return {"id": f"resp_{self.id}", "object": "response", "created_at": self._made, "model": self.model,
                "status": status, "error": None, "instructions": None, "metadata": {}, "tools": [],
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "tool_choice": "auto",
                "parallel_tool_calls": True, "temperature": None, "top_p": None,
                "output": [_item(block, "completed") for block in self.blocks],
                "usage": usage if self.ended else None}

    @property
    def _cached(self) -> int:
        return int(self.asking.usage["prompt_tokens_details"]["cached_tokens"])

    def _event(self, kind: str, /, **facts: Any) -> Named:
        return f"response.{kind}", {"sequence_number": next(self._numbers), **facts}

    def begun(self) -> Iterable[Named]:
        return [self._event(name, response=self.whole()) for name in ("created", "in_progress")]

    def opened(self, number: int, block: Block) -> Iterable[Named]:
        yield self._event("output_item.added", output_index=number, item=_item(block, "in_progress", empty=True))
        if not block.name:
            yield self._event("content_part.added", **_place(number, block), content_index=0, part=_part(""))

    def added(self, number: int, block: Block, text: str) -> Iterable[Named]:
        if block.name:
            return [self._event("function_call_arguments.delta", **_place(number, block), delta=text)]
        return [self._event("output_text.delta", **_place(number, block), content_index=0, delta=text, logprobs=[])]

    def closed(self, number: int, block: Block) -> Iterable[Named]:
        place = _place(number, block)
        if block.name:
            yield self._event("function_call_arguments.done", **place, name=block.name, arguments=block.text)
        else:
            yield self._event("output_text.done", **place, content_index=0, text=block.text, logprobs=[])
            yield self._event("content_part.done", **place, content_index=0, part=_part(block.text))
        yield self._event("output_item.done", output_index=number, item=_item(block, "completed"))

    def over(self) -> Iterable[Named]:
        facts = self.whole()
        return [self._event(facts["status"], response=facts)]

    def error(self, refused: Refused) -> Named:
        number = next(self._numbers)
        return "error", {"sequence_number": number, "code": refused.code, "message": refused.message,
                         "param": refused.param}


def _place(number: int, block: Block) -> Facts:
    return {"item_id": _id(block), "output_index": number}


def _id(block: Block) -> str:
    return f"{'fc' if block.name else 'msg'}_{block.id}"


def _part(text: str) -> Facts:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str, empty: bool = False) -> Facts:
    """An item of the output; an `empty` one has no part yet."""
    if block.name:
        return {"type": "function_call", "id": _id(block), "call_id": block.call, "name": block.name,
                "arguments": block.text, "status": status}
    content = [] if empty else [_part(block.text)]
    return {"type": "message", "id": _id(block), "role": "assistant", "status": status, "content": content}
