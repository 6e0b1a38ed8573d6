"""A split model: the assignment of tensors to ranks, and a rank's own part, read from its own folder.

It knows nothing about computing with the tensors, or about their format in files (`checkpoint.py`).
"""
from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence, Tuple

import torch

from config.files import fits
from config.run_config import QUANTIZATIONS
from config.schema.families import FAMILIES
from config.schema.fields import NAME, Kind, check, integer, list_of, number, one_of
from config.schema.heads import usual_layers
from config.schema.untrusted import read_json, stays_inside
from model.llama import LlamaConfig, Slice
from model.weights.checkpoint import CODES_BY_DTYPE, SOURCES, Checkpoint
from model.weights.split import AUTO, balance, number_of, parse_stages, placements, rooms_of, span
from model.weights.unfold import BUFFER

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST, LAST = re.compile(r"model\.embed_"), re.compile(r"model\.norm\.")  # held with the first and the last layer
LAYER = re.compile(r"model\.layers\.(\d+)\.")
MANIFEST, FORMAT, VERSION = "manifest.json", "flowspec-split", 1
WEIGHTS = "model.safetensors"
HEAD_WEIGHTS, HEAD_CONFIG = f"eagle/{WEIGHTS}", "eagle/config.json"  # of the draft head
BLOCK = 1 << 24  # bytes hashed at once
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # types of plain weights
QUANTIZED = (torch.int8, torch.uint8)  # types of weights with a scale
Shape = Tuple[int, ...]
ENTRY = {"bytes": integer(0, 1 << 48).fits, "sha256": NAME.fits}  # of a file, in a manifest
LAYERS = list_of(integer(0, 1 << 16), max_length=1024)
FIELDS = {  # of a manifest
    "rank": integer(0, 1 << 16), "stages": LAYERS, "layers": LAYERS, "split_id": NAME,
    "quant": one_of(*QUANTIZATIONS),
    "shares": list_of(number(1e-9, 1e9), max_length=1024),
    "inner": LAYERS,
    "files": Kind("names of files in its folder, with bytes and sha256 of each", lambda files: fits(files, dict)
                  and all(map(stays_inside, files)) and fits([*files.values()], [ENTRY])
                  and all(fits(entry.get("checksums", {}), {int}) for entry in files.values())),
}
NEEDED = ("rank", "stages", "layers", "split_id", "files")


def plan_stages(text: str, source: Checkpoint) -> list[int]:
    """Return layers per rank as `parse_stages`; "auto:4" splits by bytes, "auto:8,8,16" in proportion to gigabytes."""
    check_model(source)  # without it, a config with an endless number of layers would be split endlessly
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
    """Return the layer with which a tensor is held (embeddings: the first); None for the LM head and unknown ones."""
    layer = LAYER.match(name)
    if layer:
        return int(layer[1]) if int(layer[1]) < layers else None
    if FIRST.match(name):
        return 0
    return layers - 1 if LAST.match(name) else None


def assign(names: Iterable[str], stages: list[int], tied: bool,
           borrows: bool = False) -> list[dict[str, str]]:
    """Return each stage's tensors; rank 0 has a tied LM head, too, or the embedding if a draft head `borrows` it."""
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
            raise ValueError(f"the checkpoint holds {name}, which belongs to no rank; "
                             f"its config.json belongs to another model, or this kind of model is not supported")
    first = owner[0]
    if tied and EMBED in parts[first]:
        parts[0][HEAD] = parts[first][EMBED]
    elif borrows:
        parts[0][EMBED] = parts[first][EMBED]
    return parts


def read_sizes(source: Checkpoint) -> LlamaConfig:
    """Read the sizes from the `config.json` of a folder. Raises ValueError, with the folder, for an invalid field."""
    try:
        return LlamaConfig.read(source.config)
    except ValueError as error:
        raise ValueError(f"{source.folder}: {error}") from None


def check_model(source: Checkpoint) -> None:
    """Raise ValueError for an unsupported model, or for one with other tensors than its config describes."""
    config = source.config
    if "fc.weight" in source.names():
        raise ValueError(f"{source.folder} is a draft head, which needs its model: name the model's folder, "
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
    check_shapes(source, names, shapes(c), "take weights and config.json of the same model")
    for name in names.values():
        check_type(source, name)


def shapes(c: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of a model's tensors, lazily, since a config may claim any number of layers."""
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
    """Raise ValueError if tensors differ from the wanted ones; `names` maps the wanted names to those of the file."""
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
    """Raise ValueError if a tensor has a type that weights never have, since its bytes would be misread."""
    found = source.form(name).dtype
    if found not in types:
        allowed = " or ".join(CODES_BY_DTYPE[dtype] for dtype in types)
        raise ValueError(f"{name} in {source.folder} has type {CODES_BY_DTYPE[found]} instead of {allowed}; "
                         "download it again")


def _unsplit(named: Path) -> str:
    """Return the remedy if a rank's part, a whole model or a GGUF file was given as a split; else empty."""
    if (named / MANIFEST).is_file():
        return f"{named} is the part of one rank; name {named.parent}, which holds all of them"
    if named.is_file() or any((named / name).is_file() for name in SOURCES):
        return (f"{named} is a whole model; name it with base_dir=, or split it first: python split_and_save_models.py "
                f"{named} OUT_DIR --stages 4")
    return ""


class Part:
    """A rank's folder of a split, `OUT_DIR/stage_{rank}`: checked when opened, its tensors are read on request."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        command = f"python split_and_save_models.py MODEL_DIR {self.folder.parent} --stages 4"
        again = f"split again: {command}"
        if not self.folder.is_dir():
            raise ValueError(_unsplit(self.folder.parent) or
                             f"there is no folder {self.folder}; split the model first: {command}")
        if not (self.folder / MANIFEST).is_file():
            raise ValueError(f"{self.folder} has no {MANIFEST}, so it is incomplete; {again}")
        self._accept(read_json(self.folder / MANIFEST), again)
        for name, (size, _) in self.files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise ValueError(f"{path} has {found} bytes, but its manifest says {size}; {again}")
        self.weights = Checkpoint(self.folder, self._checksums.get(WEIGHTS))
        self._check_tensors(again)
        for name in self.files:
            if Path(name).name == "config.json":  # an edited one would silently change what is computed
                self._compare(name, again)

    def _accept(self, manifest: dict[str, Any], again: str) -> None:
        """Set the fields of the manifest. Raises ValueError if they are invalid or contradict each other."""
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
        self._checksums = {name: entry.get("checksums") for name, entry in entries}  # of tensors; older splits: none
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
        """Raise ValueError for weights of other layers than in the manifest, or of unsupported types."""
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
    def has_blocks(self) -> bool:
        """Whether there are weights in the blocks of a GGUF file."""
        return any(map(self.is_in_blocks, self.weights.names()))

    def is_in_blocks(self, name: str) -> bool:
        """Whether this weight is stored in the blocks of a GGUF file."""
        return self.weights.stored_form(name) != self.weights.form(name)

    @property
    def form(self) -> str:
        """The form of the split, as values of the keys `stages` and `tp`: "0+2+2", "0+4+4 tp=2" or "tp=2"."""
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
        """The layers with inputs that the stages pass on to an EAGLE-3 head."""
        return usual_layers(sum(self.stages)) if self._inner is None else tuple(self._inner)

    @property
    def own_inner(self) -> list[int]:
        """The part of `inner` that this rank passes on: its layers' inputs, and the output of the model's last one."""
        first, last = self.layers
        end = last + 1 if last == sum(self.stages) else last
        return [layer for layer in self.inner if first <= layer < end]

    @property
    def eagle(self) -> Path | None:
        """The folder of the EAGLE head, if this rank has one; `open_head` opens it."""
        return self.folder / "eagle" if HEAD_CONFIG in self.files else None

    def open_head(self) -> Checkpoint:
        """Open the EAGLE head, which this rank has."""
        assert self.eagle, f"{self.folder} has no head"
        return Checkpoint(self.eagle, self._checksums.get(HEAD_WEIGHTS))

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare every byte of the named files, or of all, with their hashes; raises ValueError for a changed one."""
        for name in self.files if names is None else names:
            self._compare(name, "delete it and split again")

    def verify_texts(self) -> None:
        """Like `verify`, for all files but weights, which are compared when they are read."""
        self.verify(name for name in self.files if name not in (WEIGHTS, HEAD_WEIGHTS))

    def _compare(self, name: str, again: str) -> None:
        """Raise ValueError if a file has changed since it was written."""
        digest = hashlib.sha256()
        with (self.folder / name).open("rb") as file:
            for block in iter(lambda: file.read(BLOCK), b""):
                digest.update(block)
        if digest.hexdigest() != self.files[name][1]:
            raise ValueError(f"{self.folder / name} has changed since it was written (its hash differs); {again}")
