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
TURN_KEYS = (("from", "value"), ("role", "content"))  # keys of role and text in a turn by ShareGPT and by OpenAI
NUM_TOGETHER = 64  # conversations per call of the tokenizer, which is faster with several and uses all cores
LINE_REMEDY = "write one JSON object per line"
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
    all_talks = [_talk(entry, where) for entry, where in _entries(path)]
    talks = [talk for talk in all_talks if len(talk) > 1]
    if len(talks) < 2:
        raise ValueError(f"{path} holds {len(talks)} conversations with an answer; a training needs at least two, "
                         "since one is held out")
    return talks


def _entries(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield each conversation, and its place in the file for messages."""
    content = read_bytes(path, READABLE_REMEDY).lstrip(b"\xef\xbb\xbf \t\r\n")
    if content.startswith(b"["):
        entries = read_json_file(path, LINE_REMEDY)
        yield from ((entry, f"entry {number} of {path}") for number, entry in enumerate(entries, 1))
    else:
        yield from ((entry, f"line {number} of {path}") for number, entry in lines(path, LINE_REMEDY))


def _talk(entry: Any, where: str) -> list[str]:
    """Return the turns before the first one that is empty or does not alternate."""
    turns = _turns(entry)
    if turns is None:
        raise ValueError(f"{where} is not a conversation; write {FORMS}")

    talk: list[str] = []
    for role, turn_text in turns:
        is_early_answer = not talk and role in ASSISTANT
        if is_early_answer or role == "system":
            continue
        expected_roles = (USER, ASSISTANT)[len(talk) % 2]
        if role not in expected_roles or not turn_text.strip():
            break
        talk.append(turn_text)

    num_answered = len(talk) // 2
    return talk[:2 * num_answered]


def _turns(entry: Any) -> list[tuple[str, str]] | None:
    """Return the role and the text of each turn, or None if the entry has none of the FORMS."""
    if fits(entry, {"turns": [str], "reference": [str]}):
        texts = chain.from_iterable(zip(entry["turns"], entry["reference"]))
        return list(zip(cycle(("user", "assistant")), texts))

    turn_lists: list[Any] = [entry]
    if isinstance(entry, dict):
        turn_lists = [entry.get("conversations"), entry.get("messages")]

    for role_key, text_key in TURN_KEYS:
        for turn_list in turn_lists:
            if fits(turn_list, [{role_key: str, text_key: str}]):
                return [(turn[role_key], turn[text_key]) for turn in turn_list]
    return None


TokenRows = Sequence[TokenRow]


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
    talk_texts = [text.prompt_text([*talk, "?"], template) for talk in talks]  # one more question ends the last answer
    spans, end_ids = text.spans(talk_texts, template), torch.tensor(sorted(text.end_ids))
    for talk, talk_text, (token_ids, token_ends) in zip(talks, talk_texts, spans):
        talk_parts = (talk[:num_turns] for num_turns in range(1, len(talk), 2))
        prompts = (text.prompt_text(part, template) for part in talk_parts)

        if token_ends:
            answer_begins = (bisect_right(token_ends, _shared(prompt, talk_text)) for prompt in prompts)
        else:
            prompt_ids = map(itemgetter(0), text.spans(list(prompts), template))
            answer_begins = (_shared(some_ids, token_ids) for some_ids in prompt_ids)
        yield _row(torch.tensor(token_ids), answer_begins, end_ids, length)


def _shared(sequence: Any, other_sequence: Any) -> int:
    """Return the length of the common prefix of two sequences."""
    is_prefix = other_sequence[:len(sequence)] == sequence  # the usual case, which is fast
    return len(sequence if is_prefix else commonprefix([sequence, other_sequence]))


def _row(token_ids: Tensor, answer_begins: Iterable[int], end_ids: Tensor, length: int) -> TokenRow | None:
    """Return the row of these ids `[N]`, with answers that begin at these positions."""
    answer_mask, row_end = torch.zeros(len(token_ids), dtype=torch.bool), 0
    is_end = torch.isin(token_ids, end_ids)
    for answer_begin in answer_begins:  # a token that crosses the border belongs to the answer
        end_offsets = is_end[answer_begin:].nonzero()
        if answer_begin >= length or not len(end_offsets):
            break
        row_end = answer_begin + int(end_offsets[0]) + 1
        answer_mask[answer_begin:row_end] = True

    num_kept = min(row_end, length)
    if not answer_mask[2:num_kept].any():
        return None
    return TokenRow(token_ids[:num_kept].int(), answer_mask[:num_kept])


def make_rows(text: Text, talks: Talks, template: str, length: int) -> list[TokenRow]:
    """Return the rows of all conversations with an answer. Raise ValueError if none has one."""
    rows: list[TokenRow] = []
    for begin in ProgressBar(range(0, len(talks), NUM_TOGETHER), desc="tokens", unit="batch", leave=False):
        some_talks = talks[begin:begin + NUM_TOGETHER]
        rows += filter(None, _rows(text, some_talks, template, length))

    if not rows:
        raise ValueError(f"no conversation has an answer with an end token among its first {length} tokens: "
                         "raise --length, or choose the --template that the model was trained with")
    return rows


def draw(num_distinct: int, seed: int, first_row: int, num_rows: int) -> list[int]:
    """Return the indices of `num_rows` rows of a training, from its row `first_row` on.

    They are out of `num_distinct` rows, shuffled in each epoch.
    """
    row_numbers = range(first_row, first_row + num_rows)
    epochs = {row_number // num_distinct for row_number in row_numbers}
    generators = {epoch: np.random.default_rng((seed, epoch)) for epoch in epochs}
    epoch_orders = {epoch: generator.permutation(num_distinct) for epoch, generator in generators.items()}
    return [int(epoch_orders[row_number // num_distinct][row_number % num_distinct]) for row_number in row_numbers]


def batch_at(step: int, rows: TokenRows, batch_size: int, seed: int) -> list[TokenRow]:
    """Return the `batch_size` rows of a step."""
    return [rows[row_index] for row_index in draw(len(rows), seed, step * batch_size, batch_size)]
