"""Conversations that a model generates itself: a user's turn, sampled in the chat template, and its answer.

A batch depends only on its number and the seed. Each has its own file, so an interruption loses at most one.
"""
from __future__ import annotations

import json
import zlib
from argparse import Namespace
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Tuple

import torch

from config.files import replace
from launch.progress import ProgressBar
from model.text import AUTO, OWN, Text, chosen
from model.weights.checkpoint import Checkpoint
from model.weights.unfold import Unfolded
from model.whole import Whole
from train.terms import digest, kept, mark
from train.writer import WRITTEN_AT_ONCE, Prompts, TextWriter

BATCH_SIZE = 4 * WRITTEN_AT_ONCE  # conversations; a multiple, since places become idle at the end of a batch
MAX_QUESTION, MAX_ANSWER = 64, 192  # most tokens; a longer question is dropped, a longer answer is cut
REPETITIVE_SHARE = 0.2  # a text that compresses below this share of its size is repetitive
USER_SLOT = "\u241f"  # placeholder of the user's turn in the template
Said = Tuple[str, bool]  # a text, and whether an end token followed


class Talker:
    """A model that generates both sides of conversations; its weights are read at its first use."""

    def __init__(self, args: Namespace, dtype: torch.dtype, device: torch.device) -> None:
        self.args, self.arithmetic = args, (dtype, device)
        self.text = Text(args.model_dir)

    @cached_property
    def model(self) -> Whole:
        return Whole(Unfolded(self.args.model_dir), *self.arithmetic)

    def talks(self, batch_number: int) -> list[dict[str, Any]]:
        """Return the conversations of this batch; answers have temperature 0 in every other batch, else 1."""
        template = self.args.template
        opening, closing = self.text.prompt_text([USER_SLOT], template).split(USER_SLOT)
        [(prompt_begin, _)] = self.text.spans([opening], template)

        # questions
        samples = self._written([prompt_begin] * BATCH_SIZE, MAX_QUESTION, 1.0, batch_number)
        candidates = (_question(*sample, closing) for sample in samples)
        questions = list(dict.fromkeys(filter(None, candidates)))

        # answers
        prompts = [self.text.prompt_ids([question], template) for question in questions]
        answers = self._written(prompts, MAX_ANSWER, float(batch_number % 2), batch_number) if prompts else []

        talks = []
        for question, (answer, _) in zip(questions, answers):
            if answer.strip() and not _repeats(answer):
                user_turn = {"role": "user", "content": question}
                assistant_turn = {"role": "assistant", "content": answer.strip()}
                talks.append({"messages": [user_turn, assistant_turn]})
        return talks

    def _written(self, prompts: Prompts, max_tokens: int, temperature: float, batch_number: int) -> list[Said]:
        """Return the model's text after each prompt, and whether it ended."""
        end_ids = self.text.end_ids
        writer = TextWriter(self.model, end_ids, max_tokens, temperature, self.args.seed)
        texts = []
        for _, token_ids in writer.write(prompts, batch_number * BATCH_SIZE):
            has_ended = token_ids[-1] in end_ids
            text_ids = token_ids[:-1] if has_ended else token_ids
            text = self.text.tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
            texts.append((text, has_ended))
        return texts


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

    sizes = BATCH_SIZE, MAX_QUESTION, MAX_ANSWER
    terms = json.dumps([mark(Checkpoint(model_dir)), template, args.seed, str(dtype), *sizes])
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
