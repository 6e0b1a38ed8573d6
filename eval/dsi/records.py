"""Records for predictions: the texts that a target writes to questions, and which of their tokens a drafter foresees.

A drafter reads a text in one pass. Noted is whether each token is the drafter's likeliest, which drafting level by
level guesses, and whether the drafter would choose it with the noise of its position, as DSI does.
"""
from __future__ import annotations

import sys
from typing import NamedTuple, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from config.questions import load
from eval.dsi.model_keys import PredictConfig
from eval.pair_keys import Measured
from eval.pairs import answer, check_pair, open_model, record
from eval.recorded import Recorded, check_room, keep, kept, settings_of
from model.cache import Admitted, TreeCache
from model.drafts.network import ModelDraft
from model.sample import Sampler

SETTINGS = ("base_dir", "draft_dir", "sets", "data", "question_begin", "question_end", "template", "temperature",
            "top_p", "top_k", "seed", "max_new_tokens", "dtype")  # the keys that decide a record


class Written(NamedTuple):
    """One answer: token ids, and for each token of the text 1 or 0."""

    prompt: list[int]
    text: list[int]
    likeliest: list[int]
    coupled: list[int]


class Book(NamedTuple):
    """The answers to all questions, the size of the vocabulary, and the tokens that end an answer."""

    answers: list[Written]
    vocab: int
    ends: list[int]


def sampler_of(config: PredictConfig) -> Sampler:
    """What chooses the tokens of the target."""
    run = config.run
    return Sampler(run.temperature, run.top_p, run.top_k, run.seed)


def book_of(config: PredictConfig) -> Book:
    """The record that the file of traces holds, or a new one, which is kept there.

    Raises ValueError if the file holds anything else, or a record of other keys, or if an answer has no room.
    """
    settings = settings_of(config, SETTINGS)
    found = kept(config.traces, settings, "holds no record of texts", "name another traces=")
    if found:
        book = Book([Written(**one) for one in found["answers"]], found["vocab"], found["ends"])
        check_room([one.prompt for one in book.answers], config.run.max_new_tokens, config.run.max_length)
        return book
    book = _made(config)
    if config.traces:
        written = [one._asdict() for one in book.answers]
        keep(config.traces, settings, {**book._asdict(), "answers": written})
    return book


def _made(config: PredictConfig) -> Book:
    """A record by both models."""
    run = config.run
    opened = Measured(dtype=run.dtype, device=run.device, threads=run.threads_per_rank)
    target, drafter = (open_model(folder, opened) for folder in (run.base_dir, run.draft_dir))
    check_pair(target, drafter)
    begin, end = run.question_begin, run.question_end
    sets = (load(config.data, name, begin, end) for name in config.chosen_sets)
    asked = [question.turns[0] for questions in sets for question in questions]
    prompts = [target.text.prompt_ids([question], run.template) for question in asked]
    contexts = (model.whole.config.context for model in (target, drafter))
    check_room(prompts, run.max_new_tokens, min(run.max_length, *contexts))
    sampler, answers = sampler_of(config), []
    for prompt in tqdm(prompts, desc="record", unit="answer", leave=False, file=sys.stderr):
        text = answer(target, prompt, run.max_new_tokens, sampler)
        likeliest = record(drafter, prompt, text, Sampler())
        coupled = record(drafter, prompt, text, sampler)
        answers.append(Written(prompt, text, likeliest, coupled))
    return Book(answers, target.whole.config.vocab, sorted(target.text.end_ids))


class Drafter:
    """A drafter out of its matches with a recorded text: where it missed a token it guesses another one.

    A chain of guesses is right as long as it equals the text, so for a chain the record is all that there is to know.
    """

    def __init__(self, target: Recorded, matches: Sequence[int]) -> None:
        self._target, self._matches = target, matches

    def draft(self, slots: int) -> ModelDraft:
        """The drafter with an empty cache of so many slots."""
        cache = TreeCache((0, 1, slots, 1), torch.float64, "cpu")
        return ModelDraft(self._read, self._target.lm_head, cache)

    def _read(self, token_T: Tensor, pos_T: Tensor, cache: Admitted) -> Tensor:
        """The guess after each row `[T, 1]`.

        Below a wrong guess all are wrong. So a token that equals the text at its position has only text before it.
        """
        guesses = list(map(self.guess, pos_T.tolist(), token_T.tolist()))
        return torch.tensor(guesses, dtype=torch.float64)[:, None]

    def guess(self, position: int, token: int) -> int:
        """The guess behind a token at a position."""
        place = position + 1 - len(self._target.prompt)
        is_text = 0 <= place < len(self._matches)
        is_right = is_text and self._matches[place] and self._target.stands(position, token)
        return (self._target.next(position) + (not is_right)) % self._target.vocab
