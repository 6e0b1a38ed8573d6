"""Tools over HTTP: shown by the model's own template, called in its form, and answered as OpenAI's client does."""
import json
import re

import openai
import pytest

from tests.serving import live, refusal, text_of, user_says

pytest.importorskip("llguidance", reason="grammars need llguidance (serve/requirements.txt)")
HERMES = """{% if messages[0].content == "refuse" %}{{ raise_exception("no such role") }}{% endif -%}
{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }} {% endfor %}
Write <tool_call> JSON </tool_call>
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}assistant: """
LLAMA = HERMES.replace("<tool_call>", "").replace("</tool_call>", "").replace('"arguments"', '"parameters"')
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Says how it will be.", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": DAYS},
    "required": ["city", "days"],
    "additionalProperties": False}}}
STOP = {"type": "function", "function": {"name": "stop"}}
ASKED = {"model": "toy", "messages": user_says(), "temperature": 1, "seed": 7, "tools": [WEATHER, STOP]}


def served(folder, template):
    (folder / "tools.jinja").write_text(template)
    return live("link=threads", "max_requests=2", "draft=suffix", f"template={folder / 'tools.jinja'}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("hermes"), HERMES) as started:
        yield started


def streamed(create_chat, **asked):
    """The text, the calls and the reason of a stream."""
    text, calls, reason = "", {}, None
    for chunk in create_chat(**asked, stream=True):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
        reason = choice.finish_reason or reason
    return text, [*calls.values()], reason


def check(*calls):
    """Each of these pairs of a tool's name and its arguments is as the tool wants it."""
    for name, arguments in calls:
        values = json.loads(arguments)
        if name == "weather":
            assert values.keys() == {"city", "days"}
            assert values["city"] in ("Paris", "Rome") and 1 <= values["days"] <= 9
        else:
            assert (name, values) == ("stop", {})


def named_calls(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_that_must_come_are_held_by_a_grammar_whole_and_streamed(create_chat, choice):
    asked = {**ASKED, "tool_choice": choice, "max_tokens": 400}
    whole = create_chat(**asked).choices[0]
    calls = named_calls(whole.message)
    assert streamed(create_chat, **asked) == ("", calls, "tool_calls") and whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert len({call.id for call in whole.message.tool_calls}) == len(calls)
    check(*calls)
    if choice != "required":
        assert [name for name, _ in calls] == ["weather"]
    [only] = named_calls(create_chat(**asked, parallel_tool_calls=False).choices[0].message)
    check(only)


def test_a_call_in_a_free_answer_is_found_behind_its_text(create_chat):
    said = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
    asked = {**ASKED, "extra_body": {"guided_choice": [said]}}
    whole = create_chat(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("I look.\n", "tool_calls")
    assert streamed(create_chat, **asked) == ("I look.\n", [("weather", '{"city": "Rome", "days": 2}')], "tool_calls")
    plain = {**asked, "tool_choice": "none"}
    assert create_chat(**plain).choices[0].message.content == said


def test_keywords_of_a_tools_schema_that_are_null_are_left_out(create_chat):
    function = {"name": "weather", "parameters": {
        "type": "object", "required": ["city", "days", "at"], "properties": {
            **WEATHER["function"]["parameters"]["properties"],
            "at": {"type": "object", "required": None, "properties": None, "default": None},
            "required": {"const": None}}}}
    chat_fields = {**ASKED, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    [call] = named_calls(create_chat(**chat_fields, parallel_tool_calls=False, max_tokens=400).choices[0].message)
    arguments = json.loads(call[1])
    assert arguments.keys() - {"required"} == {"city", "days", "at"} and arguments["at"] == {}
    check(("weather", json.dumps({name: arguments[name] for name in ("city", "days")})))


def test_up_to_64_stop_texts_end_an_answer_at_the_first(server):
    text = text_of(server.chat(max_tokens=12, seed=7, temperature=1))
    stops = [*(f"never {number}" for number in range(63)), text[6:9]]
    ended = server.chat(max_tokens=12, seed=7, temperature=1, stop=stops)
    assert text_of(ended) == text[:text.index(text[6:9])]
    assert refusal(server.chat(stop=[*stops, "a"]), "param") == (400, "stop")
    assert refusal(server.chat(stop=["a" * 4000, "b" * 97]), "message") == (
        400, "stop has 2 texts with 4097 characters: give at most 64 with 4096")


def test_the_tool_loop_of_openais_client_goes_round(server, create_chat):
    first = create_chat(**ASKED, tool_choice="required").choices[0].message
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call.id) for call in first.tool_calls)  # as Mistral's templates demand
    messages = [*user_says(), first]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "Sun."} for call in first.tool_calls]
    last = create_chat(**{**ASKED, "messages": messages, "tool_choice": "none"}, max_tokens=8)
    assert last.choices[0].message.content
    assert last.choices[0].finish_reason in ("stop", "length")
    ids = server.tokenize(messages=[m if isinstance(m, dict) else m.model_dump() for m in messages])
    text = server.engine.call(lambda pipeline: pipeline.text.decode(ids)).result(60)
    assert "tool: Sun." in text and '<tool_call>\n{"name": "' in text


def test_llamas_form_is_written_and_read_too(tmp_path):
    with served(tmp_path, LLAMA) as started, openai.OpenAI(base_url=f"{started.url}/v1", api_key="none") as sdk:
        asked = {**ASKED, "tool_choice": "required", "max_tokens": 400}
        text, calls, reason = streamed(sdk.chat.completions.create, **asked)
        assert (text, reason) == ("", "tool_calls") and calls
        check(*calls)


@pytest.mark.parametrize("fields, param", [
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice.function.name"),
    ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"), ({"logprobs": True}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "no"}}}],
      "tool_choice": "required"}, "tools")])
def test_what_cannot_be_called_is_refused_by_its_field(server, fields, param):
    got = server.chat(**{**ASKED, **fields})
    assert refusal(got, "param") == (400, param), got.text


def test_messages_that_the_template_does_not_take_are_the_clients_to_change(server):
    got = server.chat(messages=[{"role": "system", "content": "refuse"}, *user_says()])
    assert refusal(got, "message") == (
        400, "this model's chat template does not take these messages (TemplateError: no such role): change them")
