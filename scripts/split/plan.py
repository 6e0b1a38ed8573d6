"""What a split is going to write: the sources, and which rank gets which of their tensors.

It knows nothing about what the tensors compute: names and shapes decide where a tensor goes.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint import Checkpoint
from model.eagle import borrows_embedding
from model.llama import LlamaConfig
from model.text import TOKENIZER_FILES
from model.weights import HEAD, VERSION, Part, assign, check_model, plan_stages

TEXT_FILES = (*TOKENIZER_FILES, "generation_config.json")


@dataclass(frozen=True)
class Plan:
    """What is going to be written: the sources, and which rank gets which tensors."""

    source: Checkpoint
    head: Checkpoint | None
    stages: list[int]
    parts: list[dict[str, str]]  # of each rank: name there -> name in the source
    split_id: str
    out: Path

    @property
    def folders(self) -> list[Path]:
        return [self.out / f"stage_{rank}" for rank in range(len(self.stages))]

    def heads(self, rank: int) -> list[Checkpoint]:
        """The draft heads a rank holds: rank 0 has one, or none."""
        return [self.head] if self.head and HEAD in self.parts[rank] else []

    def extras(self, rank: int) -> list[str]:
        """The files that a rank gets unchanged; whoever has the language-model head writes text."""
        names = TEXT_FILES if HEAD in self.parts[rank] else ()
        return ["config.json", *(name for name in names if (self.source.folder / name).is_file())]

    def bytes(self, rank: int) -> int:
        return (sum(self.source.form(name).bytes for name in self.parts[rank].values())
                + sum(head.form(name).bytes for head in self.heads(rank) for name in head.names()))

    def kept(self, rank: int) -> bool:
        """Whether an earlier run wrote this rank's folder to the end."""
        try:
            part = Part(self.folders[rank])
        except ValueError:
            return False
        return (part.split_id, part.rank) == (self.split_id, rank)


def make_plan(model_dir: str | Path, out_dir: str | Path, stages: str, eagle_dir: str | Path | None) -> Plan:
    source = Checkpoint(model_dir)
    head = Checkpoint(eagle_dir) if eagle_dir else None
    check_model(source)
    borrows = head is not None and borrows_embedding(head, source.config)
    counts = plan_stages(stages, source)
    parts = assign(source.names(), counts, LlamaConfig.read(source.config).tied, borrows)
    text = {name: sample(source.folder / name) for name in TEXT_FILES if (source.folder / name).is_file()}
    identity = [VERSION, counts, describe(source), text, describe(head) if head else None]
    split_id = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return Plan(source, head, counts, parts, split_id, Path(out_dir))


def describe(source: Checkpoint) -> dict[str, Any]:
    """What makes a checkpoint this one: its config, the form of its tensors, sizes and samples of its files."""
    forms = {name: [str(source.form(name).dtype), *source.form(name).shape] for name in source.names()}
    return {"config": source.config, "forms": forms, "files": {path.name: sample(path) for path in source.files}}


def sample(path: Path, block: int = 1 << 20, blocks: int = 64) -> str:
    """A hash over a file's size and content; of a large file, over blocks spread evenly.

    The content counts because a model that was trained anew has the same names, shapes and sizes.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(blocks):
            file.seek(i * max(block, (size - block) // (blocks - 1)))
            digest.update(file.read(block))
    return digest.hexdigest()
