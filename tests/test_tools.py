"""Thoughts and calls of tools in answers, however these come in pieces, and the grammars of calls, in each format."""
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.markup import (
    DEEPSEEK,
    FORMATS,
    GLM,
    GLM4,
    GRANITE,
    HARMONY,
    HERMES,
    LFM2,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PHI,
    QWEN_CODER,
    THINKING,
    CallPart,
    CallReader,
    Thought,
    dialect_of,
    shown_marks,
)

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
TOOLS = {"weather": {}, "add": {"type": "object", "properties": {"a": INTEGER, "b": TEXT}}, "add_all": {}, "no-op": {},
         "flag": {"properties": {"on": {"type": "boolean"}, "note": {"type": ["string", "null"]}, "to": {}}}}
WEATHER = '{"name": "weather", "arguments": {"city": "Pa}r\\"is{", "days": [1, {"a": "b"}]}}'
LLAMAS = WEATHER.replace("arguments", "parameters")
ARGUMENTS = '{"city": "Pa}r\\"is{", "days": [1, {"a": "b"}]}'
CALL = ("weather", ARGUMENTS)
ADD = '{"name": "add", "arguments": {"a": 1}}'
ADDED, DONE = ("add", '{"a": 1}'), ("no-op", "{}")
ESCAPED = '{"name": "\\q", "arguments": {}}'  # no JSON
DRAFT = f"Perhaps <tool_call>{ADD}</tool_call>, perhaps not."
ANSWER = '{"name": "Ada", "age": 36}'
OTHER = ADD.replace('"add"', '"subtract"')
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
R1_ADD = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
R1_DONE = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>no-op\n```json\n{}\n```<｜tool▁call▁end｜>"
GLM_ADD = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
CODER_ADD = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
CODE = "def f():\n    return {\"x\": '</p>'}\n"
CASES = [  # a format, an answer, and its thoughts, its text and its calls
    # calls of JSON objects between marks
    (HERMES, "It rains < <tool never.", "", "It rains < <tool never.", []),
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", "", "", [CALL]),
    (HERMES, f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{WEATHER}</tool_call>", "",
     "Let me see.\n", [CALL, CALL]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", "", [ADDED]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "", "", [("add", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"a": "</tool_call>{"}, "name": "add"}</tool_call>', "", "",
     [("add", '{"a": "</tool_call>{"}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "no-op"}</tool_call>', "", "", [DONE]),
    (HERMES, f"<tool_call> <tool_call>\n{WEATHER}\n</tool_call>", "", "<tool_call> ", [CALL]),
    (HERMES, "<tool_call>no JSON</tool_call> then", "", "<tool_call>no JSON</tool_call> then", []),
    (HERMES, "<tool_call>\n{\"name", "", "<tool_call>\n{\"name", []),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "x', "", "", [("add", '{"a": "x')]),
    (HERMES, f"<tool_call>{WEATHER}</tool_call>\n done ", "", "\n done ", [CALL]),
    (HERMES, f"<tool_call>{ESCAPED}</tool_call>", "", f"<tool_call>{ESCAPED}</tool_call>", []),
    (HERMES, f"<tool_call>\n{ADD}\n{WEATHER}\n</tool_call>", "", "", [ADDED, CALL]),
    (HERMES, f"<tool_call>[{ADD}, {WEATHER}]</tool_call>", "", "", [ADDED, CALL]),
    (HERMES, f"<tool_call>\n{ADD}\nand more</tool_call>", "", "\nand more</tool_call>", [ADDED]),
    (HERMES, f"<tool_call>{ADD[:-1]}</tool_call> then", "", " then", [ADDED]),  # a brace is missing
    (HERMES, f'<tool_call>{ADD[:-1]}, "id": "x}}"}}</tool_call> ok', "", " ok", [ADDED]),
    (HERMES, f"<tool_call>\n{OTHER}\n</tool_call>", "", f"<tool_call>\n{OTHER}\n</tool_call>", []),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "",
     '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', []),
    (HERMES, f'<tool_call>{{"type": "function", "function": {ADD}}}</tool_call>', "", "", [ADDED]),
    (HERMES, ANSWER, "", ANSWER, []), (HERMES, ADD, "", ADD, []),
    (HERMES, f"```\n<tool_call>{ADD}</tool_call>\n```", "", "```\n\n```", [ADDED]),
    (HERMES, '<tool_call>{"name": "add_all", "arguments": {"of": "ä€😀"}}</tool_call>', "", "",
     [("add_all", '{"of": "ä€😀"}')]),
    (HERMES, f'<tool_call>{ADD[:-1]}, "id": "x', "", "", [ADDED]),
    (HERMES, f"<tool_call>{ADD}</tool_call>\n\n", "", "", [ADDED]),
    (HERMES, '<tool_call>{"name": ["add"], "arguments": {}}', "", '<tool_call>{"name": ["add"], "arguments": {}}', []),
    (HERMES, "  \n", "", "  \n", []),
    # thoughts
    (HERMES, f"<think>{DRAFT}</think>No.", DRAFT, "No.", []),
    (HERMES, f"<think>\nI write <tool_call> first.\n</think>\n\n<tool_call>{WEATHER}</tool_call>",
     "I write <tool_call> first.", "", [CALL]),
    (HERMES, "<think>\n\n</think>\n\nYes. ", "", "Yes. ", []),
    (HERMES, f"\n<think>{DRAFT}", DRAFT, "", []),
    (HERMES, "The tag <think> opens thoughts.", "", "The tag <think> opens thoughts.", []),
    (HERMES, "One.\n<think>Two.</think>\nThree.", "Two.", "One.\nThree.", []),
    (HERMES, "One.\n  <think>Two.</think>", "Two.", "One.\n  ", []),
    (HERMES, f"One.<tool_call>{ADD}</tool_call><think>Two.</think>", "Two.", "One.", [ADDED]),
    (None, f"<think>It is 4.</think>{ADD}", "It is 4.", ADD, []),
    (THINKING, f"<think>It is 4.</think>{ADD}", "It is 4.", ADD, []),
    (THINKING, f"[THINK]It is 4.[/THINK]<tool_call>{ADD}</tool_call>", "It is 4.", f"<tool_call>{ADD}</tool_call>", []),
    # calls without a mark
    (LLAMA, "{", "", "{", []), (LLAMA, LLAMAS, "", "", [CALL]),
    (LLAMA, f" {LLAMAS}; {LLAMAS}", "", "", [CALL, CALL]), (LLAMA, f"<|python_tag|>{LLAMAS}", "", "", [CALL]),
    (LLAMA, f"I look.<|python_tag|>{LLAMAS}", "", "I look.", [CALL]),
    (LLAMA, '<|python_tag|>search.call(query="x")', "", '<|python_tag|>search.call(query="x")', []),
    (LLAMA, 'See {"name": 1}', "", 'See {"name": 1}', []),
    (LLAMA, '{"answer": "}"} yes', "", '{"answer": "}"} yes', []),
    (LLAMA, ANSWER, "", ANSWER, []), (LLAMA, '{"name": "add"}', "", '{"name": "add"}', []),
    (LLAMA, f"{ANSWER}; {ANSWER}", "", f"{ANSWER}; {ANSWER}", []), (LLAMA, OTHER, "", OTHER, []),
    (LLAMA, '{"name": "Ada", "parameters": {"a": 1}}', "", '{"name": "Ada", "parameters": {"a": 1}}', []),
    (LLAMA, '{"name": "no-op", "parameters": null}', "", "", [DONE]),
    (LLAMA, f"```json\n{ADD}\n```", "", f"```json\n{ADD}\n```", []),
    (GLM4, 'add\n{"a": 1}', "", "", [ADDED]), (GLM4, 'I do.\nno-op\n{}', "", "I do.", [DONE]),
    (GLM4, "add\nnumbers", "", "add\nnumbers", []), (GLM4, "sub\n{}", "", "sub\n{}", []),
    (GLM4, ANSWER, "", ANSWER, []),
    # lists of calls after a mark
    (MISTRAL, f"[TOOL_CALLS] [{ADD}, {WEATHER}]", "", "", [ADDED, CALL]),
    (MISTRAL, f'I look. [TOOL_CALLS][{ADD[:-1]}, "id": "abcdefghi"}}]', "", "I look. ", [ADDED]),
    (MISTRAL, f"[{ADD}]", "", f"[{ADD}]", []), (MISTRAL, ANSWER, "", ANSWER, []),
    (GRANITE, f"<|tool_call|>[{ADD}, {WEATHER}]", "", "", [ADDED, CALL]), (GRANITE, f"[{ADD}]", "", "", [ADDED]),
    (GRANITE, f"[{ANSWER}, 1]", "", f"[{ANSWER}, 1]", []),
    (PHI, f"<|tool_call|>[{ADD}, {WEATHER}]<|/tool_call|>", "", "", [ADDED, CALL]),
    (PHI, f"<|tool_call|>{ADD}<|/tool_call|>", "", "", [ADDED]), (PHI, f"functools[{ADD}]", "", "", [ADDED]),
    # names before arguments
    (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]no-op[ARGS]{}', "", "", [ADDED, DONE]),
    (MISTRAL_NAMED, 'So[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", "So", [ADDED]),
    (MISTRAL_NAMED, '[TOOL_CALLS]adder[ARGS]{"a": 1}', "", '[TOOL_CALLS]adder[ARGS]{"a": 1}', []),
    (DEEPSEEK, f"<think>{DRAFT}</think>I add.<｜tool▁calls▁begin｜>{R1_ADD}\n{R1_DONE}<｜tool▁calls▁end｜>", DRAFT,
     "I add.", [ADDED, DONE]),
    (DEEPSEEK, "<｜tool▁call▁begin｜>no-op<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", "", [DONE]),
    (DEEPSEEK, R1_ADD.replace("add", "sub"), "", R1_ADD.replace("add", "sub"), []),
    # arguments as texts
    (GLM, f"Now.\n{GLM_ADD}\n<tool_call>no-op\n</tool_call>", "", "Now.\n", [ADDED, DONE]),
    (GLM, GLM_ADD.replace(">1<", ">x\"\n<").replace(">a<", ">b<"), "", "", [("add", '{"b": "x\\"\\n"}')]),
    (GLM, GLM_ADD.replace("add", "sub"), "", GLM_ADD.replace("add", "sub"), []),
    (GLM, "<tool_call>add\n<arg_key>b</arg_key>\n<arg_value>5", "", "", [("add", '{"b": "5')]),
    (GLM, GLM_ADD[:-len("</arg_value>\n</tool_call>") - 1], "", "", [("add", '{"a": "')]),
    (HERMES, GLM_ADD + CODER_ADD, "", "", [ADDED, ADDED]),
    (QWEN_CODER, f"{CODER_ADD}\n{CODER_ADD}", "", "", [ADDED, ADDED]),
    (QWEN_CODER, CODER_ADD[len("<tool_call>\n"):], "", "", [ADDED]),
    (QWEN_CODER, "<tool_call>\n<function=no-op>\n</function>\n</tool_call> ok", "", " ok", [DONE]),
    (QWEN_CODER, f"<function=add><parameter=b>\n5\n</parameter><parameter=a>[1]</parameter><parameter=c>\n{CODE}\n"
     "</parameter></function>", "", "", [("add", json.dumps({"b": "5", "a": "[1]", "c": CODE}))]),
    (QWEN_CODER, "<function=flag><parameter=on>True</parameter><parameter=note>null</parameter><parameter=to>{\"x\": 1}"
     "</parameter></function>", "", "", [("flag", '{"on": true, "note": null, "to": {"x": 1}}')]),
    (QWEN_CODER, "<function=add><parameter=a>1</parameter>and so on", "", "and so on", [ADDED]),
    (QWEN_CODER, '<function=flag><parameter=to>"x"</parameter></function>', "", "", [("flag", '{"to": "\\"x\\""}')]),
    (QWEN_CODER, "<function=sub>\n</function>", "", "<function=sub>\n</function>", []),
    # Python
    (LFM2, '<|tool_call_start|>[add(a=1), weather(city=\'Pa}r"is{\', days=[1, {"a": "b"}])]<|tool_call_end|>', "", "",
     [ADDED, CALL]),
    (LFM2, "I look.\n<|tool_call_start|>[flag(on=True, note=None)]<|tool_call_end|>So", "", "I look.\nSo",
     [("flag", '{"on": true, "note": null}')]),
    (LFM2, "<think>It is 4.</think><|tool_call_start|>[add_all()]", "It is 4.", "", [("add_all", "{}")]),
    *((LFM2, f"<|tool_call_start|>[{text}]<|tool_call_end|>", "", f"<|tool_call_start|>[{text}]<|tool_call_end|>", [])
      for text in ("subtract(a=1)", "add(1)", "add(a=open('x'))", "add(a=b'')", "add", "add(a=", "add(**{'a': 1})",
                   "add(a=" + "[" * 300)),
    # channels
    (HARMONY, f"{ANALYSIS}Sum 2+2.<|end|>{FINAL}Four.", "Sum 2+2.", "Four.", []),
    (HARMONY, f'{ANALYSIS}{DRAFT}<|end|><|start|>assistant{TO_ADD}{{"a": 1}}', DRAFT, "", [ADDED]),
    (HARMONY, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "", "", [ADDED]),
    (HARMONY, f'{ANALYSIS}I add.<|end|><|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json'
     '<|message|>{"a": 1}', "I add.", "", [ADDED]),
    (HARMONY, '<|channel|>commentary<|message|>I add.<|end|>' + FINAL + "Done.", "", "I add.\n\nDone.", []),
    (HARMONY, TO_ADD.replace("add", "subtract") + "{}", "", TO_ADD.replace("add", "subtract") + "{}", []),
    (HARMONY, TO_ADD.replace("add", "add_all.x") + "{}", "", TO_ADD.replace("add", "add_all.x") + "{}", []),
    (HARMONY, f"{ANALYSIS}I thi", "I thi", "", []), (HARMONY, ANSWER, "", ANSWER, []),
    (HARMONY, f"{TO_ADD}none", "", f"{TO_ADD}none", []), (HARMONY, "<|start|>assistant<|message|>Hi.", "", "Hi.", []),
    (HARMONY, f'{FINAL}I add.<|end|>{TO_ADD}{{"a": 1}}<|end|>{FINAL}Done.', "", "I add.Done.", [ADDED]),
    (HARMONY, "<|channel|>fin", "", "<|channel|>fin", []),
    (HARMONY, f"{FINAL}{ADD}<|end|>", "", ADD, [])]


def joined(parts):
    """The thoughts of an answer, its text, and its calls as names and arguments."""
    calls = []
    for part in parts:
        if isinstance(part, CallPart):
            calls += [("", "")] * bool(part.name)
            calls[-1] = tuple(a + b for a, b in zip(calls[-1], part))
    thoughts = "".join(piece.text for piece in parts if isinstance(piece, Thought))
    return thoughts, "".join(part for part in parts if isinstance(part, str)), calls


def parts(call_format, pieces, tools=TOOLS, **options):
    reader = CallReader(call_format, tools, **options)
    return sum(map(reader.read, pieces), []) + reader.finish()


@pytest.mark.parametrize("call_format, text, thoughts, content, calls", CASES)
def test_an_answer_has_its_thoughts_its_text_and_its_calls_whole_and_letter_by_letter(
        call_format, text, thoughts, content, calls):
    assert joined(parts(call_format, [text])) == (thoughts, content, calls)
    assert joined(parts(call_format, text)) == (thoughts, content, calls)


@settings(max_examples=150)
@given(st.sampled_from(CASES), st.data())
def test_it_has_them_however_it_is_cut(case, data):
    call_format, text, *expected = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert joined(parts(call_format, pieces)) == tuple(expected)


@settings(max_examples=200)
@given(st.sampled_from(FORMATS), st.lists(st.sampled_from([
    "<tool_call>", "</tool_call>", "<think>", "</think>", ADD, OTHER, "{", "}", "[", "]", '"', "\\", "\n", " ", "add",
    "no-op", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|python_tag|>", "<|channel|>analysis", TO_ADD, "<|message|>",
    "<|end|>", "<|start|>assistant", "<function=add>", "<parameter=a>", "</parameter>", "</function>",
    "<arg_key>a</arg_key>", GLM_ADD, "<arg_value>", "</arg_value>", R1_ADD, R1_DONE, "<｜tool▁calls▁begin｜>", "and so",
    ";", ","]), max_size=12))
def test_marks_in_any_order_are_read_alike_whole_and_letter_by_letter(call_format, words):
    text = "".join(words)
    thoughts, content, calls = joined(parts(call_format, [text]))
    assert joined(parts(call_format, text)) == (thoughts, content, calls)
    assert {name for name, _ in calls} <= TOOLS.keys()


def test_a_prompt_may_begin_the_thoughts():
    text = f"{DRAFT}\n</think>\n\n<tool_call>{ADD}</tool_call>"
    assert joined(parts(HERMES, text, in_thoughts=True)) == (DRAFT, "", [ADDED])


def test_arguments_come_as_they_are_made():
    reader = CallReader(HERMES)
    assert reader.read('<tool_call>{"name": "add", "arguments": {"a": 1') == [("add", ""), ("", '{"a": 1')]
    assert reader.read('0, "b": "') == [("", '0, "b": "')]
    assert reader.read('x"}') == [("", 'x"}')]
    assert reader.read("}</tool_call>") == [] and reader.finish() == []


def test_an_answer_in_json_comes_as_it_is_made():
    assert CallReader(LLAMA, TOOLS).read('{"answer": "It') == ['{"answer": "It']


@pytest.mark.parametrize("call_format, text, content, calls", [
    (HERMES, f'<tool_call>{{"arguments": {{}}, "name": "any"}}{OTHER}{{"arguments": 1}}</tool_call>',
     '{"arguments": 1}</tool_call>', [("any", "{}"), ("subtract", '{"a": 1}')]),
    (GLM, GLM_ADD.replace("add", "any"), "", [("any", '{"a": 1}')])])
def test_without_tools_any_name_is_one(call_format, text, content, calls):
    assert parts(call_format, [text], None)[-1] and joined(parts(call_format, text, None)) == ("", content, calls)
    assert all(any(piece) for piece in parts(call_format, text, None))


def test_what_is_nested_without_end_is_no_call():
    deep = "<tool_call>" + '{"name": ' + "[" * 100_000 + "</tool_call>"
    assert parts(HERMES, [deep]) == [deep]


@pytest.mark.parametrize("template, call_format", [
    ("{% if tools %}<tool_call>{% endif %}", HERMES), ("{% if custom_tools %}<|python_tag|>", LLAMA),
    ('{{ tools }}Respond as {"name": function name, "parameters": arguments}', LLAMA),
    ("{{ tools }}<tool_call>{function-name}<arg_key>{arg-key}</arg_key>", GLM),
    ("{{ tools }}<tool_call>\n<function=name>", QWEN_CODER), ("{{ tools }}<|observation|>", GLM4),
    ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS] [", MISTRAL), ("{{ tools }}[TOOL_CALLS]f[ARGS]", MISTRAL_NAMED),
    ("{{ tools }}<|tool_list_start|>", LFM2), ("{{ tools }}<|tool_call|>", GRANITE),
    ("<|tool|>{{ message['tools'] }}<|/tool|>", PHI),
    ("{{ tools }}<｜tool▁calls▁begin｜><think>", DEEPSEEK), ("{{ tools }}<|channel|>analysis", HARMONY),
    ("{{ content.split('</think>')[-1] }}", THINKING), ("{{ tools }}[THINK]", THINKING),
    ("{{ messages }}<tool_call>", None), ("{{ tools }}", None), ("{{ messages }}", None)])
def test_a_template_shows_its_format(template, call_format):
    assert dialect_of(template) is call_format


def test_marks_are_shown_where_a_tokenizer_has_their_format():
    assert shown_marks(["<|start|>", "<|end|>", "<|message|>", "<s>"]) == set()
    assert shown_marks(["<|channel|>", "<|end|>", "<s>"]) == {"<|channel|>", "<|end|>"}
    assert shown_marks(["[TOOL_CALLS]", "[ARGS]", "[INST]"]) == {"[TOOL_CALLS]", "[ARGS]"}


TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "n": {"$ref": "#"}}, "required": ["v"]}
PAIR = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 5},
                                         "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]}
NAMED = {"$id": "https://example.com/named", "type": "object", "properties": {"a": {"$ref": "#/definitions/C"}},
         "required": ["a"], "definitions": {"C": {"enum": ["x"]}}}
LEAF = {"type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}}, "required": ["left"],
        "additionalProperties": False, "$defs": {"leaf": {"type": "integer"}}}
REFERRING = {"tree": TREE, "pair": PAIR, "named": NAMED, "leaf": LEAF, 'odd"name': {}}


def call_text(call_format, calls):
    """These calls as the grammar of a format writes them."""
    text = call_format.text
    written = []
    for name, arguments in calls:
        head = text.call.replace("NAME", json.dumps(name)[1:-1] if '"NAME"' in text.call else name)
        written.append(f"{head}{arguments}{text.call_end}")
    return f"{text.before}{(text.between or '').join(written)}{text.after}"


@pytest.fixture(scope="module")
def follows():
    """Whether a text is one of the grammar of a format's calls."""
    pytest.importorskip("llguidance", reason="grammars need llguidance (serve/requirements.txt)")
    from serve.tools import calls_of
    from tests.grammars import BYTES, bytes_of

    def check(call_format, text):
        matcher = BYTES.of(calls_of(REFERRING, call_format, several=True)).matcher.deep_copy()
        return matcher.try_consume_tokens(bytes_of(text)) == len(bytes_of(text)) and matcher.is_accepting()
    return check


@pytest.mark.parametrize("call_format", [row for row in FORMATS if row.text])
def test_every_text_of_the_grammar_of_calls_is_read_as_calls(call_format, follows):
    calls = [("leaf", '{"left": 5}')]
    if call_format.text.between is not None:
        calls += [('odd"name', "{}")] * ('"NAME"' in call_format.text.call) + [("tree", '{"v": 1, "n": {"v": 2}}')]
    text = call_text(call_format, calls)
    assert joined(parts(call_format, text, REFERRING)) == ("", "", calls)
    assert follows(call_format, text)


@pytest.mark.parametrize("name, arguments, is_right", [
    ("tree", '{"v": 1, "n": {"v": 2, "n": {"v": 3}}}', True), ("tree", '{"v": 1, "n": {"name": "tree"}}', False),
    ("pair", '{"a": 3, "b": 5}', True), ("pair", '{"a": 3, "b": 6}', False),
    ("named", '{"a": "x"}', True), ("named", '{"a": "y"}', False)])
@pytest.mark.parametrize("call_format", [HERMES, MISTRAL_NAMED])
def test_a_schema_of_arguments_that_refers_to_itself_is_kept(name, arguments, is_right, call_format, follows):
    assert follows(call_format, call_text(call_format, [(name, arguments)])) == is_right
