"""Training data: conversations from a file, as rows of token ids with a mask of the answers.

This module knows nothing about models. The templates of model/text.py define how a conversation becomes a prompt.
"""
from __future__ import annotations

from bisect import bisect_right
from itertools import chain, cycle
from operator import itemgetter
from os.path import commonprefix
from pathlib import Path
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from config.files import READABLE_REMEDY, fits, lines, read_json_file
from config.schema.untrusted import read_bytes
from launch.progress import ProgressBar
from model.text import Text

USER, ASSISTANT = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
TURNS = (("from", "value"), ("role", "content"))  # keys of role and text in a turn by ShareGPT and by OpenAI
AT_ONCE = 64  # conversations per call of the tokenizer, which is faster with several and uses all cores
LINE = "write one JSON object per line"
FORMS = ('{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, '
         '{"messages": [{"role": "user", "content": "..."}, ...]} or {"turns": [...], "reference": [...]}')

Talk = Sequence[str]  # questions and answers, alternating
Talks = Sequence[Talk]


class TokenRow(NamedTuple):
    """Token ids `[N]` in int32, and a mask `[N]` in bool of the answers' tokens, their end tokens included."""

    ids: Tensor
    answers: Tensor


def read_conversations(path: Path) -> list[list[str]]:
    """Return the conversations of a file, each as alternating texts of user and assistant.

    The file holds one JSON object per line, or one list. Turns of the assistant before the first question, a last
    question without an answer, and system messages are omitted: the template has its own system message.
    """
    found = [_talk(entry, where) for entry, where in _entries(path)]
    talks = [talk for talk in found if len(talk) > 1]
    if len(talks) < 2:
        raise ValueError(f"{path} holds {len(talks)} conversations with an answer; a training needs at least two, "
                         "since one is held out")
    return talks


def _entries(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield each conversation, and its place in the file for messages."""
    if read_bytes(path, READABLE_REMEDY).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from ((entry, f"entry {number} of {path}") for number, entry in enumerate(read_json_file(path, LINE), 1))
    else:
        yield from ((entry, f"line {number} of {path}") for number, entry in lines(path, LINE))


def _talk(entry: Any, where: str) -> list[str]:
    """Return the turns before the first one that is empty or does not alternate."""
    turns = _turns(entry)
    if turns is None:
        raise ValueError(f"{where} is not a conversation; write {FORMS}")
    talk: list[str] = []
    for role, words in turns:
        if (not talk and role in ASSISTANT) or role == "system":
            continue
        if role not in (USER, ASSISTANT)[len(talk) % 2] or not words.strip():
            break
        talk.append(words)
    return talk[:len(talk) // 2 * 2]


def _turns(entry: Any) -> list[tuple[str, str]] | None:
    """Return the role and the text of each turn, or None if the entry has none of the FORMS."""
    if fits(entry, {"turns": [str], "reference": [str]}):
        texts = chain.from_iterable(zip(entry["turns"], entry["reference"]))
        return list(zip(cycle(("user", "assistant")), texts))
    places: list[Any] = [entry]
    if isinstance(entry, dict):
        places = [entry.get("conversations"), entry.get("messages")]
    for who, what in TURNS:
        for place in places:
            if fits(place, [{who: str, what: str}]):
                return [(turn[who], turn[what]) for turn in place]
    return None


Rows = Sequence[TokenRow]


def answer_row(prompt: Sequence[int], answer: Sequence[int]) -> TokenRow:
    """Return the row of a prompt and its answer, given as token ids."""
    ids = torch.tensor([*prompt, *answer], dtype=torch.int32)
    return TokenRow(ids, torch.arange(len(ids)) >= len(prompt))


def make_row(text: Text, talk: Talk, template: str, length: int) -> TokenRow | None:
    """Return the row of a conversation in the template, cut after `length` tokens, or None if no answer is left.

    An answer begins at the end of its prompt, and ends with the first end token.
    """
    return next(_rows(text, [talk], template, length))


def _rows(text: Text, talks: Talks, template: str, length: int) -> Iterator[TokenRow | None]:
    """Yield the row of each conversation, or None."""
    finished = [text.prompt_text([*talk, "?"], template) for talk in talks]  # one more question ends the last answer
    spans, end_ids = text.spans(finished, template), torch.tensor(sorted(text.end_ids))
    for talk, words, (ids, reach) in zip(talks, finished, spans):
        parts = (talk[:turns] for turns in range(1, len(talk), 2))
        prompts = (text.prompt_text(part, template) for part in parts)
        if reach:
            begins = (bisect_right(reach, _shared(prompt, words)) for prompt in prompts)
        else:
            begun = map(itemgetter(0), text.spans(list(prompts), template))
            begins = (_shared(some, ids) for some in begun)
        yield _row(torch.tensor(ids), begins, end_ids, length)


def _shared(some: Any, others: Any) -> int:
    """Return the length of the common prefix of two sequences."""
    begins = others[:len(some)] == some  # the usual case, which is fast
    return len(some if begins else commonprefix([some, others]))


def _row(ids: Tensor, begins: Iterable[int], end_ids: Tensor, length: int) -> TokenRow | None:
    """Return the row of these ids `[N]`, with answers that begin at these positions."""
    answers, last = torch.zeros(len(ids), dtype=torch.bool), 0
    ends = torch.isin(ids, end_ids)
    for begin in begins:  # a token that crosses the border belongs to the answer
        end = ends[begin:].nonzero()
        if begin >= length or not len(end):
            break
        last = begin + int(end[0]) + 1
        answers[begin:last] = True
    size = min(last, length)
    if not answers[2:size].any():
        return None
    return TokenRow(ids[:size].int(), answers[:size])


def make_rows(text: Text, talks: Talks, template: str, length: int) -> list[TokenRow]:
    """Return the rows of all conversations with an answer. Raise ValueError if none has one."""
    found: list[TokenRow] = []
    for begin in ProgressBar(range(0, len(talks), AT_ONCE), desc="tokens", unit="batch", leave=False):
        some = talks[begin:begin + AT_ONCE]
        found += filter(None, _rows(text, some, template, length))
    if not found:
        raise ValueError(f"no conversation has an answer with an end token among its first {length} tokens: "
                         "raise --length, or choose the --template that the model was trained with")
    return found


def draw(count: int, seed: int, first: int, size: int) -> list[int]:
    """Return the numbers of `size` rows of a training from its `first` on, out of `count`, shuffled for each epoch."""
    numbers = range(first, first + size)
    epochs = {number // count for number in numbers}
    generators = {epoch: np.random.default_rng((seed, epoch)) for epoch in epochs}
    orders = {epoch: generator.permutation(count) for epoch, generator in generators.items()}
    return [int(orders[number // count][number % count]) for number in numbers]


def batch_at(step: int, rows: Rows, size: int, seed: int) -> list[TokenRow]:
    """Return the `size` rows of a step."""
    return [rows[i] for i in draw(len(rows), seed, step * size, size)]
