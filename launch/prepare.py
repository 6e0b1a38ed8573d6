"""Prepare a start: find or write the folder of the split model, and check everything that could fail.

It starts nothing. If the environment names a rank, only that rank's own files are checked.
"""
from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

from cluster.agreement import PartFacts
from config.console import say
from config.files import check_folder, check_output
from config.presets import HOME
from config.questions import read
from config.run_config import RunConfig
from config.schema.untrusted import one_line
from launch.memory import check_memory
from launch.receive import PartSender
from launch.spec import RankSpec, device_named, local_ranks
from launch.split.write import Layout, split
from launch.trace import open_trace
from model.text import Text
from model.weights.parts import HEAD, Part, plan_stages
from model.weights.split import is_split_as
from model.weights.unfold import Unfolded
from pipeline.trace import Clock, NoTrace, forget
from tp.links import Placement


class Prepared(NamedTuple):
    """A run that can start."""

    config: RunConfig
    folder: Path  # of the split model
    placement: Placement
    trace: Callable[[int, Clock], NoTrace]  # creates the trace of a rank
    piece: Callable[[int, str, int], bytes]  # returns the next bytes of a file of another rank's part; none at its end

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.placement.world

    @property
    def shares_stages(self) -> bool:
        """Whether several ranks share a stage."""
        return self.placement.shares

    @property
    def needs_process_group(self) -> bool:
        """Whether the ranks meet in a process group of torch.distributed."""
        return self.shares_stages or self.config.link == "torch"

    @property
    def recovers(self) -> bool:
        """Whether a rank that dies is started again; impossible if ranks share a stage, as their sums break off."""
        return bool(self.config.recovery) and not self.shares_stages

    @property
    def patience(self) -> float:
        """Seconds for a silent rank to come back; 0 without recovery."""
        return self.config.recovery if self.recovers else 0.0

    @property
    def forks(self) -> bool:
        """Whether each rank of this machine is a process of its own."""
        return self.config.link != "threads" and not self.config.virtual

    def spec(self, rank: int) -> RankSpec:
        """Return the specification of a rank; raises ValueError if its part is missing."""
        return RankSpec(self.config, open_part(self.folder, rank))

    def facts(self, rank: int) -> PartFacts:
        """Return what all ranks must agree on in a rank's own part."""
        spec = self.spec(rank)
        number_type = str(spec.dtype).rpartition(".")[2]
        return PartFacts(spec.part.split_id, spec.part.world, number_type)


def prepare(config: RunConfig) -> Prepared:
    """Check a run, and split its model if necessary; raises ValueError, with the fix, for what cannot work."""
    has_all_ranks = "RANK" not in os.environ  # else this process is one rank, and may have its own folder only
    _check_threads(config.threads_per_rank)
    device_named(config.device)
    if has_all_ranks:
        _check_files(config)

    # the part of this rank, or of rank 0
    folder = Path(config.model_dir) if config.model_dir else split_of(config, has_all_ranks)
    number = int(os.environ.get("RANK", "0"))
    spec = RankSpec(config, open_part(folder, number))
    part = spec.part
    _check_form(spec)
    check_ids("prompt_ids", config.ids, part.config["vocab_size"])

    # all parts
    if has_all_ranks:
        for rank in range(1, part.world):
            check_split(open_part(folder, rank), part.split_id)
        if config.trace:
            check_folder(config.trace, "choose another trace=")
            forget(config.trace)  # an earlier run may have had more ranks
    elif HEAD in part.weights.names():  # rank 0 alone has these files
        _check_files(config)

    sender = PartSender(lambda rank: folder / f"stage_{part_number(rank, part.world)}")
    prepared = Prepared(config, folder, spec.placement, partial(open_trace, config), sender.piece)
    _check_memory(prepared)
    return prepared


def _check_threads(num_threads: int) -> None:
    """Raise ValueError for more threads than cores: they would wait for each other, and very many would crash."""
    num_cores = os.cpu_count() or 1
    if num_threads > num_cores:
        raise ValueError(f"threads_per_rank={num_threads} is more than the {num_cores} cores of this machine: give "
                         f"{num_cores} or less, or 0 to share them out among the ranks")


def _check_form(spec: RankSpec) -> None:
    """Raise ValueError for a split of another form, or for another number of ranks, than the configuration needs."""
    config, part = spec.config, spec.part
    num_stages = len(part.stages) - 1
    split_form = f"{part.folder.parent} is split as {part.form}"
    split_again = "split the model again into another folder"

    # methods that need another form
    if config.unpiped and num_stages:
        raise ValueError(f"{split_form}, but pipeline_type={config.pipeline_type} has no pipeline: {split_again}, with "
                         "--tp N and without --stages")
    if config.replicated and not num_stages:
        raise ValueError(f"{split_form}, so rank 0 holds the model and there is nothing to copy: {split_again}, with "
                         "--stages 1")
    if config.replicated and config.replica_stages not in (0, num_stages):
        raise ValueError(f"{split_form}, not for copies of {config.replica_stages} stages: leave the stages out of "
                         f"replicas=, or {split_again}")

    # keys that name another form
    is_pipeline = not (config.unpiped or config.replicated)
    if is_pipeline and config.stages and not is_split_as(config.stages, part.stages):
        raise ValueError(f"{split_form}, not as stages={config.stages}: leave stages out, or {split_again}")
    if config.tp != "0" and config.speeds != tuple(part.shares):
        raise ValueError(f"{split_form}, not with tp={config.tp}: leave tp out, or {split_again}")

    placement = spec.placement  # of a split that can be copied
    if int(os.environ.get("WORLD_SIZE", placement.world)) != placement.world:
        copies = f", in {spec.copies} replicas" if spec.copies > 1 else ""
        raise ValueError(f"{split_form}{copies}: start {placement.world} ranks, rank 0 included")


def check_ids(source_name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for token ids that the model does not have; the message names their source."""
    unknown_id = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if unknown_id is not None:
        raise ValueError(f"{source_name} has {unknown_id}, but the model knows 0 to {vocab_size - 1} only: take ids of "
                         "this model's tokenizer")


def _check_memory(prepared: Prepared) -> None:
    """Raise ValueError for ranks that do not fit; a launcher leaves CUDA to its ranks, as a query takes its memory."""
    config, environment_number = prepared.config, os.environ.get("RANK")
    is_launcher = environment_number is None and config.link != "threads"
    specs = [prepared.spec(rank) for rank in local_ranks(prepared.placement.world)]
    checked_specs = [spec for spec in specs if environment_number in (None, str(spec.part.rank))]
    if is_launcher:
        checked_specs = [spec for spec in checked_specs if spec.device.type == "cpu"]
    check_memory(specs, checked_specs, config.debug and not is_launcher)


def split_of(config: RunConfig, may_write: bool) -> Path:
    """Return the folder of the split of a model. Write it if `may_write`, or if this rank's part is incomplete."""
    if not config.base_dir:
        raise ValueError("there is no model: give model_dir=FOLDER, as split_and_save_models.py wrote it, or a preset")

    stages = ""
    if not config.unpiped:
        typed_stages = str(config.replica_stages or 1) if config.replicated else config.stages or "4"
        stages = "+".join(map(str, plan_stages(typed_stages, Unfolded(config.base_dir))))
    quant = "none" if config.quant == "auto" else config.quant
    folder = HOME / "splits" / _split_name(config, stages, quant)
    if not may_write:
        # A board may have the whole model, as toy: its part is incomplete if others write it, or a split broke off.
        with suppress(ValueError):
            open_part(folder, int(os.environ["RANK"]))
            return folder

    layout = Layout(quant, config.speeds)
    is_new = not folder.is_dir()
    split(config.base_dir, folder, stages, config.eagle_dir or None, layout=layout)
    if is_new:  # what follows takes as long, without a bar
        say(f"{folder.name} is split, once; now its ranks load it")
    return folder


def _split_name(config: RunConfig, stages: str, quant: str) -> str:
    """Return the name of a split, from model, layers of each rank, members of a group, quantization and head."""
    num_members = len(config.speeds)
    shares = f"tp{num_members}" if config.unpiped or num_members > 1 else ""
    speeds = config.tp.replace(",", "+") if "," in config.tp else ""
    weights = "" if quant == "none" else quant
    name_parts = Path(config.base_dir).name, stages, shares, speeds, weights, Path(config.eagle_dir).name
    return "-".join(filter(None, name_parts))


def part_number(rank: int, split_world: int) -> int:
    """Return the number of a rank's part; ranks above those of the split use the same parts again, in their order."""
    return 1 + (rank - 1) % max(1, split_world - 1) if rank else 0


def open_part(folder: Path, rank: int) -> Part:
    """Open a rank's own part of the split model in `folder`; raises ValueError if it is missing, or another rank's."""
    number = rank
    other_part = min(folder.glob("stage_*"), default=None)
    if other_part is not None and not (folder / f"stage_{rank}").is_dir():
        number = part_number(rank, Part(other_part).world)

    part = Part(folder / f"stage_{number}")
    if part.rank != number:
        raise ValueError(f"{part.folder} holds the part of rank {part.rank}: copy stage_{number} of the split there")
    part.rank = rank
    return part


def check_split(part: Part, split_id: str) -> None:
    """Raise ValueError for a part of another split than that of `split_id`."""
    if part.split_id != split_id:
        raise ValueError(f"{part.folder} is a part of another split than rank 0's: copy the parts of one split")


def _check_files(config: RunConfig) -> None:
    """Raise ValueError for unreadable questions, or an output that cannot be written or would overwrite an input."""
    if config.question_file:
        read(config.question_file, *config.question_range)
    if not config.output:
        return

    output_path, remedy = Path(config.output).resolve(), "choose another output="
    if config.question_file and output_path == Path(config.question_file).resolve():
        raise ValueError(f"output={config.output} is the question file: {remedy}")
    for folder in (config.model_dir, config.base_dir, config.eagle_dir, config.draft_dir, *config.small_models):
        if folder and Path(folder).resolve() in output_path.parents:
            raise ValueError(f"output={config.output} lies in {folder}, which the run reads: {remedy}")
    check_output(config.output, remedy)


def open_text(config: RunConfig, part: Part) -> Text | None:
    """Return the tokenizer of rank 0, tried on a prompt; None if prompts are token ids."""
    if config.prompt_ids:
        return None
    part.verify_texts()
    text = Text(part.folder, config.chat_template)
    if text.remark:
        say(one_line(text.remark))
    text.prompt_ids([config.prompt or "?"], config.template)
    text.end_sandbox()  # it would keep what is loaded meanwhile and freed again
    return text
