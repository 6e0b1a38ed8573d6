"""Answers of protocols whose answers are blocks, texts and calls of tools, one after the other: whole or as events."""
from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Collection, Dict, Iterable, Iterator, Sequence, Tuple

from serve.answering import Asking, Facts, call_id
from serve.engine import Ended, Event
from serve.protocol import Refused
from serve.text_chunks import Piece
from serve.tools import CallReader, Dialect, Part

Named = Tuple[str, Dict[str, Any]]  # the name of an event, and its facts


@dataclass
class Block:
    """A text, or the arguments of a call that has a `name`."""

    name: str = ""
    text: str = ""
    call: str = field(default_factory=call_id)
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class Blocks:
    """One answer as its protocol writes it; the methods without an underscore say what each event is."""

    def __init__(self, asking: Asking, model: str) -> None:
        self.asking, self.model = asking, model
        self.id = secrets.token_hex(12)
        self.blocks: list[Block] = []
        self.ended: Ended | None = None

    @property
    def calls(self) -> int:
        return sum(bool(block.name) for block in self.blocks)

    @property
    def usage(self) -> tuple[int, int]:
        """The tokens of prompt and answer."""
        usage = self.asking.usage
        return usage["prompt_tokens"], usage["completion_tokens"]

    def whole(self) -> Facts:
        """The answer, as far as it is made."""
        raise NotImplementedError

    def begun(self) -> Iterable[Named]:
        """The events before the first block."""
        raise NotImplementedError

    def opened(self, number: int, block: Block) -> Iterable[Named]:
        raise NotImplementedError

    def added(self, number: int, block: Block, text: str) -> Iterable[Named]:
        raise NotImplementedError

    def closed(self, number: int, block: Block) -> Iterable[Named]:
        raise NotImplementedError

    def over(self) -> Iterable[Named]:
        """The events behind the last block."""
        raise NotImplementedError

    def error(self, refused: Refused) -> Named:
        raise NotImplementedError

    def part(self, part: Part) -> Iterator[Named]:
        """The events of one part."""
        name, text = ("", part) if isinstance(part, str) else (part.name, part.arguments)
        begins = bool(name) or not self.blocks or (isinstance(part, str) and bool(self.blocks[-1].name))
        if begins:
            yield from self.close()
            self.blocks.append(Block(name))
            yield from self.opened(len(self.blocks) - 1, self.blocks[-1])
        if text:
            self.blocks[-1].text += text
            yield from self.added(len(self.blocks) - 1, self.blocks[-1], text)

    def close(self) -> Iterator[Named]:
        """The events that close the last block, if there is one."""
        if self.blocks:
            yield from self.closed(len(self.blocks) - 1, self.blocks[-1])

    def end(self, ended: Ended) -> Iterator[Named]:
        yield from self.close()
        self.ended = ended
        yield from self.over()


async def parts_of(asking: Asking, dialect: Dialect | None, first: tuple[int, Event]) -> AsyncIterator[Part | Ended]:
    """The parts of the only answer of an asking, and its end; `first` is the news that came before."""
    reader = CallReader(dialect) if dialect else None
    _, event = first
    while not isinstance(event, Ended):
        if isinstance(event, Piece):
            for part in reader.read(event.text) if reader else [event.text]:
                if part:
                    yield part
        _, event = await asking.next()
    for part in reader.finish() if reader else ():
        yield part
    yield event


async def whole(blocks: Blocks, dialect: Dialect | None) -> Facts:
    """The answer that is not streamed."""
    first = await blocks.asking.next()
    async for part in parts_of(blocks.asking, dialect, first):
        for _ in blocks.end(part) if isinstance(part, Ended) else blocks.part(part):
            pass
    return blocks.whole()


async def events(blocks: Blocks, dialect: Dialect | None, first: tuple[int, Event]) -> AsyncIterator[bytes]:
    """The answer as server-sent events; an error in its midst is the last of them."""
    try:
        for event in blocks.begun():
            yield _written(event)
        async for part in parts_of(blocks.asking, dialect, first):
            for event in blocks.end(part) if isinstance(part, Ended) else blocks.part(part):
                yield _written(event)
    except Refused as refused:
        yield _written(blocks.error(refused))


def _written(event: Named) -> bytes:
    name, facts = event
    data = json.dumps({"type": name, **facts})
    return f"event: {name}\ndata: {data}\n\n".encode()


# --- bodies -----------------------------------------------------------------------------------------------------------

def items(given: Any, field: str) -> list[dict[str, Any]]:
    """A list of objects; raises Refused for anything else."""
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise Refused(f"{field} is no list of objects: send one", field)
    return given


def object_of(given: dict[str, Any], field: str) -> dict[str, Any]:
    """The object in a field, empty where there is none; raises Refused for anything else."""
    found = given.get(field) or {}
    if not isinstance(found, dict):
        raise Refused(f"{field} is no object: send one, or leave it out", field)
    return found


def format_of(given: dict[str, Any], field: str) -> dict[str, Any]:
    """The `response_format` of a chat for the `format` in an object of the body, if there is one."""
    form = object_of(object_of(given, field), "format")
    if not form:
        return {}
    asked: dict[str, Any] = {"type": form.get("type")}
    if asked["type"] == "json_schema":
        asked["json_schema"] = moved(form, {"name": "name", "schema": "schema"})
    return {"response_format": asked}


def role_of(said: dict[str, Any], place: str, roles: Collection[str]) -> str:
    """Who says a message of a body; raises Refused for nobody of these."""
    role = said.get("role")
    if not isinstance(role, str) or role not in roles:
        raise Refused(f"{place}.role is none of {', '.join(roles)}: send one of them", f"{place}.role")
    return role


def text_of(content: Any, place: str, kinds: Collection[str], what: str) -> str:
    """The words of a text, or of parts of these kinds, of which the protocol calls each a `what`; raises Refused."""
    if isinstance(content, str):
        return content
    parts = items(content, place)
    texts: list[Any] = [part.get("text") for part in parts if part.get("type") in kinds]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise Refused(f"{place} has a {what} that is no text, which is not supported: send text only", place,
                      "unsupported_parameter")
    return "".join(texts)


def moved(given: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The fields that are there, under the names that a chat has for them."""
    return {ours: given[theirs] for theirs, ours in names.items() if theirs in given}


def function(tool: dict[str, Any], place: str, kinds: Sequence[Any], schema: str) -> dict[str, Any]:
    """A tool as a chat has it; `schema` is the field of its arguments. Raises Refused for one of other `kinds`."""
    if tool.get("type") not in kinds:
        raise Refused(f"{place}.type is not {kinds[0]}, and other tools are not supported: leave it out", place,
                      "unsupported_parameter")
    inner = moved(tool, {"name": "name", "description": "description", schema: "parameters"})
    return {"type": "function", "function": {key: value for key, value in inner.items() if value is not None}}


def call(name: Any, arguments: str, number: Any) -> dict[str, Any]:
    """A call as a chat has it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
