"""The writing of a split: a folder for each rank, tensor by tensor, each there whole or not at all.

It knows nothing about which rank gets what: `plan.py` decides that.
"""
from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Callable

import torch
from tqdm import tqdm

from config.files import one_at_a_time, replace
from launch.split.gguf import whole_model
from launch.split.plan import AS_IT_IS, TEXT_FILES, Layout, SplitPlan, make_plan
from model.weights.checkpoint import Writer
from model.weights.parts import FORMAT, MANIFEST, VERSION, Part
from model.weights.quant import Recast, probe
from model.weights.split import span

WEIGHTS = "model.safetensors"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk that has no room
Tick = Callable[[int], Any]  # is given how many bytes were written


def store(path: Path, data: bytes) -> dict[str, Any]:
    """Write a small file, there whole or not at all. Returns its entry in a manifest."""
    replace(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def copy(tensors: Recast, path: Path, tick: Tick) -> dict[str, Any]:
    """Write one safetensors file, a tensor at a time. Returns its entry in a manifest."""
    forms = {name: tensors.forms[name] for name in tensors.order}
    with Writer(path, forms) as file:
        for name in forms:
            file.write(name, tensors[name])
            tick(forms[name].bytes)
    return file.entry


def discard(folder: Path) -> None:
    """Forget what an earlier split left in a rank's folder: first of all its manifest, so that no half is trusted."""
    names = (MANIFEST, WEIGHTS, "config.json", f"eagle/{WEIGHTS}", "eagle/config.json", *TEXT_FILES)
    paths = [folder / name for name in names]
    paths += folder.glob("**/*.part")  # half-written files of a split that was killed
    for path in paths:
        if path.is_file():
            path.unlink()


def write_rank(plan: SplitPlan, rank: int, tick: Tick) -> None:
    """Write one rank's folder; its manifest comes last, as it vouches for the rest."""
    folder, files = plan.folders[rank], {}
    discard(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in plan.extras(rank):
        files[name] = store(folder / name, (plan.source.folder / name).read_bytes())
    files[WEIGHTS] = copy(plan.tensors(rank), folder / WEIGHTS, tick)
    for head in plan.heads(rank):
        (folder / "eagle").mkdir(exist_ok=True)
        own = {name: name for name in head.names()}
        tensors = Recast(head, own, sound=True)
        files[f"eagle/{WEIGHTS}"] = copy(tensors, folder / "eagle" / WEIGHTS, tick)
        config = (head.folder / "config.json").read_bytes()
        files["eagle/config.json"] = store(folder / "eagle" / "config.json", config)
    content = json.dumps(manifest(plan, rank, files), indent=1) + "\n"
    store(folder / MANIFEST, content.encode())


def manifest(plan: SplitPlan, rank: int, files: dict[str, Any]) -> dict[str, Any]:
    """What a rank's folder says of itself and of its files."""
    stage, _ = plan.placements[rank]
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "stages": plan.stages,
        "layers": span(plan.stages, stage),
        "shares": plan.layout.shares,
        "split_id": plan.split_id,
        "quant": plan.layout.quant,
        "files": files,
    }


def check_space(plan: SplitPlan, ranks: list[int]) -> None:
    """Refuse to write the folders of these ranks where they do not fit; what stands in them is overwritten."""
    free = shutil.disk_usage(plan.out).free
    for rank in ranks:
        old = [path for path in plan.folders[rank].glob("**/*") if path.is_file()]
        free += sum(path.stat().st_size for path in old)
    need = sum(map(plan.bytes, ranks))
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
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="splitting", disable=not progress or not ranks)
    with bar:
        for rank in ranks:
            write_rank(plan, rank, bar.update)


def split(model_dir: str | Path, out_dir: str | Path, stages: str, eagle_dir: str | Path | None = None,
          progress: bool = True, layout: Layout = AS_IT_IS) -> list[Path]:
    """Write one folder for each rank, and keep those that an earlier run finished. Returns all folders.

    A GGUF file is unpacked beside them first.

    Raises ValueError, in a sentence that names the fix, for what cannot work.
    """
    try:
        model_dir = whole_model(model_dir, Path(out_dir) / "whole", progress=progress)
        plan = make_plan(model_dir, out_dir, stages, eagle_dir, layout)
        probe(layout.quant, torch.float32, "cpu")
        if plan.missing:  # a whole split can be used by those who may only read it
            with one_at_a_time(plan.out):
                write(plan, progress)
    except OSError as error:
        if error.errno in FULL:
            raise ValueError(f"the disk of {out_dir} is full; free some space and type the command again") from error
        raise ValueError(f"{error.filename or out_dir}: {error.strerror}; choose a model folder that you may read "
                         f"and an output folder that you may write, which a run takes as model_dir=") from error
    return plan.folders


def check(out_dir: str | Path) -> list[Part]:
    """Compare all folders of a split with their hashes; on a board there may be one folder only. Returns their parts.
    """
    parts = [Part(manifest.parent) for manifest in sorted(Path(out_dir).glob(f"stage_*/{MANIFEST}"))]
    if not parts:
        raise ValueError(f"{out_dir} holds no split; give the OUT_DIR of an earlier run")
    for part in parts:
        if part.split_id != parts[0].split_id:
            raise ValueError(f"{part.folder} belongs to another split than {parts[0].folder}; split again")
        part.verify()
    return parts
