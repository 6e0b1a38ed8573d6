"""The texts that drafters learn from: prompts, and what the target writes behind them.

It knows nothing about drafters.
"""
from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from config.files import fits, whole, write_json
from config.questions import load, read
from eval.pair_keys import SETS
from toy.corpus.dialogues import dialogues
from train.writer import Prompts, Text, Writer

AT_ONCE = 64  # texts that are written beside each other
OWN = "flowspec boost"  # seed of the bundled models' grammar, which the bundled questions were not made with
FORM = {"terms": dict, "texts": [{"prompt": [int], "ids": [int]}]}
Chosen = Sequence[Tensor]  # which tokens of each text, [N]
Terms = Mapping[str, Any]


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
    for name in sorted(terms.keys() | found["terms"].keys()):
        if found["terms"].get(name) != terms.get(name):
            raise ValueError(f"{path} is of a training with {name}={found['terms'].get(name)!r} instead of "
                             f"{terms.get(name)!r}; give the same command as then, or another --out")
    return [Text(entry["prompt"], entry["ids"]) for entry in found["texts"]]


class Batch(NamedTuple):
    """Texts side by side, `[B, N]`: ids of prompts and texts, which of them are there, and which are to be learnt."""

    ids: Tensor
    there: Tensor
    learnt: Tensor


def batch_of(texts: Sequence[Text], learnt: Chosen, device: torch.device) -> Batch:
    """Some texts, of whose tokens those are learnt that `learnt` says, `[N]` for each text; short ones end in zeros."""
    width = max(len(text.prompt) + len(text.ids) for text in texts)
    ids_BN = torch.zeros(len(texts), width, dtype=torch.long)
    there_BN = torch.zeros_like(ids_BN)
    learnt_BN = torch.zeros_like(ids_BN, dtype=torch.bool)
    for row, (text, learnt_N) in enumerate(zip(texts, learnt)):
        begin, end = len(text.prompt), len(text.prompt) + len(text.ids)
        ids_BN[row, :end] = torch.tensor([*text.prompt, *text.ids])
        there_BN[row, :end] = 1
        learnt_BN[row, begin:end] = learnt_N
    return Batch(*(x.to(device) for x in (ids_BN, there_BN, learnt_BN)))
