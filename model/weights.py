"""A split model: which rank holds which tensors, and a rank's own part of them, read from its own folder.

It knows nothing about what the tensors compute, nor how they are put into files (`checkpoint.py`).
"""
from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from config.families import FAMILIES
from config.fields import NAME, Kind, check, list_of, number, one_of, whole
from config.foreign import read_json, stays_inside
from config.run_config import CHOICES
from model.checkpoint import NAMES, Checkpoint
from model.llama import LlamaConfig, Slice

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST, LAST = re.compile(r"model\.embed_"), re.compile(r"model\.norm\.")  # what goes with the first and last layer
LAYER = re.compile(r"model\.layers\.(\d+)\.")
BUFFER = re.compile(r"rotary_emb\.inv_freq$|decoder\.version$")  # computed anew by whoever needs it, or by nobody
OPT = [(re.compile(theirs), ours) for theirs, ours in (  # its names -> LLaMA's
    (r"^(model\.)?decoder\.final_layer_norm\.", "model.norm."), (r"^(model\.)?decoder\.", "model."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."), (r"\.final_layer_norm\.", ".post_attention_layernorm."),
    (r"\.out_proj\.", ".o_proj."), (r"\.fc1\.", ".mlp.up_proj."), (r"\.fc2\.", ".mlp.down_proj."))]
AUTO = re.compile(r"auto(?::([1-9]\d*))?")  # a split by bytes, into so many stages
MANIFEST, FORMAT, VERSION = "manifest.json", "flowspec-split", 1
BLOCK = 1 << 24  # bytes hashed at once
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # what weights are stored in
QUANTIZED = (torch.int8, torch.uint8)  # weights that have a scale beside them
ENTRY = {"bytes": whole(0, 1 << 48), "sha256": NAME}  # of a file, in a manifest
LAYERS = list_of(whole(0, 1 << 16), most=1024)
FIELDS = {  # of a manifest
    "rank": whole(0, 1 << 16), "stages": LAYERS, "layers": LAYERS, "split_id": NAME,
    "quant": one_of(*(kind for kind in CHOICES["quant"] if kind != "auto")),
    "shares": list_of(number(1e-9, 1e9), most=1024),
    "files": Kind("names of files in its folder, with bytes and sha256 of each", lambda value: _are_files(value)),
}
NEEDED = ("rank", "stages", "layers", "split_id", "files")


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


def plan_stages(text: str, source: Checkpoint) -> list[int]:
    """Layers per rank, as `parse_stages`; or for "auto:4" so that the largest of 4 stages has the fewest bytes."""
    check_model(source)  # a config that promises layers without end would be split without end
    layers, auto = read_sizes(source).layers, AUTO.fullmatch(text.strip())
    if not auto:
        return parse_stages(text, layers)
    stages = int(auto[1] or min(4, layers))
    if stages > layers:
        raise ValueError(f"stages={text} does not fit: the model has {layers} layers, so choose at most auto:{layers}")
    loads = [0] * layers
    for name in source.names():
        ours = translate(name)
        layer = LAYER.match(ours)
        if layer or FIRST.match(ours) or LAST.match(ours):
            loads[int(layer[1]) if layer else 0 if FIRST.match(ours) else -1] += source.form(name).bytes
    return [0, *balance(loads, stages)]


def is_split_as(text: str, stages: list[int]) -> bool:
    """Whether a split that exists is the one that is asked for; of "auto:4" only the number of stages can be told."""
    auto = AUTO.fullmatch(text)
    if auto:
        return int(auto[1] or len(stages) - 1) == len(stages) - 1
    return parse_stages(text, sum(stages)) == stages


def balance(loads: Sequence[int], shares: int) -> list[int]:
    """How many neighbours make each share, so that the largest share is smallest, and then all are most alike."""
    def longer(share: tuple[int, int, list[int]], begin: int, end: int) -> tuple[int, int, list[int]]:
        load = sum(loads[begin:end])
        return max(share[0], load), share[1] + load ** 2, [*share[2], end - begin]

    impossible: tuple[int, int, list[int]] = (sum(loads) + 1, 0, [])
    none: tuple[int, int, list[int]] = (0, 0, [])
    best = [none] + [impossible] * len(loads)  # of the first i loads: the largest share, squares, the counts
    for _ in range(shares):
        best = [min((longer(best[begin], begin, end) for begin in range(end)), default=impossible)
                for end in range(len(loads) + 1)]
    return best[-1][2]


def translate(name: str) -> str:
    """The name of a tensor here, where all families have LLaMA's names."""
    for theirs, ours in OPT:
        name = theirs.sub(ours, name)
    return name


def assign(names: Iterable[str], stages: list[int], tied: bool, borrows: bool = False) -> list[dict[str, str]]:
    """What each stage holds: the name in its part -> the name in the checkpoint. Layers keep their numbers.

    `borrows` says that the draft head of rank 0 uses the model's embedding; a tied LM head is that.
    """
    owner = [rank for rank, count in enumerate(stages) for _ in range(count)]
    parts: list[dict[str, str]] = [{} for _ in stages]
    first = min(1, len(stages) - 1)
    for theirs in names:
        name = translate(theirs)
        layer = LAYER.match(name)
        if BUFFER.search(theirs) or (name == HEAD and tied):
            continue
        if layer and int(layer[1]) < len(owner):
            parts[owner[int(layer[1])]][name] = theirs
        elif name == HEAD or FIRST.match(name) or LAST.match(name):
            parts[0 if name == HEAD else first if FIRST.match(name) else -1][name] = theirs
        else:
            raise ValueError(f"the checkpoint holds {theirs}, which no rank would take; "
                             f"its config.json belongs to another model, or this kind of model is not supported")
    if tied and EMBED in parts[first]:
        parts[0][HEAD] = parts[first][EMBED]
    elif borrows:
        parts[0][EMBED] = parts[first][EMBED]
    return parts


def read_sizes(source: Checkpoint) -> LlamaConfig:
    """What the config of a folder says; where it stands is told with what is wrong with it."""
    try:
        return LlamaConfig.read(source.config)
    except ValueError as error:
        raise ValueError(f"{source.folder}: {error}") from None


def check_model(source: Checkpoint) -> None:
    """Refuse what would be split or run wrongly: the tensors must be those of the model that the config describes."""
    config = source.config
    kinds = config.get("architectures") or [str(config.get("model_type"))]
    known = [family.architecture for family in FAMILIES.values()]
    if not set(known).intersection(kinds):
        raise ValueError(f"{source.folder} holds a {kinds[0]}, which is not supported; choose a model of the kind "
                         f"{', '.join(known[:-1])} or {known[-1]}")
    c = read_sizes(source)
    if c.family.architecture not in kinds:
        raise ValueError(f"{source.folder / 'config.json'} says architectures={kinds} and "
                         f"model_type={config.get('model_type')!r}; copy it again from the model")
    names = {translate(name): name for name in source.names() if not BUFFER.search(name)}
    if c.tied:
        names.pop(HEAD, None)
    for name, shape in shapes(c):
        if name not in names:
            raise ValueError(f"{source.folder} lacks {name}; download it again, with the config.json of the same model")
        check_shape(source, names[name], shape)
        check_type(source, names.pop(name))
    if names:
        raise ValueError(f"{source.folder} holds {next(iter(names.values()))}, which its config.json has no place for; "
                         f"take weights and config.json of one model")


def shapes(c: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a model's tensors, one after the other, since a config may promise any number of layers.
    """
    layer: dict[str, tuple[int, ...]] = {}
    for name, p in Slice(replace(c, layers=1), 0, 1).named_parameters():
        if name.startswith("layers.0."):
            layer[name[len("layers.0."):]] = tuple(p.shape)
        else:
            yield f"model.{name}", tuple(p.shape)
    if not c.tied:
        yield HEAD, (c.vocab, c.hidden)
    for i in range(c.layers):
        yield from ((f"model.layers.{i}.{name}", shape) for name, shape in layer.items())


def check_shape(source: Checkpoint, name: str, wanted: tuple[int, ...]) -> None:
    if source.form(name).shape != wanted:
        raise ValueError(f"{name} in {source.folder} has shape {source.form(name).shape} instead of {wanted}; "
                         f"take weights and config.json of one model")


def check_type(source: Checkpoint, name: str, types: Sequence[torch.dtype] = FLOATS) -> None:
    """Refuse a type that these numbers never have: a file may say any, and the same bytes are other numbers then."""
    found = source.form(name).dtype
    if found not in types:
        raise ValueError(f"{name} in {source.folder} has the type {NAMES[found]} instead of "
                         f"{' or '.join(NAMES[dtype] for dtype in types)}; download it again")


def span(stages: list[int], stage: int) -> tuple[int, int]:
    """The layers [a, b) of a stage; the first of several has none."""
    return sum(stages[:stage]), sum(stages[:stage + 1])


def placements(stages: Sequence[int], tp: int) -> list[tuple[int, int]]:
    """The stage and the place in it of every rank, if `tp` ranks share each stage; rank 0 is one of a single stage."""
    return [(stage, member) for stage in range(len(stages)) for member in range(tp if stage or len(stages) == 1 else 1)]


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(map(stays_inside, value)) and all(map(_is_entry, value.values()))


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and all(kind.fits(value.get(key)) for key, kind in ENTRY.items())


class Part:
    """A rank's folder of a split, `OUT_DIR/stage_{rank}`: looked over when it is opened, read when asked."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        command = f"python split_and_save_models.py MODEL_DIR {self.folder.parent} --stages 0+2+2+2+2"
        again = f"split again: {command}"
        if not self.folder.is_dir():
            raise ValueError(f"there is no folder {self.folder}; split the model first: {command}")
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

    def _accept(self, manifest: dict[str, Any], again: str) -> None:
        """Take over what the manifest says, if it makes sense."""
        path = self.folder / MANIFEST
        if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{path} is damaged or not of this version of FlowSpec; {again}")
        check(manifest, FIELDS, path, again, needed=NEEDED)
        self.rank: int = manifest["rank"]
        self.stages: list[int] = manifest["stages"]
        self.split_id: str = manifest["split_id"]
        self.quant: str = manifest.get("quant") or "none"  # the form of the layers' weights
        self.shares: list[float] = manifest.get("shares") or [1]  # speeds of the ranks that have a stage together
        self.files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        places = placements(self.stages, len(self.shares))
        self.world = len(places)
        stage, self.member = (*places, (-1, 0))[min(self.rank, self.world)]
        self.layers = span(self.stages, stage)
        odd = 0 in self.stages[1:] or (len(self.stages) > 1 and self.stages[0] != 0)
        if odd or stage < 0 or list(self.layers) != manifest["layers"]:
            raise ValueError(f"{path} is damaged: its rank, stages, shares and layers contradict each other; {again}")

    def _check_tensors(self, again: str) -> None:
        """Refuse weights of other layers than the manifest says, or of types that they cannot have."""
        names, layers = set(self.weights.names()), read_sizes(self.weights).layers
        if sum(self.stages) != layers:
            raise ValueError(f"{self.folder / MANIFEST} speaks of {sum(self.stages)} layers, and config.json beside it "
                             f"of {layers}; {again}")
        first, end = self.layers
        held = {int(layer[1]) for layer in map(LAYER.match, names) if layer}
        if len(held) != end - first or not all(first <= i < end for i in held):
            raise ValueError(f"{self.folder} holds other layers than its {MANIFEST} says; {again}")
        for name in names:
            owner, _, own = name.rpartition(".")
            scaled = self.quant != "none" and own == "weight" and f"{owner}.scale" in names
            check_type(self.weights, name, QUANTIZED if scaled else FLOATS)

    @property
    def form(self) -> str:
        """How the model is split, in the words of the keys."""
        words = ["+".join(map(str, self.stages))] if len(self.stages) > 1 else []
        return " ".join(words + [f"tp={len(self.shares)}"] * (not words or len(self.shares) > 1))

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
