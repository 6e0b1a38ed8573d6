"""The packed corpus: rows of token ids, and the weight of each token in the loss."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from launch.progress import ProgressBar
from toy.corpus.dialogues import dialogue, read
from toy.recipe.tokenizer import pieces_of
from train.data import draw

ANSWER_PATTERN = re.compile(r"ASSISTANT:(.*?</s>)", re.DOTALL)
ROW_LENGTH = 1024  # tokens
NUM_HELD_OUT = 64  # the last rows, held out from training
FULL_WEIGHT = 255
QUESTION_WEIGHT = 40  # less than in answers, which are the purpose of the model
SOURCE_PIECE_LENGTH = 4000  # characters
TEXTS_AT_ONCE = 512
ROWS_FILE, WEIGHTS_FILE = "rows.npy", "weights.npy"


def documents(work_dir: Path, seed: int = 5) -> list[str]:
    """Return the texts of the corpus: dialogues and pieces of source code, shuffled together."""
    texts = [dialogue(*turns) for turns in read(work_dir, "dialogues")]
    for source_text in read(work_dir, "library"):
        texts += pieces_of(source_text, SOURCE_PIECE_LENGTH)
    random.Random(seed).shuffle(texts)
    return texts


def token_weights(text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the weight of each token in the loss: the full weight in answers and source code, less in questions.

    `offsets` are the first character of each token and the end of its last one, in the order of the text.
    """
    answer_spans = [match.span(1) for match in ANSWER_PATTERN.finditer(text)]
    if not answer_spans:
        return [FULL_WEIGHT] * len(offsets)

    weights, span_index = [], 0
    for token_start, token_end in offsets:
        while span_index < len(answer_spans) and token_start >= answer_spans[span_index][1]:
            span_index += 1
        is_after_start = span_index < len(answer_spans) and answer_spans[span_index][0] <= token_start
        is_in_answer = is_after_start and token_end > token_start
        weights.append(FULL_WEIGHT if is_in_answer else QUESTION_WEIGHT)
    return weights


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(texts, TEXTS_AT_ONCE)):
        yield batch


def _save_rows(path: Path, chunks: list[np.ndarray]) -> None:
    """Write concatenated values as rows; values that do not fill a row are left out."""
    values = np.concatenate(chunks)
    num_rows = len(values) // ROW_LENGTH
    np.save(path, values[:num_rows * ROW_LENGTH].reshape(num_rows, ROW_LENGTH))


def pack(work_dir: Path, tokenizer_dir: Path) -> None:
    """Write rows.npy and weights.npy, both `[rows, ROW_LENGTH]`: concatenated documents, cut into rows."""
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), trust_remote_code=False)
    id_chunks: list[np.ndarray] = []
    weight_chunks: list[np.ndarray] = []

    for texts in _batches(iter(ProgressBar(documents(work_dir), desc="tokens"))):
        encoded = tokenizer(texts, return_offsets_mapping=True)
        for text, token_ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"]):
            id_chunks.append(np.asarray(token_ids, dtype=np.uint16))
            weight_chunks.append(np.asarray(token_weights(text, offsets), dtype=np.uint8))

    _save_rows(work_dir / ROWS_FILE, id_chunks)
    _save_rows(work_dir / WEIGHTS_FILE, weight_chunks)


class PackedRows:
    """The packed rows for training, in batches of ids and weights, both `[rows, ROW_LENGTH]`."""

    def __init__(self, work_dir: Path, seed: int) -> None:
        self.token_ids = np.load(work_dir / ROWS_FILE, mmap_mode="r")
        self.weights = np.load(work_dir / WEIGHTS_FILE, mmap_mode="r")
        self.seed = seed
        self.num_trained = len(self.token_ids) - NUM_HELD_OUT

    def _rows_at(self, row_indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        token_ids = torch.from_numpy(self.token_ids[row_indices].astype(np.int64))
        return token_ids, torch.from_numpy(self.weights[row_indices].astype(np.float32)) / FULL_WEIGHT

    def batch(self, batch_number: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return a batch of the training; no row is repeated within an epoch."""
        return self._rows_at(draw(self.num_trained, self.seed, batch_number * batch_size, batch_size))

    def held_out(self, batch_size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
        for first_row in range(self.num_trained, len(self.token_ids), batch_size):
            yield self._rows_at(range(first_row, first_row + batch_size))
