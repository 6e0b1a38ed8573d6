"""Special tokens that mark thoughts and calls: GPT-OSS's channels, and the marks of other families, in texts."""
import pytest

from model.grammar import Grammars
from model.markup import FORMATS, HARMONY, CallPart, CallReader, Thought
from model.text import AnswerReader, Text, TokenTexts
from tests.grammars import LETTERS, tokenizer
from tests.json_files import change_json, load_json, save_json
from tests.test_grammar import written
from tests.test_text import bytelevel

SPECIAL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
TEMPLATE = (
    "{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('no') }}{% endif %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant")
ANSWER = "<|channel|>analysis<|message|>The sum of 2 and 2.<|end|><|start|>assistant<|channel|>final<|message|>Four."
SHOWN = "<think>The sum of 2 and 2.</think>\n\nFour."
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'


def with_special(folder, names, **settings):
    """A text whose tokenizer has these special tokens, too."""
    base = bytelevel(folder)
    file = load_json(base / "tokenizer.json")
    file["added_tokens"] += [{"id": 320 + index, "content": name, "special": True, "normalized": False, "lstrip": False,
                              "rstrip": False, "single_word": False} for index, name in enumerate(names)]
    save_json(base / "tokenizer.json", file)
    change_json(base / "tokenizer_config.json", **settings)
    return Text(base)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return with_special(tmp_path_factory.mktemp("channels"), SPECIAL, chat_template=TEMPLATE)


def ids_of(text, answer):
    return text.tokenizer(answer, add_special_tokens=False)["input_ids"]


def read(text, answer, **options):
    """The pieces of an answer that comes a token at a time."""
    reader = AnswerReader(text, **options)
    pieces = [reader.read([token]) for token in ids_of(text, answer)] + [reader.finish()]
    assert "".join(pieces) == reader.text
    return reader.text


@pytest.mark.parametrize("answer, shown", [
    (f"{ANSWER}<|return|>", SHOWN), (ANSWER.replace("Four.", ""), "<think>The sum of 2 and 2."),
    ("<|channel|>final<|message|>Four.<|return|>", "Four."), ("Four.", "Four."), (f"{CALL}<|call|>", CALL),
    (f"{ANSWER}<|end|><|start|>assistant{CALL}<|call|>",
     f"{SHOWN}<|start|>assistant{CALL}"),
    ("<|channel|>ana", "<|channel|>ana")])
def test_an_answer_in_channels_is_its_last_one_after_its_thoughts(text, answer, shown):
    assert read(text, answer) == shown
    whole = AnswerReader(text)
    assert whole.read(ids_of(text, answer)) + whole.finish() == shown


def test_the_channels_are_as_the_model_writes_them_where_marks_are_shown(text):
    assert read(text, f"{ANSWER}<|return|>", shows_marks=True) == text.decode(ids_of(text, ANSWER)) == ANSWER
    reader = CallReader(HARMONY, {"add": {}})
    assert reader.read(ANSWER) == [Thought("The sum of 2 and 2."), "Four."]
    assert CallReader(HARMONY, {"add": {}}).read(CALL) == [CallPart("add"), CallPart(arguments='{"a": 1}')]
    assert read(text, ANSWER, stop="sum", shows_marks=True) == "<|channel|>analysis<|message|>The "
    assert read(text, ANSWER, stop="sum") == "<think>The "


def test_the_next_turn_has_no_thoughts_and_no_channels(text):
    shown = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": SHOWN}]
    prompt = text.decode(text.chat_ids([*shown, {"role": "user", "content": "Sure?"}], "own"))
    assert prompt == ("<|start|>user<|message|>2 + 2?<|end|><|start|>assistant<|message|>Four.<|end|>"
                      "<|start|>user<|message|>Sure?<|end|><|start|>assistant")
    cut_off = [shown[0], {"role": "assistant", "content": SHOWN[:20]}, shown[0]]
    assert "<|start|>assistant<|message|><|end|>" in text.decode(text.chat_ids(cut_off, "own"))


@pytest.mark.parametrize("call_format", [row for row in FORMATS if len(row.marks) > 1])
def test_the_marks_of_a_format_print_and_other_special_tokens_do_not(call_format, tmp_path):
    text = with_special(tmp_path, [*call_format.marks, "<|other|>"])
    names = [f"a{mark}<|other|>" for mark in call_format.marks]
    assert text.decode(ids_of(text, "".join(names))) == "".join(names).replace("<|other|>", "")
    spelled = TokenTexts(text.tokenizer)
    assert [spelled(320 + index).data for index in range(len(names) + 1)] == [
        *(mark.encode() for mark in call_format.marks), None]


@pytest.mark.parametrize("call_format", [row for row in FORMATS if row.text and row.marks])
def test_a_forced_call_begins_with_the_familys_own_token(call_format):
    from serve.tools import calls_of

    larger = tokenizer(LETTERS.values(), [])
    larger.add_special_tokens({"additional_special_tokens": [*call_format.marks]})
    grammars = Grammars(larger, len(larger), frozenset({0}))
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    token_ids = written(grammars, calls_of({"add": schema}, call_format, several=False))
    names = larger.convert_ids_to_tokens(token_ids)
    call_text = call_format.text
    whole = call_text.before + call_text.call + call_text.call_end + call_text.after
    assert [name for name in names if name in call_format.marks] == sorted(
        (mark for mark in call_format.marks if mark in whole), key=whole.index)
    head = call_text.call.replace("NAME", "add")
    assert larger.decode(token_ids) == f'{call_text.before}{head}{{"a": 1}}{call_text.call_end}{call_text.after}'
