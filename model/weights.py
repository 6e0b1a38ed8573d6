"""A split model: which rank holds which tensors, and a rank's own part of them, read from its own folder.

It knows nothing about what the tensors compute, nor how they are put into files (`checkpoint.py`).
"""
from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Iterable

from torch import Tensor

from model.checkpoint import Checkpoint, read_json

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
BUFFER = re.compile(r"rotary_emb\.inv_freq$")  # computed anew by whoever needs it
ARCHITECTURES = {"LlamaForCausalLM"}  # those whose names and layers are as here
MANIFEST, FORMAT, VERSION = "manifest.json", "flowspec-split", 1
BLOCK = 1 << 24  # bytes hashed at once


def parse_stages(text: str, layers: int) -> list[int]:
    """Layers per rank from "0+2+2+2+2", or from a number of stages as in the original: larger shares last."""
    counts = [int(part) for part in str(text).split("+") if part.strip().isdecimal()]
    if len(counts) != str(text).count("+") + 1:
        raise ValueError(f"stages={text!r} is not a split; write layers per rank, as 0+2+2+2+2, or a number of stages")
    if len(counts) == 1:
        stages, = counts
        if not 1 <= stages <= layers:
            raise ValueError(f"stages={text} does not fit: the model has {layers} layers, so choose 1 to {layers}")
        return [0] + [(layers + i) // stages for i in range(stages)]
    if counts[0] != 0:
        raise ValueError(f"stages={text} must begin with 0, because rank 0 drafts and holds no layers: "
                         f"write 0+{text}")
    if 0 in counts[1:]:
        raise ValueError(f"stages={text} leaves rank {counts.index(0, 1)} without a layer; "
                         f"every rank after rank 0 needs at least 1")
    if sum(counts) != layers:
        share = "+".join(map(str, parse_stages(str(min(len(counts) - 1, layers)), layers)))
        raise ValueError(f"stages={text} adds up to {sum(counts)} layers, but the model has {layers}; try {share}")
    return counts


def assign(names: Iterable[str], stages: list[int], tied: bool) -> list[dict[str, str]]:
    """What each rank holds: the name in its part -> the name in the checkpoint. Layers keep their numbers."""
    owner = [rank for rank, count in enumerate(stages) for _ in range(count)]
    parts: list[dict[str, str]] = [{} for _ in stages]
    for name in names:
        layer = LAYER.match(name)
        if BUFFER.search(name) or (name == HEAD and tied):
            continue
        if layer and int(layer[1]) < len(owner):
            parts[owner[int(layer[1])]][name] = name
        elif name in (EMBED, NORM, HEAD):
            parts[{EMBED: 1, NORM: -1, HEAD: 0}[name]][name] = name
        else:
            raise ValueError(f"the checkpoint holds {name}, which no rank would take; "
                             f"its config.json belongs to another model, or this kind of model is not supported")
    if tied and EMBED in parts[1]:
        parts[0][HEAD] = EMBED
    return parts


def check_model(source: Checkpoint) -> None:
    """Refuse what would be split or run wrongly."""
    config = source.config
    kinds = config.get("architectures") or [str(config.get("model_type"))]
    if not ARCHITECTURES.intersection(kinds):
        raise ValueError(f"{source.folder} holds a {kinds[0]}, which is not supported; choose a model of the kind "
                         f"{' or '.join(sorted(ARCHITECTURES))}")
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        if not isinstance(config.get(key), int):
            raise ValueError(f"{source.folder / 'config.json'} does not give {key}; copy it again from the model")
    names = {name for name in source.names() if not BUFFER.search(name)}
    suffixes = sorted({match[2] for match in map(LAYER.match, names) if match})
    needed = [EMBED, NORM] if config.get("tie_word_embeddings") else [EMBED, NORM, HEAD]
    needed += [f"model.layers.{i}.{end}" for i in range(config["num_hidden_layers"]) for end in suffixes or ["*"]]
    missing = [name for name in needed if name not in names]
    if missing:
        raise ValueError(f"{source.folder} lacks {missing[0]} ({len(missing)} missing in all); download it again")
    check_shape(source, EMBED, (config["vocab_size"], config["hidden_size"]))


def check_shape(source: Checkpoint, name: str, wanted: tuple[int, ...]) -> None:
    if source.form(name).shape != wanted:
        raise ValueError(f"{name} in {source.folder} has shape {source.form(name).shape} instead of {wanted}; "
                         f"take weights and config.json of one model")


def check_head(head: Checkpoint, source: Checkpoint) -> None:
    """Refuse a draft head that was made for another model."""
    if "fc.weight" not in head.names():
        raise ValueError(f"{head.folder} is not an EAGLE draft head (it has no fc.weight); give the folder of a head")
    for key in ("hidden_size", "vocab_size"):
        its, ours = head.config.get(key), source.config[key]
        if its != ours:
            raise ValueError(f"the draft head in {head.folder} has {key} {its}, but the model has {ours}; "
                             f"take the head that was trained for this model")
    hidden, vocab = source.config["hidden_size"], source.config["vocab_size"]
    check_shape(head, "fc.weight", (hidden, *head.form("fc.weight").shape[1:]))
    if "embed_tokens.weight" in head.names():
        check_shape(head, "embed_tokens.weight", (vocab, hidden))


def span(stages: list[int], rank: int) -> tuple[int, int]:
    """The layers [a, b) of a rank; rank 0 has none."""
    return sum(stages[:rank]), sum(stages[:rank + 1])


class Part:
    """A rank's folder of a split, `OUT_DIR/stage_{rank}`: looked over when it is opened, read when asked."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        command = f"python split_and_save_models.py MODEL_DIR {self.folder.parent} --stages 0+2+2+2+2"
        if not self.folder.is_dir():
            raise ValueError(f"there is no folder {self.folder}; split the model first: {command}")
        if not (self.folder / MANIFEST).is_file():
            raise ValueError(f"{self.folder} has no {MANIFEST}, so it is not whole; split again: {command}")
        if not self._accept(read_json(self.folder / MANIFEST)):
            raise ValueError(f"{self.folder / MANIFEST} is damaged or not of this version of FlowSpec; "
                             f"split again: {command}")
        for name, (size, _) in self.files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise ValueError(f"{path} has {found} bytes, but its manifest says {size}; split again: {command}")
        self.weights = Checkpoint(self.folder)

    def _accept(self, manifest: dict[str, Any]) -> bool:
        """Take over what the manifest says; whether it makes sense."""
        try:
            self.rank: int = manifest["rank"]
            self.stages: list[int] = manifest["stages"]
            self.layers: tuple[int, int] = tuple(manifest["layers"])  # type: ignore[assignment]
            self.split_id: str = manifest["split_id"]
            self.files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
            return ((manifest["format"], manifest["version"]) == (FORMAT, VERSION)
                    and self.layers == span(self.stages, self.rank))
        except (KeyError, TypeError, AttributeError):
            return False

    @property
    def config(self) -> dict[str, Any]:
        """The `config.json` of the whole model."""
        return self.weights.config

    @property
    def eagle(self) -> Path | None:
        """The folder of the draft head, if this rank has one: `Checkpoint(part.eagle)` reads it."""
        return self.folder / "eagle" if "eagle/config.json" in self.files else None

    def tensors(self) -> dict[str, Tensor]:
        return self.weights.tensors()

    def verify(self) -> None:
        """Compare every byte with the manifest's hashes."""
        for name, (_, sha256) in self.files.items():
            digest = hashlib.sha256()
            with (self.folder / name).open("rb") as file:
                for block in iter(lambda: file.read(BLOCK), b""):
                    digest.update(block)
            if digest.hexdigest() != sha256:
                raise ValueError(f"{self.folder / name} has changed since it was written (its hash differs); "
                                 f"delete it and split again")
