"""Thoughts, texts and calls of each format of answers, in each protocol, whole and streamed."""
import asyncio
import json

import pytest

from model.markup import FORMATS, GLM, HERMES, PHI, QWEN_CODER, dialect_of
from serve.anthropic import MessageAnswer
from serve.completions import ChatAnswer
from serve.engine import Ended
from serve.protocol import Body, Choice
from serve.responses import ResponseAnswer
from serve.text_chunks import Piece
from serve.tools import calls_of, with_system_tools
from tests.serving import QUESTION, live, refusal, text_of, user_says
from tests.test_serve_tools import ASKED, STOP, WEATHER
from tests.test_tools import CASES, TOOLS

THINKER = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n"
TALKER = THINKER.replace("<think>\n", "{{ '' if '</think>' else tools }}")
BLOCKS = {"message": "text", "text": "text", "reasoning": "thoughts", "thinking": "thoughts"}
FAILED = "this model's template does not support them"


class LetterEngine:
    """In place of an engine: each job gets this answer, a letter at a time."""

    def __init__(self, text, in_thoughts=False):
        self.text, self.in_thoughts = text, in_thoughts

    def submit(self, jobs):
        for job in jobs:
            job.in_thoughts = self.in_thoughts
            for letter in self.text:
                job.report(Piece(letter))
            job.report(Ended("stop", "", 1, 0, 0, 0))


def of_blocks(blocks):
    """The thoughts, the text and the calls of an answer's blocks, each with its type."""
    texts, calls = {"thoughts": "", "text": ""}, []
    for block in blocks:
        if block["type"] in BLOCKS:
            texts[BLOCKS[block["type"]]] += block["said"]
        else:
            calls.append((block["name"], block["said"]))
    return texts["thoughts"], texts["text"], calls


def of_chat(message):
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"] or "", calls


def of_response(response):
    return of_blocks([{**item, "said": item.get("arguments", "") + "".join(
        entry["text"] for entry in item.get("content", ()))} for item in response["output"]])


def of_message(message):
    content_of = {"text": lambda block: block["text"], "thinking": lambda block: block["thinking"],
                  "tool_use": lambda block: json.dumps(block["input"])}
    return of_blocks([{**block, "said": content_of[block["type"]](block)} for block in message["content"]])


def chat_stream(events):
    message = {"content": "", "tool_calls": []}
    for _, event_data in events:
        for key, value in event_data["choices"][0]["delta"].items():
            if key == "tool_calls":
                [call] = value
                message[key] += [{"function": {"name": "", "arguments": ""}}] * (call["index"] == len(message[key]))
                for name, piece in call["function"].items():
                    message[key][call["index"]]["function"][name] += piece
            elif key != "role":
                message[key] = message.get(key, "") + value
    return of_chat(json.loads(json.dumps(message)))


def response_stream(events):
    blocks = []
    for name, event_data in events:
        if name == "response.output_item.added":
            blocks.append({**event_data["item"], "said": ""})
        elif name.endswith(".delta"):
            assert event_data["output_index"] == len(blocks) - 1
            blocks[-1]["said"] += event_data["delta"]
        elif name == "response.output_item.done":
            assert of_response({"output": [event_data["item"]]}) == of_blocks(blocks[-1:])
    assert of_response(events[-1][1]["response"]) == of_blocks(blocks)
    return of_blocks(blocks)


def message_stream(events):
    blocks = []
    for name, event_data in events:
        if name == "content_block_start":
            blocks.append({**event_data["content_block"], "said": ""})
        elif name == "content_block_delta":
            delta_type, piece = event_data["delta"].values()
            blocks[-1]["said"] += piece
            assert delta_type.startswith((blocks[-1]["type"], "input_json"))
    return of_blocks(blocks)


PROTOCOLS = {ChatAnswer: (of_chat, chat_stream), ResponseAnswer: (of_response, response_stream),
             MessageAnswer: (of_message, message_stream)}


def events_of(data):
    """The events of a stream, as names and event_data."""
    for event in data.decode().strip().split("\n\n"):
        *name, line = event.split("\n")
        if line != "data: [DONE]":
            yield "".join(name).removeprefix("event: "), json.loads(line.removeprefix("data: "))


async def answered(answer_class, engine, call_format):
    """An answer as a whole, and as the events of its stream."""
    choice = Choice("", "own", dialect=call_format, tools=TOOLS)
    whole = await answer_class(engine, Body(), [choice], "toy").whole_body()
    answer = answer_class(engine, Body(stream=True), [choice], "toy")
    pieces = [piece async for piece in answer.stream(await answer.next())]
    return whole, [*events_of(b"".join(pieces))]


@pytest.mark.parametrize("answer_class", PROTOCOLS)
def test_each_answer_is_the_same_whole_and_streamed(answer_class):
    of_whole, of_stream = PROTOCOLS[answer_class]
    for call_format, text, *expected in CASES:
        if call_format is None:  # an answer that cannot have thoughts
            expected = ["", text, []]
        whole, events = asyncio.run(answered(answer_class, LetterEngine(text), call_format))
        whole = whole["choices"][0]["message"] if answer_class is ChatAnswer else whole
        assert of_stream(events) == tuple(expected), text
        if answer_class is MessageAnswer:  # which has no arguments that are cut off
            expected[2] = [(name, json.dumps(parsed(arguments))) for name, arguments in expected[2]]
        assert of_whole(whole) == tuple(expected), text


def parsed(arguments):
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def test_thoughts_that_the_prompt_began_are_thoughts():
    for answer_class, (_, of_stream) in PROTOCOLS.items():
        engine = LetterEngine("Is it 4?</think>\nYes.", in_thoughts=True)
        _, events = asyncio.run(answered(answer_class, engine, HERMES))
        assert of_stream(events) == ("Is it 4?", "Yes.", [])


@pytest.mark.parametrize("call_format, text, is_whole", [
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "Ro', False),
    (HERMES, '<tool_call>{"name": "add", "arguments": ', False),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}', True), (GLM, "<tool_call>add<arg_key>a", False),
    (QWEN_CODER, "<tool_call><function=add><parameter=a>\n1", False),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> Well', True)])
def test_a_call_that_a_stop_text_cuts_off_is_none_to_make(call_format, text, is_whole):
    whole, events = asyncio.run(answered(ChatAnswer, LetterEngine(text), call_format))
    finish_reasons = [whole["choices"][0]["finish_reason"], events[-1][1]["choices"][0]["finish_reason"]]
    assert finish_reasons == ["tool_calls" if is_whole else "stop"] * 2
    whole, events = asyncio.run(answered(ResponseAnswer, LetterEngine(text), call_format))
    calls = [item["status"] for item in whole["output"] if item["type"] == "function_call"]
    assert calls == ["completed" if is_whole else "incomplete"] * len(calls)
    whole, _ = asyncio.run(answered(MessageAnswer, LetterEngine(text), call_format))
    assert whole["stop_reason"] == ("tool_use" if is_whole else "end_turn")


@pytest.mark.parametrize("call_format", [GLM, QWEN_CODER])
def test_arguments_that_are_no_json_have_no_grammar(call_format):
    assert calls_of(TOOLS, call_format, several=True) is None


def test_a_template_that_reads_tools_in_the_system_message_has_them_there():
    assert dialect_of("{% if message['role'] == 'system' and 'tools' in message %}<|tool|>").has_system_tools
    assert [row for row in FORMATS if row.has_system_tools] == [PHI]
    functions = json.dumps([WEATHER["function"], STOP["function"]])
    [system, user] = with_system_tools(user_says(), [WEATHER, STOP])
    assert (system, user) == ({"role": "system", "content": "", "tools": functions}, *user_says())
    brief = {"role": "system", "content": "Be brief."}
    assert with_system_tools([brief, user], [WEATHER, STOP]) == [{**brief, "tools": functions}, user]


# --- live -------------------------------------------------------------------------------------------------------------

def served(folder, template):
    (folder / "own.jinja").write_text(template)
    return live("link=threads", "draft=suffix", f"template={folder / 'own.jinja'}")


def test_a_prompt_that_ends_in_open_thoughts_begins_them_unless_a_grammar_holds_the_answer(tmp_path):
    with served(tmp_path, THINKER) as started:
        got = started.chat(max_tokens=12).json()["choices"][0]["message"]
        assert got["content"] == "" and got["reasoning_content"]
        assert text_of(started.chat(guided_choice=["Yes."])) == "Yes."
        fields = {"max_tokens": 12, "messages": user_says()}
        [thinking] = started.post("/v1/messages", **fields).json()["content"]
        assert thinking == {"type": "thinking", "thinking": got["reasoning_content"], "signature": ""}
        [item] = started.post("/v1/responses", input=QUESTION, max_output_tokens=12).json()["output"]
        assert item["content"] == [{"type": "reasoning_text", "text": got["reasoning_content"]}]
        refused = started.chat(tools=[STOP])
        assert refusal(refused, "param") == (400, "tools") and FAILED in refused.text


def test_a_template_that_takes_tools_in_an_unknown_format_gets_none(tmp_path):
    with served(tmp_path, TALKER) as started:
        refused = started.chat(tools=[STOP])
        assert refusal(refused, "param") == (400, "tools") and FAILED in refused.text
        assert started.chat(max_tokens=2).status_code == 200


def test_a_call_that_no_grammar_can_write_is_not_forced(tmp_path):
    with served(tmp_path, TALKER + "<tool_call><function=name>") as started:
        refused = started.chat(tools=[STOP], tool_choice="required")
        assert refusal(refused, "param") == (400, "tool_choice")
        call = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
        got = started.chat(**{**ASKED, "guided_choice": [call]}).json()["choices"][0]
        assert got["message"]["tool_calls"][0]["function"] == {"name": "stop", "arguments": "{}"}
        assert (got["message"]["content"], got["finish_reason"]) == (None, "tool_calls")
