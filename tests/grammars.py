"""A tokenizer of the tiny models' 53 tokens, that writes JSON, and random schemas with what their values have to be."""
from __future__ import annotations

import json
from random import Random
from typing import Any, Callable, Iterable, Sequence

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from model.grammar import Grammars
from tests.tiny import CONFIG

pytest.importorskip("llguidance", reason="grammars need llguidance (serve/requirements.txt)")

END = 0
MERGES = ["t r", "u e", "tr ue", "f a", "l s", "fa ls",
          "fals e", "n u", "l l", "nu ll", '" :', '{ "', '" ,', '" }',
          "a b", ": Ġ"]
ALPHABET = '{}[]":,.-' + "0123456789" + "abcdeflnrstu" + "Ġ"
Check = Callable[[Any], bool]
Kind = tuple[Any, Check]  # a schema, and whether a value is of it


def tokenizer(letters: Iterable[str] = ALPHABET, merges: Sequence[str] = MERGES) -> Any:
    """Characters of JSON, and merges of them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", *letters, *(merge.replace(" ", "") for merge in merges)]
    pairs = [tuple(merge.split()) for merge in merges]
    own = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)},
                               merges=pairs))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>")


TOKENIZER = tokenizer()
GRAMMARS = Grammars(TOKENIZER, CONFIG.vocab, frozenset({END}))
LETTERS = bytes_to_unicode()
ALL = tokenizer(LETTERS.values(), [])  # a token for each byte
BYTES = Grammars(ALL, len(ALL), frozenset({END}))


def bytes_of(text: str) -> list[int]:
    """The tokens of a text where each byte is one."""
    known: dict[str, int] = ALL.get_vocab()
    return [known[LETTERS[byte]] for byte in text.encode()]


def schema(random: Random, depth: int = 2) -> Kind:
    """A schema whose values end soon, of one of all kinds."""
    kinds = [_integer, _string, _pattern, _literal, _choice, _enum]
    if depth:
        kinds += [_object, _object, _array, _any_of, _reference]
    return random.choice(kinds)(random, depth)


def _integer(random, depth):
    low = random.randint(-20, 20)
    high = low + random.randint(0, 30)
    given = {"type": "integer", "minimum": low, "maximum": high}
    return given, lambda value: type(value) is int and low <= value <= high


def _string(random, depth):
    most = random.randint(0, 4)
    return {"type": "string", "maxLength": most}, lambda value: isinstance(value, str) and len(value) <= most


def _pattern(random, depth):
    return ({"type": "string", "pattern": "^[ab]{2}-[0-9]$"},
            lambda value: len(value) == 4 and set(value[:2]) <= {"a", "b"}
            and value[2] == "-" and value[3].isdigit())


def _literal(random, depth):
    wanted = random.choice([True, None, "abba", 17,
                            [1, "b"], {"a": {"b": False}}])
    return {"const": wanted}, lambda value: value == wanted


def _choice(random, depth):
    return {"type": ["boolean", "null"]}, lambda value: value in (True, False, None)


def _enum(random, depth):
    wanted = random.sample(["alf", "alfa", "bar", "tune", 1, 12, 123, None, True], 3)
    return {"enum": wanted}, lambda value: value in wanted


def _object(random, depth):
    names = random.sample(["a", "name", "data", "value", "all"], random.randint(1, 3))
    names = [name.replace("m", "n").replace("v", "f") for name in names]
    parts = {name: schema(random, depth - 1) for name in names}
    needed = [name for name in names if random.random() < 0.7]
    given = {"type": "object",
             "properties": {name: part[0] for name, part in parts.items()}, "required": needed,
             "additionalProperties": False}
    return given, lambda value: isinstance(value, dict) and set(needed) <= value.keys() <= parts.keys() and all(
        parts[name][1](part) for name, part in value.items())


def _array(random, depth):
    item, fits = schema(random, depth - 1)
    least = random.randint(0, 2)
    most = least + random.randint(0, 2)
    given = {"type": "array", "items": item, "minItems": least, "maxItems": most}
    return given, lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(fits, value))


def _any_of(random, depth):
    kinds = [schema(random, depth - 1), schema(random, depth - 1)]
    return {"anyOf": [kind[0] for kind in kinds]}, lambda value: any(_fits(kind, value) for kind in kinds)


def _reference(random, depth):
    inner, fits = _integer(random, depth)
    given = {"type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}, "data": {"$ref": "#/$defs/leaf"}},
             "required": ["left", "data"], "additionalProperties": False, "$defs": {"leaf": inner}}
    # a reference is resolved from the root of the schema, so it cannot be nested: its shape is
    return ({**given, "properties": dict.fromkeys(("left", "data"), inner)} if depth < 2 else given,
            lambda value: value.keys() == {"left", "data"} and all(map(fits, value.values())))


def _fits(kind: Kind, value: Any) -> bool:
    try:
        return bool(kind[1](value))
    except (TypeError, AttributeError, IndexError):
        return False


def valid(kind: Kind, ids: list[int]) -> bool:
    """Whether an answer is a value of a schema, with the end behind it."""
    assert ids[-1] == END, TOKENIZER.decode(ids)
    return _fits(kind, json.loads(TOKENIZER.decode(ids[:-1])))
