"""Calls of tools in texts, however these come in pieces, and the grammars that hold them."""
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.tools import HERMES, LLAMA, CallPart, CallReader, dialect_of

WEATHER = '{"name": "weather", "arguments": {"city": "Pa}r\\"is{", "days": [1, {"a": "b"}]}}'
LLAMAS = WEATHER.replace("arguments", "parameters")
ARGUMENTS = '{"city": "Pa}r\\"is{", "days": [1, {"a": "b"}]}'
CALL = ("weather", ARGUMENTS)
ESCAPED = '{"name": "\\q", "arguments": {}}'  # no JSON
CASES = [
    (HERMES, "It rains < <tool never.", "It rains < <tool never.", []),
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", "", [CALL]),
    (HERMES, f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{WEATHER}</tool_call>", "Let me see.\n",
     [CALL, CALL]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"a": "</tool_call>{"}, "name": "add"}</tool_call>', "",
     [("add", '{"a": "</tool_call>{"}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, f"<think>I write <tool_call> first.</think><tool_call>{WEATHER}</tool_call>",
     "<think>I write <tool_call> first.</think>", [CALL]),
    (HERMES, f"<tool_call> <tool_call>\n{WEATHER}\n</tool_call>", "<tool_call> ", [CALL]),
    (HERMES, "<tool_call>no JSON</tool_call> then", "<tool_call>no JSON</tool_call> then", []),
    (HERMES, "<tool_call>\n{\"name", "<tool_call>\n{\"name", []),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "x', "", [("add", '{"a": "x')]),
    (HERMES, f"<tool_call>{WEATHER}</tool_call>\n done ", "\n done ", [CALL]), (LLAMA, "{", "{", []),
    (HERMES, f"<tool_call>{ESCAPED}</tool_call>", f"<tool_call>{ESCAPED}</tool_call>", []),
    (LLAMA, LLAMAS, "", [CALL]), (LLAMA, f" {LLAMAS}; {LLAMAS}", "", [CALL, CALL]),
    (LLAMA, 'See {"name": 1}', 'See {"name": 1}', []), (LLAMA, '{"answer": "}"} yes', '{"answer": "}"} yes', [])]


def joined(parts):
    """The text of an answer, and its calls as names and arguments."""
    calls = []
    for part in parts:
        if isinstance(part, CallPart):
            calls += [("", "")] * bool(part.name)
            calls[-1] = tuple(a + b for a, b in zip(calls[-1], part))
    return "".join(part for part in parts if isinstance(part, str)), calls


def parts(dialect, pieces):
    reader = CallReader(dialect)
    found = [part for piece in pieces for part in reader.read(piece)]
    return [*found, *reader.finish()]


@settings(max_examples=150)
@given(st.sampled_from(CASES), st.data())
def test_a_text_has_its_calls_however_it_is_cut(case, data):
    dialect, text, said, calls = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)),
                                    max_size=6)))
    pieces = [text[a:b]
              for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert joined(parts(dialect, pieces)) == (said, calls)
    assert joined(parts(dialect, text)) == (said, calls)


def test_arguments_come_as_they_are_made():
    reader = CallReader(HERMES)
    assert reader.read('<tool_call>{"name": "add", "arguments": {"a": 1') == [("add", ""), ("", '{"a": 1')]
    assert reader.read('0, "b": "') == [("", '0, "b": "')]
    assert reader.read('x"}') == [("", 'x"}')]
    assert reader.read("}</tool_call>") == [] and reader.finish() == []


def test_what_is_nested_without_end_is_no_call():
    deep = "<tool_call>" + '{"name": ' + "[" * 100_000 + "</tool_call>"
    assert parts(HERMES, [deep]) == [deep]


def test_a_template_shows_its_form_of_calls():
    assert dialect_of("{% if tools %}<tool_call>{% endif %}") == HERMES
    assert dialect_of("{% if custom_tools %}<|python_tag|>") == LLAMA and dialect_of("{{ messages }}") is None


@pytest.mark.parametrize("dialect", [HERMES, LLAMA])
def test_every_text_of_the_grammar_of_calls_is_read_as_calls(dialect):
    pytest.importorskip("llguidance", reason="grammars need llguidance (serve/requirements.txt)")
    from serve.tools import calls_of
    from tests.grammars import BYTES, bytes_of

    leaf = {"type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}}, "required": ["left"],
            "additionalProperties": False, "$defs": {"leaf": {"type": "integer"}}}
    grammar = BYTES.of(calls_of({"add": leaf, 'odd"name': {}}, dialect, several=True))
    body = {"name": "add", dialect.arguments_key: {"left": 5}}
    other = {"name": 'odd"name', dialect.arguments_key: {}}
    calls = [f"<tool_call>\n{json.dumps(one)}\n</tool_call>" if dialect == HERMES else json.dumps(one)
             for one in (body, other)]
    text = dialect.between.join(calls)
    assert joined(parts(dialect, text)) == ("", [("add", '{"left": 5}'), ('odd"name', "{}")])
    matcher = grammar.matcher.deep_copy()
    assert matcher.consume_tokens(bytes_of(text)) and matcher.is_accepting()
