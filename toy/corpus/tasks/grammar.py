"""A writer with a seed, which turns choice expressions into random text. This module knows nothing about tasks.

`{a|b|c}` is a random choice, which may be nested or empty; `<name>` is a slot, filled last and never expanded again;
`a(n) owl` becomes `an owl`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Choice = tuple["Phrase", ...]
Phrase = tuple["str | Choice", ...]

SLOT = re.compile(r"<(\w+)>")
ARTICLE = re.compile(r"\b([Aa])\(n\) (\W*\w)")
VOWELS = "aeiouAEIOU"


def _phrase(text: str, at: int) -> tuple[Phrase, int]:
    parts: list[str | Choice] = []
    start = at
    while at < len(text) and text[at] not in "|}":
        if text[at] == "{":
            parts.append(text[start:at])
            choice, at = _choice(text, at + 1)
            parts.append(choice)
            start = at
        else:
            at += 1
    parts.append(text[start:at])
    return tuple(p for p in parts if p), at


def _choice(text: str, at: int) -> tuple[Choice, int]:
    options: list[Phrase] = []
    while True:
        option, at = _phrase(text, at)
        options.append(option)
        assert at < len(text), f"a brace is never closed in {text!r}"
        at += 1
        if text[at - 1] == "}":
            return tuple(options), at


@lru_cache(maxsize=None)
def parse(text: str) -> Phrase:
    phrase, end = _phrase(text, 0)
    assert end == len(text), f"an unmatched closing brace, or | outside braces, in {text!r}"
    return phrase


class Writer:
    """The source of all random choices in texts, so that a seed determines the corpus."""

    def __init__(self, seed: int | str) -> None:
        self.chance = random.Random(seed)

    def one(self, options: Sequence[T]) -> T:
        return options[int(self.chance.random() * len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        return self.chance.sample(options, count)

    def number(self, low: int, high: int) -> int:
        return self.chance.randint(low, high)

    def maybe(self, share: float) -> bool:
        return self.chance.random() < share

    def _write(self, phrase: Phrase, out: list[str]) -> None:
        for part in phrase:
            if isinstance(part, str):
                out.append(part)
            else:
                self._write(self.one(part), out)

    def say(self, text: str, **slots: object) -> str:
        """Expand the choices, fill the slots, and correct the articles."""
        out: list[str] = []
        self._write(parse(text), out)
        filled = SLOT.sub(lambda m: str(slots[m[1]]) if m[1] in slots else m[0], "".join(out))
        return ARTICLE.sub(lambda m: m[1] + ("n " if m[2][-1] in VOWELS else " ") + m[2], filled)

    def sentence(self, text: str, **slots: object) -> str:
        return capital(self.say(text, **slots))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def after(opening: str, text: str) -> str:
    """Append `text` to an opening, with a capital letter unless the opening ends in the middle of a sentence."""
    return opening + (text if opening.endswith((", ", "that ", ": ", "; ", "and ")) else capital(text))


def listing(words: Sequence[str], last: str = "and") -> str:
    """Join words as in `a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" {last} {words[-1]}"
