"""Tokenizers of GGUF files read a text as the model's authors do: pieces by hand, and tokenizers built another way."""
from __future__ import annotations

import io
import json
import random
from functools import lru_cache
from typing import Any

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from launch.split.gguf_tokenizer import PRE_TOKENIZERS, Vocabulary
from tests.checkpoints import refused
from tests.test_text import plain_ids

Split, Bytes = pre_tokenizers.Split, pre_tokenizers.ByteLevel
WORDS = """the a I'll WE'RE don't HTTPServer parseJSON foo_bar foo-bar def return for in range self print 1 12 123 1234
 12345 3.14 2,000 -5 0x1F 10% $20 #tag @me http://a.b/c?d=1&e=2 'quoted' "double" (a) [b] {c} ... !!! :: -> => == != //
 /* # ``` ~~ \\n \u00e9 \u00dfe na\u00efve \u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d \u3053\u3093 \ud55c\uad6d
 \u0939\u093f\u0928 \u0e44\u0e17\u0e22 \u00bd \u2167 \U0001f600 \U0001f44d\U0001f3fd \u2014 \u2026 \u201cq\u201d \uff0c
 \u3002""".split()
GAPS = ["", "", " ", " ", " ", "  ", "    ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", " \n", "\n ", "\n    ", "\r\n",
        "  \n\n "]


@lru_cache(None)
def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of digits, tabs, blank lines, code, other scripts and emoji."""
    chance = random.Random(seed)
    return ["".join(chance.choice(GAPS) + chance.choice(WORDS) for _ in range(chance.randint(1, 12)))
            for _ in range(count)]


@lru_cache(None)
def bytes_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of a byte-level tokenizer that never splits, so that some token lies across every cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Bytes(add_prefix_space=False, use_regex=False)
    parts = [text[start:start + 12] for text in texts(3000, 1) for start in range(0, len(text), 12)]
    tokenizer.train_from_iterator(parts, trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=Bytes.alphabet(), show_progress=False, max_token_length=8))
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(pair) for pair in model["merges"]]


def lists_of(metadata: dict[str, Any]) -> Vocabulary:
    """The lists of a file that has this metadata."""
    return Vocabulary(lambda key, default=None: metadata.get(key, default))


def tokenizer_of(lists: Vocabulary) -> Any:
    return lists.tokenizer(strips_spaces=False)


def built(pre: Any, special: tuple[str, ...] = (), **metadata: Any) -> Any:
    """Build the tokenizer of a byte-level file, which ends in special tokens."""
    tokens, merges = bytes_vocabulary()
    held = {"model": "gpt2", "pre": pre, "tokens": [*tokens, *special], "merges": [" ".join(pair) for pair in merges],
            "token_type": [1] * len(tokens) + [3] * len(special), **metadata}
    return tokenizer_of(lists_of(held))


CUT_TEXTS = [  # by hand
    ("gpt-2", "I|'|LL| pay| $|1234|.|50| | now|\n\n | x| =| 5|;|\t|OK"),
    ("smollm", "I|'|LL| pay| $|1|2|3|4|.|5|0| | now|\n\n | x| =| |5|;|\t|OK"),
    ("refact", "I|'|LL| pay| $|1|2|3|4|.|5|0| | now|\n\n | x| =| |5|;|\t|OK"),
    ("llama-bpe", "I|'LL| pay| $|123|4|.|50| | now|\n\n| | x| =| |5|;|\tOK"),
    ("qwen2", "I|'LL| pay| $|1|2|3|4|.|5|0| | now|\n\n| | x| =| |5|;|\tOK"),
    ("tekken", "I|'LL| pay| $|1|2|3|4|.|5|0| | now|\n\n| | x| =| |5|;|\tOK"),
    ("gpt-4o", "I'LL| pay| $|123|4|.|50| | now|\n\n| | x| =| |5|;|\tOK"),
    ("falcon", "I|'|LL| pay| |$|123|4|.|50| | now|\n\n | x| |=| 5|;|\t|OK"),
    ("deepseek-llm", "I|'|LL| pay| $|1|2|3|4|.|5|0| | now|\n|\n| | x| =| |5|;|\tOK"),
    ("deepseek-v3", "I|'LL| pay| $|123|4|.|50| | now|\n\n| | x| =| |5|;|\tOK"),
    ("bloom", "I'LL| pay| $1234|.|50| | now|\n\n | x| =| 5;|\t|OK"),
    ("llama-bpe", "Steps|:\n\n|1|."),
    ("smollm", "Steps|:|\n\n|1|."),
    ("smollm", "x|  |5|\t\t|1|\n    |1|2"),
    ("gpt-2", "x| | 5|\t|\t|1|\n   | 12"),
    ("tekken", "parse|JSON| HTTPServer"),
    ("gpt-4o", "it's|/\n\n"),
    ("deepseek-v3", "\u4ef7\u683c\u662f|123|4|\u5143|\u3002"),
    ("deepseek-llm", "\u4ef7\u683c|1|2|\u3002"),
    ("kimi-k2", "\u4f60\u597d|ab| |123|4"),
    ("superbpe", "a |1|234|567"),
    ("afmoe", "a| |1|234|567"),
    ("tiny_aya", "a| |1|234|567"),
    ("viking", "ab| |1|2|."),
    ("seed-coder", "a|;|\n\n|b"),
    ("exaone-moe", "ab cd|;\n|\n"),
]


@pytest.mark.parametrize("pre, cut_text", CUT_TEXTS)
def test_a_text_is_split_as_written_by_hand(pre, cut_text):
    text = cut_text.replace("|", "")
    splits = built(pre).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[start:end] for _, (start, end) in splits) == cut_text


LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
MISTRAL = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
           r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
            r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
CASED = "[" + "".join(character for character in map(chr, range(0x250)) if character.isupper() or (
    character.islower() and character not in "\u00aa\u00ba")) + "\u0400-\u0481\u048a-\u052f" + "]+"


def cuts(pattern: str) -> Any:
    """Let each match be a piece of its own."""
    return Split(Regex(pattern), "isolated")


ORIGINALS = {  # as the authors' tokenizer.json has them
    "llama-bpe": [cuts(LLAMA_3)],
    "dbrx": [cuts(LLAMA_3)],
    "qwen2": [cuts(LLAMA_3.replace("{1,3}", ""))],
    "tekken": [cuts(MISTRAL)],
    "deepseek-v3": [cuts(r"\p{N}{1,3}"), cuts(CJK),
                    cuts(DEEPSEEK)],
    "deepseek-coder": [cuts("[\r\n]"), cuts(r"\s?\p{L}+"),
                       cuts(r"\s?\p{P}+"),
                       cuts("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
                       pre_tokenizers.Digits(individual_digits=True)],
    "deepseek-llm": [cuts("[\r\n]"), cuts(r"\s?" + CASED),
                     cuts("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
                     cuts(r"\s+$"), cuts("[\u0800-\u9fa5\uac00-\ud7ff]+"),
                     pre_tokenizers.Digits(individual_digits=True)],
    "bloom": [cuts(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+")],
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), [pre_tokenizers.Digits(individual_digits=True)]),
    **dict.fromkeys(("gpt-2", "olmo"), []),
}
BY_GPT_2 = ("smollm", "refact", "starcoder", "command-r", "gpt-2", "olmo")


def original(pre: str) -> Tokenizer:
    """Build the authors' tokenizer over the same tokens."""
    tokens, merges = bytes_vocabulary()
    whole = pre in ("llama-bpe", "tekken")
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(numbers, merges, ignore_merges=whole))
    letters = Bytes(add_prefix_space=False, use_regex=pre in BY_GPT_2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*ORIGINALS[pre], letters])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "olmo", "command-r"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("pre", ORIGINALS)
def test_what_a_model_wrote_is_read_again_as_the_same_ids(pre):
    """A model writes tokens as its authors' tokenizer cuts a text; of a byte-level one, any text is read again so."""
    theirs, ours = original(pre), built(pre)
    written = [encoding.ids for encoding in theirs.encode_batch(texts(1000), add_special_tokens=False)]
    decoded = theirs.decode_batch(written)
    assert decoded == texts(1000)
    assert plain_ids(ours, decoded) == written
    assert ours.batch_decode(written) == decoded


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_way_to_split_loses_nothing(pre):
    ours = built(pre)
    ids = plain_ids(ours, texts(60))
    assert ours.batch_decode(ids) == texts(60)


def test_letters_and_their_accents_become_one_where_the_authors_do_so():
    def composes(pre: str) -> bool:
        tokenizer = built(pre)
        return tokenizer("e\u0301")["input_ids"] == tokenizer("\u00e9")["input_ids"]

    assert {*filter(composes, PRE_TOKENIZERS)} == {
        "qwen2", "deepseek-r1-qwen", "qwen35", "mpt", "olmo", "command-r"}


def test_the_letters_of_deepseek_are_cut_from_others():
    letters = built("deepseek-llm").backend_tokenizer.pre_tokenizer
    cut = "".join(character for character in "aZ\u00aa\u00b5\u01bb\u0294\u0416\u0561\ua78b\ua790\uff21"
                  if len(letters.pre_tokenize_str(f"\U0001f600{character}")) == 2)
    assert cut == "aZ\u00b5\u0416\ua78b\uff21"


# SentencePiece


def pieces_vocabulary(user_tokens: tuple[str, ...] = (), **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Train a tokenizer with SentencePiece itself, and return it with its lists as a file has them."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(500, 2)), model_writer=model, vocab_size=700, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.98, minloglevel=2,
        user_defined_symbols=list(user_tokens))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    numbers = range(theirs.get_piece_size())
    types = [2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
             for i in numbers]
    tokens = [theirs.id_to_piece(i) for i in numbers]
    types = [4 if token in user_tokens else kind for token, kind in zip(tokens, types)]
    held = {"model": "llama", "tokens": tokens, "token_type": types,
            "scores": [theirs.get_score(i) for i in numbers], **changes}
    return theirs, held


def test_pieces_are_those_of_sentencepiece_itself():
    theirs, held = pieces_vocabulary()
    ours = tokenizer_of(lists_of(held))
    clean = [text.strip() for text in texts(300)]  # SentencePiece's trainer has no newline, so both write its byte
    ids = plain_ids(ours, clean)
    assert ids == [theirs.encode(text) for text in clean]
    assert ours.batch_decode(ids) == clean
    assert ours("a")["input_ids"] == [1, *theirs.encode("a")]


@pytest.mark.parametrize("space", ["\u2581", " "])
def test_spaces_of_user_defined_tokens_are_found_however_a_file_writes_them(space):
    theirs, held = pieces_vocabulary(("\u2581\u2581", "\u2581\u2581\u2581\u2581", "\n"), add_space_prefix=False)
    held["tokens"] = [token.replace("\u2581", space) if kind == 4 else token
                      for token, kind in zip(held["tokens"], held["token_type"])]
    ours = tokenizer_of(lists_of(held))
    indented = "x\n    y\n      z"
    ids = plain_ids(ours, indented)
    assert ids == theirs.encode(indented)[1:]  # without the space that it puts first
    assert ours.decode(ids) == indented


# Tokens with a role


def vocabulary(**metadata: Any) -> Vocabulary:
    held = {"model": "gpt2", "pre": "gpt-2", "merges": [],
            "tokens": [*"abcdefg", "<s>", "</s>", "<|im_end|>", "<think>"],
            "token_type": [1] * 7 + [3, 3, 1, 4], **metadata}
    return lists_of(held)


def test_roles_are_read_by_their_ids():
    """Also where the file says otherwise: a token that ends a turn is special, whatever its type."""
    lists = vocabulary(bos_token_id=7, eos_token_id=8, eot_token_id=9, eom_token_id=8, padding_token_id=99)
    tokenizer = tokenizer_of(lists)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", None)
    assert lists.end_ids == [8, 9]
    assert tokenizer("a<think></s><|im_end|>b")["input_ids"] == [0, 10, 8, 9, 1]
    assert tokenizer.decode([0, 10, 8, 9, 1], skip_special_tokens=True) == "a<think>b"


def test_an_ordinary_token_that_pads_is_printed():
    lists = vocabulary(eos_token_id=8, padding_token_id=0, unknown_token_id=1)
    assert tokenizer_of(lists).decode([0, 1, 8], skip_special_tokens=True) == "ab"
    assert tokenizer_of(vocabulary(padding_token_id=7)).pad_token == "<s>"


@pytest.mark.parametrize("metadata, ids", [
    ({"bos_token_id": 7, "add_bos_token": True}, [7, 0]), ({"bos_token_id": 7}, [0]), ({"add_bos_token": True}, [0]),
    ({"bos_token_id": 7, "pre": "llama-bpe"}, [7, 0]),
    ({"bos_token_id": 7, "pre": "llama-bpe", "add_bos_token": False}, [0]),
    ({"bos_token_id": 2 ** 32 - 1, "pre": "llama-bpe"}, [0])])
def test_a_text_begins_with_a_first_token_where_the_file_or_its_kind_says_so(metadata, ids):
    assert tokenizer_of(vocabulary(**metadata))("a")["input_ids"] == ids


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id"])
def test_an_id_that_no_token_has_is_refused(key):
    with refused(f"its {key} is 11, but it has only 11 tokens"):
        vocabulary(**{key: 11})


@pytest.mark.parametrize("key", ["token_type", "scores"])
def test_lists_of_other_lengths_are_refused(key):
    with refused(f"it has 11 tokens, but 2 entries in its {key}"):
        vocabulary(**{key: [1, 1]})


@pytest.mark.parametrize("metadata, sentence", [
    ({"pre": None}, "it is too old: it lacks tokenizer.ggml.pre, the way in which texts are split"),
    ({"pre": "default"}, "its tokenizer splits texts in the way 'default', which is not supported"),
    ({"model": "bert"}, "its tokenizer is of the kind 'bert', which is not supported, only gpt2 and llama")])
def test_what_is_not_supported_is_named(metadata, sentence):
    with refused(sentence):
        tokenizer_of(vocabulary(**metadata))


def test_special_tokens_of_phi_3_take_the_spaces_after_them():
    _, held = pieces_vocabulary()
    held["tokens"] = [*held["tokens"], "<|end|>"]
    held["token_type"] = [*held["token_type"], 3]
    held["scores"] = [*held["scores"], 0.0]
    lists = lists_of(held)
    kept, stripped = (plain_ids(lists.tokenizer(strips_spaces=strips), "<s>\n<|end|>\n a") for strips in (False, True))
    assert lists.tokenizer(strips_spaces=True).decode(stripped) == "<s> \n<|end|> a"
    assert len(kept) == len(stripped) + 1
