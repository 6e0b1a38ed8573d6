"""Tools: the grammars of calls that an answer must make, in the format of a model's family."""
from __future__ import annotations

import json
from typing import Any, Dict, Mapping, Sequence

from model.grammar import FORM, Guide
from model.markup import CallFormat

JsonMessage = Dict[str, Any]
MAX_CALLS = 8  # largest number in one answer, if a grammar forces calls
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
NAME = "NAME"  # in the text of a call


def calls_of(functions: Mapping[str, Mapping[str, Any]], call_format: CallFormat, several: bool) -> Guide | None:
    """Return the grammar of an answer that calls one or several of these functions (name -> schema of arguments).

    It is None if no grammar writes this format. Each schema is a grammar of its own, so that references in it start at
    its own root.
    """
    call_text = call_format.text
    if call_text is None:
        return None

    # rules
    between = call_text.between if several else None
    more_calls = "" if between is None else f" ({_quoted(between)} call){{0,{MAX_CALLS - 1}}}"
    call_rule = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules = [f"start: {_quoted(call_text.before)} call{more_calls} {_quoted(call_text.after)}", f"call: {call_rule}"]

    for number, (name, schema) in enumerate(functions.items()):
        shown_name = json.dumps(name)[1:-1] if f'"{NAME}"' in call_text.call else name
        head = _quoted(call_text.call.replace(NAME, shown_name))
        rules += [f"call_{number}: {head} arguments_{number} {_quoted(call_text.call_end)}",
                  f"arguments_{number}: %json {json.dumps(_argument_schema(schema))}"]
    return Guide("lark", "\n".join(rules))


def with_system_tools(messages: Sequence[JsonMessage], tools: Sequence[JsonMessage]) -> list[JsonMessage]:
    """Return a chat's messages with the tools in the system message, where the template of Phi-4-mini reads them."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    system_message = messages[0] if has_system else {"role": "system", "content": ""}
    functions = [tool["function"] for tool in tools]
    return [{**system_message, "tools": json.dumps(functions)}, *messages[has_system:]]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _argument_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments: only those that it names, unless its schema allows others."""
    argument_schema = {**(schema or NO_ARGUMENTS), "x-guidance": FORM}
    if "properties" in argument_schema:
        argument_schema.setdefault("additionalProperties", False)
    return argument_schema
