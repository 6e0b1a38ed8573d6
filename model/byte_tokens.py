"""The tokens of a model as bytes, in the form in which llguidance takes a tokenizer.

A text is written with ordinary tokens only: `</s>` in a text is the characters, never the token that ends an answer.
"""
from __future__ import annotations

import json
import secrets
from importlib import import_module
from typing import Any, Collection

from model.text import BYTE, SAME_TEXT, decoded, silent
from model.tokenizer import BYTE_OF_LETTER

SAMPLE = '{"a": [1, true]}'  # a text that each tokenizer must keep
SPACE = "\u2581"  # as sentencepiece writes a space in a token
ADDED_SPACES = {"prepend_scheme": "never", "add_prefix_space": False}  # settings with which none is added to a text


class ByteTokenizer:
    """The bytes of each token, and the tokens of a text; the attributes are those that llguidance reads.

    Raises ValueError for a tokenizer that changes texts.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        file = json.loads(tokenizer.backend_tokenizer.to_str())
        special_ids = silent(tokenizer).union(end_ids)

        self.eos_token_id = min(end_ids)
        self.special_token_ids = sorted(special_ids)
        self.tokens = _token_bytes(tokenizer, file, vocab_size)
        self._ordinary = _without_special(file, special_ids, tokenizer)

        sample_bytes = [self.tokens[token_id] for token_id in self(SAMPLE)]
        if b"".join(sample_bytes) != SAMPLE.encode():
            raise ValueError("grammars need a tokenizer that keeps each character of a text, but this model's does "
                             "not: leave the grammar out")
        first_word = self(" a")
        self.drops_first_space = decoded(tokenizer, first_word) == "a"

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, none of them special; no space is added before it."""
        token_ids: list[int] = self._ordinary.encode(text, add_special_tokens=False).ids
        return token_ids


def _token_bytes(tokenizer: Any, file: dict[str, Any], vocab_size: int) -> list[bytes]:
    """Return the bytes that each token adds to a text; of a special token its name, of an unused number nothing."""
    is_byte_level = '"ByteLevel"' in json.dumps(file["decoder"])
    added_names = {entry["content"] for entry in file["added_tokens"]}
    all_bytes = [b""] * vocab_size

    for marked_name, token_id in tokenizer.get_vocab().items():
        name = marked_name.rstrip(SAME_TEXT)
        hex_byte = BYTE.fullmatch(name)
        if token_id >= vocab_size:
            continue
        if marked_name in added_names:
            all_bytes[token_id] = name.encode()
        elif is_byte_level and BYTE_OF_LETTER.keys() >= set(name):
            all_bytes[token_id] = bytes(map(BYTE_OF_LETTER.__getitem__, name))
        elif not is_byte_level and hex_byte:
            all_bytes[token_id] = bytes.fromhex(hex_byte[1])
        elif not is_byte_level:
            all_bytes[token_id] = name.replace(SPACE, " ").encode()

    return all_bytes


def _without_special(file: dict[str, Any], special_ids: Collection[int], tokenizer: Any) -> Any:
    """Return the tokenizer with names of special tokens that no text has, and without an added space."""
    secret = secrets.token_hex(8)  # a text must not be able to name them
    names = tokenizer.convert_ids_to_tokens(sorted(special_ids))
    new_names = {name: f"<{secret}-{number}>" for number, name in enumerate(names)}

    # tokens
    model = file["model"]
    for entry in (*file["added_tokens"], model):
        for key in {"content", "unk_token"} & entry.keys():
            entry[key] = new_names.get(entry[key], entry[key])
    pairs = model["vocab"].items() if isinstance(model["vocab"], dict) else model["vocab"]
    new_pairs = [(new_names.get(name, name), value) for name, value in pairs]
    model["vocab"] = dict(new_pairs) if isinstance(model["vocab"], dict) else new_pairs

    # settings
    file.update(truncation=None, padding=None, post_processor=None)
    file["normalizer"] = _without_space(file["normalizer"])
    file["pre_tokenizer"] = _without_space(file["pre_tokenizer"])
    return import_module("tokenizers").Tokenizer.from_str(json.dumps(file))


def _without_space(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a step of a tokenizer, or steps in a sequence, that adds no space before a text."""
    if step is None or step["type"] == "Prepend":
        return None
    step = {name: ADDED_SPACES.get(name, value) for name, value in step.items()}
    for part in {"normalizers", "pretokenizers"} & step.keys():
        step[part] = [inner for inner in map(_without_space, step[part]) if inner]
    return step
