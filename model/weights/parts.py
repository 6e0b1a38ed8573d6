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
from model.llama import Layer, LlamaConfig, Slice
from model.weights.checkpoint import CODES_BY_DTYPE, SOURCES, Checkpoint
from model.weights.quant import IN_BLOCKS
from model.weights.split import AUTO, balance, number_of, parse_stages, placements, rooms_of, span
from model.weights.unfold import BUFFER

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER_PREFIX = re.compile(r"model\.layers\.(\d+)\.")
WITH_FIRST_LAYER, WITH_LAST_LAYER = re.compile(r"model\.embed_"), re.compile(r"model\.norm\.")
MANIFEST, FORMAT, VERSION = "manifest.json", "flowspec-split", 1
WEIGHTS = "model.safetensors"
HEAD_WEIGHTS, HEAD_CONFIG = f"eagle/{WEIGHTS}", "eagle/config.json"  # of the draft head

BYTES_AT_ONCE = 1 << 24  # that are hashed
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # types of plain weights
QUANTIZED = (torch.uint8,)  # types of weights with a scale
TensorShape = Tuple[int, ...]

FILE_ENTRY = {"bytes": integer(0, 1 << 48).fits, "sha256": NAME.fits}  # in a manifest
LAYERS = list_of(integer(0, 1 << 16), max_length=1024)
MANIFEST_FIELDS = {
    "rank": integer(0, 1 << 16), "stages": LAYERS, "layers": LAYERS, "split_id": NAME,
    "quant": one_of(*QUANTIZATIONS),
    "shares": list_of(number(1e-9, 1e9), max_length=1024),
    "inner": LAYERS,
    "files": Kind("names of files in its folder, with bytes and sha256 of each", lambda files: fits(files, dict)
                  and all(map(stays_inside, files)) and fits([*files.values()], [FILE_ENTRY])
                  and all(fits(entry.get("checksums", {}), {int}) for entry in files.values())),
}
NEEDED_FIELDS = ("rank", "stages", "layers", "split_id", "files")


# --- the tensors of each rank -----------------------------------------------------------------------------------------

def plan_stages(text: str, source: Checkpoint) -> list[int]:
    """Return layers per rank as `parse_stages`; "auto:4" splits by bytes, "auto:8,8,16" in proportion to gigabytes."""
    check_model(source)  # without it, a config with an endless number of layers would be split endlessly
    num_layers = read_sizes(source).layers
    auto = AUTO.fullmatch(text.strip())
    if not auto:
        return parse_stages(text, num_layers)

    num_stages = number_of(auto, min(4, num_layers))
    if num_stages > num_layers:
        raise ValueError(f"stages={text} does not fit: the model has {num_layers} layers, so choose at most "
                         f"auto:{num_layers}")

    layer_bytes = [0] * num_layers
    for name in source.names():
        layer = layer_of(name, num_layers)
        if layer is not None:
            layer_bytes[layer] += source.form(name).bytes
    stage_sizes = rooms_of(auto) or [1] * num_stages
    return [0, *balance(layer_bytes, stage_sizes)]


def layer_of(name: str, num_layers: int) -> int | None:
    """Return the layer with which a tensor is held (embeddings: the first); None for the LM head and unknown ones."""
    layer_prefix = LAYER_PREFIX.match(name)
    if layer_prefix:
        layer = int(layer_prefix[1])
        return layer if layer < num_layers else None
    if WITH_FIRST_LAYER.match(name):
        return 0
    return num_layers - 1 if WITH_LAST_LAYER.match(name) else None


def assign(names: Iterable[str], stages: list[int], tied: bool, needs_embedding: bool = False) -> list[dict[str, str]]:
    """Return each stage's tensors; rank 0 has a tied LM head, too, or the embedding if a draft head needs it."""
    stage_of_layer = [stage for stage, num_layers in enumerate(stages) for _ in range(num_layers)]
    tensors_of_stages: list[dict[str, str]] = [{} for _ in stages]
    for name in names:
        if BUFFER.search(name) or (name == HEAD and tied):
            continue
        layer = layer_of(name, len(stage_of_layer))
        if name == HEAD:
            tensors_of_stages[0][name] = name
        elif layer is not None:
            tensors_of_stages[stage_of_layer[layer]][name] = name
        else:
            raise ValueError(f"the checkpoint holds {name}, which belongs to no rank; "
                             f"its config.json belongs to another model, or this kind of model is not supported")

    with_embedding = tensors_of_stages[stage_of_layer[0]]
    if tied and EMBED in with_embedding:
        tensors_of_stages[0][HEAD] = with_embedding[EMBED]
    elif needs_embedding:
        tensors_of_stages[0][EMBED] = with_embedding[EMBED]
    return tensors_of_stages


# --- the checks of a whole model --------------------------------------------------------------------------------------

def read_sizes(source: Checkpoint) -> LlamaConfig:
    """Read the sizes from the `config.json` of a folder. Raises ValueError, with the folder, for an invalid field."""
    try:
        return LlamaConfig.read(source.config)
    except ValueError as error:
        raise ValueError(f"{source.folder}: {error}") from None


def check_model(source: Checkpoint) -> None:
    """Raise ValueError for an unsupported model, or for one with other tensors than its config describes."""
    if "fc.weight" in source.names():
        raise ValueError(f"{source.folder} is a draft head, which needs its model: name the model's folder, "
                         "and this one as its head (--eagle)")

    # the architecture
    config = source.config
    model_type = str(config.get("model_type"))
    usual_architecture = FAMILIES[model_type].architecture if model_type in FAMILIES else model_type
    architectures = config.get("architectures") or [usual_architecture]
    supported = [family.architecture for family in FAMILIES.values()]
    if not set(supported).intersection(architectures):
        raise ValueError(f"{source.folder} holds a {architectures[0]}, which is not supported; choose a model of the "
                         f"kind {', '.join(supported[:-1])} or {supported[-1]}")
    sizes = read_sizes(source)
    if sizes.family.architecture not in architectures:
        raise ValueError(f"{source.folder / 'config.json'} says architectures={architectures} and "
                         f"model_type={config.get('model_type')!r}; copy it again from the model")

    # the tensors
    names = {name: name for name in source.names() if not BUFFER.search(name)}
    if sizes.tied:
        names.pop(HEAD, None)
    check_shapes(source, names, tensor_shapes(sizes), "take weights and config.json of the same model")
    for name in names:
        check_type(source, name)


def tensor_shapes(sizes: LlamaConfig) -> Iterator[tuple[str, TensorShape]]:
    """Yield the names and shapes of a model's tensors, lazily, since a config may claim any number of layers."""
    without_layers = Slice(replace(sizes, layers=0), 0, 0)
    yield from ((f"model.{name}", tuple(parameter.shape)) for name, parameter in without_layers.named_parameters())
    if not sizes.tied:
        yield HEAD, (sizes.vocab, sizes.hidden)

    shapes_of_kinds: dict[tuple[str, bool], list[tuple[str, TensorShape]]] = {}
    for layer in range(sizes.layers):
        layer_shape = sizes.layer_kind(layer), sizes.has_experts(layer)
        if layer_shape not in shapes_of_kinds:
            parameters = Layer(sizes, number=layer).named_parameters()
            shapes_of_kinds[layer_shape] = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in shapes_of_kinds[layer_shape])


def check_shapes(source: Checkpoint, names: Mapping[str, str], expected_shapes: Iterable[tuple[str, TensorShape]],
                 remedy: str) -> None:
    """Raise ValueError if tensors differ from the expected ones; `names` maps expected names to those of the file."""
    unchecked_names = dict(names)
    for name, expected_shape in expected_shapes:
        if name not in unchecked_names:
            raise ValueError(f"{source.folder} lacks {name}; {remedy}")
        name_in_file = unchecked_names.pop(name)
        shape = source.form(name_in_file).shape
        if shape != expected_shape:
            raise ValueError(f"{name_in_file} in {source.folder} has shape {shape} instead of {expected_shape}; "
                             f"{remedy}")

    if unchecked_names:
        extra_name = next(iter(unchecked_names.values()))
        raise ValueError(f"{source.folder} holds {extra_name}, which its config.json has no place for; {remedy}")


def check_type(source: Checkpoint, name: str, types: Sequence[torch.dtype] = FLOATS) -> None:
    """Raise ValueError if a tensor has a type that weights never have, since its bytes would be misread."""
    dtype = source.form(name).dtype
    if dtype not in types:
        allowed_types = " or ".join(CODES_BY_DTYPE[allowed] for allowed in types)
        raise ValueError(f"{name} in {source.folder} has type {CODES_BY_DTYPE[dtype]} instead of {allowed_types}; "
                         "download it again")


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, as a manifest has it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BYTES_AT_ONCE), b""):
            digest.update(block)
    return digest.hexdigest()


# --- the part of a rank -----------------------------------------------------------------------------------------------

def _hint_if_unsplit(path: Path) -> str:
    """Return the remedy if a rank's part, a whole model or a GGUF file was given as a split; else empty."""
    if (path / MANIFEST).is_file():
        return f"{path} is the part of one rank; name {path.parent}, which holds all of them"
    if path.is_file() or any((path / name).is_file() for name in SOURCES):
        return (f"{path} is a whole model; name it with base_dir=, or split it first: python split_and_save_models.py "
                f"{path} OUT_DIR --stages 4")
    return ""


class Part:
    """A rank's folder of a split, `OUT_DIR/stage_{rank}`: checked when opened, its tensors are read on request."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        split_command = f"python split_and_save_models.py MODEL_DIR {self.folder.parent} --stages 4"
        split_again = f"split again: {split_command}"
        if not self.folder.is_dir():
            raise ValueError(_hint_if_unsplit(self.folder.parent) or
                             f"there is no folder {self.folder}; split the model first: {split_command}")

        # the manifest
        if not (self.folder / MANIFEST).is_file():
            raise ValueError(f"{self.folder} has no {MANIFEST}, so it is incomplete; {split_again}")
        self._accept(read_json(self.folder / MANIFEST), split_again)
        for name, (expected_size, _) in self.files.items():
            path = self.folder / name
            file_size = path.stat().st_size if path.is_file() else 0
            if file_size != expected_size:
                raise ValueError(f"{path} has {file_size} bytes, but its manifest says {expected_size}; {split_again}")

        # the weights
        self.weights = Checkpoint(self.folder, self._checksums.get(WEIGHTS))
        self._check_tensors(split_again)
        for name in self.files:
            if Path(name).name == "config.json":  # an edited one would silently change what is computed
                self._compare(name, split_again)

    def _accept(self, manifest: dict[str, Any], remedy: str) -> None:
        """Set the fields of the manifest. Raises ValueError if they are invalid or contradict each other."""
        manifest_path = self.folder / MANIFEST
        if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{manifest_path} is damaged or not of this version of FlowSpec; {remedy}")
        check(manifest, MANIFEST_FIELDS, manifest_path, remedy, needed=NEEDED_FIELDS)

        self.rank: int = manifest["rank"]
        self.stages: list[int] = manifest["stages"]
        self.split_id: str = manifest["split_id"]
        self.quant: str = manifest.get("quant") or "none"  # the form of the layers' weights
        self.shares: list[float] = manifest.get("shares") or [1]  # relative speeds of the ranks that share a stage
        self._inner: list[int] | None = manifest.get("inner")
        entries = manifest["files"].items()
        self.files = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries}
        self._checksums = {name: entry.get("checksums") for name, entry in entries}  # of tensors; older splits: none

        # the rank's stage
        rank_placements = placements(self.stages, len(self.shares))
        self.world = len(rank_placements)
        ranks = range(self.world)
        first_count, *other_counts = self.stages or [0]
        has_misplaced_layers = 0 in other_counts or other_counts and first_count
        is_consistent = self.rank in ranks and not has_misplaced_layers
        if is_consistent:
            stage, self.member = rank_placements[self.rank]
            self.layers = span(self.stages, stage)
            is_consistent = list(self.layers) == manifest["layers"]
        if not is_consistent:
            raise ValueError(f"{manifest_path} is damaged: its rank, stages, shares and layers contradict each other; "
                             f"{remedy}")

    def _check_tensors(self, remedy: str) -> None:
        """Raise ValueError for weights of other layers than in the manifest, or of unsupported types."""
        num_layers = read_sizes(self.weights).layers
        if sum(self.stages) != num_layers:
            raise ValueError(f"{self.folder / MANIFEST} says {sum(self.stages)} layers, config.json {num_layers}; "
                             f"{remedy}")

        names = set(self.weights.names())
        layers = {int(layer_prefix[1]) for layer_prefix in map(LAYER_PREFIX.match, names) if layer_prefix}
        if layers != set(range(*self.layers)):
            raise ValueError(f"{self.folder} holds other layers than its {MANIFEST} says; {remedy}")

        for name in names:
            owner, _, ending = name.rpartition(".")
            has_scale = self.quant != "none" and ending == "weight" and f"{owner}.scale" in names
            if has_scale and self.quant in IN_BLOCKS:
                stages = "+".join(map(str, self.stages))
                raise ValueError(f"{self.folder} holds {self.quant} weights in a form that is no longer read; split "
                                 f"again: python3 split_and_save_models.py MODEL_DIR {self.folder.parent} --stages "
                                 f"{stages} --quant {self.quant}")
            check_type(self.weights, name, QUANTIZED if has_scale else FLOATS)

    @property
    def has_blocks(self) -> bool:
        """Whether there are weights in the blocks of a GGUF file."""
        return any(map(self.is_in_blocks, self.weights.names()))

    def is_in_blocks(self, name: str) -> bool:
        """Whether this weight is stored in the blocks of a GGUF file."""
        return self.weights.is_in_blocks(name)

    @property
    def form(self) -> str:
        """The form of the split, as values of the keys `stages` and `tp`: "0+2+2", "0+4+4 tp=2" or "tp=2"."""
        tp_key = f"tp={len(self.shares)}"
        if len(self.stages) == 1:
            return tp_key
        stages = "+".join(map(str, self.stages))
        return stages if len(self.shares) == 1 else f"{stages} {tp_key}"

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

    def _compare(self, name: str, remedy: str) -> None:
        """Raise ValueError if a file has changed since it was written."""
        if hash_of(self.folder / name) != self.files[name][1]:
            raise ValueError(f"{self.folder / name} has changed since it was written (its hash differs); {remedy}")
