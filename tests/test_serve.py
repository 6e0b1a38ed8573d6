"""The server over HTTP: OpenAI's protocol as real clients speak it, the texts of `run_pipe.sh`, and who may ask."""
import asyncio
import json
import shutil
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import httpx
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config.cli import parse
from config.run_config import RunConfig
from config.serve_config import ServeConfig, is_loopback
from model.grammar import Guide
from scripts.serve import build, keyed, main
from serve import running
from serve.app import CLIENT_GONE, Server
from serve.auth import Guard
from serve.engine import Health
from serve.fields import HARMLESS, REFUSED
from serve.protocol import Chat, Refused, read_body
from tests.checkpoints import split_quietly
from tests.forked import command
from tests.json_files import change_json, json_values
from tests.saved import answer_of, wait_until
from tests.serving import QUESTION, alive, live, read_all, refusal, text_of, user_says

CHAT = {"messages": user_says("x")}
SAMPLED = {"model": "toy", "temperature": 0.8, "seed": 5, "max_tokens": 40}
GREEDY = {"model": "toy", "temperature": 0, "max_tokens": 8}
ENDLESS = {"messages": user_says(), "temperature": 50, "seed": 4, "max_tokens": 1900}


@pytest.fixture(scope="module")
def server():
    with live("link=threads", "max_requests=2", "queue=2", "body_mb=0.1", "ablate=thrift") as started:  # always guesses
        yield started


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """What `run_pipe.sh` answers with the options of SAMPLED."""
    return text_of_run_pipe(tmp_path_factory.mktemp("pipe"), "temperature=0.8", "seed=5", "max_new_tokens=40")


def text_of_run_pipe(folder, *words):
    return answer_of(folder, "threads_per_rank=1", f"prompt={QUESTION}", *words)["text"]


def idle(server):
    return wait_until(lambda: not server.engine.jobs, 60)


# --- answers ----------------------------------------------------------------------------------------------------------

def test_a_chat_is_the_text_of_run_pipe_whole_and_streamed(server, create_chat, text):
    got = create_chat(messages=user_says(), **SAMPLED)
    assert got.choices[0].message.content == text
    assert got.choices[0].finish_reason in ("stop", "length") and got.object == "chat.completion"
    details, usage = got.usage.completion_tokens_details, got.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < details.accepted_prediction_tokens < usage.completion_tokens
    assert details.rejected_prediction_tokens > 0

    chunks = list(create_chat(messages=user_says(), stream=True,
                                              stream_options={"include_usage": True}, **SAMPLED))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, got.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions_take_texts_and_token_ids_and_echo_them(server, sdk):
    counted = server.post("/tokenize", prompt="def add(a, b):").json()
    ids = counted["tokens"]
    assert counted["count"] == len(ids) and counted["max_model_len"] == 2048

    whole = sdk.completions.create(prompt=["def add(a, b):", "def"], **GREEDY)
    by_ids = sdk.completions.create(prompt=ids, echo=True, **GREEDY)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert by_ids.choices[0].text == "def add(a, b):" + whole.choices[0].text
    streamed = sdk.completions.create(prompt=ids, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == by_ids.choices[0].text


def test_n_choices_have_seeds_that_follow_each_other_and_one_prompt(server, create_chat):
    options = {"model": "toy", "messages": user_says("Name an animal."), "temperature": 1.0, "max_tokens": 12}
    both = create_chat(n=2, seed=7, **options)
    alone = [create_chat(seed=seed, **options) for seed in (7, 8)]
    assert [choice.message.content for choice in both.choices] == [got.choices[0].message.content
                                                                   for got in alone]
    assert both.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert both.usage.completion_tokens == sum(got.usage.completion_tokens for got in alone)


def test_stop_texts_end_an_answer_and_are_not_in_it(server, text):
    stops = [text[20:24], text[10:13]]
    cut = min(text.index(stop) for stop in stops)
    got = server.chat(stop=stops, **SAMPLED).json()["choices"][0]
    assert got["message"]["content"] == text[:cut] and got["finish_reason"] == "stop"


def test_messages_may_be_parts_and_the_system_and_the_developer_are_heard(server):
    parts = [{"type": "text", "text": "What does a "}, {"type": "text", "text": "baker do?"}]
    whole = server.chat("What does a baker do?", max_tokens=10).json()["choices"]
    assert server.chat(parts, max_tokens=10).json()["choices"] == whole
    by_system, by_developer = (server.tokenize(messages=[{"role": role, "content": "Be brief."}, *user_says(parts)])
                               for role in ("system", "developer"))
    assert by_system == by_developer != server.tokenize(messages=user_says(parts))


@contextmanager
def live_with(saved, folder, file_name, *words, **fields):
    """A server of the tiny model, with other fields in a file of its tokenizer."""
    shutil.copytree(saved / "base", folder / "base")
    change_json(folder / "base" / file_name, **fields)
    split_quietly(folder / "base", folder / "0+2+2", "0+2+2", saved / "head")
    with live("link=threads", f"model_dir={folder / '0+2+2'}", "ignore_eos=true", *words) as started:
        yield started


def test_a_template_of_the_tokenizer_reads_variables_and_messages_of_tools(saved, tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if brief %}brief {% endif %}"
    talk = [*user_says("hi"), {"role": "tool", "content": "sun"}]
    brief = {"messages": talk, "chat_template_kwargs": {"brief": True}}
    with live_with(saved, tmp_path, "tokenizer_config.json", "template=own", chat_template=template) as started:
        brief_ids = started.tokenize(**brief)
        text = started.engine.call(lambda pipeline: pipeline.text.decode(brief_ids)).result(60)
        assert text == "user: hi tool: sun brief "
        long_ids = started.tokenize(messages=talk)
        assert long_ids == started.tokenize(messages=talk, chat_template_kwargs={"brief": False})
        assert started.chat(**brief, max_tokens=4).json()["usage"]["prompt_tokens"] == len(brief_ids)
        refused = started.post("/tokenize", messages=talk, chat_template_kwargs={"tokenize": True})
        assert refusal(refused, "param") == (400, "chat_template_kwargs.tokenize")


def test_a_tokenizer_whose_pattern_fails_on_a_text_refuses_that_request_and_answers_the_next(saved, tmp_path):
    costly = {"type": "Replace", "pattern": {"Regex": "(a+)+$|(x+x+)+y"}, "content": "b"}
    with live_with(saved, tmp_path, "tokenizer.json", normalizer=costly) as started:
        for _ in range(2):
            wrong = started.post("/v1/completions", prompt="a" * 40 + "!", max_tokens=4)
            assert wrong.status_code == 400 and "retry-limit-in-match over" in wrong.json()["error"]["message"]
            right = started.post("/v1/completions", prompt="hi", max_tokens=4)
            assert right.status_code == 200 and right.json()["usage"]["completion_tokens"] == 4


def test_penalties_and_biases_are_those_of_run_pipe(server, tmp_path):
    fields = {"temperature": 0.8, "seed": 5, "min_p": 0.02, "repetition_penalty": 1.3,
              "presence_penalty": 0.5, "frequency_penalty": 0.25}
    words = [f"{name}={value}" for name, value in fields.items()]
    expected = text_of_run_pipe(tmp_path, *words, "max_new_tokens=30", "logit_bias=300:-100,301:2.5")
    got = server.chat(**fields, max_tokens=30, logit_bias={"300": -100, "301": 2.5})
    assert text_of(got) == expected
    unknown = server.chat(logit_bias={"99999999": 1})
    assert (unknown.status_code, "logit_bias has 99999999" in unknown.text) == (400, True)


def test_the_models_and_the_figures_are_shown(server, sdk):
    assert [model.id for model in sdk.models.list()] == ["toy"] == [sdk.models.retrieve("toy").id]
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")
    server.chat(max_tokens=3)
    figures = server.client.get("/metrics").text
    assert 'flowspec_requests_total{outcome="answered"}' in figures and "flowspec_restarts_total 0.0" in figures
    found = dict(line.rsplit(" ", 1) for line in figures.splitlines() if not line.startswith("#"))
    shares = [float(found[f'flowspec_rank_busy_share{{rank="{rank}"}}']) for rank in range(5)]
    assert any(shares) and all(0 <= share <= 1 for share in shares)
    assert float(found["flowspec_plain_seconds_per_token"]) > 0
    assert server.client.get("/health").json()["status"] == "ok"


# --- what is refused --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields, param", [
    *((fields, *fields) for fields in (  # by the only field that there is
        {"tools": [{"type": "function", "function": {"name": "a"}}]}, {"response_format": "json"},
        {"logit_bias": {"5": 101}}, {"logit_bias": {"fox": 1}}, {"repeat_penalty": 1.1},
        {"chat_template_kwargs": {"brief": True}}, {"max_tokens": 0}, {"n": 17}, {"stop": ["a"] * 65},
        {"stop": "\ud800"}, {"messages": []}, {"messages": "hello"}, {"messages": user_says("\ud800")})),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": user_says(5)}, "messages.0.content"),
    ({"messages": user_says([{"type": "text", "text": 5}])}, "messages.0.content.0.text"),
    ({"messages": user_says([{"type": "image_url", "image_url": {"url": "x"}}])}, "messages.0.content.0.type")])
def test_what_is_wrong_or_not_supported_is_refused_by_its_field(server, fields, param):
    got = server.chat("x", **fields)
    error = got.json()["error"]
    assert (got.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert len(error["message"].split()) > 3


def chat_of(fields):
    return read_body(json.dumps({**CHAT, **fields}).encode(), Chat)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_of_another_server_that_changes_the_answer_is_refused_by_name(name):
    with pytest.raises(Refused) as refused:
        chat_of({name: {"some": "value"}})
    assert (refused.value.param, refused.value.status) == (name, 400)


@pytest.mark.parametrize("fields, param", [
    *((fields, *fields) for fields in (
        {"skip_special_tokens": False}, {"add_generation_prompt": False},
        {"structured_outputs": {"structural_tag": "{}"}}, {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"json_schema": 5}, {"n_predict": -2}, {"echo": True})),
    ({"structured_outputs": {"regex": "a"}, "grammar": "root ::= \"b\""}, "grammar"),
    ({"response_format": {"type": "grammar", "grammar": "x"}}, "response_format.type")])
def test_a_constraint_that_is_not_supported_is_refused_by_its_field(fields, param):
    with pytest.raises(Refused) as refused:
        chat_of(fields)
    assert refused.value.param == param


NULL = {"type": "null"}
NULL_GUIDE = Guide.json_schema(NULL)


@pytest.mark.parametrize("fields, guide", [
    ({"structured_outputs": {"json": NULL}}, NULL_GUIDE),
    ({"structured_outputs": {"json": '{"type": "null"}', "disable_any_whitespace": True}}, NULL_GUIDE),
    ({"structured_outputs": {"regex": "a"}}, Guide("regex", "a")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Guide("choice", '["a", "b"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Guide("grammar", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Guide.json_schema()),
    ({"structured_outputs": {"regex": None, "json_object": False}}, None), ({"grammar": ""}, None),
    ({"grammar": 'root ::= "a"'}, Guide("grammar", 'root ::= "a"')), ({"regex": "a"}, Guide("regex", "a")),
    ({"ebnf": 'root ::= "a"'}, Guide("grammar", 'root ::= "a"')),
    ({"json_schema": NULL}, NULL_GUIDE), ({"json_schema": '{"type": "null"}'}, NULL_GUIDE),
    ({"response_format": {"type": "json_object", "schema": NULL}}, NULL_GUIDE),
    ({"response_format": {"type": "json_schema", "schema": NULL}}, NULL_GUIDE)])
def test_a_grammar_in_the_field_of_another_server_is_the_same_grammar(fields, guide):
    assert [*chat_of(fields).guides.values()] == ([guide] if guide else [])


@pytest.mark.parametrize("fields, options", [
    ({"max_tokens": -1}, {"max_new_tokens": 2048}), ({"n_predict": -1}, {"max_new_tokens": 2048}),
    ({"n_predict": 7}, {"max_new_tokens": 7}), ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_new_tokens": 5}),
    ({"max_tokens": 8.0, "seed": 3.0, "top_k": 4.0}, {"max_new_tokens": 8, "seed": 3, "top_k": 4}),
    ({"ignore_eos": True}, {"ignore_eos": True}), ({"top_logprobs": 2.0, "logprobs": True}, {"logprobs": 2})])
def test_numbers_mean_what_they_mean_to_other_servers(fields, options):
    [all_options] = chat_of(fields).options(RunConfig())
    read = {name: all_options[name] for name in options}
    assert read == options and [*map(type, read.values())] == [*map(type, options.values())]


def test_a_single_part_is_a_content(server):
    parts = [{"type": name, "text": QUESTION} for name in ("text", "input_text", "output_text")]
    contents = [QUESTION, parts[0], [QUESTION], *zip(parts), [{"type": "refusal", "refusal": QUESTION}]]
    assert {chat_of({"messages": user_says(content)}).messages[0]._text("") for content in contents} == {QUESTION}
    assert server.chat([QUESTION], max_tokens=5).json()["choices"] == server.chat(max_tokens=5).json()["choices"]


def test_an_echo_without_an_answer_is_the_prompt_with_its_log_probabilities(server):
    fields = {"prompt": "One day a fox", "echo": True, "logprobs": 1}
    got = server.post("/v1/completions", **fields, max_tokens=0).json()
    [choice] = got["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("One day a fox", "length")
    assert got["usage"]["completion_tokens"] == 0
    [longer] = server.post("/v1/completions", **fields, max_tokens=1).json()["choices"]
    count = got["usage"]["prompt_tokens"]
    assert {name: values[:count] for name, values in longer["logprobs"].items()} == choice["logprobs"]
    assert server.post("/v1/completions", prompt="One", max_tokens=0).json()["error"]["param"] == "max_tokens"


def test_what_asks_for_nothing_and_what_nobody_knows_is_ignored(server):
    harmless = {**dict.fromkeys(REFUSED, []),
                **{name: values[0] for name, values in HARMLESS.items()}}
    harmless.update(logprobs=False, top_logprobs=0, chat_template_kwargs={}, user="me")
    got = server.chat(max_tokens=2, **harmless, seed=None, store=True, something={"else": 1})
    assert got.status_code == 200, got.text


def test_half_a_character_in_a_body_is_refused_wherever_it_is(server):
    start = (b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, '
             b'"tools": [{"type": "function", "function":')
    for function in (b'{"name": "\\ud83d"}', b'{"name": "a", "description": "\\ud83d"}',
                     b'{"name": "a", "parameters": {"\\udc00": {}}}'):
        wrong = server.client.post("/v1/chat/completions", content=start + function + b"}]}")
        assert wrong.status_code == 400 and "tools has half a character" in wrong.json()["error"]["message"]


def test_a_prompt_that_is_too_long_and_a_body_that_is_too_large_are_refused(server):
    long = server.chat("fox " * 5000)
    assert refusal(long) == (400, "context_length_exceeded")
    assert "this model's maximum context length is 2048 tokens" in long.json()["error"]["message"]
    longer = server.post("/tokenize", prompt="fox " * 20000).json()["error"]
    assert (longer["code"], longer["param"]) == ("context_length_exceeded", "prompt")
    assert refusal(server.chat("fox " * 50000)) == (413, "body_too_large")
    nowhere = server.client.get("/v2/nothing").json()["error"]
    assert nowhere["code"] == "not_served" and "addresses of the API begin with /v1/" in nowhere["message"]
    assert server.client.get("/v1/models/").json() == server.client.get("/v1/models").json()
    packed = server.client.post("/v1/completions", content=b"x", headers={"Content-Encoding": "gzip"})
    assert refusal(packed) == (415, "encoding")
    wrong = server.client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert server.client.head("/health").status_code == 200
    assert server.post("/v1/completions", prompt=[1, "a"]).json()["error"]["param"] == "prompt.1"


JSON = json_values(st.just("\ud800"))
FIELDS = [*"""messages prompt temperature top_p top_k seed n stop stream stream_options user echo logprobs top_logprobs
    chat_template_kwargs model max_completion_tokens""".split(), *REFUSED]
TALK = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]),
                                       "content": JSON}), max_size=3)


@settings(max_examples=50)
@given(path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize"]),
       talk=TALK, fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
@example(path="/v1/completions", talk=[], fields={"prompt": [2**70]})
@example(path="/v1/completions", talk=[],
         fields={"prompt": [[], ["a"]], "n": 10**400})
@example(path="/v1/chat/completions", talk=[],
         fields={"temperature": float("nan"), "top_p": float("inf")})
def test_no_body_brings_an_error_of_the_server(server, path, talk, fields):
    if isinstance(fields.get("max_completion_tokens"), int):
        fields["max_completion_tokens"] = min(fields["max_completion_tokens"], 2)  # no long answers
    body = {"messages": talk, "prompt": "a", **fields, "max_tokens": 1}
    got = server.post(path, **body)
    assert got.status_code < 500, (body, got.text)
    if got.status_code >= 400:
        assert got.json()["error"]["message"]


@pytest.mark.parametrize("data",
                         [b"", b"[]", b"{", b"\xff", b"[" * 100000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_object_is_refused(server, data):
    assert refusal(server.client.post("/v1/chat/completions", content=data)) == (400, "invalid_json")


# --- places -----------------------------------------------------------------------------------------------------------

def num_cancelled(server):
    return server.engine.metrics.requests_by_outcome.labels("cancelled")._value.get()


def test_a_client_that_leaves_frees_its_place_streaming_or_not(server):
    assert idle(server)
    for stream in (True, False):
        before = num_cancelled(server)
        with httpx.Client(base_url=server.url) as client:
            content = json.dumps({**ENDLESS, "stream": stream, "n": 2})
            request = client.build_request("POST", "/v1/chat/completions", content=content)
            leave = threading.Timer(1.0, client.close)
            leave.start()
            with suppress(httpx.HTTPError, RuntimeError):
                client.send(request)
            leave.join()
        assert idle(server)
        assert num_cancelled(server) > before

    assert server.chat(max_tokens=2).status_code == 200


def test_a_client_may_leave_in_the_midst_of_its_body_or_just_before_its_first_event(server, monkeypatch):
    assert idle(server)
    app = Server(server.engine, ServeConfig.of(), "toy").app
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
             "headers": [(b"host", b"127.0.0.1")], "asgi": {"spec_version": "2.3"}}

    async def ask(*heard):
        """What the client is sent, who lets this be heard; None is silence."""
        left, sent = list(heard), []

        async def receive():
            found = left.pop(0)
            return found if found is not None else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)
        return sent

    half = {"type": "http.request", "body": body[:9], "more_body": True}
    gone = {"type": "http.disconnect"}
    assert asyncio.run(ask(half, gone))[0]["status"] == CLIENT_GONE
    monkeypatch.setattr("serve.app.BODY_SECONDS", 0.01)
    assert asyncio.run(ask(half, None))[0]["status"] == 408
    monkeypatch.undo()
    before = num_cancelled(server)
    asyncio.run(ask({"type": "http.request", "body": body}, None, gone))
    assert idle(server) and num_cancelled(server) == before + 1


def test_a_reader_who_is_slow_stalls_nobody_and_loses_nothing(server):
    assert idle(server)
    asked = {**ENDLESS, "max_tokens": 100}
    more = {"flowspec_tree": True, "logprobs": True, "top_logprobs": 20}  # more than all buffers hold
    body = json.dumps({**asked, **more, "stream": True})
    address = httpx.URL(server.url)
    server.door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections from now on
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((address.host, address.port))
        slow.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc.decode()}\r\nConnection: close\r\n"
                     f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert wait_until(lambda: len(server.engine.jobs) == 1, 30)
        assert server.chat(max_tokens=8).status_code == 200
        assert idle(server)  # the slow reader's answer is whole, though nobody has read it
        read = read_all(slow)
    events = [json.loads(line[6:]) for line in read.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event.get("choices", [])]
    text = "".join(choice["delta"].get("content", "") for choice in choices)

    assert text == text_of(server.chat(**asked))
    assert b"data: [DONE]" in read and len(read) > 120_000
    assert not any("usage" in event for event in events), "it was not asked for"


# --- strangers --------------------------------------------------------------------------------------------------------

def test_pages_of_strangers_and_names_that_lead_here_are_refused(server):
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Host": "[::1"},
                    {"Origin": "http://["}, {"Origin": "null"}):
        refused = server.client.get("/v1/models", headers=headers)
        assert refusal(refused) == (403, list(headers)[0].lower())
    assert server.client.get("/v1/models", headers={"Origin": server.url}).status_code == 200


@pytest.mark.parametrize("host, words, status", [
    ("10.0.0.1:8000", "", 200), ("[fd00::1]:8000", "", 200),
    ("Box:8000", "", 200), ("box.local", "", 200),
    ("localhost", "", 200), ("evil.example", "", 403),
    ("box.evil.example", "", 403), ("", "", 403),
    ("evil.example", "api_key=x", 401)])
def test_an_open_server_is_asked_by_its_address_and_name_and_not_by_the_name_of_a_strangers_page(
        monkeypatch, host, words, status):
    monkeypatch.setattr(socket, "gethostname", lambda: "Box")
    config = parse(["host=0.0.0.0", "open=true", *words.split()], "", keys_class=ServeConfig)
    guard = Guard(lambda *called: None, config)
    headers = [(b"host", host.encode()), (b"origin", f"http://{host}".encode())]
    scope = {"type": "http", "path": "/v1/models", "headers": headers}
    refused = guard._refused(scope)
    assert (refused.status if refused else 200) == status
    at_loopback = Guard(lambda *called: None, parse(["host=127.0.0.1"], "", keys_class=ServeConfig))
    assert (at_loopback._refused(scope) is None) == (host == "localhost"), "there only loopback's own names are known"


def test_a_key_is_asked_for_and_an_origin_that_was_named_may_ask():
    with live("link=threads", "api_key=sécret", "cors=http://a.example") as started:
        assert started.client.get("/v1/models").status_code == 401
        key = {"Authorization": "Bearer sécret".encode()}
        wrong = {"Authorization": "Bearer secret"}
        assert started.client.get("/v1/models", headers=wrong).json()["error"]["code"] == "invalid_api_key"
        assert started.client.get("/health").status_code == 200
        got = started.client.get("/v1/models", headers={**key, "Origin": "http://a.example"})
        assert got.status_code == 200 and got.headers["access-control-allow-origin"] == "http://a.example"
        asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization, x-stainless-lang"}
        assert started.client.options("/v1/chat/completions", headers=asked).status_code == 200


@pytest.mark.parametrize("words, message", [
    ("host=0.0.0.0", "can be reached by other machines: add api_key=SECRET, or open=true"),
    ("cors=example.org", "which is not an origin"), ("queue=-1", "queue=-1 is not possible"),
    ("prompt=hello", "prompt is a key of single runs: leave"), ("maxrequests=2", "did you mean max_requests"),
    ("hosts=no/hosts.txt", "there is no file"), ("temperature=-1", "temperature=-1")])
def test_a_start_that_cannot_work_is_one_sentence(capfd, words, message):
    assert main(words.split()) == 2
    said = capfd.readouterr().err
    assert message in said and said.strip().count("\n") == 0


def test_an_address_that_is_taken_is_reported_before_anything_is_loaded(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([f"port={port}"]) == 2
    said = capfd.readouterr()
    assert f"cannot listen at host=127.0.0.1 port={port}" in said.err and "give another" in said.err
    assert len(said.err.strip().splitlines()) == 1 and not said.out


def test_a_key_in_the_environment_counts_and_loopback_is_distinguished_from_the_rest(monkeypatch):
    assert isinstance(parse(["host=0.0.0.0", "api_key=x"], "", keys_class=ServeConfig), ServeConfig)
    names = ["localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org", ""]
    assert [is_loopback(name) for name in names] == [True, True, True, False, False, False]
    monkeypatch.setenv("FLOWSPEC_API_KEY", "from the environment")
    assert parse(keyed(["host=0.0.0.0"]), keys_class=ServeConfig).api_key == "from the environment"


def test_the_command_serves_until_it_is_asked_to_end(tmp_path):
    with command(tmp_path, "scripts.serve", "port=0") as started:
        assert wait_until(lambda: "Ctrl-C" in started.stdout, 120), started.stderr
        _, page, api, *_ = started.stdout.splitlines()
        url = page.split()[1]
        assert api.split()[1] == f"{url}/v1"
        assert httpx.get(f"{url}/readyz").status_code == httpx.get(f"{url}/livez").status_code == 200
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "toy"
        started.process.send_signal(signal.SIGTERM)
        assert started.end(60) == 130
        assert started.stderr.strip().endswith("flowspec: stopped")


def test_who_is_still_answered_when_the_server_ends_learns_it(monkeypatch):
    monkeypatch.setattr("serve.running.LEAVE_SECONDS", 0.1)
    engine, listener = build(["port=0", "threads_per_rank=1", "link=threads", "max_requests=1"])
    body = {"messages": user_says(), "temperature": 2, "max_tokens": 1900,
            "logit_bias": {"2": -100}}  # the toy's </s>: no text ends by itself
    got = []
    with alive(engine, listener) as server:
        waiting = threading.Thread(target=lambda: got.append(server.post("/v1/chat/completions", **body)))
        streamed = json.dumps({**body, "stream": True})
        with server.client.stream("POST", "/v1/chat/completions", content=streamed) as found:
            lines = found.iter_lines()
            next(lines)
            waiting.start()
            assert wait_until(lambda: len(engine.jobs) == 2, 60)
            listener.should_exit = True
            last = [line for line in lines if line][-1]
        waiting.join()

    assert json.loads(last[6:])["error"]["code"] == "stopped"
    assert refusal(got[0]) == (503, "stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_is_asked_to_end_while_it_loads_waits_for_nobody(monkeypatch, capfd, number):
    loading = SimpleNamespace(health=Health("loading"), error=None, run=threading.Event().wait, stop=lambda: None)
    interrupted = SimpleNamespace(bound_sockets=list, run=lambda sockets: signal.raise_signal(number))
    monkeypatch.setattr("serve.running.LEAVE_SECONDS", 0.0)
    monkeypatch.setattr("serve.running.die", sys.exit)
    monkeypatch.setattr("config.console.REPEAT_SECONDS", 0)  # the test before may have pressed it just now
    before = {asked: signal.getsignal(asked) for asked in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as ended:
            running.run(loading, interrupted)
    finally:
        for asked, handler in before.items():
            signal.signal(asked, handler)

    assert ended.value.code == 130 and capfd.readouterr().err.strip() == "flowspec: stopped"
