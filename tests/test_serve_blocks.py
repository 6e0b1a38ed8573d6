"""/v1/responses and /v1/messages: texts, tools and streams, as their clients read them; the texts are a chat's."""
import json

import pytest

from serve.bodies import MAX_SMALL_BYTES, _report_left_out
from tests.serving import QUESTION, live, refusal, text_of, user_says
from tests.test_serve_tools import STOP, WEATHER, check, server

__all__ = ["server"]  # a fixture
HI = {"max_tokens": 5, "messages": user_says("hi")}
PLAIN = {"model": "toy", "max_tokens": 12, "messages": user_says()}
KINDS = ("invalid_request_error", "authentication_error")  # of a wrong key, for OpenAI's clients and for Anthropic's
STRANGERS = ("invalid_request_error", "permission_error")  # of a page of another origin
SAMPLED = {"temperature": 1, "seed": 7}
RESPONSE = {"model": "toy", "temperature": 1, "extra_body": {"seed": 7}}
RESPONSES_TOOL = {"type": "function", **WEATHER["function"]}
WEATHER_FORM = {"type": "json_schema", "schema": WEATHER["function"]["parameters"]}
MESSAGES_TOOL = {"name": "weather", "description": "Says.", "input_schema": WEATHER["function"]["parameters"]}


@pytest.fixture(scope="module")
def text(server):
    return text_of(server.chat(**PLAIN, **SAMPLED))


def events(server, path, **body):
    """The events of a stream, by name and facts."""
    got = server.post(path, stream=True, **body)
    assert got.headers["content-type"].startswith("text/event-stream"), got.text
    found = []
    for event in got.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(facts["type"] == name for name, facts in found)
    return found


def test_openais_client_of_responses_reads_texts_whole_and_streamed(sdk, text):
    asked = {**RESPONSE, "input": QUESTION, "max_output_tokens": 12}
    whole = sdk.responses.create(**asked)
    assert whole.output_text == text and whole.status in ("completed", "incomplete")
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with sdk.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].response.output_text == text and events[-1].type == f"response.{whole.status}"
    [done] = [event.item for event in events if event.type == "response.output_item.done"]
    assert whole.output[-1].status == done.status == events[-1].response.output[-1].status == whole.status


def test_an_item_of_responses_that_is_cut_by_length_is_incomplete(server):
    asked = {"model": "toy", "input": QUESTION, "max_output_tokens": 3}
    whole = server.post("/v1/responses", **asked).json()
    assert whole["status"] == whole["output"][-1]["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    done = [facts["item"] for name, facts in events(server, "/v1/responses", **asked) if name.endswith("item.done")]
    assert [item["status"] for item in done] == ["incomplete"]


def test_openais_client_of_responses_goes_round_with_tools_and_schemas(sdk):
    asked = {**RESPONSE, "tools": [RESPONSES_TOOL]}
    talk = user_says([{"type": "input_text", "text": QUESTION}])
    with sdk.responses.stream(**asked, input=talk, tool_choice="required", parallel_tool_calls=False) as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        called = stream.get_final_response().output[0]
    check((called.name, called.arguments))
    assert streamed == called.arguments and called.type == "function_call"
    talk += [{"type": "function_call", "call_id": called.call_id, "name": called.name, "arguments": called.arguments},
             {"type": "function_call_output", "call_id": called.call_id, "output": "Sun."}]

    assert sdk.responses.create(**{**asked, "tools": []}, input=talk, max_output_tokens=5).output_text
    held = sdk.responses.create(model="toy", input=QUESTION, text={"format": {**WEATHER_FORM, "name": "weather"}})
    check(("weather", held.output_text))


def test_messages_are_answered_whole_and_streamed(server, text):
    asked = {**PLAIN, **SAMPLED}
    whole = server.post("/v1/messages", **asked).json()
    assert whole["content"] == [{"type": "text", "text": text}]
    assert whole["stop_reason"] in ("end_turn", "max_tokens") and whole["usage"]["input_tokens"] > 0
    found = events(server, "/v1/messages", **asked)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(facts["delta"]["text"] for name, facts in found if name == "content_block_delta") == text
    assert found[-2][1]["usage"] == {"output_tokens": whole["usage"]["output_tokens"]}


def test_a_message_names_the_stop_sequence_that_has_ended_it_whole_and_streamed(server, text):
    asked = {**PLAIN, "stop_sequences": ["never", text[6:9]], **SAMPLED}
    ended = {"stop_reason": "stop_sequence", "stop_sequence": text[6:9]}
    whole = server.post("/v1/messages", **asked).json()
    assert whole["content"] == [{"type": "text",
                                 "text": text[:text.index(text[6:9])]}]
    assert ended.items() <= whole.items()
    assert events(server, "/v1/messages", **asked)[-2][1]["delta"] == ended


def test_messages_call_tools_and_read_their_results(server):
    usual = {"model": "toy", "tools": [MESSAGES_TOOL], **SAMPLED}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {**usual, "max_tokens": 400, "messages": user_says(), "tool_choice": choice}
    whole = server.post("/v1/messages", **asked).json()
    [called] = whole["content"]
    assert (called["type"], whole["stop_reason"]) == ("tool_use", "tool_use")
    check((called["name"], json.dumps(called["input"])))
    pieces = [facts["delta"]["partial_json"] for name, facts in events(server, "/v1/messages", **asked)
              if name == "content_block_delta"]
    assert json.loads("".join(pieces)) == called["input"]
    result = {"type": "tool_result", "tool_use_id": called["id"], "content": [{"type": "text", "text": "Sun."}]}
    talk = [*user_says(), {"role": "assistant", "content": [called]}, *user_says([result])]
    again = server.post("/v1/messages", **usual, max_tokens=5, messages=talk, system="Be brief.",
                        tool_choice={"type": "none"})

    assert again.json()["content"][0]["type"] == "text", again.text


@pytest.mark.parametrize("path, fields, words", [
    ("/v1/messages", {"messages": user_says()}, "max_tokens is missing"),
    ("/v1/messages", {**HI, "messages": []}, "messages is empty"),
    ("/v1/messages", {**HI, "messages": [{"role": "judge", "content": "hi"}]}, "messages.0.role is none of"),
    ("/v1/messages", {**HI, "system": 7}, "system is no list of objects"),
    ("/v1/messages", {**HI, "tools": [{"type": "function", "function": {"name": "a"}}]}, "tools.0.type is missing or"),
    ("/v1/responses", {"input": "hi", "tools": [{"name": "a"}]}, "tools.0.type is missing or invalid: send function"),
    ("/v1/messages", {**HI, "tool_choice": {"type": "some"}}, "tool_choice.type is invalid: send auto, none, any"),
    ("/v1/messages", {**HI, "tool_choice": {"type": "tool"}}, "or tool with a name"),
    ("/v1/messages", {**HI, "tool_choice": {"type": "any"}}, "tool_choice names no tool"),
    ("/v1/messages", {**HI, "output_config": {"format": {**WEATHER_FORM, "schema": {"type": 1}}}}, "mend it"),
    ("/v1/messages", {**HI, "messages": [{"role": "assistant", "content": "Well"}]}, "nothing to answer"),
    ("/v1/messages", {**HI, "messages": user_says([{"type": "image"}])}, "send text"),
    ("/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}, "nothing is stored here"),
    ("/v1/responses", {"input": [{"type": "computer_call"}]}, "is not supported"),
    ("/v1/responses", {"input": "hi", "tool_choice": {"type": "web_search"}}, "tool_choice.type is not function"),
    ("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning_effort (in a body of /v1/responses"),
    ("/v1/responses", {"input": 5}, "input is no list"), ("/v1/responses", {}, "input is missing"),
    ("/v1/responses", {"input": [{"role": "tool", "content": "hi"}]}, "input.0.role is none of user, assistant"),
    ("/v1/responses", {"input": user_says([{"type": "image"}])}, "input.0.content has a part"),
    ("/v1/responses", {"input": [{"type": "function_call", "arguments": "{}"}]}, "function.name"),
    ("/v1/responses", {"input": "hi", "text": {"format": {"type": "yaml"}}}, "response_format.type")])
def test_what_is_wrong_is_refused_in_the_form_of_the_protocol(server, path, fields, words):
    got = server.post(path, **fields)
    said = got.json()["error"]["message"]
    assert got.status_code == 400 and words in said and "\n" not in said, got.text
    assert (got.json().get("type") == "error") == path.startswith("/v1/messages")


def test_a_key_comes_in_either_header_and_errors_have_the_form_of_the_path():
    with live("link=threads", "api_key=a-key") as started:
        for path in ("/v1/messages", "/v1/messages/no_such", "/v1/chat/completions"):
            is_anthropic = path.startswith("/v1/messages")
            stranger = started.client.post(path, content="{}", headers={"Origin": "http://evil.example"})
            assert refusal(stranger, "type") == (403, STRANGERS[is_anthropic])
            unknown_key = started.client.post(path, content="{}", headers={"x-api-key": "another"})
            assert refusal(unknown_key, "type") == (401, KINDS[is_anthropic])
        for headers in ({"x-api-key": "a-key"}, {"Authorization": "Bearer a-key"}):
            assert started.client.get("/v1/models", headers=headers).status_code == 200


def test_a_schema_holds_a_message_and_its_prompt_is_counted(server):
    asked = {"model": "toy", "messages": user_says(), "system": "Be brief."}
    got = server.post("/v1/messages", **asked, **SAMPLED,
                      max_tokens=200, output_config={"format": WEATHER_FORM}).json()
    check(("weather", got["content"][0]["text"]))
    counted = server.post("/v1/messages/count_tokens", **asked)
    assert counted.json() == {"input_tokens": got["usage"]["input_tokens"]}


def test_anthropics_own_client_streams_and_calls(server, text):
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is tried where it is installed")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = {**PLAIN, "extra_body": SAMPLED}
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().content[0].text == text

    assert client.messages.create(**asked).content[0].text == text
    call = {**asked, "max_tokens": 400, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    with client.messages.stream(**call) as stream:
        [block] = stream.get_final_message().content
    check((block.name, json.dumps(block.input)))
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**asked, "max_tokens": 0})


CALLED = {"name": "stop", "arguments": "{}"}
CALL = {"id": "call_1", "type": "function", "function": CALLED}
DONE = {"role": "tool", "tool_call_id": "call_1", "content": "Done."}
CLOSED = {"type": "object", "properties": {}, "required": []}
REPLAYED = {  # requests as these clients were seen to make them, in the midst of an agent's loop
    "Open WebUI": ("/v1/chat/completions", {
        "stream": True, "stream_options": {"include_usage": True}, "tools": [STOP], "tool_choice": None,
        "messages": [{"role": "system", "content": "Be brief."}, *user_says(),
                     {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **CALL}]}, DONE]}),
    "litellm": ("/v1/chat/completions", {
        "tools": [STOP], "extra_body": {}, "messages": [
            *user_says(),
            {"role": "assistant", "content": None, "function_call": None, "provider_specific_fields": {"refusal": None},
             "tool_calls": [CALL]},
            {**DONE, "name": None}]}),
    "langchain-anthropic": ("/v1/messages", {
        "max_tokens": 5, "tools": [{"name": "stop", "input_schema": CLOSED, "description": "", "cache_control": None}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [*user_says(),
                     {"role": "assistant", "content": [
                         {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "I stop."},
                         {"type": "tool_use", "id": "call_1", "name": "stop", "input": {}, "caller": None}]},
                     *user_says([
                         {"type": "tool_result", "tool_use_id": "call_1", "content": None, "is_error": False}])]}),
    "Claude Code": ("/v1/messages", {
        "max_tokens": 5, "system": [{"type": "text", "text": "Be brief."}], "stream": True,
        "messages": [*user_says(), {"role": "system", "content": "These agents can be called: none."}]}),
    "openai-agents": ("/v1/responses", {
        "include": [], "store": None, "instructions": "Be brief.", "max_output_tokens": 5, "tool_choice": "auto",
        "tools": [{"type": "function", "name": "stop", "parameters": CLOSED, "strict": True, "description": ""}],
        "input": [*user_says(),
                  {"type": "reasoning", "id": "rs_1", "summary": []},
                  {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                      {"type": "output_text", "text": "I stop.", "annotations": [], "logprobs": []}]},
                  {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed", **CALLED},
                  {"type": "function_call_output", "call_id": "call_1", "output": "Done."}]})}


PROVIDERS = {  # tools that only the provider runs, beside a function
    "/v1/messages": {"max_tokens": 400, "messages": user_says(),
                     "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "tools": [
        MESSAGES_TOOL, {"type": "web_search_20260209", "name": "web_search", "max_uses": 5}]},
    "/v1/responses": {"tool_choice": "required", "parallel_tool_calls": False, "input": QUESTION,
                      "max_output_tokens": 400, "tools": [
        RESPONSES_TOOL, {"type": "custom", "name": "apply_patch"}, {"type": "web_search"}, {"type": "web_search"},
        {"type": "namespace", "name": "mcp", "tools": [RESPONSES_TOOL]}, {"type": "local_shell"}]}}


@pytest.mark.parametrize("path", PROVIDERS)
def test_tools_that_only_their_provider_runs_are_left_out_with_a_line_for_each_type(server, path, capsys):
    _report_left_out.cache_clear()
    fields = PROVIDERS[path]
    for filler in ({}, {"metadata": "x" * MAX_SMALL_BYTES}):
        got = server.post(path, **fields, **filler, temperature=1, seed=7).json()
        calls = got.get("content") or got["output"]
        assert [call.get("name") for call in calls] == ["weather"], got
    lines = capsys.readouterr().err.splitlines()
    types = [tool["type"] for tool in fields["tools"][1:]]
    assert lines == [f"flowspec: tools of the type {tool_type} are left out of requests, since only their provider can "
                     "run them" for tool_type in dict.fromkeys(types)]
    only_provided = {**fields, "tools": fields["tools"][1:]}
    assert "tool_choice names no tool" in server.post(path, **only_provided).json()["error"]["message"]


@pytest.mark.parametrize("client", REPLAYED)
def test_requests_as_other_clients_make_them_are_answered(server, client):
    path, fields = REPLAYED[client]
    short = {"max_tokens": 5} if path == "/v1/chat/completions" else {}
    got = server.post(path, model="toy", **short, **fields)
    assert got.status_code == 200, got.text
    written = got.text if fields.get("stream") else json.dumps(got.json())
    assert '"content"' in written and "error\": {" not in written
