"""A large body is read by another process: its answer, or why it is refused, is that of a small one."""
import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest

from config.run_config import RunConfig
from config.serve_config import ServeConfig
from serve import anthropic, responses
from serve.bodies import MAX_SMALL_BYTES, BodyReader
from serve.protocol import MAX_VALUES, Chat, Completion, Refused, ToTokenize, body_of, read_body, small_body
from tests.serving import refusal, server, user_says  # noqa: F401
from tests.test_body_steps import run_config  # noqa: F401

FILLER = {"metadata": "x" * MAX_SMALL_BYTES}  # nobody reads this field
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
         "/tokenize")
FIELDS = {"messages": user_says(), "input": "What is bread?", "prompt": "Bread is", "max_tokens": 5,
          "max_output_tokens": 5, "temperature": 0}


def without_ids(answer):
    """An answer without what differs from one to the next."""
    if isinstance(answer, list):
        return [without_ids(value) for value in answer]
    if not isinstance(answer, dict):
        return answer
    changing = ("id", "created", "created_at", "prompt_tokens_details", "input_tokens_details",
                "completion_tokens_details")
    return {name: without_ids(value) for name, value in answer.items() if name not in changing}


@pytest.mark.parametrize("path", PATHS)
def test_every_endpoint_answers_a_large_body_as_a_small_one(server, path):  # noqa: F811
    fields = {name: value for name, value in FIELDS.items() if name != "prompt" or path != "/tokenize"}
    if path == "/v1/responses":
        fields.pop("prompt")
    answers = [server.post(path, **fields, **filler) for filler in ({}, FILLER)]
    assert [answer.status_code for answer in answers] == [200, 200]
    small, large = (without_ids(answer.json()) for answer in answers)
    assert small == large


@pytest.mark.parametrize("fields, param", [
    ({"stop": ["a"] * 65}, "stop"), ({"stop": ["a" * 4097]}, "stop"),
    ({"messages": user_says(5)}, "messages.0.content"), ({"suffix": "a"}, "suffix"),
    ({"user": "\ud800"}, "user"), ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"guided_regex": "((("}, "guided_regex"), ({"temperature": float("nan")}, "temperature")])
def test_a_large_body_is_refused_as_a_small_one(server, fields, param):  # noqa: F811
    small, large = (server.chat(**{"question": "x", **fields, **filler}) if "messages" not in fields
                    else server.post("/v1/chat/completions", **fields, **filler) for filler in ({}, FILLER))
    assert large.status_code == 400 and large.json() == small.json()
    assert refusal(large, "param") == (400, param)


@pytest.mark.parametrize("error", [TimeoutError("not finished after 10 seconds"), ValueError("it ended")])
def test_a_body_that_takes_too_much_time_or_memory_to_read_is_refused_with_the_reason(error):
    def fail(*arguments):
        raise error

    reader = BodyReader(ServeConfig.of())
    reader._sandbox = SimpleNamespace(call=fail)
    with pytest.raises(Refused) as refused:
        asyncio.run(reader.read(b" " * (MAX_SMALL_BYTES + 1), Chat, dict))
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")
    assert refused.value.message == f"the body cannot be read ({error}): send a simpler one"


def test_too_many_values_are_refused_wherever_they_are_but_a_prompt_may_have_many():
    many = [0] * MAX_VALUES
    calls = [{"function": {"name": "a", "arguments": json.dumps({"a": many})}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *user_says("x")]
    for fields, words in (({"messages": user_says("x"), "metadata": many}, "the body has "),
                          ({"messages": messages}, "messages has ")):
        with pytest.raises(Refused) as refused:
            read_body(json.dumps(fields).encode(), Chat).choices(RunConfig(template="own"))
        assert refused.value.message.startswith(words)
        assert refused.value.message.endswith(f" values: send {MAX_VALUES} at most") and refused.value.status == 400

    config = RunConfig(max_length=100)
    assert read_body(json.dumps({"prompt": many}).encode(), Completion).choices(config)[0].prompt == many
    with pytest.raises(Refused) as refused:
        read_body(json.dumps({"prompt": many * 2}).encode(), Completion).choices(config)
    assert refused.value.message == f"prompt has {2 * MAX_VALUES + 2} values: send {MAX_VALUES + 1600} at most"


SCHEMA = {"type": "object", "properties": {
    "a": {"maximum": float("inf"), "enum": [10 ** 30, -0.5, None, "\U0001f600"]}}}
TOOLS = [{"type": "function", "function": {"name": "a", "parameters": SCHEMA}}]
CALLS = [{"id": "b", "type": "function", "function": {"name": "a", "arguments": "{}"}}]
COUNT = partial(dict, max_tokens=1)


@pytest.mark.parametrize("body_class, translate, fields", [
    *((Chat, dict, {"messages": user_says("x"), **fields}) for fields in (
        {}, {"grammar": ""}, {"top_k": -1, "seed": 3.0, "max_tokens": 8.0, "user": None, "flowspec_tree": True},
        {"json_schema": SCHEMA}, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "a"}}, "stream": True},
        {"logit_bias": {"5": -1}, "stop": "a", "stream_options": {"include_usage": True}, "n": 2, "seed": 2})),
    (Chat, dict, {"messages": [{"role": "assistant", "content": None, "tool_calls": CALLS},
                               *user_says([{"type": "text", "text": "é", "detail": 1}])]}),
    (Completion, dict, {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 2}), (Completion, dict, {"prompt": "x"}),
    (ToTokenize, dict, {"messages": user_says("x")}), (ToTokenize, dict, {"prompt": "x"}),
    (Chat, COUNT, {"messages": user_says("x")}),
    (Chat, anthropic.as_chat, {"messages": user_says("x"), "max_tokens": 1, "tools": [{"name": "a"}], "system": "b"}),
    (Chat, responses.as_chat, {"input": "x", "max_output_tokens": 4, "text": {"format": {"type": "json_object"}}})])
def test_a_body_that_another_process_has_read_is_the_same_body(run_config, body_class, translate, fields):  # noqa: F811
    data = json.dumps({**fields, "metadata": {"a": [1]}}).encode()
    read_here = read_body(data, body_class, translate)
    small_text = small_body(run_config, data, body_class, translate)
    copied = body_of(small_text, body_class)
    assert copied == read_here and "metadata" not in small_text
    assert ("messages" in copied.model_fields_set) == ("messages" in read_here.model_fields_set)
