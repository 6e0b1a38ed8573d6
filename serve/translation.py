"""Translation of bodies of other protocols into equivalent bodies of /v1/chat/completions."""
from __future__ import annotations

from typing import Any, Collection, Mapping, NamedTuple, Sequence

from config.run_config import SAMPLING
from serve.protocol import JsonObject, Refused

SHARED_FIELDS = ("model", "stream", "seed", "ignore_eos", "logit_bias", *SAMPLING)  # under one name in all protocols


class Wording(NamedTuple):
    """A protocol's names for the parts of a chat."""

    fields: Mapping[str, str]  # names of further plain fields -> a chat's names
    system_field: str  # of the system prompt
    format_field: str  # of the object with the format of the answer
    part_word: str  # the protocol's word for a part of a content ...
    text_types: Collection[str]  # ... and the types of parts that are texts
    roles: Collection[str]
    tool_types: Sequence[str | None]  # the types of tools that are functions; others are run by the provider
    schema_field: str  # of the schema of their arguments

    def chat(self, body: JsonObject) -> JsonObject:
        """Return the body of a chat, without the messages after the system prompt and without `tool_choice`."""
        chat_body = renamed(body, {**{name: name for name in SHARED_FIELDS}, **self.fields})
        system_text = self.text(body.get(self.system_field) or "", self.system_field)
        chat_body["messages"] = [{"role": "system", "content": system_text}] if system_text else []

        # format of the answer
        answer_format = object_of(object_of(body, self.format_field), "format")
        if answer_format:
            chat_body["response_format"] = {"type": answer_format.get("type")}
        if answer_format.get("type") == "json_schema":
            chat_body["response_format"]["json_schema"] = answer_format

        # tools
        chat_body.update(tools=[], provider_tools=[])
        chat_names = {"name": "name", "description": "description", self.schema_field: "parameters"}
        for number, tool in enumerate(checked_items(body.get("tools") or [], "tools")):
            if tool.get("type") in self.tool_types:
                chat_body["tools"].append({"type": "function", "function": renamed(tool, chat_names)})
            elif isinstance(tool.get("type"), str) and tool["type"] != "function":
                chat_body["provider_tools"].append(tool["type"])
            else:
                field = f"tools.{number}.type"
                raise Refused(f"{field} is missing or invalid: send {self.tool_types[0]}", field)
        return chat_body

    def text(self, content: Any, field: str) -> str:
        """Return the text of a string or of a list of text parts; raise Refused for anything else."""
        if isinstance(content, str):
            return content

        parts = checked_items([content] if isinstance(content, dict) else content, field)
        for part in parts:
            if part.get("type") not in self.text_types or not isinstance(part.get("text"), str):
                raise Refused(f"{field} has a {self.part_word} that is no text, which is not supported: send text only",
                              field, "unsupported_parameter")
        return "".join(part["text"] for part in parts)

    def role(self, message: JsonObject, field: str) -> str:
        """Return the role of a message; raise Refused for a role that the protocol does not have."""
        role = message.get("role")
        if not isinstance(role, str) or role not in self.roles:
            raise Refused(f"{field}.role is none of {', '.join(self.roles)}: send one of them", f"{field}.role")
        return role


def checked_items(value: Any, field: str) -> list[JsonObject]:
    """Return a list of objects unchanged; raise Refused for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(f"{field} is no list of objects: send one", field)
    return value


def object_of(body: JsonObject, field: str) -> JsonObject:
    """Return the object in a field, empty if missing; raise Refused for anything else."""
    value = body.get(field) or {}
    if not isinstance(value, dict):
        raise Refused(f"{field} is no object: send one, or leave it out", field)
    return value


def renamed(facts: JsonObject, new_names: Mapping[str, str]) -> JsonObject:
    """Return the existing fields under other names: `new_names` maps old names to new ones."""
    return {new_name: facts[old_name] for old_name, new_name in new_names.items() if old_name in facts}


def tool_call(name: Any, arguments: Any, call_id: Any) -> JsonObject:
    """Return a call of a function in the format of a chat."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
