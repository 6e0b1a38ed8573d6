"""Splits a Hugging Face model into one folder per rank, tensor by tensor, so that a rank reads its own folder only.

It knows nothing about what the tensors compute: names and shapes decide where a tensor goes.
"""
from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from tqdm import tqdm

from model.checkpoint import Checkpoint, Writer
from model.eagle import borrows_embedding
from model.llama import LlamaConfig
from model.text import TOKENIZER_FILES
from model.weights import FORMAT, HEAD, MANIFEST, VERSION, Part, assign, check_model, plan_stages, span

WEIGHTS = "model.safetensors"
TEXT_FILES = (*TOKENIZER_FILES, "generation_config.json")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXAMPLE = """\
example:
  python split_and_save_models.py models/vicuna-7b split/vicuna-7b --stages 0+8+8+8+8 --eagle models/eagle-vicuna-7b
  python split_and_save_models.py --check split/vicuna-7b

  OUT_DIR/stage_0 gets the language-model head, the tokenizer and the draft head; OUT_DIR/stage_1 ... stage_N get the
  layers, the first of them also the embedding and the last one the final norm. Copy each folder to the board that runs
  that rank. Memory needed: about the largest tensor. If it is interrupted, type the same command again: finished
  folders are kept.
"""


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


def store(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file, there whole or not at all; its entry in a manifest."""
    new = path.with_name(path.name + ".part")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def copy(source: Checkpoint, names: dict[str, str], path: Path, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Write one safetensors file (name there -> name in the source), a tensor at a time; its entry in a manifest."""
    place = {name: i for i, name in enumerate(source.names())}
    # wide types first, so that every tensor is aligned; then as in the source, so that each file is opened once
    order = sorted(names, key=lambda name: (-source.form(names[name]).width, place[names[name]]))
    with Writer(path, {name: source.form(names[name]) for name in order}) as file:
        for name in order:
            file.write(name, source.sound(names[name]))
            tick(source.form(names[name]).bytes)
    return file.entry


def discard(folder: Path) -> None:
    """Forget what an earlier split left in a rank's folder: first of all its manifest, so that no half is trusted."""
    for name in (MANIFEST, WEIGHTS, "config.json", f"eagle/{WEIGHTS}", "eagle/config.json", *TEXT_FILES):
        if (folder / name).is_file():
            (folder / name).unlink()


def write_rank(plan: Plan, rank: int, tick: Callable[[int], Any]) -> None:
    folder, files = plan.folders[rank], {}
    discard(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in plan.extras(rank):
        files[name] = store(folder / name, (plan.source.folder / name).read_bytes())
    files[WEIGHTS] = copy(plan.source, plan.parts[rank], folder / WEIGHTS, tick)
    for head in plan.heads(rank):
        (folder / "eagle").mkdir(exist_ok=True)
        own = {name: name for name in head.names()}
        files[f"eagle/{WEIGHTS}"] = copy(head, own, folder / "eagle" / WEIGHTS, tick)
        files["eagle/config.json"] = store(folder / "eagle" / "config.json", (head.folder / "config.json").read_bytes())
    manifest = {"format": FORMAT, "version": VERSION, "rank": rank, "stages": plan.stages,
                "layers": span(plan.stages, rank), "split_id": plan.split_id, "files": files}
    store(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())  # last: it vouches for the rest


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Let only one process at a time split into a folder; the others wait, and then find it done."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_space(plan: Plan, ranks: list[int]) -> None:
    old = sum(path.stat().st_size for rank in ranks for path in plan.folders[rank].glob("**/*") if path.is_file())
    need, free = sum(map(plan.bytes, ranks)), shutil.disk_usage(plan.out).free + old
    if need > free:
        raise ValueError(f"the split needs {need / 1e9:.2f} GB, but the disk of {plan.out} has {free / 1e9:.2f} GB; "
                         f"choose another output folder or free some space")


def write(plan: Plan, progress: bool) -> None:
    """Write the folders that an earlier run did not finish."""
    ranks = [rank for rank in range(len(plan.stages)) if not plan.kept(rank)]
    check_space(plan, ranks)
    total = sum(map(plan.bytes, ranks))
    with tqdm(total=total, unit="B", unit_scale=True, desc="splitting", disable=not progress or not ranks) as bar:
        for rank in ranks:
            write_rank(plan, rank, bar.update)
    for folder in set(plan.out.glob("stage_*")).difference(plan.folders):  # of an earlier split with more ranks
        discard(folder)


def split(model_dir: str | Path, out_dir: str | Path, stages: str, eagle_dir: str | Path | None = None,
          progress: bool = True) -> list[Path]:
    """One folder per rank; those that an earlier run finished are kept. A ValueError says what is wrong."""
    try:
        plan = make_plan(model_dir, out_dir, stages, eagle_dir)
        with alone(plan.out):
            write(plan, progress)
    except OSError as error:
        if error.errno in FULL:
            raise ValueError(f"the disk of {out_dir} is full; free some space and type the command again") from error
        raise ValueError(f"{error.filename or out_dir}: {error.strerror}; choose a model folder that you may read "
                         f"and an output folder that you may write") from error
    return plan.folders


def check(out_dir: str | Path) -> list[Part]:
    """Compare all folders of a split with their hashes; on a board there may be one folder only."""
    parts = [Part(manifest.parent) for manifest in sorted(Path(out_dir).glob(f"stage_*/{MANIFEST}"))]
    if not parts:
        raise ValueError(f"{out_dir} holds no split; give the OUT_DIR of an earlier run")
    for part in parts:
        if part.split_id != parts[0].split_id:
            raise ValueError(f"{part.folder} belongs to another split than {parts[0].folder}; split again")
        part.verify()
    return parts


def report(parts: list[Part]) -> None:
    for part in parts:
        size = sum(size for size, _ in part.files.values())
        held = f"layers {part.layers[0]} to {part.layers[1] - 1}" if part.layers[0] < part.layers[1] else "drafts"
        print(f"{part.folder}: {held}, {size / 1e6:,.1f} MB")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", metavar="MODEL_DIR", help="a model in Hugging Face form")
    parser.add_argument("out_dir", nargs="?", metavar="OUT_DIR", help="where the folders stage_0, stage_1, ... go")
    parser.add_argument("--stages", metavar="SPLIT", help="layers per rank, as 0+2+2+2+2 (rank 0 drafts and has none); "
                        "a number of stages: equal shares, larger ones last; or auto:4: 4 stages with bytes alike")
    parser.add_argument("--eagle", metavar="DIR", help="the EAGLE draft head of that model (safetensors or .bin)")
    parser.add_argument("--check", metavar="OUT_DIR", help="write nothing: compare an existing split with its hashes")
    args = parser.parse_args(argv)
    if not args.check and not (args.model_dir and args.out_dir and args.stages):
        parser.error("MODEL_DIR, OUT_DIR and --stages are needed (or --check OUT_DIR alone); see --help")
    try:
        if args.check:
            report(check(args.check))
        else:
            report([Part(folder) for folder in split(args.model_dir, args.out_dir, args.stages, args.eagle)])
    except ValueError as error:
        print(f"split_and_save_models.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("split_and_save_models.py: stopped; type the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
