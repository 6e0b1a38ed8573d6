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
from model.text import Text

SETTINGS = ("base_dir", "draft_dir", "sets", "data", "question_begin", "question_end", "template", "temperature",
            "top_p", "top_k", "seed", "max_new_tokens", "dtype")  # the keys that decide a record


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


def _is_id(value: Any) -> bool:
    return fits(value, int) and value >= 0


BITS = [lambda value: fits(value, int) and value in (0, 1)]
ANSWER = {"prompt": [_is_id], "text": [_is_id], "likeliest": BITS, "coupled": BITS}
FORM = {"keys": dict, "vocab": _is_id, "ends": [_is_id], "answers": [ANSWER]}


def sampler_of(config: PredictConfig) -> Sampler:
    """What chooses the tokens of the target."""
    return Sampler(config.run.temperature, config.run.top_p, config.run.top_k, config.run.seed)


def book_of(config: PredictConfig) -> Book:
    """The record that the file of traces holds, or a new one, which is kept there.

    Raises ValueError if the file holds anything else, or a record of other keys, or if an answer has no room.
    """
    path = Path(config.traces)
    if config.traces and path.is_file():
        book = _kept(path, settings_of(config, SETTINGS))
        check_room([one.prompt for one in book.answers], config.run.max_length, config)
        return book
    book = _made(config)
    if config.traces:
        answers = [one._asdict() for one in book.answers]
        content = {"keys": settings_of(config, SETTINGS), **book._asdict(), "answers": answers}
        write_json(path, content, indent=None)
    return book


def check_room(prompts: Sequence[Sequence[int]], context: int, config: PredictConfig) -> None:
    """Raise ValueError if a prompt and its answer may not fit into so many tokens."""
    longest = max(map(len, prompts))
    most = config.run.max_new_tokens
    if longest + most > context:
        raise ValueError(f"a prompt of {longest} tokens leaves no room for max_new_tokens={most} in a "
                         f"context of {context}: give less, or other sets= or questions")


def _kept(path: Path, settings: dict[str, Any]) -> Book:
    other = "name another traces="
    found = whole(path, other)
    if not fits(found, FORM) or not _are_sound(found["answers"], found["vocab"]):
        raise ValueError(f"{path} holds no record of texts: {other}")
    check_settings(path, found["keys"], settings, other)
    answers = [Written(*map(one.get, Written._fields)) for one in found["answers"]]
    return Book(answers, found["vocab"], found["ends"])


def _are_sound(answers: Sequence[dict[str, list[int]]], vocab: int) -> bool:
    """Whether there are answers, each with a prompt, tokens of the vocabulary, and a bit of each kind for a token."""
    def is_sound(one: dict[str, list[int]]) -> bool:
        even = len(one["text"]) == len(one["likeliest"]) == len(one["coupled"])
        return bool(one["prompt"] and one["text"]) and even and max(one["prompt"] + one["text"]) < vocab

    return bool(answers) and all(map(is_sound, answers))


# --- with both models -------------------------------------------------------------------------------------------------

def _made(config: PredictConfig) -> Book:
    opened = Measured(dtype=config.run.dtype, device=config.run.device, threads=config.run.threads_per_rank)
    target, drafter = (open_model(folder, opened) for folder in (config.run.base_dir, config.run.draft_dir))
    check_pair(target, drafter)
    sampler, answers = sampler_of(config), []
    prompts = _prompts(config, target.text)
    contexts = (model.whole.config.context for model in (target, drafter))
    check_room(prompts, min(config.run.max_length, *contexts), config)
    for prompt in tqdm(prompts, desc="record", unit="answer", leave=False, file=sys.stderr):
        text = answer(target, prompt, config.run.max_new_tokens, sampler)
        likeliest = record(drafter, prompt, text, Sampler())
        coupled = record(drafter, prompt, text, sampler)
        answers.append(Written(prompt, text, likeliest, coupled))
    return Book(answers, target.whole.config.vocab, sorted(target.text.end_ids))


def _prompts(config: PredictConfig, text: Text) -> Sequence[list[int]]:
    """The first turns of all chosen questions as token ids."""
    begin, end = config.run.question_begin, config.run.question_end
    sets = (load(config.data, name, begin, end) for name in config.chosen_sets)
    asked = [question.turns[0] for questions in sets for question in questions]
    return [text.prompt_ids([question], config.run.template) for question in asked]
