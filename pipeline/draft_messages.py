"""What rank 0 and small models on ranks of their own send each other, and the 8-byte numbers that carry it.

It knows nothing about who draws a proposal, or how.

Shapes: N nodes with proposals below them, V vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Sequence

import torch
from torch import Tensor

from config.run_config import CHOICES
from config.trees import Shape
from model.sample import Sampler

RULES = CHOICES["verify"]
WORD = 1 << 64  # how many numbers 8 bytes can be


@dataclass
class Ask:
    """Rank 0 wants a tree of this shape below its text, which goes on with `tokens` behind the first `sent` ones.

    Where none was sent before, the text is that of a new request: of at most `limit` tokens, which `sampler` chooses.
    `number` is that of the question, from which an answer has it.
    """

    number: int
    sent: int
    tokens: list[int]
    limit: int
    sampler: Sampler
    shape: Shape


@dataclass
class Drafted:
    """The tree of one small model: what it proposed, in this order, in levels of so many proposals.

    A parent is the place of the proposal that it stands on, counted from 1; 0 is the tip. A score is that of the path
    from the tip, its log-probability. `law_NV` has, for each parent in the order of their first proposals, the law that
    those were drawn from; no rows, if they were chosen without chance.
    """

    number: int
    levels: list[int]
    parents: list[int]
    tokens: list[int]
    scores: list[float]
    law_NV: Tensor


def words_of(msg: Ask | Drafted) -> Tensor:
    """A message as `int64[n]`: columns of numbers, each behind its length."""
    if isinstance(msg, Ask):
        sampler = msg.sampler
        seed = sampler.seed - WORD if sampler.seed >= WORD // 2 else sampler.seed
        rule = RULES.index(sampler.rule)
        whole = [msg.number, msg.sent, msg.limit, seed, sampler.top_k, rule]
        real = _real([sampler.temperature, sampler.top_p])
        levels = list(map(len, msg.shape))
        flat = [count for level in msg.shape for count in level]
        columns = [whole, real, msg.tokens, levels, flat]
    else:
        laws = _real(msg.law_NV.flatten())
        columns = [[msg.number], msg.levels, msg.parents, msg.tokens, _real(msg.scores), laws]
    found = []
    for column in columns:
        numbers = torch.as_tensor(column, dtype=torch.int64)
        found += [torch.tensor([len(numbers)]), numbers]
    return torch.cat(found)


def ask_of(words: Tensor) -> Ask:
    """The question that numbers from the wire are; ValueError if they are none."""
    whole, real, tokens, levels, flat = _columns(words, 5)
    sizes = len(whole), len(real), int(levels.sum())
    fits = sizes == (6, 2, len(flat)) and not (levels < 0).any()
    if not fits or not 0 <= whole[5] < len(RULES):
        raise ValueError("a question for a tree whose numbers contradict each other")
    number, sent, limit, seed, top_k, rule = whole.tolist()
    temperature, top_p = _floats(real).tolist()
    sampler = Sampler(temperature, top_p, top_k, seed % WORD, RULES[rule])
    ends = list(accumulate(levels.tolist()))
    counts = flat.tolist()
    shape = tuple(tuple(counts[begin:end]) for begin, end in zip([0, *ends], ends))
    return Ask(number, sent, tokens.tolist(), limit, sampler, shape)


def drafted_of(words: Tensor) -> Drafted:
    """The tree that numbers from the wire are; ValueError if they are none."""
    number, levels, parents, tokens, scores, laws = _columns(words, 6)
    size = len(parents)
    known = parents.unique()
    fits = len(tokens) == len(scores) == size == int(levels.sum())
    possible = fits and len(number) == 1 and len(known) > 0
    if not possible or len(laws) % len(known) or (levels < 0).any():
        raise ValueError("a tree of proposals whose numbers contradict each other")
    if ((parents < 0) | (parents > torch.arange(size))).any():
        raise ValueError("a proposal that stands on a later one")
    law_NV = torch.empty(0, 0, dtype=torch.float64)
    if len(laws):
        law_NV = _floats(laws).view(len(known), -1)
    path_scores = _floats(scores).tolist()
    return Drafted(int(number[0]), levels.tolist(), parents.tolist(), tokens.tolist(), path_scores, law_NV)


def _columns(words: Tensor, count: int) -> list[Tensor]:
    """So many columns; ValueError if their lengths are not those of the numbers that are there."""
    found = []
    for _ in range(count):
        size = int(words[0]) if len(words) else -1
        if not 0 <= size < len(words):
            raise ValueError(f"{count} columns of numbers that are cut off")
        found.append(words[1:size + 1])
        words = words[size + 1:]
    return found


def _real(numbers: Sequence[float] | Tensor) -> Tensor:
    """Floating-point numbers as the whole numbers of the same bits."""
    x = torch.as_tensor(numbers, dtype=torch.float64)
    return x.view(torch.int64) if len(x) else torch.empty(0, dtype=torch.int64)


def _floats(words: Tensor) -> Tensor:
    return words.view(torch.float64) if len(words) else torch.empty(0, dtype=torch.float64)
