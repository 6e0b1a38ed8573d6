"""Records for predictions: the texts that a target writes to questions, and which of their tokens a drafter foresees.

A drafter reads a text in one pass. Noted is whether each token is the drafter's likeliest, which drafting level by
level guesses, and whether the drafter would choose it with the noise of its position, as DSI does.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from tqdm import tqdm

from config.files import fits, whole, write_json
from config.questions import load
from eval.dsi.model_keys import PredictConfig
from eval.pair_keys import Measured
from eval.pairs import answer, check_pair, open_model, record
from eval.recorded import Record, check_settings, settings_of
from model.sample import Sampler

SETTINGS = ("base_dir", "draft_dir", "sets", "data", "question_begin", "question_end", "template", "temperature",
            "top_p", "top_k", "seed", "max_new_tokens", "dtype")  # the keys that decide a record
OTHER = "name another traces="


class Written(NamedTuple):
    """One answer: token ids, and for each token of the text 1 or 0."""

    prompt: list[int]
    text: list[int]
    likeliest: list[int]
    coupled: list[int]

    def record(self, coupled: bool) -> Record:
        """What a drafter that chooses with the target's noise has to know, or one that takes the likeliest token."""
        return Record(self.prompt, self.text, self.coupled if coupled else self.likeliest)


class Book(NamedTuple):
    """The answers to all questions, the size of the vocabulary, and the tokens that end an answer."""

    answers: list[Written]
    vocab: int
    ends: list[int]


ANSWER = dict.fromkeys(Written._fields, [int])
FORM = {"keys": dict, "vocab": int, "ends": [int], "answers": [ANSWER]}


def sampler_of(config: PredictConfig) -> Sampler:
    """What chooses the tokens of the target."""
    run = config.run
    return Sampler(run.temperature, run.top_p, run.top_k, run.seed)


def book_of(config: PredictConfig) -> Book:
    """The record that the file of traces holds, or a new one, which is kept there.

    Raises ValueError if the file holds anything else, or a record of other keys, or if an answer has no room.
    """
    path, settings = Path(config.traces), settings_of(config, SETTINGS)
    if config.traces and path.is_file():
        found = whole(path, OTHER)
        if not fits(found, FORM) or not _is_sound(found):
            raise ValueError(f"{path} holds no record of texts: {OTHER}")
        check_settings(path, found["keys"], settings, OTHER)
        answers = [Written(*map(one.get, Written._fields)) for one in found["answers"]]
        check_room([one.prompt for one in answers], config.run.max_length, config)
        return Book(answers, found["vocab"], found["ends"])
    book = _made(config)
    if config.traces:
        answered = [one._asdict() for one in book.answers]
        write_json(path, {"keys": settings, **book._asdict(), "answers": answered}, indent=None)
    return book


def _is_sound(found: dict[str, Any]) -> bool:
    """Whether there are answers, each with a prompt, tokens of the vocabulary, and a bit of each kind for a token."""
    vocab = range(found["vocab"])
    for one in found["answers"]:
        prompt, text, *bits = map(one.get, Written._fields)
        even = all(len(some) == len(text) for some in bits)
        are_bits = all({*some} <= {0, 1} for some in bits)
        known = all(token in vocab for token in [*prompt, *text, *found["ends"]])
        if not (prompt and text and even and are_bits and known):
            return False
    return bool(found["answers"])


def check_room(prompts: Sequence[Sequence[int]], context: int, config: PredictConfig) -> None:
    """Raise ValueError if a prompt and its answer may not fit into so many tokens."""
    longest = max(map(len, prompts))
    most = config.run.max_new_tokens
    if longest + most > context:
        raise ValueError(f"a prompt of {longest} tokens leaves no room for max_new_tokens={most} in a "
                         f"context of {context}: give less, or other sets= or questions")


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
    check_room(prompts, min(config.run.max_length, *contexts), config)
    sampler, answers = sampler_of(config), []
    for prompt in tqdm(prompts, desc="record", unit="answer", leave=False, file=sys.stderr):
        text = answer(target, prompt, run.max_new_tokens, sampler)
        likeliest = record(drafter, prompt, text, Sampler())
        coupled = record(drafter, prompt, text, sampler)
        answers.append(Written(prompt, text, likeliest, coupled))
    return Book(answers, target.whole.config.vocab, sorted(target.text.end_ids))
