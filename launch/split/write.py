"""The writing of a split: a folder per rank, tensor by tensor, each there whole or not at all.

It knows nothing about which rank gets what: that is planned (`plan.py`).
"""
from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from tqdm import tqdm

from config.files import replace
from launch.split.plan import AS_IT_IS, TEXT_FILES, Layout, SplitPlan, make_plan
from model.checkpoint import Writer
from model.quant import Recast, probe
from model.weights import FORMAT, MANIFEST, VERSION, Part, placements, span

WEIGHTS = "model.safetensors"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def store(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file, there whole or not at all; its entry in a manifest."""
    replace(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def copy(tensors: Recast, path: Path, tick: Callable[[int], Any]) -> dict[str, Any]:
    """Write one safetensors file, a tensor at a time; its entry in a manifest."""
    order = tensors.order
    with Writer(path, {name: tensors.forms[name] for name in order}) as file:
        for name in order:
            file.write(name, tensors[name])
            tick(tensors.forms[name].bytes)
    return file.entry


def discard(folder: Path) -> None:
    """Forget what an earlier split left in a rank's folder: first of all its manifest, so that no half is trusted."""
    names = (MANIFEST, WEIGHTS, "config.json", f"eagle/{WEIGHTS}", "eagle/config.json", *TEXT_FILES)
    drafts = folder.glob("**/*.part")  # of a split that was killed
    for path in [*(folder / name for name in names), *drafts]:
        if path.is_file():
            path.unlink()


def write_rank(plan: SplitPlan, rank: int, tick: Callable[[int], Any]) -> None:
    folder, files = plan.folders[rank], {}
    discard(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in plan.extras(rank):
        files[name] = store(folder / name, (plan.source.folder / name).read_bytes())
    files[WEIGHTS] = copy(plan.tensors(rank), folder / WEIGHTS, tick)
    for head in plan.heads(rank):
        (folder / "eagle").mkdir(exist_ok=True)
        own = {name: name for name in head.names()}
        files[f"eagle/{WEIGHTS}"] = copy(Recast(head, own, sound=True), folder / "eagle" / WEIGHTS, tick)
        files["eagle/config.json"] = store(folder / "eagle" / "config.json", (head.folder / "config.json").read_bytes())
    manifest = {"format": FORMAT, "version": VERSION, "rank": rank, "stages": plan.stages,
                "layers": span(plan.stages, placements(plan.stages, len(plan.layout.shares))[rank][0]),
                "shares": plan.layout.shares, "split_id": plan.split_id, "quant": plan.layout.quant, "files": files}
    store(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())  # last: it vouches for the rest


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Let only one process at a time split into a folder; the others wait, and then find it done."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_space(plan: SplitPlan, ranks: list[int]) -> None:
    old = sum(path.stat().st_size for rank in ranks for path in plan.folders[rank].glob("**/*") if path.is_file())
    need, free = sum(map(plan.bytes, ranks)), shutil.disk_usage(plan.out).free + old
    if need > free:
        raise ValueError(f"the split needs {need / 1e9:.2f} GB, but the disk of {plan.out} has {free / 1e9:.2f} GB; "
                         f"choose another output folder or free some space")


def write(plan: SplitPlan, progress: bool) -> None:
    """Write the folders that an earlier run did not finish."""
    ranks = plan.missing
    check_space(plan, ranks)
    for folder in set(plan.out.glob("stage_*")).difference(plan.folders):  # of an earlier split with more ranks
        discard(folder)
    total = sum(map(plan.bytes, ranks))
    with tqdm(total=total, unit="B", unit_scale=True, desc="splitting", disable=not progress or not ranks) as bar:
        for rank in ranks:
            write_rank(plan, rank, bar.update)


def split(model_dir: str | Path, out_dir: str | Path, stages: str, eagle_dir: str | Path | None = None,
          progress: bool = True, layout: Layout = AS_IT_IS) -> list[Path]:
    """One folder per rank; those that an earlier run finished are kept. A ValueError says what is wrong."""
    try:
        plan = make_plan(model_dir, out_dir, stages, eagle_dir, layout)
        probe(layout.quant, torch.float32, "cpu")
        if plan.missing:  # whoever may only read a split that is whole can use it
            with alone(plan.out):
                write(plan, progress)
    except OSError as error:
        if error.errno in FULL:
            raise ValueError(f"the disk of {out_dir} is full; free some space and type the command again") from error
        raise ValueError(f"{error.filename or out_dir}: {error.strerror}; choose a model folder that you may read "
                         f"and an output folder that you may write, which a run takes as model_dir=") from error
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
