"""Translation of bodies of other protocols into equivalent bodies of /v1/chat/completions."""
from __future__ import annotations

from typing import Any, Collection, Mapping, NamedTuple, Sequence

from serve.protocol import Facts, Refused


class Wording(NamedTuple):
    """A protocol's names for the parts of a chat."""

    fields: Mapping[str, str]  # names of plain fields -> a chat's names
    system: str  # the field of the system prompt
    form: str  # the field of the object with the format of the answer
    part: str  # the protocol's word for a part of a content ...
    texts: Collection[str]  # ... and the types of parts that are texts
    roles: Collection[str]
    tools: Sequence[str | None]  # the types of tools that are functions
    schema: str  # the field of the schema of their arguments

    def chat(self, given: Facts) -> Facts:
        """Return the body of a chat, without the messages after the system prompt and without `tool_choice`."""
        body = renamed(given, self.fields)
        system = self.text(given.get(self.system) or "", self.system)
        body["messages"] = [{"role": "system", "content": system}] if system else []
        form = object_of(object_of(given, self.form), "format")
        if form:
            body["response_format"] = {"type": form.get("type")}
        if form.get("type") == "json_schema":
            body["response_format"]["json_schema"] = renamed(form, {"name": "name", "schema": "schema"})
        tools = checked_items(given.get("tools") or [], "tools")
        body["tools"] = [self._function(tool, f"tools.{number}") for number, tool in enumerate(tools)]
        return body

    def text(self, content: Any, place: str) -> str:
        """Return the text of a string or of a list of text parts; raise Refused for anything else."""
        if isinstance(content, str):
            return content
        parts = checked_items([content] if isinstance(content, dict) else content, place)
        if not all(part.get("type") in self.texts and isinstance(part.get("text"), str) for part in parts):
            raise Refused(f"{place} has a {self.part} that is no text, which is not supported: send text only", place,
                          "unsupported_parameter")
        return "".join(part["text"] for part in parts)

    def role(self, message: Facts, place: str) -> str:
        """Return the role of a message; raise Refused for a role that the protocol does not have."""
        role = message.get("role")
        if not isinstance(role, str) or role not in self.roles:
            raise Refused(f"{place}.role is none of {', '.join(self.roles)}: send one of them", f"{place}.role")
        return role

    def _function(self, tool: Facts, place: str) -> Facts:
        if tool.get("type") not in self.tools:
            raise Refused(f"{place}.type is not {self.tools[0]}, and other tools are not supported: leave it out",
                          place, "unsupported_parameter")
        names = {"name": "name", "description": "description", self.schema: "parameters"}
        return {"type": "function", "function": renamed(tool, names)}


def checked_items(given: Any, field: str) -> list[Facts]:
    """Return a list of objects unchanged; raise Refused for anything else."""
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise Refused(f"{field} is no list of objects: send one", field)
    return given


def object_of(given: Facts, field: str) -> Facts:
    """Return the object in a field, empty if missing; raise Refused for anything else."""
    found = given.get(field) or {}
    if not isinstance(found, dict):
        raise Refused(f"{field} is no object: send one, or leave it out", field)
    return found


def renamed(given: Facts, names: Mapping[str, str]) -> Facts:
    """Return the existing fields under other names: `names` maps old names to new ones."""
    return {ours: given[theirs] for theirs, ours in names.items() if theirs in given}


def call(given: Facts, arguments: Any, number: Any) -> Facts:
    """Return a tool call in the format of a chat."""
    return {"id": number, "type": "function", "function": {"name": given.get("name"), "arguments": arguments}}
