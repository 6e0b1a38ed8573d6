"""What is predicted, and its record: the texts that a target writes, and which of their tokens a drafter foresees.

A drafter reads a text in one pass. Noted is whether each token is the drafter's likeliest, which drafting level by
level guesses, and whether the drafter would choose it with the noise of its position, as DSI does.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from config.keys import WHOLE, listed, over, preset_of, raw_values
from config.presets import TOY
from config.questions import load
from config.run_config import PENALTIES, RunConfig
from eval.dsi.keys import COMMAND
from eval.keys import AsksSets, problems_of_files
from eval.pair_keys import Measured
from eval.pairs import answer, check_pair, open_model, record
from eval.prompts import problems as problems_of_sets
from eval.recorded import Recorded, check_room, keep, kept, sampler_of, settings_of
from model.cache import Admitted, TreeCache
from model.drafts.network import ModelDraft
from model.sample import Sampler

SETTINGS = ("base_dir", "draft_dir", "sets", "data", "question_begin", "question_end", "template", "temperature",
            "top_p", "top_k", "min_p", "seed", "max_new_tokens", "dtype", *PENALTIES)  # the keys that decide a record
CHAINS = ("ar", "serial", "naive", "pruned", "pipedec", "continuous", "pipeinfer", "dsi")
LOOKAHEAD = "5"  # with four replicas of jetson-7b the least of Eq. 1
DEFAULTS = {"profile": "jetson-7b", "max_new_tokens": "48", "question_end": "1", "draft": "model"}
NARROW = {  # of every level the likeliest guess alone, however unlikely it is
    "width": "1", "init_topk_pipedec": "1", "min_probability": "0"}
SEGMENTS = ("run_pipeinfer", "subseq_token")
LEVELS = ("init_depth", "expand_depth")  # after the first
OPEN = {"lookahead": "auto", "subseq_token": 0}  # keys, and what asks for a measurement


@dataclass(frozen=True)
class PredictConfig(AsksSets):
    """One prediction and its measurement."""

    REFUSED = ("pipeline_type", "model_dir", "tp", "prompt_ids", "question_file", "stop", "ignore_eos", "time", "trace",
               "hosts")

    EXAMPLES = f"""\
  {COMMAND} predict
  {COMMAND} predict profile=lan-1g slowdown=8 output=lan.json
  {COMMAND} predict methods=serial,continuous,dsi sets=gsm8k question_end=4 temperature=1 seed=3
  {COMMAND} predict toy draft_dir=toy/draft_b lookahead=4 traces=draft_b.json"""

    # What is compared
    methods: str = ",".join(CHAINS)  # those that are predicted and measured (commas between); ar always is
    measure: bool = True  # run the methods, too, in the time that the cluster would need; false: predict only
    traces: str = ""  # JSON file for the texts and matches, which are read if it is there; empty: none

    def problems(self) -> Iterator[str]:
        chosen = listed(self.methods)
        for name in chosen:
            if name not in CHAINS:
                yield (f"methods={self.methods}: {name} drafts no chain, or is no method: choose among "
                       f"{', '.join(CHAINS)}")
        if len(set(chosen)) < len(chosen):
            yield f"methods={self.methods} names something twice: leave one of them out"
        yield from problems_of_sets(self.chosen_sets)
        yield from _problems_of_chains(self.run)
        if self.run.cluster is None:
            yield "profile=none has no times to predict with: name an emulated cluster, as in profile=jetson-7b"
        yield from problems_of_files(self.run, "output")
        yield from problems_of_files(self, "traces")

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods, `ar` first, with which all others are compared."""
        return ("ar", *(name for name in listed(self.methods) if name != "ar"))

    def single(self, method: str, virtual: bool) -> RunConfig:
        """The configuration of a single run by one of the methods, in virtual time or as it is measured."""
        timed: dict[str, Any] = {"time": "virtual", "slowdown": 1.0} if virtual else {}
        return replace(self.run, pipeline_type=method, output="", **timed)


def words(argv: Sequence[str]) -> list[str]:
    """The words of a prediction: those that were typed, and those that make every method draft one chain.

    A chain has `lookahead` guesses, where it is drafted for a verification or a tree, and so has a segment or a run.
    """
    raw = raw_values(argv)
    lookahead = raw.get("lookahead", LOOKAHEAD)
    if not WHOLE.fullmatch(lookahead) or int(lookahead[:9]) < 1:
        lookahead = LOOKAHEAD  # what was typed is refused by its own name
    defaults = {**DEFAULTS, **NARROW, "lookahead": lookahead, **dict.fromkeys(SEGMENTS, lookahead),
                **dict.fromkeys(LEVELS, str(int(lookahead) - 1))}
    if preset_of(argv) in ("", "toy") and raw.get("draft", "model") == "model":
        defaults["draft_dir"] = str(TOY / "draft_a")
    return over(argv, defaults, "toy")


def _problems_of_chains(c: RunConfig) -> Iterator[str]:
    if c.draft != "model":
        yield (f"draft={c.draft} guesses by more than a record of the text holds: add draft=model draft_dir=FOLDER, a "
               "small model")
    elif not c.draft_dir:
        yield "there is no drafter: give draft_dir=FOLDER, a small model in Hugging Face form"
    for key, value in NARROW.items():
        if getattr(c, key) != float(value):
            yield f"{key}={getattr(c, key):g} drafts no chain of all guesses: leave it out, or give {key}={value}"
    for key, open_value in OPEN.items():
        if getattr(c, key) == open_value:
            yield (f"{key}={open_value} asks for a measurement, of which a prediction knows nothing: give {key} a "
                   "number from 1")


# --- the record -------------------------------------------------------------------------------------------------------

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
    sets = (load(config.folder, name, begin, end) for name in config.chosen_sets)
    asked = [question.turns[0] for questions in sets for question in questions]
    prompts = [target.text.prompt_ids([question], run.template) for question in asked]
    contexts = (model.whole.config.context for model in (target, drafter))
    check_room(prompts, run.max_new_tokens, min(run.max_length, *contexts))
    sampler, answers = sampler_of(config.run), []
    for prompt in tqdm(prompts, desc="record", unit="answer", leave=False, file=sys.stderr):
        text = answer(target, prompt, run.max_new_tokens, sampler)
        likeliest = record(drafter, prompt, text, Sampler())
        coupled = record(drafter, prompt, text, sampler)
        answers.append(Written(prompt, text, likeliest, coupled))
    return Book(answers, target.whole.config.vocab, sorted(target.text.end_ids))


class Drafter(ModelDraft):
    """A drafter out of its matches with a recorded text: where it missed a token it guesses another one.

    A chain of guesses is right as long as it equals the text, so for a chain the record is all that there is to know.
    """

    def __init__(self, target: Recorded, matches: Sequence[int], slots: int) -> None:
        super().__init__(self._guesses, target.lm_head, TreeCache((0, 1, slots, 1), torch.float64, "cpu"))
        self._target, self._matches = target, matches

    def _guesses(self, token_T: Tensor, pos_T: Tensor, cache: Admitted) -> Tensor:
        """The guess after each row `[T, 1]`.

        Below a wrong guess all are wrong. So a token that equals the text at its position has only text before it.
        """
        guesses = list(map(self.guess_at, pos_T.tolist(), token_T.tolist()))
        return torch.tensor(guesses, dtype=torch.float64)[:, None]

    def guess_at(self, position: int, token: int) -> int:
        """The guess behind a token at a position."""
        place = position + 1 - len(self._target.prompt)
        is_text = 0 <= place < len(self._matches)
        is_right = is_text and self._matches[place] and self._target.stands(position, token)
        return (self._target.next(position) + (not is_right)) % self._target.vocab
