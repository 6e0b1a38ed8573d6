"""A GGUF file becomes a model folder in Hugging Face form, tensor by tensor, which everything else can read.

It knows how llama.cpp names, orders and quantizes weights, by the library `gguf`; config and tokenizer are read out of
the file's metadata by transformers. Nothing in the file is executed: its chat template is only copied.
"""
from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from config.files import one_at_a_time, replace
from config.schema.fields import CONFIG, check
from config.schema.untrusted import read_json, shown
from model.llama import LlamaConfig
from model.rotary import Rotary
from model.weights.checkpoint import Form, Writer, sample
from model.weights.parts import shapes

MARK = "gguf.json"  # of which file a folder was made; written last
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM"}  # model_type -> architecture
INTERLEAVED = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
FACTORS = "rope_freqs.weight"  # by which each rotary wave is stretched, in Llama 3.1 and later
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
FIELDS = (*CONFIG, "hidden_act", "bos_token_id")  # of a config.json
REMEDY = "download it again, or take the same model in safetensors"


def is_gguf(path: str | Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def unpack(path: Path, folder: Path, progress: bool = True) -> Path:
    """Write a GGUF file as a model folder with all weights in float32; a folder that is finished is kept.

    The peak of memory is about the largest tensor. ValueError for a file that is damaged, a model that is not
    supported, or a folder that holds another model.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the path of a GGUF file")
    mark, source = folder / MARK, {"file": sample(path), "dtype": "float32"}
    if (folder / "config.json").is_file() and not mark.is_file():
        raise ValueError(f"{folder} holds another model: give a folder that is empty or not there")
    if _is_made(mark, source):  # which those may use who may only read it
        return folder
    with _explained(path), one_at_a_time(folder):
        if _is_made(mark, source):
            return folder
        file = GgufFile(path)
        mark.unlink(missing_ok=True)
        file.write_weights(folder / "model.safetensors", progress)
        file.write_text(folder)
        replace(mark, json.dumps(source).encode())
    return folder


def _is_made(mark: Path, source: dict[str, str]) -> bool:
    """Whether a folder was made of this file, to the end."""
    return mark.is_file() and read_json(mark) == source


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the file and a remedy, whatever goes wrong with it: a damaged one may raise anything in the libraries."""
    try:
        yield
    except OSError:
        raise
    except ImportError as error:
        raise ValueError(f"{path} needs the package {error.name} to be read: type pip install gguf") from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read ({shown(reason)[1:-1]}): {REMEDY}") from error


class GgufFile:
    """A GGUF file: its model's config, and its tensors under their names at Hugging Face."""

    def __init__(self, path: Path) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = str(self._reader.fields["general.architecture"].contents())
        self.config = self._read_config()
        self._sizes = LlamaConfig.read(self.config)
        known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(known[self._architecture], self._sizes.layers)

    def _read_config(self) -> dict[str, Any]:
        """What the model's `config.json` would say; ValueError if that is not supported."""
        from transformers import AutoConfig

        found = AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name).to_dict()
        kind = found["model_type"]
        if kind not in ARCHITECTURES:
            raise ValueError(f"a model of the kind {kind} is not supported, only {', '.join(ARCHITECTURES)}")
        config: dict[str, Any] = {name: found[name] for name in FIELDS if found.get(name) is not None}
        config["architectures"] = [ARCHITECTURES[kind]]
        width = self._reader.get_field(f"{self._architecture}.attention.key_length")
        if width is not None:  # which transformers does not read for every family
            config["head_dim"] = width.contents()
        check(config, CONFIG, "its metadata")
        if FACTORS in self._tensors:
            config["rope_scaling"] = self._stretched(config)
        return config

    def _stretched(self, config: dict[str, Any]) -> dict[str, Any]:
        """The `rope_scaling` of Llama 3.1 and later, of which the file holds only what each wave is divided by."""
        factors = torch.from_numpy(self._tensors[FACTORS].data.copy())
        scaling = {**LLAMA3, "factor": float(factors.max())}
        sizes = (LlamaConfig.read({**config, "rope_scaling": how}) for how in (None, scaling))
        plain, scaled = (Rotary(each.turns).frequency() for each in sizes)
        if plain.shape != factors.shape or not torch.allclose(plain / factors, scaled, rtol=1e-3):
            raise ValueError("its rotary positions are scaled in a way that is not supported")
        return scaling

    def write_weights(self, path: Path, progress: bool) -> None:
        """Write all tensors to a safetensors file."""
        forms = {name: Form(torch.float32, shape) for name, shape in shapes(self._sizes)}
        found = {name: self._find(name) for name in forms}
        left = self._tensors.keys() - {tensor.name for tensor in found.values()} - {FACTORS}
        if left:
            raise ValueError(f"it holds {min(left)}, which no {self._architecture} model has")
        need, free = sum(form.bytes for form in forms.values()), shutil.disk_usage(path.parent).free
        if need > free:
            raise ValueError(f"it unpacks to {need / 1e9:.2f} GB, but the disk of {path.parent} has {free / 1e9:.2f}")
        bar = tqdm(total=need, unit="B", unit_scale=True, desc=f"unpacking {self.path.name}", disable=not progress)
        with bar, Writer(path, forms) as file:
            for name, form in forms.items():
                file.write(name, self._weights(name, found[name], form))
                bar.update(form.bytes)

    def _find(self, name: str) -> Any:
        """The tensor of the file that has this name at Hugging Face."""
        base, kind = name.rsplit(".", 1)
        theirs = f"{self._names.get_name(base)}.{kind}"
        if theirs not in self._tensors:
            raise ValueError(f"it lacks {theirs}")
        return self._tensors[theirs]

    def _weights(self, name: str, tensor: Any, form: Form) -> Tensor:
        """A tensor as float32, dequantized, its rows in the order of Hugging Face."""
        from gguf import dequantize

        weights = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tuple(weights.shape) != form.shape:
            raise ValueError(f"{tensor.name} has the shape {tuple(weights.shape)} instead of {form.shape}")
        heads = [self.config[key] for part, key in INTERLEAVED.items() if part in name]
        if self._architecture == "llama" and heads:
            pairs = weights.reshape(heads[0], -1, 2, *weights.shape[1:])  # there the two of a wave are neighbours
            weights = pairs.transpose(1, 2).reshape(weights.shape)
        return weights

    def write_text(self, folder: Path) -> None:
        """Write `config.json`, and the files of the tokenizer with its chat template."""
        from transformers import AutoTokenizer

        begins = self._reader.get_field("tokenizer.ggml.add_bos_token")  # which transformers does not read
        known = {} if begins is None else {"add_bos_token": bool(begins.contents())}
        tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, legacy=True, **known)
        tokenizer.save_pretrained(folder, legacy_format=False)
        replace(folder / "config.json", json.dumps(self.config, indent=1).encode())


def _open(path: Path) -> Any:
    """The library's reader, which refuses to look beyond the end of the file."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != int(count):
                raise ValueError("it is cut off")
            return found

    return Reader(path)
