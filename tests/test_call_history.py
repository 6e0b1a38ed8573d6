"""Calls, thoughts and efforts of a chat, as clients send them back, in templates of the forms that families have."""
import json
from types import SimpleNamespace

import pytest

from model.text import CallForm, Text, chosen, own_template
from serve import anthropic, responses
from serve.protocol import Chat, Refused, read_body
from tests.json_files import change_json, load_json
from tests.test_text import bytelevel

pytest.importorskip("jinja2", reason="transformers needs it for templates")
JOINED = (  # DeepSeek R1's: arguments are a text, and a message with calls has no content
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{% for call in m['tool_calls'] %}"
    "{{ '<call>' + call['function']['name'] + ' ' + call['function']['arguments'] + '</call>' }}{% endfor %}"
    "{% else %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}")
PAIRS = (  # Qwen3-Coder's: pairs of a name and a value
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<function={{ call.function.name }}>{% for name, value in call.function.arguments|items %}{{ name }}={{ value }};"
    "{% endfor %}{% endfor %}{% endfor %}")
SHORT = (  # Mistral's: ids of nine signs, and a content only where there are no calls
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}{% for call in m.tool_calls %}{% if call.id|length != 9 %}"
    "{{ raise_exception('ids have 9 signs') }}{% endif %}"
    "[TOOL_CALLS]{{ call.function|tojson }}{{ call.id }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('ids have 9 signs') }}{% endif %}"
    "[RESULT]{{ m.content }}{{ m.tool_call_id }}{% else %}{{ m.content }}{% endif %}{% endfor %}")
IDS = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.id }}{% endfor %}{% endfor %}"
PRINTED = (  # writes an object as Python does, unless it is a text
    "{% for m in messages %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function.arguments }}"
    "{% endfor %}{% endfor %}")
PARTS = (
    "{% for m in messages %}{% for part in m.content or [] %}{{ part.text }}{% endfor %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments|tojson }}{% endfor %}{% endfor %}")
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # reads no calls
THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}Reasoning: {{ reasoning_effort|default('medium') }}")
LONG_ID, NINE = "call_0123456789abcdef01234567", "a1B2c3D4e"
CHANNELS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bytelevel(tmp_path_factory.mktemp("history") / "new")


@pytest.mark.parametrize("translate, sent_fields", [
    (responses.as_chat, {"input": "hi"}),
    (anthropic.as_chat, {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]})])
def test_what_changes_an_answer_counts_in_each_protocol_or_is_refused(translate, sent_fields):
    fields = {"temperature": 2.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 3,
              "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1.0}, "ignore_eos": True}
    read = read_body(json.dumps({**sent_fields, **fields}).encode(), Chat, translate)
    assert {name: getattr(read, name) for name in fields} == fields
    for name in ("min_tokens", *(["top_logprobs"] if "input" in sent_fields else [])):
        with pytest.raises(Refused, match=f"{name} is not supported"):
            read_body(json.dumps({**sent_fields, name: 5}).encode(), Chat, translate)


def rendered(folder, tmp_path, template, chat_body, translate=dict):
    """What a template makes of a chat_body of a request."""
    file = tmp_path / "own.jinja"
    file.write_text(template)
    config = SimpleNamespace(uses_jinja=True, template="own", chat_template=str(file), first_folder=folder)
    [choice] = read_body(json.dumps(chat_body).encode(), Chat, translate).prompt_choices(config)
    text = Text(folder, str(file))
    try:
        return text._chat_text(choice.prompt, "own", choice.variables)
    finally:
        text.end_sandbox()


def history(arguments='{"a": 1}', call_id=LONG_ID, content=None):
    """The messages of a chat after a call and its result."""
    call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [{"role": "user", "content": "Add."}, {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "5"}]


@pytest.mark.parametrize("content", [None, "", "missing"])
@pytest.mark.parametrize("template, expected", [
    (JOINED, '<user>Add.<call>add {"a": 1}</call><tool>5'), (PAIRS, "<user>Add.<assistant><function=add>a=1;<tool>5"),
    (PRINTED, 'Add.{"a": 1}5'), (PARTS, 'Add.{"a": 1}5'), (PLAIN, "<user>Add.<assistant><tool>5")],
    ids=["joined", "pairs", "printed", "parts", "plain"])
def test_a_call_is_shown_in_the_form_that_the_template_reads(folder, tmp_path, template, expected, content):
    messages = history(content=content)
    if content == "missing":
        del messages[1]["content"]
    assert rendered(folder, tmp_path, template, {"messages": messages}) == expected


@pytest.mark.parametrize("arguments", ["", "null", "[1]", '{"a": ', '{"a": 1}}', None, "{}"])
def test_arguments_that_are_no_object_are_an_empty_one(folder, tmp_path, arguments):
    messages = history(arguments)
    assert rendered(folder, tmp_path, PAIRS, {"messages": messages}) == "<user>Add.<assistant><function=add><tool>5"
    assert rendered(folder, tmp_path, JOINED, {"messages": messages}) == "<user>Add.<call>add {}</call><tool>5"


@pytest.mark.parametrize("call_id", [LONG_ID, NINE, "", "toolu_01", "nine_sign"])
def test_ids_have_nine_letters_and_digits_where_the_template_wants_them_and_else_stay(folder, tmp_path, call_id):
    shown = rendered(folder, tmp_path, SHORT, {"messages": history(call_id=call_id)})
    before, _, after = shown.partition("[RESULT]5")
    assert len(after) == 9 and after.isalnum() and after.isascii() and before.endswith(after)
    assert (after == call_id) == (call_id == NINE)
    others = rendered(folder, tmp_path, SHORT, {"messages": history(call_id="another")})
    assert not others.endswith(after)
    if len(call_id) == len(LONG_ID):
        assert rendered(folder, tmp_path, IDS, {"messages": history()}) == f"Add.{LONG_ID}5"


def test_a_template_that_fails_in_every_form_reports_its_own_error(folder, tmp_path):
    with pytest.raises(ValueError, match="no calls here"):
        rendered(folder, tmp_path, "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls here') }}"
                                   "{% endif %}{{ m.content }}{% endfor %}", {"messages": history()})
    message = {"role": "user", "content": "x"}
    assert CallForm(has_short_ids=True, has_null_content=True).applied(message) == message


# --- thoughts ---------------------------------------------------------------------------------------------------------

THOUGHT_CHAT = {"reasoning_effort": "low", "messages": [
    {"role": "user", "content": "q"}, {"role": "assistant", "content": "A", "reasoning_content": "BECAUSE"},
    {"role": "user", "content": "z"}]}
RENAMED_CHAT = json.loads(json.dumps(THOUGHT_CHAT).replace("reasoning_content", "reasoning"))
THOUGHT_RESPONSE = {"reasoning": {"effort": "low"}, "input": [
    {"role": "user", "content": "q"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "BECAUSE"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
    {"role": "user", "content": "z"}]}
THOUGHT_MESSAGE = {"max_tokens": 5, "messages": [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "BECAUSE", "signature": ""},
                                      {"type": "text", "text": "A"}]},
    {"role": "user", "content": "z"}]}


@pytest.mark.parametrize("chat_body, translate, effort", [
    (THOUGHT_CHAT, dict, "low"), (RENAMED_CHAT, dict, "low"), (THOUGHT_RESPONSE, responses.as_chat, "low"),
    (THOUGHT_MESSAGE, anthropic.as_chat, "medium")], ids=["chat", "reasoning", "response", "message"])
def test_thoughts_and_their_effort_reach_the_template_in_each_protocol(folder, tmp_path, chat_body, translate, effort):
    shown = rendered(folder, tmp_path, THOUGHTS, chat_body, translate)
    assert shown == f"<user>q<assistant><think>BECAUSE</think>A<user>zReasoning: {effort}"


def test_a_variable_of_the_template_counts_more_than_the_effort(folder, tmp_path):
    chat_body = {**THOUGHT_CHAT, "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert rendered(folder, tmp_path, THOUGHTS, chat_body).endswith("Reasoning: high")


def test_thoughts_before_a_call_are_the_calls_message(folder, tmp_path):
    items = [THOUGHT_RESPONSE["input"][0], THOUGHT_RESPONSE["input"][1],
             {"type": "function_call", "name": "add", "call_id": NINE, "arguments": "{}"},
             {"type": "function_call_output", "call_id": NINE, "output": "5"}]
    messages = responses.as_chat({"input": items})["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "BECAUSE" and len(messages[1]["tool_calls"]) == 1


def test_what_the_template_does_not_read_is_refused_by_name(folder, tmp_path):
    with pytest.raises(Refused) as refused:
        rendered(folder, tmp_path, PLAIN, THOUGHT_CHAT)
    assert refused.value.param == "reasoning_effort"
    config = SimpleNamespace(uses_jinja=False, template="vicuna")
    for chat_body, param in ((THOUGHT_CHAT, "messages.1.reasoning_content"), (RENAMED_CHAT, "messages.1.reasoning"),
                        ({"messages": history(content="x")}, "messages.1.tool_calls")):
        with pytest.raises(Refused) as refused:
            read_body(json.dumps(chat_body).encode(), Chat).prompt_choices(config)
        assert (refused.value.status, refused.value.param) == (400, param)


def test_channels_have_thoughts_under_their_own_name_before_a_call(tmp_path):
    from tests.test_channels import with_special

    text = with_special(tmp_path / "new", CHANNELS, chat_template=(
        "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{{ m.thinking or '' }}|{{ m.content or '' }}|{% endfor %}"))
    messages = history(arguments={"a": 1})
    messages[1].update(content="", reasoning_content="BECAUSE")
    assert text._chat_text(messages, "own", {}) == "|Add.|BECAUSE|||5|"
    text.end_sandbox()


# --- files ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("as_list", [False, True])
def test_a_template_in_the_file_of_a_processor_is_the_models_own(folder, tmp_path, as_list):
    base = bytelevel(tmp_path / "new")
    settings = load_json(base / "tokenizer_config.json")
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chosen("auto", base) == "vicuna"
    template = "{{ messages[0].content }}!"
    value = [{"name": "default", "template": template}, {"name": "rag", "template": "x"}] if as_list else template
    (base / "chat_template.json").write_text(json.dumps({"chat_template": value}))
    assert chosen("auto", base) == "own" and template in own_template(base)
    assert Text(base).prompt_text(["Hi"], "auto") == "Hi!"


def test_a_byte_order_mark_is_no_text_of_a_template_or_of_json(tmp_path):
    base = bytelevel(tmp_path / "new")
    change_json(base / "tokenizer_config.json", chat_template="{{ messages[0].content }}!")
    expected = Text(base).prompt_ids(["Hi"], "own")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (base / name).write_bytes(b"\xef\xbb\xbf" + (base / name).read_bytes())
        assert Text(base).prompt_ids(["Hi"], "own") == expected

    file = tmp_path / "own.jinja"
    file.write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}?")
    assert Text(base, str(file)).prompt_text(["Hi"], "own") == "Hi?"
    (base / "chat_template.jinja").write_bytes(file.read_bytes())
    assert Text(base).prompt_text(["Hi"], "own") in ("Hi?", "Hi!")  # transformers decides which of the two counts
