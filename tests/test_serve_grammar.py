"""Answers of the server that follow a grammar, by the fields of OpenAI and vLLM."""
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving import refusal, server, user_says

pytest.importorskip("llguidance", reason="grammars need llguidance (serve/requirements.txt)")
__all__ = ["server"]  # a fixture
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8},
                                           "age": {"type": "integer", "minimum": 0, "maximum": 120}},
          "required": ["name", "age"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


def said(got):
    assert got.status_code == 200, got.text
    choice = got.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_a_schema_is_kept_whole_and_streamed_by_openais_client(create_chat):
    asked = {"model": "toy", "messages": user_says(), "response_format": FORMAT, "temperature": 0.9, "seed": 3}
    whole = create_chat(**asked)
    chunks = list(create_chat(**asked, stream=True))
    person = json.loads(whole.choices[0].message.content)
    assert person.keys() == {"name", "age"}
    assert len(person["name"]) <= 8 and 0 <= person["age"] <= 120
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 3


def test_answers_at_once_keep_each_its_own_grammar(server):
    asked = [{"response_format": FORMAT, "temperature": 1, "seed": 5}, {"guided_regex": "[a-c]{4}-[0-9]{2}"},
             {"guided_choice": ["fox", "baker"]}, {"guided_grammar": 'root ::= "(" [a-z] ")" | "none"'},
             {"guided_json": PERSON}, {"guided_json": json.dumps({"type": "boolean"})}]
    alone = [said(server.chat(**fields)) for fields in asked]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda fields: said(server.chat(**fields)), asked)) == alone
    assert re.fullmatch("[a-c]{4}-[0-9]{2}", alone[1]) and alone[2] in ("fox", "baker")
    assert re.fullmatch(r"\([a-z]\)|none", alone[3]) and alone[5] in ("true", "false")
    assert json.loads(alone[4]).keys() == {"name", "age"}
    assert said(server.post("/v1/completions", prompt="one", guided_choice=["two"])) == "two"


def test_any_object_is_an_object_as_far_as_there_is_room(server):
    got = server.chat(response_format={"type": "json_object"}, max_tokens=40).json()["choices"][0]
    assert got["message"]["content"].startswith("{")
    if got["finish_reason"] == "stop":
        assert isinstance(json.loads(got["message"]["content"]), dict)


@pytest.mark.parametrize("fields, param, words", [
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "response_format",
     "Invalid type: nothing"),
    ({"guided_json": {"type": "string", "minLength": 5, "maxLength": 3}}, "guided_json", "Unsatisfiable schema"),
    ({"guided_json": "{"}, "guided_json", "cannot be met"), ({"guided_regex": "((("}, "guided_regex", "cannot be met"),
    ({"guided_grammar": 'start: "a" start'}, "guided_grammar", "without an end"),
    ({"guided_regex": "((a{999}){999}){999}"}, "guided_regex", "the regex "),
    ({"guided_json": {"exclusiveMinimum": 1, "maximum": 1.5}}, "guided_json", "narrower than 1"),
    ({"guided_choice": []}, "guided_choice", "is empty"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json and guided_regex are both given")])
def test_what_cannot_be_met_is_refused_by_its_field(server, fields, param, words):
    got = server.chat(**fields)
    assert refusal(got, "param") == (400, param), got.text
    assert words in got.json()["error"]["message"]


LIMITED = {"guided_regex": "(([a-z]{1,300} ){1,300}){1,300}END", "temperature": 0, "max_tokens": 200}


def test_a_grammar_that_reaches_a_limit_ends_in_an_error_each_time_and_never_in_half_an_answer(server):
    for _ in range(2):
        assert refusal(server.chat(**LIMITED), "message") == (400, LIMIT)
    lines = server.chat(**LIMITED, stream=True).text.split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == LIMIT
    assert re.fullmatch("[a-c]{4}", said(server.chat(guided_regex="[a-c]{4}")))


LIMIT = "the answer cannot be continued in its grammar (lexer error: too many expressions constructed): simplify " \
        "the grammar"


@pytest.mark.parametrize("text", ["x</s>y", " lead", "<s>"])
def test_a_chosen_text_is_written_whole(server, text):
    assert said(server.chat(guided_choice=[text])) == text
