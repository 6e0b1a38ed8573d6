"""A writer with a seed, which turns choice expressions into random text. This module knows nothing about tasks.

`{a|b|c}` is a random choice, which may be nested or empty; `<name>` is a slot, filled last and never expanded again;
`a(n) owl` becomes `an owl`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

Item = TypeVar("Item")
PhraseChoice = tuple["Phrase", ...]
Phrase = tuple["str | PhraseChoice", ...]
TemplateSlots = dict[str, object]  # the texts and numbers for the slots of a template
Exchange = tuple[str, str]  # a question and its answer
DialogueTurns = tuple[list[str], list[str]]  # questions, and the answer to each

SLOT_PATTERN = re.compile(r"<(\w+)>")
ARTICLE_PATTERN = re.compile(r"\b([Aa])\(n\) (\W*\w)")
VOWELS = "aeiouAEIOU"
OPEN_ENDS = (", ", "that ", ": ", "; ", "and ")  # of openings after which the sentence goes on


def _parse_phrase(text: str, position: int) -> tuple[Phrase, int]:
    pieces: list[str | PhraseChoice] = []
    piece_start = position

    while position < len(text) and text[position] not in "|}":
        if text[position] == "{":
            pieces.append(text[piece_start:position])
            choice, position = _parse_choice(text, position + 1)
            pieces.append(choice)
            piece_start = position
        else:
            position += 1

    pieces.append(text[piece_start:position])
    return tuple(piece for piece in pieces if piece), position


def _parse_choice(text: str, position: int) -> tuple[PhraseChoice, int]:
    options: list[Phrase] = []
    while True:
        option, position = _parse_phrase(text, position)
        options.append(option)
        assert position < len(text), f"a brace is never closed in {text!r}"
        position += 1
        if text[position - 1] == "}":
            return tuple(options), position


@lru_cache(maxsize=None)
def parse_template(text: str) -> Phrase:
    phrase, end_position = _parse_phrase(text, 0)
    assert end_position == len(text), f"an unmatched closing brace, or | outside braces, in {text!r}"
    return phrase


class PhraseWriter:
    """The source of all random choices in texts, so that a seed determines the corpus."""

    def __init__(self, seed: int | str) -> None:
        self.random_source = random.Random(seed)

    def choose(self, options: Sequence[Item]) -> Item:
        return options[int(self.random_source.random() * len(options))]

    def sample(self, options: Sequence[Item], num_items: int) -> list[Item]:
        return self.random_source.sample(options, num_items)

    def shuffle(self, items: list[Item]) -> None:
        self.random_source.shuffle(items)

    def number_between(self, lowest: int, highest: int) -> int:
        return self.random_source.randint(lowest, highest)

    def happens(self, probability: float) -> bool:
        return self.random_source.random() < probability

    def _expand_phrase(self, phrase: Phrase) -> str:
        return "".join(piece if isinstance(piece, str) else self._expand_phrase(self.choose(piece)) for piece in phrase)

    def expand(self, template: str, **slots: object) -> str:
        """Expand the choices, fill the slots, and correct the articles."""
        def fill_slot(match: re.Match[str]) -> str:
            return str(slots.get(match[1], match[0]))

        def correct_article(match: re.Match[str]) -> str:
            article_end = "n " if match[2][-1] in VOWELS else " "
            return match[1] + article_end + match[2]

        filled_text = SLOT_PATTERN.sub(fill_slot, self._expand_phrase(parse_template(template)))
        return ARTICLE_PATTERN.sub(correct_article, filled_text)

    def sentence(self, template: str, **slots: object) -> str:
        return capital(self.expand(template, **slots))

    def continue_text(self, text: str, joint_template: str, templates: Iterable[str], **slots: object) -> str:
        """Append clauses to a text, each after a random joint, and with a capital letter if that is a full stop."""
        for template in templates:
            text += self.expand(joint_template)
            clause = self.expand(template, **slots)
            text += capital(clause) if text.endswith(". ") else clause
        return text


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def after(opening: str, text: str) -> str:
    """Append `text` to an opening, with a capital letter unless the opening ends in the middle of a sentence."""
    return opening + (text if opening.endswith(OPEN_ENDS) else capital(text))


def word_list(words: Sequence[str]) -> str:
    """Join words as in `a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"


def numbered_lines(texts: Iterable[str]) -> str:
    """Return a text a line, as in `1. a`."""
    return "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))
