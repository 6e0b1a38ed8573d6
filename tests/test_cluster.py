"""The memory that docs/cluster.md names for 7B and 13B, computed from splits of these shapes whose files are holes."""
import json
import math
import re

import pytest
import torch

from config.presets import ROOT
from config.run_config import RunConfig
from launch.memory import GB, need
from launch.spec import RankSpec
from launch.split import write
from model.weights.parts import Part
from tests.json_files import save_json

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
TABLE = {cells[0]: list(map(float, cells[1:])) for cells in
         re.findall(r"^\| (\w+ ?\d?) \|" + r" (\d+\.\d) \|" * 4 + "$", PAGE, re.M)}
SIZES = {"7B": (4096, 11008, 32), "13B": (5120, 13824, 40)}  # hidden, intermediate, layers
COLUMNS = [("7B", "none"), ("7B", "nf4"), ("13B", "none"), ("13B", "nf4")]
NAMES = {torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


def hole(path, forms):
    """A safetensors file of these tensors, all zero, which takes no room on a disk. Returns its line of a manifest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header, end = {}, 0
    for name, (dtype, shape, size) in forms.items():
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)
    return {"bytes": 8 + len(data) + end, "sha256": "0" * 64}


def checkpoint(folder, config, tensors):
    hole(folder / "model.safetensors", {name: (torch.float16, shape, 2 * math.prod(shape))
                                        for name, shape in tensors})
    save_json(folder / "config.json", config)
    return folder


def layer(prefix, hidden, intermediate):
    yield from ((f"{prefix}.self_attn.{name}_proj.weight", (hidden, hidden)) for name in "qkvo")
    yield from ((f"{prefix}.mlp.{name}_proj.weight", (intermediate, hidden)) for name in ("gate", "up"))
    yield f"{prefix}.mlp.down_proj.weight", (hidden, intermediate)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def model(folder, hidden, intermediate, layers):
    """A LLaMA of these sizes with 32,000 tokens, and an EAGLE-1 head of it; returns both folders."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": hidden,
              "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
              "num_key_value_heads": hidden // 128, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
    vocabulary = (32000, hidden)
    tensors = [("model.embed_tokens.weight", vocabulary), ("model.norm.weight", (hidden,)),
               ("lm_head.weight", vocabulary)]
    for number in range(layers):
        tensors += layer(f"model.layers.{number}", hidden, intermediate)
        tensors.append((f"model.layers.{number}.input_layernorm.weight", (hidden,)))
    head = [("embed_tokens.weight", vocabulary),
            ("fc.weight", (hidden, 2 * hidden)), ("fc.bias", (hidden,)),
            *layer("layers.0", hidden, intermediate)]
    return (checkpoint(folder / "model", config, tensors),
            checkpoint(folder / "head", {**config, "num_hidden_layers": 1}, head))


@pytest.mark.parametrize("column", range(len(COLUMNS)),
                         ids=list(map(" ".join, COLUMNS)))
def test_the_page_says_what_the_fullest_board_needs(column, tmp_path, monkeypatch):
    size, quant = COLUMNS[column]
    whole, head = model(tmp_path, *SIZES[size])
    monkeypatch.setattr(write, "copy", lambda tensors, path, tick: hole(path, {
        name: (form.dtype, form.shape, form.bytes)
        for name, form in tensors.forms.items()}))
    config = RunConfig(dtype="float16", device="cpu")
    found = {}
    for boards in range(1, 6):
        folders = write.split(whole, tmp_path / f"split_{boards}", str(boards), head, progress=False,
                              layout=write.Layout(quant))
        rank_0, *others = (need(RankSpec(config, Part(folder))).total for folder in folders)
        found[f"{boards}"] = round(max(others) / GB, 1)
        found.setdefault("rank 0", []).append(rank_0)
    found["rank 0"] = round(max(found["rank 0"]) / GB, 1)

    assert {boards: row[column] for boards, row in TABLE.items()} == found
