"""Conversations that a model generates itself: a user's turn, sampled in the chat template, and its answer.

A batch depends only on its number and the seed. Each has its own file, so an interruption loses at most one.
"""
from __future__ import annotations

import json
import zlib
from argparse import Namespace
from functools import cached_property, partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, Sequence, Tuple

import torch

from config.files import replace
from launch.progress import ProgressBar
from model.text import AUTO, OWN, Text, chosen
from model.weights.checkpoint import Checkpoint
from model.weights.unfold import Unfolded
from model.whole import WholeModel, open_whole
from train.terms import digest, kept, mark
from train.writer import WRITTEN_AT_ONCE, Prompts, TextWriter

BATCH_SIZE = 4 * WRITTEN_AT_ONCE  # conversations; a multiple, since places become idle at the end of a batch
NUM_QUESTIONS = 2  # most in a conversation; a second one follows an answer that ended
MAX_QUESTION, MAX_ANSWER = 128, 192  # most tokens; a longer question is dropped, a longer answer is cut
REPETITIVE_SHARE = 0.2  # a text that compresses below this share of its size is repetitive
QUESTION_TEMPERATURE = 0.8  # questions of small models make little sense at 1
USER_SLOT = "\u241f"  # placeholder of the user's turn in the template
Said = Tuple[str, bool]  # a text, and whether an end token followed

# Beginnings of first questions. Without them a small model asks for little but advice and plans.
BEGINNINGS = ("", "Write a Python function that", "Who", "Summarize this article in a few sentences:",
              "", "Solve this step by step:", "What is", "Make a table of",
              "", "Complete this function:\n\ndef", "How many", "List",
              "", "Rewrite this text:", "Explain why", "Compare")


class Talker:
    """A model that generates both sides of conversations; its weights are read at its first use."""

    def __init__(self, args: Namespace, dtype: torch.dtype, device: torch.device) -> None:
        self.args, self.arithmetic = args, (dtype, device)
        self.text = Text(args.model_dir)

    @cached_property
    def model(self) -> WholeModel:
        return open_whole(Unfolded(self.args.model_dir), *self.arithmetic)

    def talks(self, batch_number: int) -> list[dict[str, Any]]:
        """Return the conversations of this batch; answers have temperature 0 in every other batch, else 1."""
        talks: list[list[str]] = [[] for _ in range(BATCH_SIZE)]
        open_talks = talks
        for _ in range(NUM_QUESTIONS):
            if open_talks:
                open_talks = self._extend(open_talks, batch_number)
        return [{"messages": _messages(talk)} for talk in talks if talk]

    def _extend(self, talks: list[list[str]], batch_number: int) -> list[list[str]]:
        """Add a question and its answer to each conversation, if both are good; return those whose answer ended."""
        questions = self._questions(talks, batch_number)
        asked_talks = [(talk, question) for talk, question in zip(talks, questions) if question]

        template, temperature = self.args.template, float(batch_number % 2)
        prompts = [self.text.prompt_ids([*talk, question], template) for talk, question in asked_talks]
        answers = self._written(prompts, MAX_ANSWER, temperature, batch_number)

        open_talks = []
        for (talk, question), (answer, has_ended) in zip(asked_talks, answers):
            if answer.strip() and not _repeats(answer):
                talk += [question, answer.strip()]
                if has_ended:
                    open_talks.append(talk)
        return open_talks

    def _questions(self, talks: list[list[str]], batch_number: int) -> list[str]:
        """Return a question for each conversation, or "" if the model writes none."""
        # the template around each question, and how the question begins
        template = self.args.template
        beginnings = ["" if talk else beginning for talk, beginning in zip(talks, cycle(BEGINNINGS))]
        frames = [self.text.prompt_text([*talk, USER_SLOT], template).split(USER_SLOT) for talk in talks]

        # the rest of each question, by the model
        openings = [opening + beginning for (opening, _), beginning in zip(frames, beginnings)]
        prompts = [token_ids for token_ids, _ in self.text.spans(openings, template)]
        samples = self._written(prompts, MAX_QUESTION, QUESTION_TEMPERATURE, batch_number)

        parts = zip(beginnings, samples, frames)
        return [_question(beginning + sample, has_ended, closing)
                for beginning, (sample, has_ended), (_, closing) in parts]

    def _written(self, prompts: Prompts, max_tokens: int, temperature: float, batch_number: int) -> list[Said]:
        """Return the model's text after each prompt, and whether it ended."""
        if not prompts:
            return []
        end_ids = self.text.end_ids
        writer = TextWriter(self.model, end_ids, max_tokens, temperature, self.args.seed)
        texts = []
        for _, token_ids in writer.write(prompts, batch_number * BATCH_SIZE):
            has_ended = token_ids[-1] in end_ids
            text_ids = token_ids[:-1] if has_ended else token_ids
            text = self.text.tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
            texts.append((text, has_ended))
        return texts


def _messages(talk: Sequence[str]) -> list[dict[str, str]]:
    """Return the turns of a conversation in OpenAI's form; the first one is the user's."""
    roles = cycle(("user", "assistant"))
    return [{"role": role, "content": turn} for role, turn in zip(roles, talk)]


def _question(text: str, has_ended: bool, closing: str) -> str:
    """Return the text before the end of the user's turn in the template, or "" if it does not end or repeats itself."""
    turn_end = closing.strip()
    question, has_mark, _ = text.partition(turn_end) if turn_end else (text, "", "")
    return question.strip() if (has_ended or has_mark) and not _repeats(question) else ""


def _repeats(text: str) -> bool:
    content = text.encode()
    return len(zlib.compress(content)) < REPETITIVE_SHARE * len(content)


def make_own(args: Namespace, dtype: torch.dtype, device: torch.device) -> Path:
    """Let the model in MODEL_DIR generate `--own` conversations, and return their file in OUT_DIR.

    Existing batches are reused. Raises ValueError if the model has no chat template, or generates no conversations in
    it.
    """
    model_dir, template, num_wanted = args.model_dir, args.template, args.own
    if template == AUTO and chosen(template, model_dir) != OWN:
        raise ValueError(f"the tokenizer in {model_dir} has no chat template, which --own requires; name the model's "
                         "with --template")

    sizes = BATCH_SIZE, NUM_QUESTIONS, MAX_QUESTION, MAX_ANSWER, QUESTION_TEMPERATURE
    options = template, args.seed, str(dtype), *sizes, *BEGINNINGS
    terms = json.dumps([mark(Checkpoint(model_dir)), *options])
    batches_dir = args.out_dir / f"own-{digest(terms.encode())[:12]}"
    talker = Talker(args, dtype, device)

    talk_by_question: dict[str, Any] = {}
    with ProgressBar(total=num_wanted, desc="conversations", unit="talk") as progress_bar:
        for batch_number in count():
            batch_path = batches_dir / f"{batch_number}.pt"
            for talk in kept(batch_path, partial(talker.talks, batch_number)):
                talk_by_question.setdefault(talk["messages"][0]["content"], talk)

            progress_bar.update(min(len(talk_by_question), num_wanted) - progress_bar.n)
            if len(talk_by_question) >= num_wanted:
                break
            if batch_number > 3 and len(talk_by_question) < batch_number:
                raise ValueError(f"the model in {model_dir} generates no conversations in the template {template}; "
                                 "give --data, or the --template that it was trained with")

    own_path: Path = args.out_dir / "own.jsonl"
    talk_lines = (json.dumps(talk, ensure_ascii=False) for talk in islice(talk_by_question.values(), num_wanted))
    replace(own_path, "\n".join([*talk_lines, ""]).encode())
    return own_path
