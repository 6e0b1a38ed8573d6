"""A split model: which rank holds which tensors, and a rank's own part of them, read from its own folder.

It knows nothing about what the tensors compute, nor how they are put into files (`checkpoint.py`).
"""
from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence, Tuple

import torch

from config.files import fits
from config.run_config import CHOICES
from config.schema.families import FAMILIES
from config.schema.fields import NAME, Kind, check, integer, list_of, number, one_of
from config.schema.heads import usual_layers
from config.schema.untrusted import read_json, stays_inside
from model.llama import LlamaConfig, Slice
from model.weights.checkpoint import NAMES, SOURCES, Checkpoint
from model.weights.split import AUTO, balance, number_of, parse_stages, placements, rooms_of, span
from model.weights.unfold import BUFFER

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST, LAST = re.compile(r"model\.embed_"), re.compile(r"model\.norm\.")  # what goes with the first and last layer
LAYER = re.compile(r"model\.layers\.(\d+)\.")
MANIFEST, FORMAT, VERSION = "manifest.json", "flowspec-split", 1
BLOCK = 1 << 24  # bytes hashed at once
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # what weights are stored in
QUANTIZED = (torch.int8, torch.uint8)  # weights that have a scale beside them
Shape = Tuple[int, ...]
ENTRY = {"bytes": integer(0, 1 << 48).fits, "sha256": NAME.fits}  # of a file, in a manifest
LAYERS = list_of(integer(0, 1 << 16), most=1024)
FIELDS = {  # of a manifest
    "rank": integer(0, 1 << 16), "stages": LAYERS, "layers": LAYERS, "split_id": NAME,
    "quant": one_of(*(kind for kind in CHOICES["quant"] if kind != "auto")),
    "shares": list_of(number(1e-9, 1e9), most=1024),
    "inner": LAYERS,
    "files": Kind("names of files in its folder, with bytes and sha256 of each", lambda files: fits(files, dict)
                  and all(map(stays_inside, files)) and fits([*files.values()], [ENTRY])),
}
NEEDED = ("rank", "stages", "layers", "split_id", "files")


def plan_stages(text: str, source: Checkpoint) -> list[int]:
    """Layers per rank, as `parse_stages`; for "auto:4" by their bytes, for "auto:8,8,16" in proportion to gigabytes."""
    check_model(source)  # a config that promises layers without end would be split without end
    layers = read_sizes(source).layers
    auto = AUTO.fullmatch(text.strip())
    if not auto:
        return parse_stages(text, layers)
    stages = number_of(auto, min(4, layers))
    if stages > layers:
        raise ValueError(f"stages={text} does not fit: the model has {layers} layers, so choose at most auto:{layers}")
    bytes_of = [0] * layers
    for name in source.names():
        layer = layer_of(name, layers)
        if layer is not None:
            bytes_of[layer] += source.form(name).bytes
    return [0, *balance(bytes_of, rooms_of(auto) or [1] * stages)]


def layer_of(name: str, layers: int) -> int | None:
    """The layer beside which a tensor is held, as the first for embeddings; None for the LM head and unknown ones."""
    layer = LAYER.match(name)
    if layer:
        return int(layer[1]) if int(layer[1]) < layers else None
    if FIRST.match(name):
        return 0
    return layers - 1 if LAST.match(name) else None


def assign(names: Iterable[str], stages: list[int], tied: bool,
           borrows: bool = False) -> list[dict[str, str]]:
    """What each stage holds, by name; if the draft head `borrows` it, rank 0 holds the embedding, or a tied LM head."""
    owner = [rank for rank, count in enumerate(stages) for _ in range(count)]  # of each layer
    parts: list[dict[str, str]] = [{} for _ in stages]
    for name in names:
        layer = layer_of(name, len(owner))
        if BUFFER.search(name) or (name == HEAD and tied):
            continue
        if name == HEAD:
            parts[0][name] = name
        elif layer is not None:
            parts[owner[layer]][name] = name
        else:
            raise ValueError(f"the checkpoint holds {name}, which no rank would take; "
                             f"its config.json belongs to another model, or this kind of model is not supported")
    first = owner[0]
    if tied and EMBED in parts[first]:
        parts[0][HEAD] = parts[first][EMBED]
    elif borrows:
        parts[0][EMBED] = parts[first][EMBED]
    return parts


def read_sizes(source: Checkpoint) -> LlamaConfig:
    """The sizes in the `config.json` of a folder; the ValueError for a wrong field names the folder."""
    try:
        return LlamaConfig.read(source.config)
    except ValueError as error:
        raise ValueError(f"{source.folder}: {error}") from None


def check_model(source: Checkpoint) -> None:
    """Refuse a model that would be split or run wrongly: its tensors must be those that its config describes."""
    config = source.config
    if "fc.weight" in source.names():
        raise ValueError(f"{source.folder} is a draft head, which is none without its model: name the model's folder, "
                         "and this one as its head (--eagle)")
    kind = str(config.get("model_type"))
    own = FAMILIES[kind].architecture if kind in FAMILIES else kind
    kinds = config.get("architectures") or [own]
    known = [family.architecture for family in FAMILIES.values()]
    if not set(known).intersection(kinds):
        raise ValueError(f"{source.folder} holds a {kinds[0]}, which is not supported; choose a model of the kind "
                         f"{', '.join(known[:-1])} or {known[-1]}")
    c = read_sizes(source)
    if c.family.architecture not in kinds:
        raise ValueError(f"{source.folder / 'config.json'} says architectures={kinds} and "
                         f"model_type={config.get('model_type')!r}; copy it again from the model")
    names = {name: name for name in source.names() if not BUFFER.search(name)}
    if c.tied:
        names.pop(HEAD, None)
    check_shapes(source, names, shapes(c), "take weights and config.json of one model")
    for name in names.values():
        check_type(source, name)


def shapes(c: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    """The names and shapes of a model's tensors, one after another: a config may promise any number of layers."""
    layer: dict[str, Shape] = {}
    for name, p in Slice(replace(c, layers=1), 0, 1).named_parameters():
        if name.startswith("layers.0."):
            layer[name[len("layers.0."):]] = tuple(p.shape)
        else:
            yield f"model.{name}", tuple(p.shape)
    if not c.tied:
        yield HEAD, (c.vocab, c.hidden)
    for i in range(c.layers):
        yield from ((f"model.layers.{i}.{name}", shape) for name, shape in layer.items())


def check_shapes(source: Checkpoint, names: Mapping[str, str], wanted: Iterable[tuple[str, Shape]],
                 remedy: str) -> None:
    """Refuse tensors that are not those that are wanted; `names` leads from the wanted ones to those of the file."""
    left = dict(names)
    for name, shape in wanted:
        if name not in left:
            raise ValueError(f"{source.folder} lacks {name}; {remedy}")
        theirs = left.pop(name)
        found = source.form(theirs).shape
        if found != shape:
            raise ValueError(f"{theirs} in {source.folder} has shape {found} instead of {shape}; {remedy}")
    if left:
        stray = next(iter(left.values()))
        raise ValueError(f"{source.folder} holds {stray}, which its config.json has no place for; {remedy}")


def check_type(source: Checkpoint, name: str, types: Sequence[torch.dtype] = FLOATS) -> None:
    """Refuse a tensor of a type that weights never have: a file may name any, and then its bytes mean other numbers."""
    found = source.form(name).dtype
    if found not in types:
        allowed = " or ".join(NAMES[dtype] for dtype in types)
        raise ValueError(f"{name} in {source.folder} has type {NAMES[found]} instead of {allowed}; download it again")


def _unsplit(named: Path) -> str:
    """What to do where a rank's part, a whole model or a GGUF file was named as a split; empty if it is none of these.
    """
    if (named / MANIFEST).is_file():
        return f"{named} is the part of one rank; name {named.parent}, which holds all of them"
    if named.is_file() or any((named / name).is_file() for name in SOURCES):
        return (f"{named} is a whole model; name it with base_dir=, or split it first: python split_and_save_models.py "
                f"{named} OUT_DIR --stages 4")
    return ""


class Part:
    """A rank's folder of a split, `OUT_DIR/stage_{rank}`: checked when it is opened, its tensors read when asked."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        command = f"python split_and_save_models.py MODEL_DIR {self.folder.parent} --stages 4"
        again = f"split again: {command}"
        if not self.folder.is_dir():
            raise ValueError(_unsplit(self.folder.parent) or
                             f"there is no folder {self.folder}; split the model first: {command}")
        if not (self.folder / MANIFEST).is_file():
            raise ValueError(f"{self.folder} has no {MANIFEST}, so it is not whole; {again}")
        self._accept(read_json(self.folder / MANIFEST), again)
        for name, (size, _) in self.files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise ValueError(f"{path} has {found} bytes, but its manifest says {size}; {again}")
        self.weights = Checkpoint(self.folder)
        self._check_tensors(again)
        for name in self.files:
            if Path(name).name == "config.json":  # one that was edited by hand changes what is computed, without a word
                self._compare(name, again)

    def _accept(self, manifest: dict[str, Any], again: str) -> None:
        """Take over the fields of the manifest; ValueError if they contradict each other."""
        path = self.folder / MANIFEST
        if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{path} is damaged or not of this version of FlowSpec; {again}")
        check(manifest, FIELDS, path, again, needed=NEEDED)
        self.rank: int = manifest["rank"]
        self.stages: list[int] = manifest["stages"]
        self.split_id: str = manifest["split_id"]
        self.quant: str = manifest.get("quant") or "none"  # the form of the layers' weights
        self.shares: list[float] = manifest.get("shares") or [1]  # relative speeds of the ranks that share a stage
        self._inner: list[int] | None = manifest.get("inner")
        entries = manifest["files"].items()
        self.files = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries}
        places = placements(self.stages, len(self.shares))
        ranks = range(len(places))
        self.world = len(places)
        first, *others = self.stages or [0]
        misplaced = 0 in others or others and first
        possible = self.rank in ranks and not misplaced
        if possible:
            stage, self.member = places[self.rank]
            self.layers = span(self.stages, stage)
            possible = list(self.layers) == manifest["layers"]
        if not possible:
            raise ValueError(f"{path} is damaged: its rank, stages, shares and layers contradict each other; {again}")

    def _check_tensors(self, again: str) -> None:
        """Refuse weights of other layers than the manifest says, or of types that they cannot have."""
        layers = read_sizes(self.weights).layers
        if sum(self.stages) != layers:
            raise ValueError(f"{self.folder / MANIFEST} says {sum(self.stages)} layers, config.json {layers}; {again}")
        names = set(self.weights.names())
        held = {int(layer[1]) for layer in map(LAYER.match, names) if layer}
        if held != set(range(*self.layers)):
            raise ValueError(f"{self.folder} holds other layers than its {MANIFEST} says; {again}")
        for name in names:
            owner, _, own = name.rpartition(".")
            scaled = self.quant != "none" and own == "weight" and f"{owner}.scale" in names
            check_type(self.weights, name, QUANTIZED if scaled else FLOATS)

    @property
    def form(self) -> str:
        """How the model is split, in the words of the configuration's keys: "0+2+2", "0+4+4 tp=2" or "tp=2"."""
        tp = f"tp={len(self.shares)}"
        if len(self.stages) == 1:
            return tp
        stages = "+".join(map(str, self.stages))
        return stages if len(self.shares) == 1 else f"{stages} {tp}"

    @property
    def config(self) -> dict[str, Any]:
        """The `config.json` of the whole model."""
        return self.weights.config

    @property
    def inner(self) -> tuple[int, ...]:
        """The layers whose inputs the stages pass on to a head of EAGLE-3."""
        return usual_layers(sum(self.stages)) if self._inner is None else tuple(self._inner)

    @property
    def own_inner(self) -> list[int]:
        """Those of them that this rank passes on: the inputs of its layers, and the output of the model's last one."""
        first, last = self.layers
        end = last + 1 if last == sum(self.stages) else last
        return [layer for layer in self.inner if first <= layer < end]

    @property
    def eagle(self) -> Path | None:
        """The folder of the EAGLE head, if this rank has one: `Checkpoint(part.eagle)` reads it."""
        return self.folder / "eagle" if "eagle/config.json" in self.files else None

    def verify(self) -> None:
        """Compare every byte with the manifest's hashes; ValueError for a file that has changed."""
        for name in self.files:
            self._compare(name, "delete it and split again")

    def _compare(self, name: str, again: str) -> None:
        """Refuse a file that has changed since it was written."""
        digest = hashlib.sha256()
        with (self.folder / name).open("rb") as file:
            for block in iter(lambda: file.read(BLOCK), b""):
                digest.update(block)
        if digest.hexdigest() != self.files[name][1]:
            raise ValueError(f"{self.folder / name} has changed since it was written (its hash differs); {again}")
