"""GGUF files: unpacked, they are the model that transformers reads out of them; damaged or strange ones are refused."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Iterator

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from config.schema.fields import read_config
from launch.split.gguf import unpack
from launch.split.write import split
from model.llama import LlamaConfig, Rotary

HIDDEN, FEED, LAYERS, HEADS, SHARED = 256, 512, 2, 2, 1
PLAIN = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
SCALES = {  # of K-quants, which the library cannot write: where in a block its float16 scales are
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
TOKENS = ["<|end|>", *bytes_to_unicode().values(), "he", "ll"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def quantized(kind: Kind, shape: tuple[int, ...], noise: np.random.Generator) -> np.ndarray:
    """Random weights in this form, as the bytes of a file."""
    if kind not in SCALES:
        return gguf.quantize(noise.normal(0, 0.1, shape).astype(np.float32), kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = noise.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for place in SCALES[kind]:
        blocks[..., place:place + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def shapes(architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """llama.cpp's names and the shapes of a small model's tensors."""
    width = HIDDEN // HEADS
    yield "token_embd.weight", (len(TOKENS), HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    yield "output.weight", (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name, out, into in (("attn_q", HIDDEN, HIDDEN), ("attn_k", SHARED * width, HIDDEN),
                                ("attn_v", SHARED * width, HIDDEN), ("attn_output", HIDDEN, HIDDEN),
                                ("ffn_gate", FEED, HIDDEN), ("ffn_up", FEED, HIDDEN), ("ffn_down", HIDDEN, FEED)):
            yield f"{block}.{name}.weight", (out, into)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                yield f"{block}.{name}.bias", (out,)
        for norm in ("attn_norm", "ffn_norm"):
            yield f"{block}.{norm}.weight", (HIDDEN,)
        for norm in ("attn_q_norm", "attn_k_norm") if architecture == "qwen3" else ():
            yield f"{block}.{norm}.weight", (width,)


def write(path: Path, architecture: str = "llama", kinds: tuple[Kind, ...] = (Kind.Q4_1,),
          change: Callable[[gguf.GGUFWriter], None] = lambda writer: None, without: str = "") -> Path:
    """A small model as a GGUF file, by the library's own writer; its matrices take the kinds by turns."""
    writer, noise = gguf.GGUFWriter(str(path), architecture), np.random.default_rng(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(SHARED)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["h e", "l l"])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    matrices = 0
    for name, shape in shapes(architecture):
        if len(shape) == 1:
            data, kind = noise.normal(1, 0.1, shape).astype(np.float32), Kind.F32
        else:
            kind = kinds[matrices % len(kinds)]
            data = quantized(kind, shape, noise)
            matrices += 1
        if name != without:
            writer.add_tensor(name, data, raw_dtype=kind)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture, kinds", [
    ("llama", PLAIN), ("llama", tuple(SCALES)), ("qwen2", (Kind.Q8_0,)), ("qwen3", (Kind.F16,))])
def test_it_unpacks_to_what_transformers_reads(architecture: str, kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", architecture, kinds)
    folder = unpack(path, tmp_path / "whole", progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.state_dict().keys()
    for name, weights in theirs.state_dict().items():
        assert torch.equal(ours[name], weights), name
    again = AutoModelForCausalLM.from_pretrained(folder)  # by the config that was written
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, theirs(ids).logits)


def test_the_tokenizer_and_its_template_are_read(tmp_path: Path) -> None:
    folder = unpack(write(tmp_path / "model.gguf"), tmp_path / "whole", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello")["input_ids"]) == ["he", "ll", "o"]
    assert tokenizer.chat_template == TEMPLATE
    assert read_config(folder)["eos_token_id"] == 0


def test_a_split_unpacks_it_and_the_second_time_keeps_it(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    folders = split(path, tmp_path / "out", "0+1+1", progress=False)
    made = (tmp_path / "out/whole/model.safetensors").stat().st_mtime_ns
    assert [folder.name for folder in folders] == ["stage_0", "stage_1", "stage_2"]
    assert split(path, tmp_path / "out", "0+1+1", progress=False) == folders
    assert (tmp_path / "out/whole/model.safetensors").stat().st_mtime_ns == made


def test_a_folder_of_another_model_is_not_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    with pytest.raises(ValueError, match="other holds another model: give a folder"):
        unpack(path, tmp_path / "other", progress=False)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file .*none.gguf: give the path of a GGUF file"):
        split(tmp_path / "none.gguf", tmp_path / "out", "1", progress=False)


def llama3(factor: float) -> np.ndarray:
    """What llama.cpp divides each wave by in a model of Llama 3's kind."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "vocab_size": len(TOKENS),
        "intermediate_size": FEED, "rms_norm_eps": 1e-6, "max_position_embeddings": 128}
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    plain = Rotary(LlamaConfig.read(sizes).turns).frequency()
    stretched = LlamaConfig.read({**sizes, "rope_scaling": scaling})
    return (plain / Rotary(stretched.turns).frequency()).numpy()


def test_the_stretched_waves_of_llama_3_are_known_by_their_factors(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", llama3(32)))
    config = read_config(unpack(path, tmp_path / "whole", progress=False))
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == pytest.approx(32)


def damaged(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:int(len(data) * keep)])


def endless(path: Path) -> None:
    """Let the list of tokens say that it goes on for ever."""
    data = path.read_bytes()
    count = len(TOKENS).to_bytes(8, "little")
    place = data.index(count, data.index(b"tokenizer.ggml.tokens"))
    path.write_bytes(data[:place] + (1 << 60).to_bytes(8, "little") + data[place + 8:])


@pytest.mark.parametrize("harm", [
    lambda path: damaged(path, 0), lambda path: damaged(path, 0.001), lambda path: damaged(path, 0.01),
    lambda path: damaged(path, 0.5), lambda path: path.write_bytes(b"GGUF"), endless,
    lambda path: path.write_bytes(b"\0" * 1000)])
def test_a_damaged_file_is_refused(harm: Callable[[Path], None], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    harm(path)
    with pytest.raises(ValueError, match=r"model\.gguf cannot be read .*: download it again"):
        unpack(path, tmp_path / "whole", progress=False)
    assert not (tmp_path / "whole/config.json").exists()


def add_strange_quant(writer: gguf.GGUFWriter) -> None:
    raw = np.zeros((HIDDEN, gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]), np.uint8)  # a block of 256 weights in a row
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=Kind.Q8_K)


@pytest.mark.parametrize("words, options", [
    ("bloom", {"architecture": "bloom"}),
    ("lacks blk.1.ffn_up.weight", {"without": "blk.1.ffn_up.weight"}),
    ("holds strange.weight", {"change": lambda writer: writer.add_tensor("strange.weight", np.ones(8, np.float32))}),
    ("Q8_K is not yet implemented", {"without": "blk.0.attn_q.weight", "change": add_strange_quant}),
    ("in a way that is not supported",
     {"change": lambda writer: writer.add_tensor("rope_freqs.weight", llama3(32)[::-1].copy())}),
    ("shape", {"without": "output_norm.weight",
               "change": lambda writer: writer.add_tensor("output_norm.weight", np.ones(8, np.float32))}),
])
def test_what_is_not_supported_is_named(words: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=f"cannot be read .*({words})"):
        unpack(path, tmp_path / "whole", progress=False)
    assert not (tmp_path / "whole/config.json").exists()
