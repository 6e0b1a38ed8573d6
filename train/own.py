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

BATCH = 4 * WRITTEN_AT_ONCE  # conversations; a multiple, since places become idle at the end of a batch
QUESTION, ANSWER = 64, 192  # most tokens; a longer question is dropped, a longer answer is cut
REPEATING = 0.2  # a text that compresses below this share of its size is repetitive
SLOT = "\u241f"  # placeholder of the user's turn in the template
Said = Tuple[str, bool]  # a text, and whether an end token followed


class Talker:
    """A model that generates both sides of conversations; its weights are read at its first use."""

    def __init__(self, args: Namespace, dtype: torch.dtype, device: torch.device) -> None:
        self.args, self.arithmetic = args, (dtype, device)
        self.text = Text(args.model_dir)

    @cached_property
    def model(self) -> Whole:
        return Whole(Unfolded(self.args.model_dir), *self.arithmetic)

    def talks(self, number: int) -> list[dict[str, Any]]:
        """Return the conversations of this batch; answers have temperature 0 in every other batch, else 1."""
        template = self.args.template
        opening, closing = self.text.prompt_text([SLOT], template).split(SLOT)
        [(begin, _)] = self.text.spans([opening], template)
        samples = self._written([begin] * BATCH, QUESTION, 1.0, number)
        candidates = (_question(*one, closing) for one in samples)
        questions = list(dict.fromkeys(filter(None, candidates)))
        prompts = [self.text.prompt_ids([question], template) for question in questions]
        answers = self._written(prompts, ANSWER, float(number % 2), number) if prompts else []
        found = []
        for question, (answer, _) in zip(questions, answers):
            if answer.strip() and not _repeats(answer):
                user = {"role": "user", "content": question}
                found.append({"messages": [user, {"role": "assistant", "content": answer.strip()}]})
        return found

    def _written(self, prompts: Prompts, limit: int, temperature: float, number: int) -> list[Said]:
        """Return the model's text after each prompt, and whether it ended."""
        ends = self.text.end_ids
        writer = TextWriter(self.model, ends, limit, temperature, self.args.seed)
        found = []
        for _, ids in writer.write(prompts, number * BATCH):
            ended = ids[-1] in ends
            words = self.text.tokenizer.decode(ids[:-1] if ended else ids, clean_up_tokenization_spaces=False)
            found.append((words, ended))
        return found


def _question(text: str, ended: bool, closing: str) -> str:
    """Return the text before the end of the user's turn in the template, or "" if it does not end or repeats itself."""
    mark = closing.strip()
    words, follows, _ = text.partition(mark) if mark else (text, "", "")
    return words.strip() if (ended or follows) and not _repeats(words) else ""


def _repeats(words: str) -> bool:
    content = words.encode()
    return len(zlib.compress(content)) < REPEATING * len(content)


def make_own(args: Namespace, dtype: torch.dtype, device: torch.device) -> Path:
    """Let the model in MODEL_DIR generate `--own` conversations, and return their file in OUT_DIR.

    Existing batches are reused. Raises ValueError if the model has no chat template, or generates no conversations in
    it.
    """
    folder, template, wanted = args.model_dir, args.template, args.own
    if template == AUTO and chosen(template, folder) != OWN:
        raise ValueError(f"the tokenizer in {folder} has no chat template, which --own requires; name the model's "
                         "with --template")
    sizes = BATCH, QUESTION, ANSWER
    terms = json.dumps([mark(Checkpoint(folder)), template, args.seed, str(dtype), *sizes])
    batches = args.out_dir / f"own-{digest(terms.encode())[:12]}"
    talker = Talker(args, dtype, device)
    found: dict[str, Any] = {}  # by question
    with ProgressBar(total=wanted, desc="conversations", unit="talk") as bar:
        for number in count():
            for talk in kept(batches / f"{number}.pt", partial(talker.talks, number)):
                found.setdefault(talk["messages"][0]["content"], talk)
            bar.update(min(len(found), wanted) - bar.n)
            if len(found) >= wanted:
                break
            if number > 3 and len(found) < number:
                raise ValueError(f"the model in {folder} generates no conversations in the template {template}; give "
                                 "--data, or the --template that it was trained with")
    path: Path = args.out_dir / "own.jsonl"
    talks = (json.dumps(talk, ensure_ascii=False) for talk in islice(found.values(), wanted))
    replace(path, "\n".join([*talks, ""]).encode())
    return path
