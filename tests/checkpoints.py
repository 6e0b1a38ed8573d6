"""Small checkpoints in folders, and how an error is expected: what the tests of weights and splits share."""
from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.split.write import split
from model.drafts.heads import EagleHead
from model.llama import LlamaConfig
from tests.json_files import save_json

split_quietly = partial(split, progress=False)


@contextmanager
def refused(*fragments: str) -> Iterator[Any]:
    """The error is one sentence with these fragments in their order, and does nothing to a terminal."""
    with pytest.raises(ValueError, match=".*".join(map(re.escape, fragments))) as error:
        yield error
    assert str(error.value).isprintable()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype
                                        and torch.equal(a[name], b[name]) for name in a)


def save_llama(folder: Path, tied: bool = False, layers: int = 3, vocab: int = 40,
               bins: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """A random LLaMA of hidden size 16, written by `transformers`, or in torch's own files; its tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied)).bfloat16()
    llama.save_pretrained(folder, **options)
    if bins:
        _as_bins(folder)
    return dict(llama.state_dict())


def _as_bins(folder: Path) -> None:
    """Write a folder's safetensors files again as torch's, which transformers 5 does not write."""
    for file in folder.glob("model*.safetensors"):
        torch.save(load_file(file), folder / _as_bin(file.name))
        file.unlink()
    for index in folder.glob("*.index.json"):
        (folder / _as_bin(index.name)).write_text(_as_bin(index.read_text()))
        index.unlink()


def _as_bin(text: str) -> str:
    return re.sub(r"model([-.\w]*)\.safetensors", r"pytorch_model\1.bin", text)


@contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a model, to be changed in place; they are written again behind the block."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors")


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file of weights in the format of its name."""
    save = save_file if path.suffix == ".safetensors" else torch.save
    save(tensors, path)


def save_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor],
                    name: str = "pytorch_model.bin") -> Path:
    """A new folder with a config and one file of weights."""
    folder.mkdir(parents=True)
    save_json(folder / "config.json", config)
    save_tensors(tensors, folder / name)
    return folder


def save_head(folder: Path, hidden: int = 16, vocab: int = 40, **config: int) -> dict[str, torch.Tensor]:
    """A draft head's file with tensors of several types; its tensors."""
    form = {"hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 24, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    types = cycle([torch.float32, torch.float16, torch.float64, torch.bfloat16])
    tensors = {name: torch.rand(p.shape).to(dtype) for (name, p), dtype in zip(
        EagleHead(LlamaConfig.read(form), bias=True).named_parameters(), types)}
    save_checkpoint(folder, {**form, **config}, tensors)
    return tensors


def tensors_of(source: Any) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by name."""
    return {name: source.read(name) for name in source.names()}
