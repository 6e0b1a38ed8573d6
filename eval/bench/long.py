"""Long texts: the time of a model's layers to read them in chunks and to write after them, the size of their caches,
and the effect of 8 bits for keys and values on the text.

Times and memory depend only on the sizes. So a model with few positions gets more of them, by yarn, and its text is
arbitrary tokens.
"""
from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from config.run_config import RunConfig
from eval.bench import Cost, cost, number, status
from eval.bench.head import PIECE, text_of
from eval.tables import in_columns
from launch.build import build_stage
from launch.memory import Need, check_memory, need
from launch.spec import RankSpec
from launch.split.write import split
from model.cache import TreeCache
from model.llama import LlamaConfig
from model.weights.parts import Part
from model.weights.unfold import Unfolded
from model.whole import Whole
from pipeline.trace import OFF

KINDS = ("none", "int8")
WRITTEN = 16  # tokens after a text
MB = 1e6
COLUMNS = ("positions", "prefill_chunk", "quant_kv", "prefill, s", "of processor, s", "a token, ms", "cache, MB",
           "stated", "all, MB", "stated")


class Figures(NamedTuple):
    """The costs of one text: reading it, a token after it, and the bytes of the cache and of the process."""

    prefill: Cost
    token: float
    cache: int
    taken: int


def long(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench long`."""
    parser = argparse.ArgumentParser(prog="python3 -m scripts.bench long")
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a model in Hugging Face form")
    parser.add_argument("--positions", type=number, nargs="+", default=[8192, 32768], metavar="N",
                        help="tokens of the texts to read (8192 32768)")
    parser.add_argument("--chunks", type=number, nargs="+", default=[64, 256], metavar="N",
                        help="prefill_chunk (64 256)")
    parser.add_argument("--tokens", type=number, default=2000, metavar="N",
                        help="tokens of the bundled questions, after each of which the likeliest is compared (2000)")
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    source = Unfolded(args.model)
    table = []
    with tempfile.TemporaryDirectory(prefix="flowspec-") as place:
        longest = max(args.positions) + WRITTEN
        [_, folder] = split(_stretched(source, longest, Path(place)), Path(place) / "split", "1")
        jobs = list(product(args.positions, args.chunks, KINDS))
        for job in tqdm(jobs, desc="texts", leave=False):
            stated, found = _measured(folder, *job)
            times = [f"{each:.1f}" for each in (found.prefill.wall, found.prefill.processor, 1e3 * found.token)]
            sizes = [f"{size / MB:.0f}" for size in (found.cache, stated.cache, found.taken, stated.total)]
            table.append([*map(str, job), *times, *sizes])
    print(f"a stage with all layers of {args.model.name}, float32, {torch.get_num_threads()} thread(s), each text in a "
          "process of its own; all: without Python and torch")
    print(in_columns(COLUMNS, table, names=0))
    same = agreement(source, args.tokens)
    print(f"reading {len(same)} tokens of text, quant_kv=int8 finds the same token likeliest after "
          f"{100 * float(same.double().mean()):.2f} %")
    return 0


# --- times and memory -------------------------------------------------------------------------------------------------

def _stretched(source: Unfolded, length: int, place: Path) -> Path:
    """Return the model's folder; for more positions than it has, another one in `place` with the same weights."""
    given = source.config
    trained = given.get("max_position_embeddings") or RunConfig.max_length
    if length <= trained:
        return source.folder
    if not LlamaConfig.read(given).family.rotary:
        raise ValueError(f"{source.folder} has {trained} trained positions: give --positions "
                         f"{max(1, trained - WRITTEN)} or less")
    folder = place / source.folder.name
    folder.mkdir()
    for path in source.folder.resolve().iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    yarn = {"rope_type": "yarn", "factor": length / trained, "original_max_position_embeddings": trained}
    changed = {**given, "max_position_embeddings": length, "rope_scaling": yarn, "rope_parameters": None}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def _measured(folder: Path, positions: int, chunk: int, kind: str) -> tuple[Need, Figures]:
    """Return the stated and the measured costs of a text, in a new process; raise ValueError for too little memory."""
    config = RunConfig("ar", dtype="float32", device="cpu", max_length=positions + WRITTEN, prefill_chunk=chunk,
                       quant_kv=kind, draft="none", threads_per_rank=torch.get_num_threads())
    spec = RankSpec(config, Part(folder))
    check_memory([spec], [spec], report=False)
    with get_context("spawn").Pool(1) as pool:
        found: Figures = pool.apply(_read_and_written, (spec, positions, chunk))
    return need(spec), found


def _read_and_written(spec: RankSpec, positions: int, chunk: int) -> Figures:
    """Return the figures of a text; its memory is that of weights and caches, without the process before them."""
    before = status("self")["VmRSS"]
    stage = build_stage(spec, OFF)
    cache = stage.cache(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: files of weights were mapped

    def read(first: int, last: int) -> None:
        nodes = range(first, last)
        cache.admit(nodes, [max(0, node - 1) for node in nodes], len(nodes))
        stage.part(torch.tensor(nodes) % spec.sizes.vocab, torch.tensor(nodes), cache)

    def prefill() -> None:
        for first in range(0, positions, chunk):
            read(first, min(first + chunk, positions))

    whole = cost(prefill)
    tokens = [cost(read, node, node + 1).wall for node in range(positions, positions + WRITTEN)]
    taken = 1024 * (status("self")["VmHWM"] - before)
    return Figures(whole, median(tokens), cache.bytes, taken)


# --- the text ---------------------------------------------------------------------------------------------------------

def agreement(source: Unfolded, tokens: int) -> Tensor:
    """Return for each token whether the likeliest next one is the same with 8-bit keys and values, `[T]`."""
    whole = Whole(source, torch.float32, "cpu", context=tokens)
    ids = text_of(source.folder, tokens)
    plain = whole.cache(len(ids))
    small = TreeCache(plain.shape, plain.like.dtype, plain.like.device, small=True)
    same = []
    for begin in range(0, len(ids), PIECE):
        piece = ids[begin:begin + PIECE]
        exact, rough = (whole.logits(piece, cache, len(piece)).argmax(-1) for cache in (plain, small))
        same.append(exact == rough)
    return torch.cat(same)
