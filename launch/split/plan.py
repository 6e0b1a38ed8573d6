"""What a split is going to write: the sources, which rank gets which of their tensors, and in which form.

It knows nothing about what the tensors compute: names and shapes decide where a tensor goes.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from config.tensor_parallel import USUAL
from model.checkpoint import Checkpoint
from model.eagle import MAPS, borrows_embedding
from model.llama import LlamaConfig
from model.quant import Recast
from model.text import TOKENIZER_FILES
from model.weights import FLOATS, HEAD, VERSION, Part, assign, check_model, check_type, placements, plan_stages
from tp.shares import ShardedSource, held

INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)  # what a head's maps between vocabularies are stored in
TEXT_FILES = (*TOKENIZER_FILES, "generation_config.json")


@dataclass(frozen=True)
class Layout:
    """The form of what a rank holds: its weights as they are, or quantized; a stage whole, or shared by several ranks.
    """

    quant: str = "none"
    shares: tuple[float, ...] = (1.0,)  # the speeds of the ranks that share a stage


AS_IT_IS = Layout()


@dataclass(frozen=True)
class SplitPlan:
    """What is going to be written: the sources, which rank gets which tensors, and in which form."""

    source: Checkpoint
    head: Checkpoint | None
    stages: list[int]
    parts: list[dict[str, str]]  # of each rank: name there -> name in the source
    layout: Layout
    split_id: str
    out: Path

    @property
    def folders(self) -> list[Path]:
        return [self.out / f"stage_{rank}" for rank in range(len(self.parts))]

    def tensors(self, rank: int) -> Recast:
        """What a rank gets of the model, in the form in which it is written."""
        member = placements(self.stages, len(self.layout.shares))[rank][1]
        source = ShardedSource(self.source, self.layout.shares, member) if len(self.layout.shares) > 1 else self.source
        return Recast(source, self.parts[rank], self.layout.quant, sound=True)

    def heads(self, rank: int) -> list[Checkpoint]:
        """The draft heads a rank holds: rank 0 has one, or none."""
        return [self.head] if self.head and HEAD in self.parts[rank] else []

    def extras(self, rank: int) -> list[str]:
        """The files that a rank gets unchanged; whoever has the language-model head writes text."""
        names = TEXT_FILES if HEAD in self.parts[rank] else ()
        return ["config.json", *(name for name in names if (self.source.folder / name).is_file())]

    def bytes(self, rank: int) -> int:
        return (sum(form.bytes for form in self.tensors(rank).forms.values())
                + sum(head.form(name).bytes for head in self.heads(rank) for name in head.names()))

    def kept(self, rank: int) -> bool:
        """Whether an earlier run wrote this rank's folder to the end."""
        try:
            part = Part(self.folders[rank])
        except ValueError:
            return False
        return (part.split_id, part.rank) == (self.split_id, rank)

    @property
    def missing(self) -> list[int]:
        """The ranks whose folders are still to be written."""
        return [rank for rank in range(len(self.parts)) if not self.kept(rank)]


def make_plan(model_dir: str | Path, out_dir: str | Path, stages: str, eagle_dir: str | Path | None,
              layout: Layout) -> SplitPlan:
    source = Checkpoint(model_dir)
    head = Checkpoint(eagle_dir) if eagle_dir else None
    check_model(source)
    borrows = head is not None and borrows_embedding(head, source.config)
    if head:
        for name in head.names():
            check_type(head, name, INDICES if name in MAPS else FLOATS)
    c = LlamaConfig.read(source.config)
    check_group(len(layout.shares), c.heads)
    counts = plan_stages(stages, source) if stages else [c.layers]
    whole = assign(source.names(), counts, c.tied, borrows)
    parts = [held(whole[stage], c, layout.shares, member) for stage, member in placements(counts, len(layout.shares))]
    text = {name: sample(source.folder / name) for name in TEXT_FILES if (source.folder / name).is_file()}
    identity = [VERSION, counts, describe(source), text, describe(head) if head else None, asdict(layout)]
    split_id = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return SplitPlan(source, head, counts, parts, layout, split_id, Path(out_dir))


def check_group(ranks: int, heads: int) -> None:
    """Refuse to share a layer among ranks that would have next to nothing of it."""
    most = max(heads, USUAL)
    if ranks > most:
        raise ValueError(f"{ranks} ranks are too many to share a layer of this model, which has {heads} heads: choose "
                         f"at most {most}, as tp={most} or --tp {most}")


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
