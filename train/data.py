"""The data of a training: conversations from a file, as rows of token ids of which the answers count.

It knows nothing about models. What a conversation looks like to the model is said by the templates of model/text.py.
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
from tqdm import trange

from config.files import ANOTHER, fits, lines, whole
from config.schema.untrusted import read_bytes
from model.text import Text

USER, ASSISTANT = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
TURNS = (("from", "value"), ("role", "content"))  # keys of who says what, as ShareGPT and OpenAI write a turn
AT_ONCE = 64  # conversations; a tokenizer is faster with several, and uses all cores
LINE = "write one JSON object a line"
FORMS = ('{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, '
         '{"messages": [{"role": "user", "content": "..."}, ...]} or {"turns": [...], "reference": [...]}')

Talk = Sequence[str]  # questions and answers by turns
Talks = Sequence[Talk]


class Row(NamedTuple):
    """Token ids `[N]` in int32, and which of them are an answer's, its end token included, `[N]` in bool."""

    ids: Tensor
    answers: Tensor


def read_conversations(path: Path) -> list[list[str]]:
    """The conversations of a file, each as what user and assistant say by turns; one JSON object a line, or one list.

    What an assistant says before the first question and a last question without an answer are left out, and system
    messages too: the template has its own.
    """
    found = [_talk(entry, where) for entry, where in _entries(path)]
    talks = [talk for talk in found if len(talk) > 1]
    if len(talks) < 2:
        raise ValueError(f"{path} holds {len(talks)} conversations with an answer; a training needs two at least, "
                         "one of them to be held out")
    return talks


def _entries(path: Path) -> Iterator[tuple[Any, str]]:
    """Each conversation, and where it stands."""
    if read_bytes(path, ANOTHER).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from ((entry, f"entry {number} of {path}") for number, entry in enumerate(whole(path, LINE), 1))
    else:
        yield from ((entry, f"line {number} of {path}") for number, entry in lines(path, LINE))


def _talk(entry: Any, where: str) -> list[str]:
    """The turns, up to where they stop to alternate or one is empty."""
    said = _said(entry)
    if said is None:
        raise ValueError(f"{where} is not a conversation; write {FORMS}")
    talk: list[str] = []
    for role, words in said:
        if (not talk and role in ASSISTANT) or role == "system":
            continue
        if role not in (USER, ASSISTANT)[len(talk) % 2] or not words.strip():
            break
        talk.append(words)
    return talk[:len(talk) // 2 * 2]


def _said(entry: Any) -> list[tuple[str, str]] | None:
    """Who said what; None if that is not given in one of the FORMS."""
    if fits(entry, {"turns": [str], "reference": [str]}):
        said = chain.from_iterable(zip(entry["turns"], entry["reference"]))
        return list(zip(cycle(("user", "assistant")), said))
    places: list[Any] = [entry]
    if isinstance(entry, dict):
        places = [entry.get("conversations"), entry.get("messages")]
    for who, what in TURNS:
        for place in places:
            if fits(place, [{who: str, what: str}]):
                return [(turn[who], turn[what]) for turn in place]
    return None


Rows = Sequence[Row]


def answer_row(prompt: Sequence[int], answer: Sequence[int]) -> Row:
    """The row of a prompt and the answer to it, as token ids."""
    ids = torch.tensor([*prompt, *answer], dtype=torch.int32)
    return Row(ids, torch.arange(len(ids)) >= len(prompt))


def make_row(text: Text, talk: Talk, template: str, length: int) -> Row | None:
    """A conversation as the model would have written it, cut after `length` tokens; None if no answer is left.

    An answer begins where the prompt that asks for it ends, and ends with the first end token.
    """
    return next(_rows(text, [talk], template, length))


def _rows(text: Text, talks: Talks, template: str, length: int) -> Iterator[Row | None]:
    """The row of each conversation."""
    finished = [text.prompt_text([*talk, "?"], template) for talk in talks]  # "?": so that the last answer ends
    spans, end_ids = text.spans(finished, template), torch.tensor(sorted(text.end_ids))
    for talk, words, (ids, reach) in zip(talks, finished, spans):
        asked = (talk[:turns] for turns in range(1, len(talk), 2))
        prompts = (text.prompt_text(turns, template) for turns in asked)
        if reach:
            begins = (bisect_right(reach, _shared(prompt, words)) for prompt in prompts)
        else:
            begun = map(itemgetter(0), text.spans(list(prompts), template))
            begins = (_shared(some, ids) for some in begun)
        yield _row(torch.tensor(ids), begins, end_ids, length)


def _shared(some: Any, others: Any) -> int:
    """How many elements two sequences begin with alike."""
    begins = others[:len(some)] == some  # which is usual, and soon seen
    return len(some if begins else commonprefix([some, others]))


def _row(ids: Tensor, begins: Iterable[int], end_ids: Tensor, length: int) -> Row | None:
    """The row of these ids `[N]`, whose answers begin at these places."""
    answers, last = torch.zeros(len(ids), dtype=torch.bool), 0
    ends = torch.isin(ids, end_ids)
    for begin in begins:  # a token may straddle the border, and counts to the answer
        end = ends[begin:].nonzero()
        if begin >= length or not len(end):
            break
        last = begin + int(end[0]) + 1
        answers[begin:last] = True
    size = min(last, length)
    if not answers[2:size].any():
        return None
    return Row(ids[:size].int(), answers[:size])


def make_rows(text: Text, talks: Talks, template: str, length: int) -> list[Row]:
    """The rows of all conversations that have an answer. Raises ValueError if none has."""
    found: list[Row] = []
    for begin in trange(0, len(talks), AT_ONCE, desc="tokens", unit="batch", leave=False):
        some = talks[begin:begin + AT_ONCE]
        found += filter(None, _rows(text, some, template, length))
    if not found:
        raise ValueError(f"no conversation has an answer among its first {length} tokens that ends with an end token: "
                         "raise --length, or choose the --template that the model was trained with")
    return found


def draw(count: int, seed: int, first: int, size: int) -> list[int]:
    """Which rows are the `first` and following ones of a training: shuffled again each time all were seen."""
    numbers = range(first, first + size)
    epochs = {number // count for number in numbers}
    generators = {epoch: np.random.default_rng((seed, epoch)) for epoch in epochs}
    orders = {epoch: generator.permutation(count) for epoch, generator in generators.items()}
    return [int(orders[number // count][number % count]) for number in numbers]


def batch_at(step: int, rows: Rows, size: int, seed: int) -> list[Row]:
    """The rows of a step, so many of them."""
    return [rows[i] for i in draw(len(rows), seed, step * size, size)]
