"""What reads a body takes at most 2.1 times the steps for a body of twice the size, whatever is large in it.

A step is an instruction of Python, a call of C, or a character that a function or a pattern receives.
"""
from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import suppress
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any, Callable

import pytest

import config.files
import config.schema.untrusted
import model.grammar
import model.markup
import model.schema_ranges
import serve.anthropic
import serve.app
import serve.bodies
import serve.fields
import serve.protocol
import serve.responses
import serve.translation
from config.cli import parse
from model.markup import DEEPSEEK, GLM, GLM4, HARMONY, HERMES, LLAMA, MISTRAL, QWEN_CODER, CallReader
from model.schema_ranges import inexact_part
from model.text import AnswerReader, Text
from serve.protocol import Chat, Completion, Refused, ToTokenize, body_of, read_body, small_body
from serve.text_chunks import prompt_ids
from tests.test_serve_formats import PROTOCOLS, LetterEngine
from tests.test_serve_tools import HERMES as HERMES_TEMPLATE

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _parser  # type: ignore[no-redef]

MODULES = [config.files, config.schema.untrusted, model.grammar, model.schema_ranges, serve.anthropic, serve.app,
           serve.bodies, serve.fields, serve.protocol, serve.responses, serve.translation]
PATTERNS = [(module, name, value) for module in MODULES for name, value in vars(module).items()
            if isinstance(value, re.Pattern)]
SIZE, MAX_RATIO = 160, 2.1  # this shows what is quadratic as well as twice the size and 2.2 do, in half the time
OF_BUFFERS = 2 * SIZE, 2.2  # where blanks or a long stop text are held back, which are more than SIZE pieces


class CountedPattern:
    """A compiled pattern that counts the characters of the texts in which it looks."""

    def __init__(self, pattern: re.Pattern[str], add_steps: Callable[[int], None]) -> None:
        self._pattern, self._add_steps = pattern, add_steps

    def __getattr__(self, name: str) -> Any:
        def call(*texts: str, **options: bool) -> Any:
            self._add_steps(len(texts[-1]))
            return getattr(self._pattern, name)(*texts, **options)
        return call


class CountedText(str):
    """A text that counts the characters in which something is looked for, and those that are copied."""

    add_steps: Callable[[int], None] = staticmethod(lambda number: None)

    def find(self, wanted: str, *limits: int) -> int:  # type: ignore[override]
        index = super().find(wanted, *limits)
        self.add_steps((len(self) if index < 0 else index) - sum(limits))
        return index

    def _counted(self, text: str) -> str:
        self.add_steps(len(text))
        return CountedText(text)

    def __getitem__(self, key: Any) -> str:
        return self._counted(super().__getitem__(key))

    def __add__(self, text: str) -> str:
        return self._counted(super().__add__(text))

    def __radd__(self, text: str) -> str:
        return self._counted(text.__add__(self))


def num_steps(function: Callable[[], Any]) -> int:
    """The steps of a function, which may refuse its input."""
    total = 0

    def add_steps(number: int) -> None:
        nonlocal total
        total += number

    def on_instruction(frame: Any, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":
            add_steps(sum(len(value) for value in frame.f_locals.values() if isinstance(value, (str, bytes))))
        add_steps(1)
        return on_instruction

    def on_c_call(frame: Any, event: str, c_function: Any) -> None:
        owner = getattr(c_function, "__self__", None)
        if event == "c_call":
            add_steps(1 + (len(owner) if isinstance(owner, (str, bytes)) else 0))

    def counted_dumps(*arguments: Any, **options: Any) -> str:
        text = plain_dumps(*arguments, **options)
        add_steps(len(text))
        return text

    plain_dumps, previous_trace = json.dumps, sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dumps", counted_dumps)
        patch.setattr(CountedText, "add_steps", staticmethod(add_steps))
        compiled = model.markup.compiled
        patch.setattr(model.markup, "compiled", lambda pattern: CountedPattern(compiled(pattern), add_steps))
        for module, name, pattern in PATTERNS:
            patch.setattr(module, name, CountedPattern(pattern, add_steps))
        sys.setprofile(on_c_call)
        sys.settrace(on_instruction)
        try:
            with suppress(Refused):
                function()
        finally:
            sys.settrace(previous_trace)
            sys.setprofile(None)
    return total


def check_linear(work_on: Callable[[int], Callable[[], Any]], size: int = SIZE, max_ratio: float = MAX_RATIO) -> None:
    """`work_on` returns the work on an input of a size, which takes at most 2.1 times the steps at twice the size."""
    work_on(2)()  # what happens once in a process
    small, large = num_steps(work_on(size)), num_steps(work_on(2 * size))
    assert size < small < large <= max_ratio * small, (small, large)


def test_the_counter_sees_loops_of_python_texts_of_functions_and_texts_in_which_a_pattern_looks():
    def loop(size: int) -> Callable[[], Any]:
        return lambda: [number for number in range(size) for _ in range(size)]

    def decoding(size: int) -> Callable[[], Any]:
        return lambda: [(b"x" * size).decode() for _ in range(size)]

    def looking(size: int) -> Callable[[], Any]:
        return lambda: [config.files.SURROGATE.search("x" * size) for _ in range(size)]

    def writing(size: int) -> Callable[[], Any]:
        return lambda: [json.dumps("x" * size) for _ in range(size)]

    def adding(size: int) -> Callable[[], Any]:
        return lambda: reduce(add, [CountedText("x")] * size)

    for quadratic in (loop, decoding, looking, writing, adding):
        with pytest.raises(AssertionError):
            check_linear(quadratic)


# --- patterns ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pattern", [pattern for _, _, pattern in PATTERNS], ids=[name for _, name, _ in PATTERNS])
def test_a_pattern_that_looks_into_a_body_has_a_bounded_width_so_that_it_never_looks_back_far(pattern):
    _, max_width = _parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE).getwidth()
    assert max_width < 20


# --- bodies -----------------------------------------------------------------------------------------------------------

def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], **fields}


def anthropic(**fields: Any) -> dict[str, Any]:
    return {**chat(), "max_tokens": 1, **fields}


def called(size: int) -> list[Any]:
    return [{"id": "a", "function": {"name": "b", "arguments": json.dumps({"c": [{}] * size})}}] * 2


def deep(size: int, inner: str = "") -> str:
    return "[" * size + inner + "]" * size


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": {"type": "object", **parameters}}}


def named(size: int) -> dict[str, Any]:
    return {f"k{number}": number for number in range(size)}


TEXT = {"type": "text", "text": "x"}
COUNT = serve.app._as_chat_to_count
FORMS: dict[str, tuple[Any, Callable[[int], Any]]] = {  # translation or class, and a body of a size
    # depth
    "deep_field": (Chat, lambda size: '{"messages": [], "x": ' + deep(size) + "}"),
    "deep_content": (Chat, lambda size: '{"messages": [{"role": "user", "content": ' + deep(size) + "}]}"),
    "deep_schema": (Chat, lambda size: chat(guided_json=deep(size))),
    "deep_arguments": (Chat, lambda size: {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "b", "arguments": deep(size)}}]}]}),
    "deep_prompt": (Completion, lambda size: '{"prompt": ' + deep(size) + "}"),
    "many_deep": (Chat, lambda size: chat(x=[json.loads(deep(50))] * (size // 10))),
    # width
    "messages": (Chat, lambda size: {"messages": chat()["messages"] * size}),
    "parts": (Chat, lambda size: {"messages": [{"role": "user", "content": [TEXT] * size}]}),
    "bad_parts": (Chat, lambda size: {"messages": [{"role": "user", "content": [{"type": "image"}] * size}]}),
    "calls": (Chat, lambda size: {"messages": [{"role": "assistant", "tool_calls": called(2) * size}]}),
    "arguments": (Chat, lambda size: {"messages": [{"role": "assistant", "tool_calls": called(size)}]}),
    "tools": (Chat, lambda size: chat(tools=[tool()] * size)),
    "forced_tools": (Chat, lambda size: chat(tools=[
        {"type": "function", "function": {"name": f"t{number}"}} for number in range(size)], tool_choice="required")),
    "stops": (Chat, lambda size: chat(stop=["x"] * size)),
    "choices": (Chat, lambda size: chat(guided_choice=["x"] * size)),
    "prompts": (Completion, lambda size: {"prompt": ["x"] * size}),
    "lists": (Completion, lambda size: {"prompt": [[1]] * size}),
    "to_tokenize": (ToTokenize, lambda size: {"messages": chat()["messages"] * size}),
    "blocks": (serve.anthropic.as_chat, lambda size: anthropic(messages=[{"role": "user", "content": [TEXT] * size}])),
    "results": (serve.anthropic.as_chat, lambda size: anthropic(messages=[
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [TEXT]}] * size}])),
    "uses": (serve.anthropic.as_chat, lambda size: anthropic(messages=[
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}] * size}])),
    "counted": (COUNT, lambda size: {"messages": chat()["messages"] * size, "tools": [{"name": "a"}] * size}),
    "items": (serve.responses.as_chat, lambda size: {"input": chat()["messages"] * size}),
    "item_calls": (serve.responses.as_chat, lambda size: {"input": [
        {"type": "function_call", "name": "a", "call_id": "b"}] * size}),
    "item_outputs": (serve.responses.as_chat, lambda size: {"input": [
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "x"}]}] * size}),
    # long texts
    "content": (Chat, lambda size: {"messages": [{"role": "user", "content": "é\n" * size}]}),
    "escapes": (Chat, lambda size: '{"messages": [{"role": "user", "content": "' + "\\ud83d\\ude00" * size + '"}]}'),
    "half": (Chat, lambda size: '{"messages": [], "user": "' + "x" * size + '\\ud800"}'),
    "stop": (Chat, lambda size: chat(stop=["x" * size] * 4)),
    "pattern": (Chat, lambda size: chat(json_schema={"pattern": "[" * size})),
    "role": (Chat, lambda size: {"messages": [{"role": "x" * size, "content": "x"}]}),
    "token": (Chat, lambda size: chat(logit_bias={"9" * size: 1})),
    "text": (Completion, lambda size: {"prompt": ["x" * size] * 16, "guided_regex": "x" * size}),
    "system": (serve.anthropic.as_chat, lambda size: anthropic(system="x" * size)),
    "instructions": (serve.responses.as_chat, lambda size: {"input": "x" * size, "instructions": "x" * size}),
    # many fields
    "fields": (Chat, lambda size: chat(**named(size))),
    "half_after_fields": (Chat, lambda size: chat(**named(size), user="\ud800")),
    "pairs_after_fields": (Chat, lambda size: chat(**named(size), user="\U0001f600")),
    "null_fields": (Chat, lambda size: chat(**dict.fromkeys(named(size)))),
    "repeated": (Chat, lambda size: "{" + '"x": 1,' * size + '"y": 1}'),
    "biases": (Chat, lambda size: chat(logit_bias={str(number): 1 for number in range(size)})),
    "bad_biases": (Chat, lambda size: chat(logit_bias=dict.fromkeys(named(size), "x"))),
    "variables": (Chat, lambda size: chat(chat_template_kwargs=named(size))),
    "properties": (Chat, lambda size: chat(tool_choice="required", tools=[tool(properties=named(size))])),
    "response_format": (Chat, lambda size: chat(response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": named(size)}}})),
    "arguments_by_name": (Chat, lambda size: {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "b", "arguments": json.dumps(named(size))}}]}]}),
    "block_fields": (serve.anthropic.as_chat, lambda size: anthropic(**named(size))),
    "item_fields": (serve.responses.as_chat, lambda size: {"input": [{"role": "user", "content": "x", **named(size)}]}),
    # numbers
    "ids": (Completion, lambda size: {"prompt": [7] * size}),
    "bad_ids": (Completion, lambda size: {"prompt": [7] * size + ["x"]}),
    "seed": (Chat, lambda size: '{"messages": [], "seed": ' + "9" * size * 20 + "}"),
    "digits": (Chat, lambda size: '{"messages": [], "temperature": 0.' + "9" * size * 20 + "}"),
    "integers": (Chat, lambda size: '{"messages": [], "x": [' + ", ".join(["9" * 4000] * (size // 40)) + "]}"),
    "literals": (Chat, lambda size: chat(tools=[tool(enum=[1.5] * size)], tool_choice="required"))}


@pytest.fixture(scope="module")
def run_config(tmp_path_factory):
    template_path = tmp_path_factory.mktemp("hermes") / "tools.jinja"
    template_path.write_text(HERMES_TEMPLATE)
    return parse(["toy", f"template={template_path}"])


def reading(target: Any, content: Any) -> tuple[bytes, Any, Any]:
    """The arguments with which a server reads a body."""
    data = (content if isinstance(content, str) else json.dumps(content)).encode()
    return (data, target, dict) if isinstance(target, type) else (data, Chat, target)


@pytest.mark.parametrize("name", FORMS)
def test_a_body_of_twice_the_size_takes_twice_the_steps_of_an_endpoint(run_config, name):
    target, body_of_size = FORMS[name]

    def read(data: bytes, body_class: Any, translate: Any) -> None:
        with suppress(Refused):
            read_body(data, body_class, translate).choices(run_config)
        with suppress(Refused):
            body_of(small_body(run_config, data, body_class, translate), body_class)

    def work_on(size: int) -> Callable[[], Any]:
        arguments = reading(target, body_of_size(size))
        return lambda: read(*arguments)

    check_linear(work_on)


# --- schemas ----------------------------------------------------------------------------------------------------------

REFERENCE = {"$ref": "#/$defs/a/enum/0"}
SCHEMAS: dict[str, Callable[[int], Any]] = {
    "deep": lambda size: '{"const": ' + deep(size // 8, ", ".join(["1"] * size)) + "}",
    "alternatives": lambda size: '{"anyOf": [' * (size // 8) + "true" + "]}" * (size // 8),
    "joined": lambda size: {"allOf": [{"minimum": number} for number in range(size)]},
    "options": lambda size: {"enum": [f"text {number}" for number in range(size)]},
    "references": lambda size: {"$defs": {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(size)}},
    "value_references": lambda size: {"anyOf": [REFERENCE] * size, "$defs": {"a": {"enum": [{"minimum": 1}] * size}}},
    "texts": lambda size: {"enum": ["x" * size, "\\" * size]},
    "open_choices": lambda size: {"pattern": "[" * size},
    "closed_choices": lambda size: {"pattern": "[ab]" * size},
    "short_choices": lambda size: {"pattern": "[a]" * size},
    "cut_escapes": lambda size: {"pattern": "[\\x1" * size + "\\"},
    "names": lambda size: {"properties": named(size), "patternProperties": {f"[{name}": {} for name in named(size)}},
    "numbers": lambda size: {"enum": [*range(size)]},
    "long_number": lambda size: '{"const": 1.' + "0" * size * 20 + "1}",
    "long_integer": lambda size: '{"const": ' + "1" * size * 20 + "}",
    "small_numbers": lambda size: '{"enum": [' + ", ".join(["1e-200"] * size) + "]}"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_of_twice_the_size_takes_twice_the_steps(name):
    def work_on(size: int) -> Callable[[], Any]:
        schema = SCHEMAS[name](size)
        source = schema if isinstance(schema, str) else json.dumps(schema)
        return lambda: [inexact_part("json_schema", source), inexact_part("lark", f"start: %json {source}")]

    check_linear(work_on)


@pytest.mark.parametrize("rule", ["%json {} ", '%json {"description": "%json"} ', "%json" + " " * 20 + "{}"])
def test_of_a_grammar_with_twice_as_many_schemas_twice_the_characters_are_looked_at(rule, monkeypatch):
    num_characters = []
    for size in (SIZE, 2 * SIZE):
        counts: list[int] = []
        monkeypatch.setattr(CountedText, "add_steps", staticmethod(counts.append))
        assert inexact_part("grammar", CountedText("start: " + rule * size)) == ""
        num_characters.append(sum(counts))
    assert SIZE < num_characters[0] < num_characters[1] <= MAX_RATIO * num_characters[0]


# --- prompts ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("roles", [("user", "assistant"), ("user",), ("system",)])
@pytest.mark.parametrize("template", ["own", "none", "vicuna"])
def test_twice_as_many_messages_take_twice_the_steps_until_the_tokenizer_has_their_text(template, roles):
    text = Text("toy/llama")
    text._sandbox = SimpleNamespace(call=lambda seconds, messages, variables: str(messages))
    text.tokenizer.chat_template = "{{ messages }}"
    text.spans = lambda texts, name, has_ends: iter([([len(texts[0])], [])])
    pipeline: Any = SimpleNamespace(
        text=text, spec=SimpleNamespace(context=10 ** 6), prompt_ids=text.chat_ids)

    def work_on(size: int) -> Callable[[], Any]:
        contents = [{"role": role, "content": CountedText("x")} for role in roles]
        messages = contents * size + chat()["messages"]
        choice = serve.protocol.Choice(messages, template)
        return lambda: prompt_ids(choice, pipeline)

    check_linear(work_on)


@pytest.mark.parametrize("template", ["own", "vicuna"])
def test_a_prompt_that_is_too_long_once_it_is_in_its_template_is_refused_before_it_is_tokenized(template, monkeypatch):
    text = Text("toy/llama")
    text.tokenizer.chat_template = "{{ 'long words ' * 400 }}{{ messages[0].content }}"
    pipeline: Any = SimpleNamespace(text=text, spec=SimpleNamespace(context=20), prompt_ids=text.chat_ids)
    monkeypatch.setattr(text, "spans", lambda *texts, **options: pytest.fail("it is tokenized"))
    with pytest.raises(Refused) as refused:
        prompt_ids(serve.protocol.Choice(chat()["messages"] * 300, template, field="messages"), pipeline)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    text.end_sandbox()


def test_a_prompt_is_tokenized_without_the_offsets_that_nobody_reads(monkeypatch):
    text, options_of_calls = Text("toy/llama"), []

    def tokenize(function: Any, *inputs: Any, **options: Any) -> Any:
        options_of_calls.append(options.get("return_offsets_mapping", False))
        return function(*inputs, **options)

    monkeypatch.setattr("model.text.call_tokenizer", tokenize)
    assert text.chat_ids(chat()["messages"], "none") and not any(options_of_calls)
    assert len([*text.spans(["x"], "none")][0][1]) == 2 and options_of_calls[-1]


# --- answers ----------------------------------------------------------------------------------------------------------

ADD = '{"name": "add", "arguments": {"a": 1}}'
ANSWERS: dict[str, tuple[Any, Callable[[int], list[str]]]] = {  # a format, and the pieces of an answer of a size
    "text": (HERMES, lambda size: ["x"] * size),
    "blanks": (HERMES, lambda size: [" "] * size),
    "braces": (LLAMA, lambda size: ["{"] * size),
    "begun_marks": (HERMES, lambda size: ["<tool_call"] * size),
    "mentioned_marks": (HERMES, lambda size: ["a <think>"] * size),
    "thoughts": (HERMES, lambda size: ["<think>", *["x"] * size]),
    "blank_thoughts": (HERMES, lambda size: ["<think>x", *["\n"] * 4 * size]),
    "analysis": (HARMONY, lambda size: ["<|channel|>analysis<|message|>x", *["\n"] * 4 * size]),
    "calls": (HERMES, lambda size: [f"<tool_call>{ADD}</tool_call>"] * (size // 5)),
    "list": (MISTRAL, lambda size: ["[TOOL_CALLS][", *[f"{ADD}, "] * (size // 5)]),
    "blank_head": (HERMES, lambda size: ["<tool_call>{", *[" "] * size]),
    "blanks_after_arguments": (HERMES, lambda size: [f"<tool_call>{ADD[:-1]}", *[" "] * size]),
    "blanks_between": (LLAMA, lambda size: [ADD, *[" "] * size]),
    "arguments": (HERMES, lambda size: [f"<tool_call>{ADD[:-3]}", *["1"] * size]),
    "later_name": (HERMES, lambda size: ['<tool_call>{"arguments": {"a": "', *["x"] * size]),
    "id": (HERMES, lambda size: [f'<tool_call>{ADD[:-1]}, "id": "', *["x"] * size]),
    "header": (HARMONY, lambda size: ["<|start|>", *["x"] * size]),
    "name": (GLM4, lambda size: ["\n", *["x"] * size]),
    "word": (DEEPSEEK, lambda size: ["<｜tool▁call▁begin｜>", *["x"] * size]),
    "key": (GLM, lambda size: ["<tool_call>add\n<arg_key>", *["x"] * size]),
    "value": (QWEN_CODER, lambda size: ["<tool_call><function=add><parameter=a>\n", *["x\n"] * size]),
    "values": (QWEN_CODER, lambda size: [
        "<function=add>", *["<parameter=a>\n1\n</parameter>\n"] * (size // 5)])}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_twice_the_pieces_takes_its_reader_twice_the_steps(name):
    call_format, pieces_of_size = ANSWERS[name]

    def work_on(size: int) -> Callable[[], Any]:
        pieces = [CountedText(piece) for piece in pieces_of_size(size)]
        reader = CallReader(call_format, {"add": {}})
        return lambda: [*map(reader.read, pieces), reader.finish()]

    check_linear(work_on, *OF_BUFFERS)


async def sent(answer_class: Any, engine: Any, call_format: Any) -> list[bytes]:
    """The pieces of an answer's stream, after it was sent as a whole."""
    choices = [serve.protocol.Choice("", "own", dialect=call_format, tools={"add": {}})]
    await answer_class(engine, serve.protocol.Body(), choices, "toy").whole_body()
    answer = answer_class(engine, serve.protocol.Body(stream=True), choices, "toy")
    return [piece async for piece in answer.stream(await answer.next())]


@pytest.mark.parametrize("name", ["text", "thoughts", "calls", "arguments"])
@pytest.mark.parametrize("answer_class", PROTOCOLS)
def test_an_answer_of_twice_the_pieces_is_sent_in_twice_the_steps(answer_class, name):
    call_format, pieces_of_size = ANSWERS[name]

    def work_on(size: int) -> Callable[[], Any]:
        engine: Any = LetterEngine([CountedText(piece) for piece in pieces_of_size(size)])
        return lambda: asyncio.run(sent(answer_class, engine, call_format))

    check_linear(work_on)


@pytest.mark.parametrize("stops", [(), ("x" * 99 + "y", "y" * 3999)])
def test_the_text_of_an_answer_with_twice_the_pieces_is_put_together_in_twice_the_steps(stops):
    def work_on(size: int) -> Callable[[], Any]:
        reader = AnswerReader(Text("toy/llama"), stops)
        reader._stream = SimpleNamespace(add=CountedText, finish=str)  # type: ignore[assignment]
        return lambda: [reader.read("x") for _ in range(size)] and reader.finish()  # type: ignore[arg-type]

    check_linear(work_on, *OF_BUFFERS)
