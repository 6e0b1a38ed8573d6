"""Before a pipeline starts: the folder of its split model, and a look at all that could go wrong.

It knows nothing about processes: a rank of many looks only at what it has itself.
"""
from __future__ import annotations

import os
from pathlib import Path

from config.files import check_folder, check_output
from config.presets import ROOT, absent
from config.questions import read
from config.run_config import RunConfig
from launch.devices import usable
from launch.memory import check_memory, local_ranks
from launch.spec import RankSpec
from launch.split.plan import Layout
from launch.split.write import split
from model.checkpoint import Checkpoint
from model.text import Text
from model.weights import HEAD, Part, is_split_as, plan_stages
from tp.links import Placement


def prepare(config: RunConfig) -> tuple[Path, Placement]:
    """The folder of the split model, which is made if need be, and who sits where; refuses what cannot work."""
    alone = "RANK" not in os.environ  # then this process sees to all ranks; else a rank's own folder may be all it has
    _check_threads(config.threads_per_rank)
    usable(config.device)
    if alone:
        _check_files(config)
    folder = Path(config.model_dir) if config.model_dir else _split(config, alone)
    part = open_part(folder, int(os.environ.get("RANK", "0")))
    _check_form(config, part)
    vocab = part.config["vocab_size"]
    if max(config.ids, default=0) >= vocab:
        raise ValueError(f"prompt_ids has {max(config.ids)}, but the model knows 0 to {vocab - 1} only: take ids of "
                         "this model's tokenizer")
    if not alone and HEAD in part.weights.names():  # on several hosts no other has these files
        _check_files(config)
    if alone:
        for rank in range(1, part.world):
            check_split(open_part(folder, rank), part.split_id)
        if config.trace:
            check_folder(config.trace, "choose another trace=")
        for old in Path(config.trace).glob("rank_*.jsonl") if config.trace else ():
            old.unlink()  # an earlier run may have had more ranks
    _check_memory(config, folder, part, alone)
    return folder, Placement.of(part.stages, len(part.shares))


def _check_form(config: RunConfig, part: Part) -> None:
    """Refuse a split of another form than the configuration asks for."""
    held, again = f"{part.folder.parent} is split as {part.form}", "or split the model again into another folder"
    if config.tensor_parallel.whole:
        if len(part.stages) > 1:
            raise ValueError(f"{held}, but pipeline_type={config.pipeline_type} has no pipeline: split the model again "
                             "into another folder, with --tp N and without --stages")
    elif config.stages and not is_split_as(config.stages, part.stages):
        raise ValueError(f"{held}, not as stages={config.stages}: leave stages out, {again}")
    if config.tensor_parallel.asked and config.tensor_parallel.speeds != tuple(part.shares):
        raise ValueError(f"{held}, not with {config.tensor_parallel.asked}: leave tp and tp_shares out, {again}")
    if int(os.environ.get("WORLD_SIZE", part.world)) != part.world:
        raise ValueError(f"{held}: start {part.world} ranks, rank 0 included")


def _check_threads(asked: int) -> None:
    """More threads than cores only wait for each other, and very many end in a crash."""
    cores = os.cpu_count() or 1
    if asked > cores:
        raise ValueError(f"threads_per_rank={asked} is more than the {cores} cores of this machine: give {cores} or "
                         "less, or 0 to share them out among the ranks")


def _check_memory(config: RunConfig, folder: Path, own: Part, alone: bool) -> None:
    """Before any rank loads. A launcher leaves CUDA to the ranks: it would take some of that memory itself."""
    specs = [RankSpec(config, open_part(folder, rank)) for rank in local_ranks(own.world)]
    launches = alone and config.processes
    mine = specs if alone else [RankSpec(config, own)]
    if launches:
        mine = [spec for spec in specs if spec.device.type == "cpu"]
    check_memory(specs, mine, config.debug and not launches)


def _split(config: RunConfig, write: bool) -> Path:
    """The folder of the split of a whole model, written if it is not there."""
    if not config.base_dir:
        raise ValueError("there is no model: give model_dir=FOLDER, as split_and_save_models.py wrote it, or a preset")
    if problem := absent(config):
        raise ValueError(problem)
    source, speeds = Checkpoint(config.base_dir), config.tensor_parallel.speeds
    layout = Layout("none" if config.quant == "auto" else config.quant, speeds)
    stages = "" if config.tensor_parallel.whole else "+".join(map(str, plan_stages(config.stages or "4", source)))
    group = f"tp{len(speeds)}" + (f"-{config.tp_shares.replace(',', '+')}" if config.tp_shares else "")
    words = [Path(config.base_dir).name, stages, group if config.tensor_parallel.whole or len(speeds) > 1 else "",
             "" if layout.quant == "none" else layout.quant]
    folder = ROOT / "splits" / "-".join(word for word in words if word)
    # A board that has the whole model, as toy: others may write into the same folder, or an earlier split broke off.
    if write or not _is_whole(folder / f"stage_{os.environ['RANK']}"):
        split(config.base_dir, folder, stages, config.eagle_dir or None, layout=layout)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        Part(folder)
    except ValueError:
        return False
    return True


def open_part(folder: Path, rank: int) -> Part:
    part = Part(folder / f"stage_{rank}")
    if part.rank != rank:
        raise ValueError(f"{part.folder} holds the part of rank {part.rank}: copy stage_{rank} of the split there")
    return part


def check_split(part: Part, split_id: str) -> None:
    """Refuse to run with parts of different splits."""
    if part.split_id != split_id:
        raise ValueError(f"{part.folder} is a part of another split than rank 0's: copy the parts of one split")


def _check_files(config: RunConfig) -> None:
    """What the rank that asks reads and writes: better now than when all have started, or when the answer is there."""
    if config.question_file:
        read(config.question_file, config.question_begin, config.question_end)
    if config.output:
        check_output(config.output, "choose another output=")


def open_text(config: RunConfig, folder: Path) -> Text | None:
    """The tokenizer of the rank that asks, tried out; none where prompts are token ids."""
    if config.prompt_ids:
        return None
    text = Text(folder)
    text.prompt_ids([config.prompt or "?"], config.template)
    return text
