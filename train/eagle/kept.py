"""The lessons of a training, and the file that keeps them for when the training goes on: tokenizing takes minutes.

It is a safetensors file that only its user may read, since it holds conversations. One that is broken, or was made of
anything else, is not read.
"""
from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from config.files import ANOTHER, ROOM, make_private
from config.schema.untrusted import read_bytes
from model.text import SETTINGS, TOKENIZER_FILES
from model.weights.checkpoint import Form, Writer
from train.data import Row

FILE = "lessons.safetensors"
WORDS = ("template", "limit", "held_out", "judged", "seed")  # of the command, which decide what the lessons are


@dataclass(frozen=True)
class Lessons:
    """The conversations as rows to learn from, and the questions of those that are held out."""

    rows: list[Row]
    prompts: list[list[int]]
    ends: frozenset[int]


def fingerprint(args: Namespace, length: int) -> Tensor:
    """What differs for other data, another tokenizer or other words, `[32]` in uint8."""
    files = {name: args.model_dir / name for name in (*TOKENIZER_FILES, *SETTINGS)}
    hashes = {name: _hash(path) for name, path in files.items() if path.is_file()}
    words = [getattr(args, name) for name in WORDS]
    content = json.dumps([_hash(args.data), hashes, words, length])
    digest = hashlib.sha256(content.encode()).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def _hash(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, ANOTHER)).hexdigest()


def load(path: Path, mark: Tensor) -> Lessons | None:
    """The lessons of this fingerprint in a file; None if it has none."""
    try:
        found = load_file(path)
        if not torch.equal(found["mark"], mark):
            return None
        sizes = found["sizes"].tolist()
        rows = map(Row, found["ids"].split(sizes), found["answers"].split(sizes))
        prompts = found["prompts"].split(found["prompt_sizes"].tolist())
        ends = frozenset(found["ends"].tolist())
        return Lessons(list(rows), [prompt.tolist() for prompt in prompts], ends)
    except Exception:  # what safetensors raises on a broken file is written nowhere
        return None


def store(path: Path, mark: Tensor, lessons: Lessons) -> None:
    """Write the file, whole or not at all. Raises ValueError if that cannot be."""
    rows, prompts = lessons.rows, lessons.prompts
    numbers = {
        "sizes": [len(row.ids) for row in rows],
        "prompt_sizes": [len(prompt) for prompt in prompts],
        "prompts": [token for prompt in prompts for token in prompt],
        "ends": sorted(lessons.ends)}
    tensors = {name: torch.tensor(some, dtype=torch.long)
               for name, some in numbers.items()}
    tensors["ids"] = torch.cat([row.ids for row in rows])
    tensors["answers"] = torch.cat([row.answers for row in rows])
    tensors["mark"] = mark
    try:
        make_private(f"{path}.part")  # which the writer fills
        forms = {name: Form(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        with Writer(path, forms) as file:
            for name, x in tensors.items():
                file.write(name, x)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): {ROOM}") from error
