"""Conversations that a model makes itself: a user's turn, sampled from the chat template, and the answer to it.

A batch depends on its number and the seed alone, and each has a file of its own: an interruption loses one at most.
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
from tqdm import tqdm

from config.files import replace
from model.text import AUTO, OWN, Text, chosen
from model.weights.checkpoint import Checkpoint
from model.weights.unfold import Unfolded
from model.whole import Whole
from train.terms import digest, kept, mark
from train.writer import WRITTEN_AT_ONCE, Prompts, Writer

BATCH = 4 * WRITTEN_AT_ONCE  # conversations; at the end of each some places are empty
QUESTION, ANSWER = 64, 192  # tokens at most; a longer question is dropped, a longer answer is cut
REPEATING = 0.2  # a text that is compressed below this part of its size says one thing again and again
SLOT = "\u241f"  # in place of the user's turn in the template
Said = Tuple[str, bool]  # what was said, and whether an end token followed


class Talker:
    """A model that speaks for the user too; its weights are read when it is first asked."""

    def __init__(self, args: Namespace, dtype: torch.dtype, device: torch.device) -> None:
        self.args, self.arithmetic = args, (dtype, device)
        self.text = Text(args.model_dir)

    @cached_property
    def model(self) -> Whole:
        return Whole(Unfolded(self.args.model_dir), *self.arithmetic)

    def talks(self, number: int) -> list[dict[str, Any]]:
        """The conversations of this batch; each second batch has answers of temperature 0."""
        template = self.args.template
        opening, closing = self.text.prompt_text([SLOT], template).split(SLOT)
        [(begin, _)] = self.text.spans([opening], template)
        said = self._written([begin] * BATCH, QUESTION, 1.0, number)
        asked = (_question(*one, closing) for one in said)
        questions = list(dict.fromkeys(filter(None, asked)))
        prompts = [self.text.prompt_ids([question], template) for question in questions]
        answers = self._written(prompts, ANSWER, float(number % 2), number) if prompts else []
        found = []
        for question, (answer, _) in zip(questions, answers):
            if answer.strip() and not _repeats(answer):
                user = {"role": "user", "content": question}
                found.append({"messages": [user, {"role": "assistant", "content": answer.strip()}]})
        return found

    def _written(self, prompts: Prompts, limit: int, temperature: float, number: int) -> list[Said]:
        """What the model writes behind each prompt, and whether it ended."""
        ends = self.text.end_ids
        writer = Writer(self.model, ends, limit, temperature, self.args.seed)
        found = []
        for _, ids in writer.write(prompts, number * BATCH):
            ended = ids[-1] in ends
            said = self.text.tokenizer.decode(ids[:-1] if ended else ids, clean_up_tokenization_spaces=False)
            found.append((said, ended))
        return found


def _question(said: str, ended: bool, closing: str) -> str:
    """What was said up to the end of a user's turn in the template; nothing if it has none."""
    mark = closing.strip()
    words, follows, _ = said.partition(mark) if mark else (said, "", "")
    return words.strip() if (ended or follows) and not _repeats(words) else ""


def _repeats(words: str) -> bool:
    content = words.encode()
    return len(zlib.compress(content)) < REPEATING * len(content)


def make_own(args: Namespace, dtype: torch.dtype, device: torch.device) -> Path:
    """The file of the `--own` conversations that MODEL_DIR makes, in OUT_DIR.

    Batches that are there already are not made again. Raises ValueError if the model has no chat template, or writes
    nothing in it.
    """
    folder, template, wanted = args.model_dir, args.template, args.own
    if template == AUTO and chosen(template, folder) != OWN:
        raise ValueError(f"the tokenizer in {folder} has no chat template, in which --own would ask; name the model's "
                         "with --template")
    sizes = BATCH, QUESTION, ANSWER
    terms = json.dumps([mark(Checkpoint(folder)), template, args.seed, str(dtype), *sizes])
    batches = args.out_dir / f"own-{digest(terms.encode())[:12]}"
    talker = Talker(args, dtype, device)
    found: dict[str, Any] = {}  # by question
    with tqdm(total=wanted, desc="conversations", unit="talk") as bar:
        for number in count():
            for talk in kept(batches / f"{number}.pt", partial(talker.talks, number)):
                found.setdefault(talk["messages"][0]["content"], talk)
            bar.update(min(len(found), wanted) - bar.n)
            if len(found) >= wanted:
                break
            if number > 3 and len(found) < number:
                raise ValueError(f"the model in {folder} writes no conversations in the template {template}; give "
                                 "--data, or the --template that it was trained with")
    path: Path = args.out_dir / "own.jsonl"
    talks = (json.dumps(talk, ensure_ascii=False) for talk in islice(found.values(), wanted))
    replace(path, "\n".join([*talks, ""]).encode())
    return path
