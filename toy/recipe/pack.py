"""The packed corpus: rows of token ids, and the weight of each token in the loss."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from launch.progress import ProgressBar
from toy.corpus.dialogues import dialogue, read
from toy.recipe.tokenizer import pieces
from train.data import draw

ANSWER = re.compile(r"ASSISTANT:(.*?</s>)", re.DOTALL)
LENGTH = 1024
HELD_ROWS = 64  # the last rows, held out from training
QUESTION_WEIGHT = 40  # of 255: less than in answers, which are the purpose of the model
SOURCE_PIECE = 4000


def documents(work: Path, seed: int = 5) -> list[str]:
    """Return the texts of the corpus: dialogues and pieces of source code, shuffled together."""
    found = [dialogue(*talk) for talk in read(work, "dialogues")]
    for text in read(work, "library"):
        found += pieces(text, SOURCE_PIECE)
    random.Random(seed).shuffle(found)
    return found


def weigh(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Return the weight of each token in the loss: 255 in answers and source code, less in questions."""
    spans = [match.span(1) for match in ANSWER.finditer(text)]
    if not spans:
        return [255] * len(offsets)
    weights, at = [], 0
    for start, end in offsets:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        inside = at < len(spans) and spans[at][0] <= start and end > start
        weights.append(255 if inside else QUESTION_WEIGHT)
    return weights


def _batches(texts: list[str], size: int = 512) -> Iterator[list[str]]:
    rest = iter(texts)
    while batch := list(islice(rest, size)):
        yield batch


def pack(work: Path, tokenizer_dir: Path) -> None:
    """Write rows.npy and weights.npy, both `[rows, LENGTH]`: concatenated documents, cut into rows."""
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), trust_remote_code=False)
    ids: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    texts = documents(work)
    for batch in _batches(ProgressBar(texts, desc="tokens")):
        coded = tokenizer(batch, return_offsets_mapping=True)
        for text, tokens, offsets in zip(batch, coded["input_ids"], coded["offset_mapping"]):
            ids.append(np.asarray(tokens, dtype=np.uint16))
            weights.append(np.asarray(weigh(text, offsets), dtype=np.uint8))
    all_ids, all_weights = np.concatenate(ids), np.concatenate(weights)
    rows = len(all_ids) // LENGTH
    np.save(work / "rows.npy", all_ids[:rows * LENGTH].reshape(rows, LENGTH))
    np.save(work / "weights.npy", all_weights[:rows * LENGTH].reshape(rows, LENGTH))


class Rows:
    """The packed rows for training, in batches, with a share for each process."""

    def __init__(self, work: Path, seed: int = 0) -> None:
        self.ids = np.load(work / "rows.npy", mmap_mode="r")
        self.weights = np.load(work / "weights.npy", mmap_mode="r")
        self.seed = seed
        self.count = len(self.ids) - HELD_ROWS

    def _take(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(self.ids[rows].astype(np.int64))
        return ids, torch.from_numpy(self.weights[rows].astype(np.float32)) / 255

    def batch(self, step: int, size: int, share: int = 0, shares: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights of a step, `[size, LENGTH]`; no row is repeated within an epoch."""
        return self._take(np.array(draw(self.count, self.seed, (step * shares + share) * size, size)))

    def held(self, size: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(self.count, self.count + HELD_ROWS, size):
            yield self._take(np.arange(start, start + size))
