"""How single tokens are written: the bytes that each adds to a text, also where they are a piece of a character.

It knows nothing about models. A text is decoded by `text.Stream`; here each token stands alone.
"""
from __future__ import annotations

import re
from typing import Any, NamedTuple

from model.text import BROKEN, decoded, silent

BEFORE = "a"  # what stands before a token, since the first of a text may lose its space
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte as sentencepiece writes it


class TokenText(NamedTuple):
    """A token as a name that is UTF-8, and the bytes that it adds to a text; None for one that prints nothing."""

    name: str
    data: bytes | None

    @property
    def whole(self) -> bool:
        """Whether its bytes are whole characters."""
        return self.data is None or self.data == self.name.encode()


class TokenTexts:
    """The tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._silent = silent(tokenizer)
        self._context: list[int] = tokenizer(BEFORE, add_special_tokens=False)["input_ids"]
        self._before = decoded(tokenizer, self._context)
        self._known: dict[int, TokenText] = {}

    def __call__(self, token: int) -> TokenText:
        """How a token is written; one that the tokenizer does not know is written as its number."""
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def _spell(self, token: int) -> TokenText:
        if token >= len(self._tokenizer):
            return TokenText(f"<{token}>", None)
        name: str = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._silent:
            return TokenText(name, None)
        text = decoded(self._tokenizer, [*self._context, token])
        if BROKEN not in text and text.startswith(self._before):
            text = text[len(self._before):]
            return TokenText(text, text.encode())
        data = _bytes(name)
        try:
            return TokenText(data.decode(), data)
        except UnicodeDecodeError:
            return TokenText("".join(f"\\x{byte:02x}" for byte in data), data)


def _bytes(name: str) -> bytes:
    """The bytes of a token that is no text of its own, by its name in the vocabulary."""
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    byte = BYTE.fullmatch(name)
    if byte:
        return bytes([int(byte[1], 16)])
    of_letter = {letter: value for value, letter in bytes_to_unicode().items()}  # as tokenizers of bytes write them
    if all(letter in of_letter for letter in name):
        return bytes(of_letter[letter] for letter in name)
    return name.encode()
