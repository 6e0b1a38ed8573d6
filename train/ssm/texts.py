"""The texts that drafters learn from: prompts, and what the target writes behind them.

It knows nothing about drafters.
"""
from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from config.files import fits, whole, write_json
from config.questions import load, read
from eval.pair_keys import SETS
from toy.corpus.dialogues import dialogues
from train.terms import Terms, check
from train.writer import Prompts, Text, Writer

AT_ONCE = 64  # texts that are written beside each other
OWN = "flowspec boost"  # seed of the bundled models' grammar, which the bundled questions were not made with
FORM = {"terms": dict, "texts": [{"prompt": [int], "ids": [int]}]}
Chosen = Sequence[Tensor]  # which tokens of each text, [N]


def prompts_of(path: Path | None, count: int, seed: int) -> list[str]:
    """So many different prompts at most, by chance: of a file, or of the grammar, bundled questions left out."""
    if path:
        found = dict.fromkeys(question.turns[0] for question in read(path))
    else:
        asked = [asked[0] for asked, _ in dialogues(count, OWN)]
        sets = [load("", name) for name in SETS.split(",")]
        bundled = {question.turns[0] for questions in sets for question in questions}
        found = dict.fromkeys(question for question in asked if question not in bundled)
    chosen = list(found)
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def texts_of(writer: Writer, prompts: Prompts, path: Path, terms: Terms) -> list[Text]:
    """What the target writes to these prompts, from where `path` ends, which keeps it.

    Raises ValueError if that file is of other terms.
    """
    texts = _kept(path, terms)
    size, done = len(prompts), len(texts)
    with tqdm(total=size, initial=done, desc="texts", unit="text") as bar:
        while len(texts) < size:
            some = prompts[len(texts):len(texts) + AT_ONCE]
            texts += writer.write(some, len(texts))
            content = {"terms": terms, "texts": [text._asdict() for text in texts]}
            write_json(path, content, indent=None)
            bar.update(len(some))
    return texts


def _kept(path: Path, terms: Terms) -> list[Text]:
    """The texts in a file that was begun with these terms; none if there is no file."""
    if not path.exists():
        return []
    found = whole(path, "delete it to begin again")
    if not fits(found, FORM):
        raise ValueError(f"{path} holds no texts; delete it to begin again")
    check(path, found["terms"], terms, "another --out")
    return [Text(entry["prompt"], entry["ids"]) for entry in found["texts"]]


def whole_of(texts: Sequence[Text]) -> list[Tensor]:
    """That all tokens of the texts are left."""
    return [torch.ones(len(text.ids), dtype=torch.bool) for text in texts]


class Batch(NamedTuple):
    """Texts side by side, `[B, N]`: ids of prompts and texts, which of them are there, and which are to be learnt."""

    ids: Tensor
    there: Tensor
    learnt: Tensor


def batch_of(texts: Sequence[Text], learnt: Chosen, device: torch.device) -> Batch:
    """Some texts, of whose tokens those are learnt that `learnt` says, `[N]` for each text; short ones end in zeros."""
    ids = [torch.tensor([*text.prompt, *text.ids]) for text in texts]
    there = [torch.ones_like(ids_N) for ids_N in ids]
    wanted = [torch.cat([torch.zeros(len(text.prompt), dtype=torch.bool), learnt_N])
              for text, learnt_N in zip(texts, learnt)]
    return Batch(*(pad_sequence(rows, batch_first=True).to(device) for rows in (ids, there, wanted)))
