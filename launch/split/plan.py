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

from config.run_config import USUAL_RANKS
from model.drafts.eagle import MAPS, borrows_embedding
from model.llama import LlamaConfig
from model.text import TOKENIZER_FILES
from model.weights.checkpoint import Checkpoint, sample
from model.weights.parts import FLOATS, HEAD, VERSION, Part, assign, check_model, check_type, plan_stages
from model.weights.quant import Recast
from model.weights.split import placements
from tp.shares import ShardedSource, held

INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)  # what a head's maps between vocabularies are stored in
TEXT_FILES = (*TOKENIZER_FILES, "generation_config.json")


@dataclass(frozen=True)
class Layout:
    """The form of what a rank holds: weights as they are, or quantized; layers whole, or a share of each."""

    quant: str = "none"
    shares: tuple[float, ...] = (1.0,)  # the speeds of the ranks that share a stage

    def __post_init__(self) -> None:
        assert self.shares and min(self.shares) > 0, self.shares


AS_IT_IS = Layout()


@dataclass(frozen=True)
class SplitPlan:
    """What is going to be written: the sources, which rank gets which tensors, and in which form."""

    source: Checkpoint
    head: Checkpoint | None  # the draft head, if there is one
    stages: list[int]  # layers of each stage; rank 0's come first
    parts: list[dict[str, str]]  # of each rank: name there -> name in the source
    layout: Layout
    split_id: str
    out: Path

    @property
    def folders(self) -> list[Path]:
        """The folder of each rank."""
        return [self.out / f"stage_{rank}" for rank in range(len(self.parts))]

    def tensors(self, rank: int) -> Recast:
        """What a rank gets of the model, in the form in which it is written."""
        source: Checkpoint = self.source
        if len(self.layout.shares) > 1:
            _, member = self.placements[rank]
            source = ShardedSource(source, self.layout.shares, member)
        return Recast(source, self.parts[rank], self.layout.quant, sound=True)

    def heads(self, rank: int) -> list[Checkpoint]:
        """The draft heads that a rank holds: rank 0 one or none, the others none."""
        return [self.head] if self.head and HEAD in self.parts[rank] else []

    def extras(self, rank: int) -> list[str]:
        """The files that a rank gets unchanged; the one with the LM head gets the tokenizer too."""
        names = ["config.json"]
        if HEAD in self.parts[rank]:
            names += _text_files(self.source)
        return names

    def bytes(self, rank: int) -> int:
        """The size of a rank's tensors, the draft head included."""
        layers = sum(form.bytes for form in self.tensors(rank).forms.values())
        heads = [head.form(name).bytes for head in self.heads(rank) for name in head.names()]
        return layers + sum(heads)

    def kept(self, rank: int) -> bool:
        """Whether an earlier run wrote this rank's folder to the end."""
        try:
            part = Part(self.folders[rank])
        except ValueError:
            return False
        return (part.split_id, part.rank) == (self.split_id, rank)

    @property
    def placements(self) -> list[tuple[int, int]]:
        """The stage of each rank, and which member of it the rank is."""
        return placements(self.stages, len(self.layout.shares))

    @property
    def missing(self) -> list[int]:
        """The ranks whose folders are still to be written."""
        return [rank for rank in range(len(self.parts)) if not self.kept(rank)]


def make_plan(model_dir: str | Path, out_dir: str | Path, stages: str, eagle_dir: str | Path | None,
              layout: Layout) -> SplitPlan:
    """The plan of a split; raises ValueError for a model, a head, `stages` or a layout that do not fit.

    Without `stages`, all ranks share all layers.
    """
    source = Checkpoint(model_dir)
    check_model(source)
    head = _draft_head(eagle_dir) if eagle_dir else None
    borrows = head is not None and borrows_embedding(head, source.config)
    sizes = LlamaConfig.read(source.config)
    ranks = len(layout.shares)
    check_group(ranks, sizes.heads)
    counts = plan_stages(stages, source) if stages else [sizes.layers]
    whole = assign(source.names(), counts, sizes.tied, borrows)
    parts = []
    for stage, member in placements(counts, ranks):
        parts.append(held(whole[stage], sizes, layout.shares, member))
    split_id = identify(source, head, counts, layout)
    return SplitPlan(source, head, counts, parts, layout, split_id, Path(out_dir))


def _draft_head(folder: str | Path) -> Checkpoint:
    """The checkpoint of a draft head; raises ValueError for a tensor of a type that a head does not have."""
    head = Checkpoint(folder)
    for name in head.names():
        check_type(head, name, INDICES if name in MAPS else FLOATS)
    return head


def identify(source: Checkpoint, head: Checkpoint | None, stages: list[int], layout: Layout) -> str:
    """The id of a split: a hash of all that decides what stands in its folders."""
    text = {name: sample(source.folder / name) for name in _text_files(source)}
    draft = describe(head) if head else None
    identity = [VERSION, stages, describe(source), text, draft, asdict(layout)]
    content = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _text_files(source: Checkpoint) -> list[str]:
    return [name for name in TEXT_FILES if (source.folder / name).is_file()]


def check_group(ranks: int, heads: int) -> None:
    """Refuse to share a layer among ranks that would have next to nothing of it."""
    most = max(heads, USUAL_RANKS)
    if ranks > most:
        raise ValueError(f"{ranks} ranks are too many to share a layer of this model, which has {heads} heads: choose "
                         f"at most {most}, as tp={most} or --tp {most}")


def describe(source: Checkpoint) -> dict[str, Any]:
    """What makes a checkpoint this one: its config, the form of its tensors, sizes and samples of its files."""
    forms = {}
    for name in source.names():
        form = source.form(name)
        forms[name] = [str(form.dtype), *form.shape]
    files = {path.name: sample(path) for path in source.files}
    return {"config": source.config, "forms": forms, "files": files}
