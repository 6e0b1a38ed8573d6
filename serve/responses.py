"""OpenAI's newer protocol, `/v1/responses`: bodies as chats, and answers as output items; nothing is stored."""
from __future__ import annotations

from functools import cached_property
from itertools import count
from typing import Any, Iterator

from serve.answering import AnswerForm, ChoiceAnswer, ContentBlock, typed
from serve.protocol import Facts, Refused
from serve.text_chunks import Piece
from serve.translation import Wording, call, checked_items

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "stop", "top_k")
WORDING = Wording(
    fields={"max_output_tokens": "max_tokens", **{name: name for name in SAME}},
    system="instructions", form="text", part="part", texts=("input_text", "output_text", "text"),
    roles=("user", "assistant", "system", "developer"), tools=("function",), schema="parameters")
CUT = {"reason": "max_output_tokens"}
STORED = ("previous_response_id", "conversation", "background", "prompt")


def as_chat(given: Facts) -> Facts:
    """Return the equivalent body of /v1/chat/completions."""
    for name in STORED:
        if given.get(name):
            raise Refused(f"{name} is not supported, since nothing is stored here: send the whole conversation as "
                          "input", name, "unsupported_parameter")
    if "input" not in given:
        raise Refused("input is missing: send a text or a list of items", "input")
    body = WORDING.chat(given)
    said = given["input"]
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    for number, item in enumerate(checked_items(said, "input")):
        _add(body["messages"], item, f"input.{number}")
    choice: Any = given.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    body["tool_choice"] = choice
    return body


def _add(messages: list[Facts], item: Facts, place: str) -> None:
    """Add an item of the input to the messages of a chat; tool calls join the assistant's last message."""
    kind = item.get("type", "message")
    if kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append(call(item, item.get("arguments", "{}"), item.get("call_id")))
    elif kind == "function_call_output":
        content = WORDING.text(item.get("output") or "", f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "message":
        content = WORDING.text(item.get("content") or "", f"{place}.content")
        messages.append({"role": WORDING.role(item, place), "content": content})
    elif kind != "reasoning":
        raise Refused(f"{place}.type is not supported: send messages, function calls and their outputs", place,
                      "unsupported_parameter")


class ResponseAnswer(AnswerForm):
    """The answer of /v1/responses, with numbered events."""

    @cached_property
    def _numbers(self) -> Iterator[int]:
        return count()

    def facts(self) -> Facts:
        [said] = self.said
        outcome = _status(said)
        status = outcome if said.ended else "in_progress"
        return {"id": f"resp_{self.id}", "object": "response", "created_at": self.made, "model": self.model,
                "status": status, "error": None, "instructions": None, "metadata": {}, "tools": [],
                "incomplete_details": CUT if outcome == "incomplete" else None, "tool_choice": "auto",
                "parallel_tool_calls": True, "temperature": None, "top_p": None,
                "output": [_item(block, outcome if block is said.block else "completed") for block in said.blocks],
                "usage": self._usage() if said.ended else None}

    def _usage(self) -> Facts:
        usage = self.usage
        return {"input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"]}

    def begun(self) -> bytes:
        facts = self.facts()
        return self._event("created", response=facts) + self._event("in_progress", response=facts)

    def opened(self, said: ChoiceAnswer) -> bytes:
        item = _item(said.block, "in_progress")
        if said.block.name:
            return self._event("output_item.added", output_index=said.place, item=item)
        item["content"] = []
        begun = self._event("output_item.added", output_index=said.place, item=item)
        return begun + self._of_block("content_part.added", said, content_index=0, part=_part(""))

    def added(self, said: ChoiceAnswer, new: Piece) -> bytes:
        if said.block.name:
            return self._of_block("function_call_arguments.delta", said, delta=new.text)
        return self._of_block("output_text.delta", said, content_index=0, delta=new.text, logprobs=[])

    def closed(self, said: ChoiceAnswer) -> bytes:
        block = said.block
        if block.name:
            done = self._of_block("function_call_arguments.done", said, name=block.name, arguments=block.text)
        else:
            done = self._of_block("output_text.done", said, content_index=0, text=block.text, logprobs=[])
            done += self._of_block("content_part.done", said, content_index=0, part=_part(block.text))
        return done + self._event("output_item.done", output_index=said.place, item=_item(block, _status(said)))

    def ended(self, said: ChoiceAnswer) -> bytes:
        facts = self.facts()
        return self._event(facts["status"], response=facts)

    def failed(self, refused: Refused) -> bytes:
        number = next(self._numbers)
        return typed("error", sequence_number=number, code=refused.code, message=refused.message, param=refused.param)

    def _event(self, kind: str, /, **facts: Any) -> bytes:
        return typed(f"response.{kind}", sequence_number=next(self._numbers), **facts)

    def _of_block(self, kind: str, said: ChoiceAnswer, /, **facts: Any) -> bytes:
        """Return an event of the last block of a choice."""
        return self._event(kind, item_id=_id(said.block), output_index=said.place, **facts)


def _id(block: ContentBlock) -> str:
    return f"{'fc' if block.name else 'msg'}_{block.id}"


def _status(said: ChoiceAnswer) -> str:
    """Return the status of the answer, which is also that of its last item."""
    return "incomplete" if said.reason == "length" else "completed"


def _part(text: str) -> Facts:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: ContentBlock, status: str) -> Facts:
    """Return an item of the output."""
    if block.name:
        return {"type": "function_call", "id": _id(block), "call_id": block.call, "name": block.name,
                "arguments": block.text, "status": status}
    return {"type": "message", "id": _id(block), "role": "assistant", "status": status,
            "content": [_part(block.text)]}
