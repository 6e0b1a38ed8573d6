"""Before a pipeline starts: the folder of its split model, and a look at all that could go wrong.

It knows nothing about processes: a rank of many looks only at what it has itself.
"""
from __future__ import annotations

import os
import tempfile
from pathlib import Path

from config.presets import ROOT, absent
from config.run_config import RunConfig
from model.checkpoint import Checkpoint
from model.weights import Part, is_split_as, plan_stages
from scripts.split.write import split


def prepare(config: RunConfig) -> tuple[Path, int]:
    """The folder of the split model, which is made if need be, and the number of ranks; refuses what cannot work."""
    alone = "RANK" not in os.environ  # then this process sees to all ranks; else a rank's own folder may be all it has
    folder = Path(config.model_dir) if config.model_dir else _split(config, alone)
    part = open_part(folder, int(os.environ.get("RANK", "0")))
    held, vocab = "+".join(map(str, part.stages)), part.config["vocab_size"]
    if config.stages and not is_split_as(config.stages, part.stages):
        raise ValueError(f"{folder} is split as {held}, not as stages={config.stages}: leave stages out, or split the "
                         "model again into another folder")
    if int(os.environ.get("WORLD_SIZE", len(part.stages))) != len(part.stages):
        raise ValueError(f"{folder} is split as {held}: start {len(part.stages)} ranks, rank 0 included")
    if max(config.ids, default=0) >= vocab:
        raise ValueError(f"prompt_ids has {max(config.ids)}, but the model knows 0 to {vocab - 1} only: take ids of "
                         "this model's tokenizer")
    if alone:
        for rank in range(1, len(part.stages)):
            check_split(open_part(folder, rank), part.split_id)
        for name, target in (("output", Path(config.output).parent if config.output else None),
                             ("trace", Path(config.trace) if config.trace else None)):
            _check_writable(name, target)
        for old in Path(config.trace).glob("rank_*.jsonl") if config.trace else ():
            old.unlink()  # an earlier run may have had more ranks
    return folder, len(part.stages)


def _split(config: RunConfig, write: bool) -> Path:
    """The folder of the split of a whole model, written if it is not there."""
    if not config.base_dir:
        raise ValueError("there is no model: give model_dir=FOLDER, as split_and_save_models.py wrote it, or a preset")
    if problem := absent(config):
        raise ValueError(problem)
    stages = "+".join(map(str, plan_stages(config.stages or "4", Checkpoint(config.base_dir))))
    folder = ROOT / "splits" / f"{Path(config.base_dir).name}-{stages}"
    if write:
        split(config.base_dir, folder, stages, config.eagle_dir or None)
    return folder


def open_part(folder: Path, rank: int) -> Part:
    part = Part(folder / f"stage_{rank}")
    if part.rank != rank:
        raise ValueError(f"{part.folder} holds the part of rank {part.rank}: copy stage_{rank} of the split there")
    return part


def check_split(part: Part, split_id: str) -> None:
    """Refuse to run with parts of different splits."""
    if part.split_id != split_id:
        raise ValueError(f"{part.folder} is a part of another split than rank 0's: copy the parts of one split")


def _check_writable(key: str, folder: Path | None) -> None:
    """Better now than when the answer is there."""
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{key}: {folder} cannot be written ({error.strerror}): choose another {key}=") from error
