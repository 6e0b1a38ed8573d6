"""Prompts get the correct ids, and streamed text equals the whole text, without half characters."""
import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.run_config import RunConfig
from launch.prepare import open_text
from model.sandbox import Sandbox
from model.text import LLAMA2_SYSTEM, AnswerReader, Stream, Text, chosen, own_template
from model.tokenizer import FileTokenizer
from tests.checkpoints import refused
from tests.forked import CONTEXT
from tests.json_files import change_json, load_json, save_json
from tests.saved import run_program

CORPUS = ["The quick brown fox jumps over the lazy dog, and the dog does not mind.", "  def add(a, b):", "naïve café",
          "How are you today? I am fine, thank you.", "One two three four five six seven eight nine ten."]
MIXED = "Grüße an 世界! 👩‍👧 costs 5 €,  two  spaces\n\tdone 🎉"


def sentencepiece(folder):
    """A tokenizer like LLaMA's: BPE over whole characters, bytes for the rest."""
    import sentencepiece as spm

    folder.mkdir(exist_ok=True)
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_prefix=str(folder / "tokenizer"), vocab_size=380,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, minloglevel=2)
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, "bos_token": "<s>",
                "eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False}
    save_json(folder / "tokenizer_config.json", settings)
    save_json(folder / "config.json", {"model_type": "llama", "vocab_size": 400, "eos_token_id": 2})
    return folder


def bytelevel(folder):
    """A tokenizer like Llama-3's: BPE over bytes, a chat template of its own, an end-of-turn token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    save_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1],
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}"
                         "{% if add_generation_prompt %}assistant:{% endif %}"})
    save_json(folder / "generation_config.json", {"eos_token_id": [1, 9]})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def llama(folder):
    return Text(sentencepiece(folder / "llama"))


@pytest.fixture(scope="module")
def llama3(folder):
    return Text(bytelevel(folder / "llama3"))


@pytest.fixture(scope="module")
def tokenizers(llama, llama3):
    from transformers import LlamaTokenizer

    slow = LlamaTokenizer.from_pretrained(str(llama.folder))
    return {"sentencepiece": llama.tokenizer, "slow sentencepiece": slow, "byte level": llama3.tokenizer}


KINDS = pytest.mark.parametrize("kind", ["sentencepiece", "slow sentencepiece", "byte level"])


def plain_ids(tokenizer, written):
    """The ids of a text, or of each of several, without a first token."""
    return tokenizer(written, add_special_tokens=False)["input_ids"]


def pieces(tokenizer, ids):
    stream = Stream(tokenizer)
    return [*(stream.add([i]) for i in ids), stream.finish()]


@KINDS
@settings(max_examples=60)
@given(text=st.text(st.sampled_from("ab the é€世👩‍👧\u200d \n\t.")) | st.text(st.characters(codec="utf-8")))
def test_streamed_pieces_together_are_the_decoded_text(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = plain_ids(tokenizer, text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True,
                                                               clean_up_tokenization_spaces=False)


@settings(max_examples=60)
@given(data=st.data())
def test_any_ids_in_any_portions_give_one_text(llama, data):
    ids = data.draw(st.lists(st.integers(0, 450), max_size=40))
    stream = Stream(llama.tokenizer)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)),
                                     max_size=5)))
    parts = [stream.add(ids[a:b])
             for a, b in zip([0, *cuts], [*cuts, len(ids)])]
    assert "".join(parts) + stream.finish() == llama.decode(ids)


@KINDS
def test_no_piece_holds_half_a_character(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = plain_ids(tokenizer, MIXED)
    assert len(ids) > len(MIXED), "the test needs characters of several tokens"
    found = pieces(tokenizer, ids)
    assert "".join(found) == MIXED and not any("\ufffd" in piece for piece in found)
    assert found[-1] == "", "nothing waits for the end"


def test_a_character_that_is_cut_off_appears_at_the_end_only(llama):
    ids = plain_ids(llama.tokenizer, "so 🎉")[:-1]
    stream = Stream(llama.tokenizer)
    assert stream.add(ids).strip() == "so"
    assert set(stream.finish()) == {"\ufffd"}


def test_a_character_that_never_becomes_whole_does_not_hold_the_text_back(llama):
    broken = llama.tokenizer.convert_tokens_to_ids("<0xFF>")
    stream = Stream(llama.tokenizer)
    assert "\ufffd" in stream.add([broken] * 100)


def test_spaces_at_the_seams_are_kept_and_special_tokens_print_nothing(llama):
    fox, dog = (plain_ids(llama.tokenizer, word) for word in ("fox", "dog"))
    assert llama.decode([1, *fox, 2, *dog, 2, 2]) == "fox dog"
    stream = Stream(llama.tokenizer)
    assert [stream.add(fox), stream.add([2]), stream.add(dog)] == ["fox", "", " dog"]


@pytest.mark.parametrize("word", [" the", " ", "</s>", "é", "\n"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(llama, word, monkeypatch):
    longest, decode = [0], llama.tokenizer.decode
    monkeypatch.setattr(llama.tokenizer, "decode",
                        lambda ids, **how: longest.append(len(ids)) or decode(ids, **how))
    stream = Stream(llama.tokenizer)
    stream.add(plain_ids(llama.tokenizer, word * 500))
    assert max(longest) < 100


# Prompts


def test_a_vicuna_prompt_is_fschats_with_one_first_token(llama):
    ids = llama.prompt_ids(["How are you?", "Fine.", "And the dog?"], "vicuna")
    text = llama.tokenizer.decode(ids, skip_special_tokens=False)
    assert ids[0] == 1 and ids.count(1) == 1 and ids.count(2) == 1
    assert text.startswith("<s> A chat between a curious user and an artificial intelligence assistant.")
    assert re.search(r"USER: How are you\? ASSISTANT: Fine\.</s> *USER: And the dog\? ASSISTANT:$", text)


def test_a_llama_2_prompt_has_its_system_prompt_and_the_originals_last_space(llama):
    text = llama.tokenizer.decode(llama.prompt_ids(["How are you?"], "llama-2"), skip_special_tokens=False)
    assert text.startswith("<s> [INST] <<SYS>>\nYou are a helpful, respectful and honest assistant. Always")
    assert LLAMA2_SYSTEM in text and text.endswith("How are you? [/INST] ")


def test_the_tokenizers_own_template_and_raw_text(llama, llama3):
    pytest.importorskip("jinja2", reason="transformers needs it for templates")
    own = llama3.prompt_ids(["Hi", "Ho", "Hu"], "own")
    assert llama3.tokenizer.decode(own) == ("<|begin_of_text|>user: Hi<|eot_id|>assistant: Ho<|eot_id|>"
                                            "user: Hu<|eot_id|>assistant:")
    assert llama.prompt_ids(["the dog"], "none") == llama.tokenizer("the dog")["input_ids"]
    assert llama.prompt_ids(["<s>the dog"], "none").count(1) == 1
    assert llama3.tokenizer.decode(llama3.prompt_ids(["the dog"], "none")) == "the dog"


def test_a_template_that_is_left_open_is_the_tokenizers_own_or_else_vicunas(llama, llama3, tmp_path):
    assert llama3.prompt_ids(["Hi"], "auto") == llama3.prompt_ids(["Hi"], "own") != llama3.prompt_ids(["Hi"], "vicuna")
    assert llama.prompt_ids(["Hi"], "auto") == llama.prompt_ids(["Hi"], "vicuna")
    assert chosen("auto", tmp_path) == "vicuna" and chosen("none", llama3.folder) == "none"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert chosen("auto", tmp_path) == "own"


def test_a_template_beside_the_tokenizer_is_read_where_transformers_does_not(llama3, monkeypatch, tmp_path):
    pytest.importorskip("jinja2", reason="transformers needs it for templates")
    folder = shutil.copytree(llama3.folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0].content }} A:")
    opened = Text._open

    def open_without_template(text):
        tokenizer = opened(text)
        tokenizer.chat_template = None
        return tokenizer

    monkeypatch.setattr(Text, "_open", open_without_template)
    assert Text(folder).prompt_text(["Hi"], "own") == "Q: Hi A:"


def test_a_template_in_a_file_is_read_in_place_of_the_tokenizers_own(folder, tmp_path):
    pytest.importorskip("jinja2", reason="transformers needs it for templates")
    file = tmp_path / "loud.jinja"
    file.write_text("{% for m in messages %}{{ m.content | upper }}!{% endfor %}")
    base = bytelevel(folder / "loud")
    text = Text(base, str(file))
    assert text.tokenizer.decode(text.prompt_ids(["Hi"], "own")) == "HI!"
    assert chosen(str(file), tmp_path) == "own"
    assert own_template(base, str(file)) == file.read_text()
    with refused("template=nowhere cannot be read (FileNotFoundError"):
        Text(base, "nowhere")


def test_every_end_token_that_the_model_names_counts(llama, llama3, folder):
    assert llama.end_ids == {2}
    assert llama3.end_ids == {1, 2, 9}
    endless = bytelevel(folder / "endless")
    (endless / "generation_config.json").write_text("{}")
    plain = (endless / "tokenizer.json").read_text().replace("<|eot_id|>", "<|other|>").replace("of_text", "of_it")
    (endless / "tokenizer.json").write_text(plain)
    change_json(endless / "tokenizer_config.json", eos_token=None)
    with refused("names no end token; add eos_token_id to its generation_config.json, or use ignore_eos=true"):
        _ = Text(endless).end_ids


@pytest.mark.parametrize("template, names, ends", [
    ("{% for m in messages %}[{{ m.role }}]{{ m.content }} <|im_done|>\n{% endfor %}", "<|im_done|>", {1, 9, 320}),
    ("{% for m in messages %}{{ m.content }}<a><ab>{% endfor %}", "<a> <ab> <|im_end|>", {1, 9, 320, 322}),
    ("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", "<|end|>", {1, 9, 320}),
    ("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", "<|end|> <|return|>", {1, 9, 321}),
    ("{% for m in messages %}{{ m.content }}!<ab>{% endfor %}", "<ab>", {1, 9}), ("{{ 1 / 0 }}", "", {1, 9})])
def test_the_token_with_which_a_template_closes_an_answer_ends_it(folder, tmp_path, template, names, ends):
    """And known names do; in the format of GPT-OSS, which has <|return|>, <|end|> ends only a part."""
    base = bytelevel(tmp_path)
    file = json.loads((base / "tokenizer.json").read_text().replace("<|eot_id|>", "<|other|>"))
    file["added_tokens"] += [{"id": 320 + place, "content": name, "special": True, "normalized": False, "lstrip": False,
                              "rstrip": False, "single_word": False} for place, name in enumerate(names.split())]
    save_json(base / "tokenizer.json", file)
    change_json(base / "tokenizer_config.json", chat_template=template)
    assert Text(base).end_ids == ends


# Bad input


def test_a_tokenizer_that_an_older_version_read_out_of_a_gguf_file_is_refused(llama3, tmp_path):
    with refused("was read out of a GGUF file in a way that splits texts wrongly: split the file again"):
        Text(copied(llama3, tmp_path / "old", model_type="gpt2"))


@pytest.mark.parametrize("turns, template, sentence", [
    ([], "vicuna", "the prompt is empty"), ([" \n"], "none", "the prompt is empty"),
    (["a", "b"], "vicuna", "end it with a turn of the user"),
    (["a"], "alpaca", "choose one of vicuna, llama-2, own, none"), (["a"], "own", "has no chat template of its own"),
])
def test_a_bad_prompt_is_refused(llama, turns, template, sentence):
    with refused(sentence):
        llama.prompt_ids(turns, template)


def test_a_folder_without_a_tokenizer_says_how_to_do_without(tmp_path):
    with refused("or give token ids with prompt_ids="):
        Text(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with refused("cannot be read"):
        Text(tmp_path)


def test_a_tokenizer_may_be_larger_than_the_model_but_ids_beyond_it_end_nothing(llama, tmp_path):
    shutil.copytree(llama.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 100, "eos_token_id": [2, 100]}')
    larger = Text(tmp_path)
    assert larger.remark == (f"the tokenizer in {tmp_path} has {len(llama.tokenizer)} tokens, but the model knows only "
                             "100: a prompt with one of the others is refused")
    assert larger.end_ids == {2} and llama.remark == ""


def copied(text, folder, **settings):
    """Copy the tokenizer's folder, with other settings."""
    shutil.copytree(text.folder, folder)
    change_json(folder / "tokenizer_config.json", **settings)
    return folder


def changed(text, tmp_path, **settings):
    """The same tokenizer with other settings."""
    return Text(copied(text, tmp_path / "new", **settings))


EXTRA = ["<|eot_id|>", "<|end_of_text|>"]


@pytest.mark.parametrize("more", [{}, {"processor_class": "Pixtral"}], ids=["by tokenizers", "by transformers"])
def test_settings_as_transformers_5_writes_them_are_read(llama3, tmp_path, more):
    """It calls a class and a list otherwise; 4 fails at both."""
    new_words = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "is_local": True,
                 "extra_special_tokens": EXTRA, "local_files_only": False, **more}
    new = changed(llama3, tmp_path, **new_words)
    old = Text(copied(llama3, tmp_path / "old", additional_special_tokens=EXTRA, **more))
    both = [text.tokenizer for text in (new, old)]
    assert type(both[0]) is type(both[1]) and isinstance(both[0], FileTokenizer) == (not more)
    ids = [tokenizer(f"{MIXED}<|eot_id|>{MIXED}")["input_ids"] for tokenizer in both]
    assert ids[0] == ids[1] and both[0].all_special_ids == both[1].all_special_ids
    assert new.decode(ids[0]) == old.decode(ids[1]) and new.end_ids == old.end_ids


@pytest.mark.parametrize("content", ["[]", "{"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                  "added_tokens.json", "generation_config.json"])
def test_a_file_of_a_tokenizer_that_is_no_object_is_named(llama3, tmp_path, name, content):
    folder = copied(llama3, tmp_path / "new")
    (folder / name).write_text(content)
    with refused(str(folder / name)):
        Text(folder)


def test_code_that_a_tokenizer_brings_is_never_run_and_nobody_is_asked(llama3, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    for name, kind in (("own", "Mine"), ("known", "PreTrainedTokenizerFast")):
        folder = copied(llama3, tmp_path / name, tokenizer_class=kind,
                        auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]})
        (folder / "mine.py").write_text(code)
        if name == "known":  # the class that transformers has itself does
            assert len(Text(folder).tokenizer) == len(llama3.tokenizer)
        else:
            with refused("needs code of its own (auto_map), but code from a model's folder is never run "
                         "(trust_remote_code=False)"):
                Text(folder)

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", [
    "PreTrainedTokenizerBase", "AutoModel", "AutoTokenizer", "pipeline", "BatchEncoding", 5])
def test_a_class_that_is_no_tokenizer_is_refused_in_one_sentence(llama3, tmp_path, kind):
    folder = copied(llama3, tmp_path / "new", tokenizer_class=kind)
    with refused(f"the tokenizer in {folder} cannot be read ("):
        Text(folder)


def with_rules(source, folder, **rules):
    """A copy of a tokenizer with other rules in its tokenizer.json."""
    copied(source, folder)
    change_json(folder / "tokenizer.json", **rules)
    return Text(folder)


def replaces(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


COSTLY = {"Regex": "(a+)+$|(x+x+)+y"}  # on a row of a's its library gives up


def test_a_pattern_that_fails_on_a_text_refuses_that_text_and_no_other(llama3, tmp_path):
    text = with_rules(llama3, tmp_path / "new", normalizer=replaces(COSTLY, "b"))
    for _ in range(2):
        assert text.prompt_ids(["dog"], "none")
        with refused("fails (RuntimeError: Onig: Regex search error: retry-limit-in-match over)"):
            text.prompt_ids(["a" * 40 + "!"], "none")


def test_a_decoder_that_fails_on_a_text_raises_what_ends_one_request_alone(llama3, tmp_path):
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                 "use_regex": True}, replaces(COSTLY, "b")]}
    text = with_rules(llama3, tmp_path / "new", decoder=decoder)
    ids = llama3.prompt_ids(["a" * 40 + "!"], "none")
    with pytest.raises(RuntimeError, match="retry-limit-in-match over"):
        text.decode(ids)
    assert text.decode(llama3.prompt_ids(["dog"], "none")) == "dog"


LONG = replaces({"String": "a"}, "a" * 300)
SEVERAL = [replaces({"String": "a"}, "a" * 20)] * 2
HARMLESS_RULES = [{"type": "Prepend", "prepend": "_"}, replaces({"String": " "}, "_"),
                  replaces({"Regex": " {2,}"}, " "), replaces({"String": "ab"}, "a" * 40)]


@pytest.mark.parametrize("rules, growth", [
    ({"normalizer": LONG}, 300), ({"decoder": LONG}, 300),
    ({"normalizer": {"type": "Sequence", "normalizers": SEVERAL}}, 400),
    ({"decoder": {"type": "Sequence", "decoders": SEVERAL}}, 400),
    ({"normalizer": replaces({"Regex": "x*"}, "a" * 150)}, 300)])
def test_rules_that_multiply_a_text_are_refused_before_they_are_used(llama3, tmp_path, rules, growth):
    with refused(f"its rules may write {growth} characters for one, more than 256"):
        with_rules(llama3, tmp_path / "new", **rules)


def test_rules_that_real_tokenizers_have_are_used(llama3, tmp_path):
    rules = {"type": "Sequence", "normalizers": HARMLESS_RULES}
    assert with_rules(llama3, tmp_path / "new", normalizer=rules).prompt_ids(["dog"], "none")


def test_a_text_has_the_same_tokens_each_time_though_training_left_merges_out(llama3, tmp_path):
    model = load_json(llama3.folder / "tokenizer.json")["model"]
    text = with_rules(llama3, tmp_path / "new", model={**model, "dropout": 0.9})
    prompt = ["the dog and the baker"]
    assert {tuple(text.prompt_ids(prompt, "none")) for _ in range(20)} == {tuple(llama3.prompt_ids(prompt, "none"))}


ATTACK = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


@pytest.mark.parametrize("template, sentence", [
    ("{% for m in %}", "TemplateSyntaxError"), ("{{ raise_exception('say \x1b[31m no') }}", r"say \x1b[31m no"),
    ("{% for i in range(10**12) %}x{% endfor %}", "OverflowError"), (ATTACK, "SecurityError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"), ("{{ messages.nothing.more }}", "UndefinedError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"), ("{{ messages + 1 }}", "TypeError"),
], ids="syntax raise range attack division undefined recursion type".split())
def test_a_chat_template_that_fails_is_reported_in_one_line(llama3, tmp_path, template, sentence):
    text = changed(llama3, tmp_path, chat_template=template)
    with refused(sentence) as error:
        text.prompt_ids(["Hi"], "own")
    printed = str(error.value)
    assert printed.startswith("the chat template of the tokenizer in") and "use template=vicuna" in printed


def messages_of(*talk):
    """The messages of a conversation, for pairs of a role and a text."""
    return [{"role": role, "content": content} for role, content in talk]


PARTS = "{% for m in messages %}[{% for part in m.content %}{{ part.text }}{% endfor %}]{% endfor %}"
MIXED_PARTS = """{% for m in messages %}
{%- if m.role == 'user' %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}|
{%- endfor %}"""
TEXT_OR_PARTS = """{% for m in messages %}
{%- if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text | upper }}{% endif %}|
{%- endfor %}"""
ONLY_PARTS = "{{ messages[0].content[0].text }}{% if messages[0].content is string %}{{ 1 / 0 }}{% endif %}"


@pytest.mark.parametrize("template, prompt", [
    (PARTS, "[Be kind.][dog][fox][lazy]"), (MIXED_PARTS, "Be kind.|dog|fox|lazy|"), (ONLY_PARTS, "Be kind."),
    (TEXT_OR_PARTS, "Be kind.|dog|fox|lazy|")], ids=["parts", "the user's", "text fails", "text or parts"])
def test_a_template_gets_its_contents_in_the_form_that_it_reads(llama3, tmp_path, template, prompt):
    text = changed(llama3, tmp_path, chat_template=template)
    messages = messages_of(("system", "Be kind."), ("user", "dog"), ("assistant", "fox"), ("user", "lazy"))
    for _ in range(2):
        assert text.tokenizer.decode(text.chat_ids(messages, "own")) == prompt


SIGNED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SYSTEM_FIRST = SIGNED.replace("<", "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
                              "{% endif %}<", 1)
SYSTEM_LOST = SIGNED.replace("<", "{% if m.role != 'system' or loop.first %}<", 1).replace(
    "{% endfor", "{% endif %}{% endfor")


@pytest.mark.parametrize("template, is_moved", [(SIGNED, False), (SYSTEM_FIRST, True), (SYSTEM_LOST, True)])
@pytest.mark.parametrize("has_first", [True, False])
def test_a_later_system_message_stays_in_its_place_or_joins_the_first_one(
        llama3, tmp_path, template, is_moved, has_first):
    """Agents send reminders so, also as the last message."""
    text = changed(llama3, tmp_path, chat_template=template)
    talk = messages_of(("user", "dog"), ("system", "Hush."), ("assistant", "fox"), ("user", "lazy"), ("system", "Now."))
    first = messages_of(("system", "Be kind."))[:has_first]
    joined = "\n\n".join(message["content"] for message in [*first, *talk] if message["role"] == "system")
    head = "<system>Be kind." if has_first else ""
    wanted = f"{head}<user>dog<system>Hush.<assistant>fox<user>lazy<system>Now."
    if is_moved:
        wanted = f"<system>{joined}<user>dog<assistant>fox<user>lazy"
    assert text._chat_text([*first, *talk], "own", {}) == wanted


@pytest.mark.parametrize("template", ["{{ bos_token }}Hello", "{% for m in messages %}{{ m.role }}{% endfor %}",
                                      "{{ messages[0].content[0].image }}x"])
def test_a_template_that_leaves_out_the_words_of_the_user_is_refused(llama3, tmp_path, template):
    text = changed(llama3, tmp_path, chat_template=template)
    for _ in range(2):
        with refused("fails (ValueError: it leaves out the words of the user); use template=vicuna"):
            text.prompt_ids(["Hi"], "own")


GREEDY = """{% set said = messages[0].content %}{% if said == "loop" %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif said == "eat" %}{{ "x" * 10**10 }}{% elif said == "babble" %}{{ "x" * 10**7 }}{% endif %}{{ said }}"""


@pytest.fixture(scope="module")
def greedy(llama3, tmp_path_factory):
    return Text(copied(llama3, tmp_path_factory.mktemp("greedy") / "new", chat_template=GREEDY))


@pytest.mark.parametrize("said, seconds, sentence", [
    ("loop", 0.01, "TimeoutError: not finished after 0.01 seconds"), ("eat", 60.0, "MemoryError"),
    ("babble", 60.0, "it returns a text of 10000006 characters")])
def test_a_chat_template_is_bounded_each_time_and_works_the_next_time(greedy, monkeypatch, said, seconds, sentence):
    for _ in range(2):
        with monkeypatch.context() as patch, refused(sentence):
            patch.setattr("model.text.PATIENCE", seconds)
            greedy.prompt_ids([said], "own")
        assert greedy.tokenizer.decode(greedy.prompt_ids(["dog"], "own")) == "dog"


def test_a_process_that_used_up_its_processor_time_was_too_slow_and_any_other_end_is_an_error(monkeypatch):
    """On a busy machine a call may take longer than its processor time, and its text may not depend on that."""
    end = Sandbox(lambda number: os.kill(os.getpid(), number))
    with pytest.raises(TimeoutError, match="not finished after 9 seconds"):
        end.call(9.0, signal.SIGXCPU)
    with pytest.raises(ValueError, match="it ended without an error message"):
        end.call(9.0, signal.SIGKILL)

    monkeypatch.setattr("model.sandbox.BUSY_FACTOR", 1e4)
    slow = Sandbox(lambda: time.sleep(0.05) or "text")
    assert slow.call(0.01) == "text"


def test_a_chat_template_has_one_process_which_ends_with_its_text(llama3):
    text = Text(llama3.folder)
    before = set(multiprocessing.active_children())
    talks = [["Hi", "Ho", str(i)] for i in range(20)]
    found = [text.prompt_ids(talk, "own") for talk in talks]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(partial(text.prompt_ids, template="own"), talks)) == found
    (process,) = set(multiprocessing.active_children()) - before
    os.kill(process.pid, signal.SIGKILL)  # as the system does when memory is short
    process.join()
    assert text.prompt_ids(talks[0], "own") == found[0]
    (process,) = set(multiprocessing.active_children()) - before
    assert len(os.listdir(f"/proc/{process.pid}/fd")) == 4, "the standard ones, and its link"
    text.end_sandbox()
    assert not set(multiprocessing.active_children()) - before  # those of other tests may end meanwhile
    assert text.prompt_ids(talks[0], "own") == found[0]
    del text
    gc.collect()

    assert process not in multiprocessing.active_children()


def test_no_process_of_a_template_stays_while_weights_are_loaded(llama3):
    """It would keep the memory that loading frees."""
    before = set(multiprocessing.active_children())
    part = SimpleNamespace(folder=llama3.folder, verify_texts=lambda: None)
    assert open_text(RunConfig(template="own"), part).tokenizer.chat_template
    assert not set(multiprocessing.active_children()) - before


def ask_and_wait(folder, link):
    """Send the number of this process's children after a template was used."""
    text = Text(folder)
    text.prompt_ids(["Hi"], "own")
    link.send(len(multiprocessing.active_children()))
    signal.pause()


def test_the_process_of_a_template_ends_with_a_program_that_is_killed(llama3):
    mine, its = CONTEXT.Pipe()
    program = CONTEXT.Process(target=ask_and_wait, args=(llama3.folder, its))
    program.start()
    its.close()
    assert mine.recv() == 1
    program.kill()
    program.join()
    with pytest.raises(EOFError):  # comes when nobody has the pipe open any more
        mine.recv()


def test_half_a_character_is_refused(llama):
    with refused("the prompt has half a character, or bytes that are not UTF-8"):
        llama.prompt_ids(["a", "b", "c\udcff"], "vicuna")


IMPORTS = """
import sys, time, split_and_save_models, model.text
from concurrent.futures import ThreadPoolExecutor
from tests.saved import run_program
print({"transformers", "fastchat"} & set(sys.modules))
def ask(number):
    time.sleep(number / 20)
    return model.text._of_transformers("PreTrainedTokenizerBase").__name__
with ThreadPoolExecutor(20) as pool:
    print(set(pool.map(ask, range(20))))
"""


def test_transformers_is_not_imported_before_it_is_needed_and_by_threads_one_after_the_other():
    done = run_program(sys.executable, "-c", IMPORTS)
    assert done.stdout == "set()\n{'PreTrainedTokenizerBase'}\n", done.stderr


def test_the_token_that_completes_a_stop_text_is_the_last_one(llama):
    ids = llama.tokenizer("the dog runs home", add_special_tokens=False).input_ids
    stops = AnswerReader(llama, "dog").stops
    found = [stops(token) for token in ids]
    last = found.index(True)
    assert "dog" in llama.decode(ids[:last + 1])
    assert "dog" not in llama.decode(ids[:last])


@pytest.mark.parametrize("text, is_loop", [
    ("The dog runs home. " * 3, True), ("A cat. " + "the dog runs home, " * 4, True), ("the dog, " * 6, True),
    ("The dog runs home. " * 2, False), ("The dog runs home. A cat. " * 2 + "The dog runs home. ", False),
    ("no, " * 4, False), ("-" * 80, False), ("The dog runs home. The dog runs far. The dog runs on. ", False)])
def test_a_loop_ends_an_answer_at_its_third_repetition_if_asked(llama, text, is_loop):
    ids = plain_ids(llama.tokenizer, text)
    stops, never_stops = AnswerReader(llama, stops_loops=True).stops, AnswerReader(llama).stops
    token_stops = [stops(token) for token in ids]
    assert any(token_stops) == is_loop and not any(never_stops(token) for token in ids)
    if is_loop:
        end_text = llama.decode(ids[:token_stops.index(True) + 1])
        assert max(end_text.count(sentence) for sentence in ("og runs home", "og, the dog")) == 3


def test_several_stop_texts_end_at_the_first_and_what_may_become_one_is_held_back(llama):
    ids = plain_ids(llama.tokenizer, "the dog and the cat")
    reader = AnswerReader(llama, ["cat", "and the", "zebra"])
    shown = "".join(reader.read([token]) for token in ids)
    assert reader.stopped and shown == reader.text == "the dog "
    whole = AnswerReader(llama, ["horse", ""])
    assert "".join([*(whole.read([token]) for token in ids),
                    whole.finish()]) == "the dog and the cat"


def test_messages_are_the_conversation_that_their_turns_are_and_the_system_speaks_first(llama):
    talk = [("user", "How are you?"), ("assistant", "Fine."), ("user", "And the dog?")]
    messages = messages_of(*talk)
    for template in ("vicuna", "llama-2", "none"):
        turns = [content for _, content in talk]
        assert llama.chat_ids(messages, template) == llama.prompt_ids(turns, template)
    found = messages_of(talk[0], ("user", "Well?"), ("system", "Be brief."))
    text = llama.tokenizer.decode(llama.chat_ids(found, "vicuna"), skip_special_tokens=True)
    assert text == "Be brief. USER: How are you?\n\nWell? ASSISTANT:"


@pytest.mark.parametrize("messages, sentence", [
    ([], "the messages are empty"),
    ([("user", " ")], "the messages are empty"),
    ([("user", "a"), ("assistant", "b")], "the last message has the role assistant"),
    ([("user", "a"), ("assistant", "b"), ("system", "c")], "the last message has the role assistant"),
    ([("system", "c")], "the last message has the role system"),
    ([("assistant", "a"), ("user", "b")], "the first message is the assistant's"),
    ([("user", "a"), ("tool", "b")], "no place for messages of the role tool")])
def test_messages_that_no_answer_follows_are_refused(llama, messages, sentence):
    with refused(sentence):
        llama.chat_ids(messages_of(*messages), "vicuna")


def test_a_template_that_is_a_link_out_of_its_folder_is_refused_but_not_the_hubs_own_links(llama3, tmp_path):
    private = tmp_path / "private"
    private.write_text("{{ messages[0].content }} secret")
    folder = copied(llama3, tmp_path / "new")
    (folder / "chat_template.jinja").symlink_to(private)
    with refused(f"{folder / 'chat_template.jinja'} is a link to {private}, outside of its folder"):
        Text(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "own.jinja").write_text("{{ messages[0].content }}")
    (folder / "chat_template.jinja").symlink_to(folder / "own.jinja")
    assert Text(folder).prompt_text(["Hi"], "own") == "Hi"

    snapshot = copied(llama3, tmp_path / "models--a--b" / "snapshots" / "0123")
    blob = tmp_path / "models--a--b" / "blobs" / "abc"
    blob.parent.mkdir()
    blob.write_text("{{ messages[0].content }}!")
    (snapshot / "chat_template.jinja").symlink_to(blob)
    assert Text(snapshot).prompt_text(["Hi"], "own") == "Hi!"
