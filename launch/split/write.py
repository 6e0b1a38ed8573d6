"""Split a model into a folder for each rank, tensor by tensor; every file is written atomically.

It knows nothing about what the tensors compute: names and shapes decide where a tensor goes.
"""
from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from config.console import say
from config.files import check_space, one_at_a_time, replace
from config.run_config import USUAL_RANKS
from config.schema.heads import usual_layers
from config.schema.untrusted import Name
from launch.hub import head_here
from launch.progress import ProgressBar
from launch.split.gguf import is_gguf, unpack
from model.drafts.head_files import MAPS, borrows_embedding, fit_head, held_ahead
from model.llama import LlamaConfig
from model.text import TOKENIZER_FILES, check_template_links
from model.weights.checkpoint import Checkpoint, sample, writing
from model.weights.parts import (
    EMBED,
    FLOATS,
    FORMAT,
    HEAD,
    HEAD_CONFIG,
    HEAD_WEIGHTS,
    MANIFEST,
    VERSION,
    WEIGHTS,
    Part,
    assign,
    check_model,
    check_type,
    plan_stages,
)
from model.weights.quant import Recast, kind_on
from model.weights.quant_layers import probe
from model.weights.split import placements, span
from model.weights.unfold import Unfolded
from tp.shares import ShardedSource, member_tensors

INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)  # types of a head's maps between vocabularies
TEXT_FILES = (*TOKENIZER_FILES, "generation_config.json")
CPU = torch.device("cpu")  # on which weights are quantized
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk
AUTO_HEAD = "auto"  # in place of a draft head's folder: that of a preset, if it is here and fits
Tick = Callable[[int], Any]  # receives the number of bytes that were written


# --- the plan ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Layout:
    """The form of a rank's weights: as they are, or quantized; of whole layers, or of a share of each."""

    quant: str = "none"
    shares: tuple[float, ...] = (1.0,)  # the speeds of the ranks that share a stage

    def __post_init__(self) -> None:
        assert self.shares and min(self.shares) > 0, self.shares


@dataclass(frozen=True)
class SplitPlan:
    """The plan of a split: the sources, the tensors of each rank, and their form."""

    source: Checkpoint
    head: Checkpoint | None  # the draft head, if there is one
    stages: list[int]  # layers of each stage; rank 0's come first
    parts: list[dict[str, str]]  # of each rank: name in its part -> name in the source
    layout: Layout
    split_id: str
    out: Path

    @property
    def inner(self) -> list[int]:
        """The layers of which the stages pass on the inputs."""
        layers_of_head = fit_head(self.head, self.source.config).inner if self.head else ()
        return list(layers_of_head or usual_layers(sum(self.stages)))

    @property
    def folders(self) -> list[Path]:
        """The folder of each rank."""
        return [self.out / f"stage_{rank}" for rank in range(len(self.parts))]

    @property
    def placements(self) -> list[tuple[int, int]]:
        """The stage of each rank, and the rank's number among its members."""
        return placements(self.stages, len(self.layout.shares))

    @property
    def missing(self) -> list[int]:
        """The ranks without a complete folder from an earlier run."""
        return [rank for rank, folder in enumerate(self.folders) if not self._is_kept(rank, folder)]

    def _is_kept(self, rank: int, folder: Path) -> bool:
        try:
            part = Part(folder)
        except ValueError:
            return False
        return (part.split_id, part.rank) == (self.split_id, rank)

    def contents(self, rank: int) -> Iterator[tuple[str, Path | Recast]]:
        """Yield the files of a rank, in order: each a file to copy, or tensors in the form to write.

        The rank with the LM head gets the tokenizer and the draft head, too.
        """
        has_head = HEAD in self.parts[rank]
        for name in ["config.json", *(_text_files(self.source) if has_head else ())]:
            yield name, self.source.folder / name

        source_of_rank: Checkpoint = self.source
        if len(self.layout.shares) > 1:
            _, member = self.placements[rank]
            source_of_rank = ShardedSource(self.source, self.layout.shares, member)
        kind = kind_on(CPU, self.layout.quant)
        yield WEIGHTS, Recast(source_of_rank, self.parts[rank], kind, keeps_blocks=True, must_be_finite=True)

        if has_head and self.head:
            head_names = {name: name for name in held_ahead(self.head) or self.head.names()}
            yield HEAD_WEIGHTS, Recast(self.head, head_names, must_be_finite=True)
            yield HEAD_CONFIG, self.head.folder / "config.json"

    def bytes(self, rank: int) -> int:
        """Return the size of a rank's tensors in bytes, including the draft head."""
        tensors = (content for _, content in self.contents(rank) if isinstance(content, Recast))
        return sum(form.bytes for each in tensors for form in each.forms.values())


def make_plan(model_dir: Name, out_dir: Name, stages: str, eagle_dir: Name | None, layout: Layout) -> SplitPlan:
    """Return the plan of a split; raises ValueError for a model, a head, `stages` or a layout that do not fit.

    Without `stages`, all ranks share all layers.
    """
    # the model, and its draft head
    source = Unfolded(model_dir)
    check_model(source)
    sizes = LlamaConfig.read(source.config)
    head = _draft_head(eagle_dir) if eagle_dir else _head_inside(Checkpoint(source.folder))
    needs_embedding = head is not None and borrows_embedding(head, source.config)

    # the tensors of each rank
    group_size = len(layout.shares)
    check_group(group_size, sizes)
    layer_counts = plan_stages(stages, source) if stages else [sizes.layers]
    tensors_of_stages = assign(source.names(), layer_counts, sizes.tied, needs_embedding)
    parts = []
    for stage, member in placements(layer_counts, group_size):
        parts.append(member_tensors(tensors_of_stages[stage], sizes, layout.shares, member))

    split_id = identify(source, head, layer_counts, layout)
    return SplitPlan(source, head, layer_counts, parts, layout, split_id, Path(out_dir))


def _head_inside(source: Checkpoint) -> Checkpoint | None:
    """Return the checkpoint itself if it has layers that predict further tokens, else None."""
    return source if held_ahead(source) else None


def _draft_head(folder: Name) -> Checkpoint:
    """Open the checkpoint of a draft head; raises ValueError for a tensor of an unsupported type."""
    head = Checkpoint(folder)
    for name in head.names():
        check_type(head, name, INDICES if name.rpartition(".")[2] in MAPS else FLOATS)
    return head


def _check_tied(source: Checkpoint) -> None:
    """Raise ValueError for an LM head that is not the embedding, though the config says so: transformers 4.57 ignores
    it, and 5 reads it."""
    is_tied = LlamaConfig.read(source.config).tied and HEAD in source.names()
    if is_tied and not torch.equal(source.read(HEAD), source.read(EMBED)):
        raise ValueError(f"{source.folder} holds {HEAD}, which differs from {EMBED}, but its config.json says "
                         "tie_word_embeddings=true: write false there if the model was trained so")


def identify(source: Checkpoint, head: Checkpoint | None, stages: list[int], layout: Layout) -> str:
    """Return the id of a split: a hash of everything that determines the contents of its folders."""
    text_samples = {name: sample(source.folder / name) for name in _text_files(source)}
    head_description = describe(head) if head else None
    identity = [VERSION, stages, describe(source), text_samples, head_description, asdict(layout)]
    content = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _text_files(source: Checkpoint) -> list[str]:
    check_template_links(source.folder)
    return [name for name in TEXT_FILES if (source.folder / name).is_file()]


def check_group(num_ranks: int, c: LlamaConfig) -> None:
    """Raise ValueError for layers that ranks cannot share, or for far too many ranks."""
    reason = "norms all heads together" if c.family.wide_norms else "has recurrent layers" if c.recurrent else ""
    if num_ranks > 1 and reason:
        raise ValueError(f"{num_ranks} ranks cannot share a layer of a {c.family.architecture}, which {reason}: give "
                         "each rank layers of its own, without --tp or tp=")

    max_ranks = max(c.heads, USUAL_RANKS)
    if num_ranks > max_ranks:
        raise ValueError(f"{num_ranks} ranks are too many to share a layer of this model, which has {c.heads} heads: "
                         f"choose at most {max_ranks}, as tp={max_ranks} or --tp {max_ranks}")


def describe(source: Checkpoint) -> dict[str, Any]:
    """Return what identifies a checkpoint: its config, the form of its tensors, sizes and samples of its files."""
    forms = {}
    for name in source.names():
        form = source.form(name)
        forms[name] = [str(form.dtype), *form.shape]
    files = {path.name: sample(path) for path in source.files}
    return {"config": source.config, "forms": forms, "files": files}


# --- the writing ------------------------------------------------------------------------------------------------------

def store(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file atomically. Returns its entry in a manifest."""
    replace(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def copy(tensors: Recast, path: Path, tick: Tick) -> dict[str, Any]:
    """Write one safetensors file, a tensor at a time. Returns its entry in a manifest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    forms = {name: tensors.forms[name] for name in tensors.order}
    with writing(path, forms) as file:
        for name in forms:
            file.write(name, tensors[name])
            tick(forms[name].bytes)
    return file.entry


def discard(folder: Path) -> None:
    """Delete an earlier split in a rank's folder: first of all its manifest, so that no incomplete one is trusted."""
    file_names = (MANIFEST, WEIGHTS, "config.json", HEAD_WEIGHTS, HEAD_CONFIG, *TEXT_FILES)
    old_paths = [folder / name for name in file_names]
    old_paths += folder.glob("**/*.part")  # half-written files of a split that was killed
    for path in old_paths:
        if path.is_file():
            path.unlink()


def write_rank(plan: SplitPlan, rank: int, tick: Tick) -> None:
    """Write one rank's folder; its manifest comes last, as it vouches for the rest."""
    folder, files = plan.folders[rank], {}
    discard(folder)
    for name, content in plan.contents(rank):
        path = folder / name
        files[name] = copy(content, path, tick) if isinstance(content, Recast) else store(path, content.read_bytes())

    stage, _ = plan.placements[rank]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "stages": plan.stages,
        "layers": span(plan.stages, stage),
        "shares": plan.layout.shares,
        "split_id": plan.split_id,
        "quant": plan.layout.quant,
        "inner": plan.inner,
        "files": files,
    }
    store(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def write(plan: SplitPlan, progress: bool) -> None:
    """Write the folders that no earlier run finished, over their contents; raises ValueError if the disk lacks room."""
    # the disk
    missing_ranks = plan.missing
    old_files = chain.from_iterable(plan.folders[rank].glob("**/*") for rank in missing_ranks)
    num_bytes = sum(map(plan.bytes, missing_ranks))
    check_space(plan.out, num_bytes, "the split needs", "choose another output folder or free some space", old_files)

    # the folders
    for folder in set(plan.out.glob("stage_*")).difference(plan.folders):  # of an earlier split with more ranks
        discard(folder)
    is_silent = not progress or not missing_ranks
    with ProgressBar(total=num_bytes, unit="B", unit_scale=True, desc="splitting", disable=is_silent) as progress_bar:
        for rank in missing_ranks:
            write_rank(plan, rank, progress_bar.update)


def split(model_dir: Name, out_dir: Name, stages: str, eagle_dir: Name | None = None,
          progress: bool = True, layout: Layout = Layout()) -> list[Path]:
    """Write one folder for each rank, and keep those that an earlier run finished. Returns all folders.

    Beside them, a folder describes a GGUF file. `eagle_dir=AUTO_HEAD` is a preset's head, if one is here and fits.
    Raises ValueError, with the fix, for what cannot work.
    """
    model_name = Path(model_dir).resolve().name
    try:
        if is_gguf(model_dir):
            model_dir = unpack(Path(model_dir), Path(out_dir) / "whole", progress=progress)

        if eagle_dir == AUTO_HEAD:
            eagle_dir = head_here(model_name, Path(model_dir))
            if eagle_dir:
                say(f"the split gets the draft head in {eagle_dir}, which fits the model; --eagle none leaves it out")

        plan = make_plan(model_dir, out_dir, stages, eagle_dir, layout)
        probe(kind_on(CPU, layout.quant), torch.float32, CPU)

        if plan.missing:  # else users who may only read the split can use it
            _check_tied(plan.source)
            with one_at_a_time(plan.out):
                write(plan, progress)

    except OSError as error:
        if error.errno in FULL:
            raise ValueError(f"the disk of {out_dir} is full; free some space and type the command again") from error
        raise ValueError(f"{error.filename or out_dir}: {error.strerror}; choose a model folder that you may read "
                         f"and an output folder that you may write, which a run takes as model_dir=") from error

    return plan.folders


def check(out_dir: Name) -> list[Part]:
    """Return the parts of a split, after comparing them with their hashes; a board may have one folder only."""
    parts = [Part(manifest.parent) for manifest in sorted(Path(out_dir).glob(f"stage_*/{MANIFEST}"))]
    if not parts:
        raise ValueError(f"{out_dir} holds no split; give the OUT_DIR of an earlier run")

    for part in parts:
        if part.split_id != parts[0].split_id:
            raise ValueError(f"{part.folder} belongs to another split than {parts[0].folder}; split again")
        part.verify()

    all_folders = (Path(out_dir) / f"stage_{rank}" for rank in range(parts[0].world))
    for folder in filter(Path.is_dir, all_folders):
        Part(folder)  # raises ValueError for a folder without a manifest
    return parts
