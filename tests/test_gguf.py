"""GGUF files: unpacked, they are the model that transformers reads out of them; damaged or strange ones are refused."""
from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Callable, Iterator

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

from config.schema.families import published
from config.schema.fields import read_config
from launch.split.gguf import GgufFile, is_current, unpack
from launch.split.write import Layout, identify
from model.byte_tokens import ByteTokenizer
from model.llama import LlamaConfig, Rotary
from model.text import Text
from model.weights.checkpoint import GGUF_LIST, Checkpoint
from model.weights.unfold import Unfolded
from tests.checkpoints import refused, split_quietly
from tests.json_files import change_json, save_json
from tests.test_families import random_model

HIDDEN, FEED, LAYERS, HEADS, SHARED = 256, 512, 2, 2, 1
PLAIN = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0,
         Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
SCALES = {  # of K-quants, which the library cannot write: where in a block its float16 scales are
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
TOKENS = ["<|end|>", *bytes_to_unicode().values(), "he", "ll"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def quantized(kind: Kind, shape: tuple[int, ...], noise: np.random.Generator) -> np.ndarray:
    """Random weights in this form, as the bytes of a file."""
    if kind not in SCALES:
        return gguf.quantize(noise.normal(0, 0.1, shape).astype(np.float32), kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = noise.integers(0, 256,
                            (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for place in SCALES[kind]:
        blocks[..., place:place + 2] = np.frombuffer(np.float16(0.01).tobytes(),
                                                     np.uint8)
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


def write_out(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["h e", "l l"])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    matrix_kinds = cycle(kinds)
    for name, shape in shapes(architecture):
        if len(shape) == 1:
            data, kind = noise.normal(1, 0.1, shape).astype(np.float32), Kind.F32
        else:
            kind = next(matrix_kinds)
            data = quantized(kind, shape, noise)
        if name != without:
            writer.add_tensor(name, data, raw_dtype=kind)
    change(writer)
    write_out(writer)
    return path


def unpacked(path: Path, name: str = "whole") -> Path:
    """The folder of this name beside a GGUF file, with what it holds."""
    return unpack(path, path.parent / name, progress=False)


def as_transformers_reads(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.parametrize("architecture, kinds", [
    ("llama", PLAIN), ("llama", tuple(SCALES)),
    ("qwen2", (Kind.Q8_0,)), ("qwen3", (Kind.F16,))])
def test_it_unpacks_to_what_transformers_reads(architecture, kinds, tmp_path):
    path = write(tmp_path / "model.gguf", architecture, kinds)
    folder = unpacked(path)
    theirs = as_transformers_reads(path)
    described, their_weights = Unfolded(folder), theirs.state_dict()
    assert set(described.names()) == their_weights.keys()
    for name in described.names():
        assert torch.equal(described.read(name).float(), their_weights[name]), name
    written_config = transformers.AutoConfig.from_pretrained(folder)
    again = transformers.AutoModelForCausalLM.from_config(written_config, dtype=torch.float32)
    again.load_state_dict(their_weights)
    ids = torch.arange(20)[None]

    assert torch.equal(again(ids).logits, theirs(ids).logits)


def test_a_file_of_the_hubs_cache_is_read_whose_name_is_that_of_a_link(tmp_path):
    whole_file = write(tmp_path / "model.gguf")
    blob = tmp_path / "blobs" / "0123456789abcdef"
    blob.parent.mkdir()
    whole_file.rename(blob)
    whole_file.symlink_to(blob)

    name = "model.norm.weight"
    norm_weights = [tensor.data.tolist() for tensor in gguf.GGUFReader(str(blob)).tensors
                    if tensor.name == "output_norm.weight"]
    assert [Unfolded(unpacked(whole_file)).read(name).tolist()] == norm_weights


def test_the_tokenizer_and_its_template_are_read(tmp_path):
    folder = unpacked(write(tmp_path / "model.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello")["input_ids"]) == ["he", "ll", "o"]
    assert tokenizer.chat_template == TEMPLATE
    assert len(tokenizer) == len(TOKENS)
    assert read_config(folder)["eos_token_id"] == 0


@pytest.mark.parametrize("is_special", [False, True])
def test_tokens_with_one_text_are_all_decoded_and_the_last_is_written(tmp_path, is_special):
    same_ids = [200, 210, TOKENS.index("he")]
    tokens = ["he" if token_id in same_ids else token for token_id, token in enumerate(TOKENS)]
    types = [3 if token_id == 0 or is_special and token_id in same_ids[:2] else 1 for token_id in range(len(TOKENS))]

    def change(writer):
        for name in ("tokens", "token_type"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}"]
        writer.add_token_list(tokens)
        writer.add_token_types(types)

    folder = unpacked(write(tmp_path / "model.gguf", change=change))
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(folder), Text(folder)
    assert len(tokenizer) == len(TOKENS) and tokenizer("he")["input_ids"] == same_ids[-1:]
    assert [tokenizer.decode([token_id]) for token_id in same_ids] == ["he"] * 3
    assert tokenizer.decode([*same_ids, *tokenizer("llo")["input_ids"]]) == "hehehello"
    vocabulary = ByteTokenizer(text.tokenizer, len(TOKENS), [0])
    assert [vocabulary.tokens[token_id] for token_id in same_ids] == [b"he"] * 3


def test_a_big_endian_file_is_named_as_such(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(LAYERS)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    write_out(writer)
    with refused("model.gguf cannot be read (it is big-endian: take the little-endian file of this model, which"):
        unpacked(tmp_path / "model.gguf")


def test_the_sampling_that_a_file_recommends_is_read(tmp_path):
    def recommend(writer):
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_top_p(0.95)
        writer.add_sampling_min_p(0.05)

    folder = unpacked(write(tmp_path / "model.gguf", change=recommend))
    generation = transformers.GenerationConfig.from_pretrained(folder)
    values = generation.temperature, generation.top_k, generation.top_p, generation.min_p
    assert values == pytest.approx((0.6, 20, 0.95, 0.05))


def test_a_split_unpacks_it_and_the_second_time_keeps_it(tmp_path):
    path = write(tmp_path / "model.gguf")
    folders = split_quietly(path, tmp_path / "out", "0+1+1")
    made = (tmp_path / "out/whole/model.safetensors").stat().st_mtime_ns
    assert [folder.name for folder in folders] == ["stage_0", "stage_1", "stage_2"]
    assert split_quietly(path, tmp_path / "out", "0+1+1") == folders
    assert (tmp_path / "out/whole/model.safetensors").stat().st_mtime_ns == made


def test_a_folder_of_another_model_is_not_written_over(tmp_path):
    path = write(tmp_path / "model.gguf")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    with refused("other holds another model: give an empty or new folder"):
        unpacked(path, "other")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with refused("there is no file ", "none.gguf: give the path of a GGUF file"):
        split_quietly(tmp_path / "none.gguf", tmp_path / "out", "1")


def test_a_file_without_an_architecture_holds_no_model(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "none.gguf"), "llama")
    writer.kv_data[0].pop("general.architecture")
    writer.add_uint32("general.file_type", 0)
    write_out(writer)
    with refused("does not name its architecture ", ", so it holds no model"):
        unpacked(tmp_path / "none.gguf")


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


def test_the_stretched_waves_of_llama_3_are_known_by_their_factors(tmp_path):
    path = write(tmp_path / "model.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", llama3(32)))
    config = read_config(unpacked(path))
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == pytest.approx(32)


def test_a_llama_with_windows_is_a_mistral(tmp_path):
    path = write(tmp_path / "model.gguf", change=lambda writer: writer.add_sliding_window(16))
    config = read_config(unpacked(path))
    assert config["model_type"] == "mistral" and LlamaConfig.read(config).windows == (16,) * LAYERS


def test_a_window_of_0_is_none(tmp_path):
    path = write(tmp_path / "model.gguf", change=lambda writer: writer.add_sliding_window(0))
    config = read_config(unpacked(path))
    assert config["model_type"] == "llama" and config["sliding_window"] is None


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
    lambda path: damaged(path, 0),
    lambda path: damaged(path, 0.001), lambda path: damaged(path, 0.01),
    lambda path: damaged(path, 0.5), lambda path: path.write_bytes(b"GGUF"), endless,
    lambda path: path.write_bytes(b"\0" * 1000)])
def test_a_damaged_file_is_refused(harm, tmp_path):
    path = write(tmp_path / "model.gguf")
    harm(path)
    with refused("model.gguf cannot be read ", ": download it again"):
        unpacked(path)
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
     {"change": lambda writer: writer.add_tensor("rope_freqs.weight",
                                                 llama3(32)[::-1].copy())}),
    ("shape", {"without": "output_norm.weight",
               "change": lambda writer: writer.add_tensor("output_norm.weight", np.ones(8, np.float32))}),
])
def test_what_is_not_supported_is_named(words, options, tmp_path):
    path = write(tmp_path / "model.gguf", **options)
    with refused("cannot be read ", words):
        unpacked(path)
    assert not (tmp_path / "whole/config.json").exists()


# --- families ---------------------------------------------------------------------------------------------------------


SIZES = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3,
         "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BY_EXPERT = {"num_experts_per_tok": 2, "sliding_window": None}
GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "truncate": False}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
            "long_factor": [2.0] * 6}
FACTS = {"context_length": 160, "embedding_length": 64, "feed_forward_length": 96, "block_count": 4,
         "attention.head_count": 4, "attention.head_count_kv": 2}
FAMILY = {  # llama.cpp's name: transformers' name, config, more facts, and whether transformers reads the file
    "llama": ("Mixtral", {**SIZES, **BY_EXPERT, "num_local_experts": 3},
              {"expert_count": 3, "expert_used_count": 2, "rope.dimension_count": 16}, False),
    "qwen3moe": ("Qwen3Moe", {**SIZES, **BY_EXPERT, "num_experts": 3, "moe_intermediate_size": 32, "head_dim": 32,
                              "norm_topk_prob": True},
                 {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32,
                  "attention.key_length": 32}, False),
    "phi3": ("Phi3", {**SIZES, "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE, "sliding_window": 30,
                      "original_max_position_embeddings": 80},
             {"rope.dimension_count": 12, "rope.scaling.original_context_length": 80,
              "attention.sliding_window": 30}, False),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
               {"attention.key_length": 32, "attention.sliding_window": 16, "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 3.0}, True),
    "gemma3": ("Gemma3", {**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
               {"attention.key_length": 32, "attention.sliding_window": 16, "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0}, True),
    "olmo2": ("Olmo2", SIZES, {}, False),
    "olmo2 with windows": ("Olmo3", {**SIZES, "sliding_window": 16}, {"attention.sliding_window": 16}, False),
    "granite": ("Granite", {**SIZES, "embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
                            "attention_multiplier": 0.25},
                {"embedding_scale": 3.0, "logit_scale": 4.0, "residual_scale": 0.5, "attention.scale": 0.25}, False),
    "glm4": ("Glm4", {**SIZES, "head_dim": 32, "attention_bias": True},
             {"attention.key_length": 32, "rope.dimension_count": 16}, False),
    "seed_oss": ("SeedOss", {**SIZES, "head_dim": 32}, {"attention.key_length": 32}, False),
    "ernie4_5": ("Ernie4_5", {**SIZES, "head_dim": 32}, {"attention.key_length": 32}, False),
    "lfm2": ("Lfm2", {**SIZES, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 4,
                      "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
             {"attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 4}, False),
    "smollm3": ("SmolLM3", {**SIZES, "tie_word_embeddings": True}, {"rope.dimension_count": 16}, False),
    "gpt-oss": ("GptOss", {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 32,
                           "sliding_window": 16, "rope_scaling": YARN},
                {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 96,
                 "attention.key_length": 32, "attention.sliding_window": 16, "rope.scaling.type": "yarn",
                 "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 40}, False),
}
FUSED = {"phi3": (("[qkv]_proj", "qkv_proj"), ("(gate|up)_proj", "gate_up_proj")),
         "glm4": (("(gate|up)_proj", "gate_up_proj"),)}


def saved(architecture: str, folder: Path) -> None:
    """A random model as transformers saves it."""
    kind, fields, _, _ = FAMILY[architecture]
    random_model(kind, fields).save_pretrained(folder)


def exported(base: Path, path: Path, architecture: str, kind: Kind) -> None:
    """A model's folder as a GGUF file, with tensors as llama.cpp's converter names and changes them."""
    source = Unfolded(base)
    sizes = LlamaConfig.read(source.config)
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture.split()[0]]
    names, tensors = gguf.get_tensor_name_map(number, sizes.layers), {}
    for name in source.names():
        weights = source.read(name).float()
        if architecture in ("llama", "granite", "smollm3", "glm4", "ernie4_5") and re.search(r"\.[qk]_proj\.", name):
            heads = weights.unflatten(0, (-1, sizes.head_dim)).clone()
            waves = heads[:, :int(sizes.head_dim * sizes.rotated_share)]
            waves[:] = waves.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            weights = heads.flatten(0, 1)
        if sizes.family.norm_weight_plus_one and published(name, sizes.family).endswith("norm.weight"):
            weights = weights + 1
        theirs = re.sub(r"\.experts\.\d+\.", ".experts.", published(name, sizes.family))
        for part, together in FUSED.get(architecture, ()):
            theirs = re.sub(rf"\b{part}\b", together, theirs)
        if weights.dim() == 3:  # a convolution
            weights = weights[:, 0]
        own = theirs if theirs.endswith("sinks") else theirs.rpartition(".")[0]
        ending = theirs[len(own):] or ".weight"
        tensors.setdefault(names.get_name(own) + ending, []).append(weights)
    writer = begun(path, architecture, TOKENS)
    writer.add_rope_freq_base(5000.0)
    writer.add_pad_token_id(0)
    put(writer, architecture, tensors, kind)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata as what it is in Python."""
    add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool,
           list: writer.add_array}[type(value)]
    add(key, value)


def begun(path: Path, architecture: str, tokens: list[str]) -> gguf.GGUFWriter:
    """A file with these tokens, of which the first begins and ends a text, and without weights so far."""
    writer = gguf.GGUFWriter(str(path), architecture.split()[0])
    for key, value in {**FACTS, **FAMILY[architecture][2]}.items():
        add_key(writer, f"{writer.arch}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    return writer


def add_rope_factors(writer: gguf.GGUFWriter, long_factors: list[float], short_factors: list[float]) -> None:
    writer.add_tensor("rope_factors_long.weight", np.array(long_factors, np.float32))
    writer.add_tensor("rope_factors_short.weight", np.array(short_factors, np.float32))


def put(writer: gguf.GGUFWriter, architecture: str, tensors: dict[str, Any], kind: Kind) -> None:
    """Write tensors to the end; experts, and products that are one here, are given in parts."""
    for name, held in tensors.items():
        whole = torch.stack(held) if "_exps" in name else torch.cat(held)
        matrix = whole.dim() > 1 and "_inp" not in name and "shortconv.conv" not in name
        data = gguf.quantize(whole.numpy(), kind) if matrix else whole.numpy()
        writer.add_tensor(name, data, raw_dtype=kind if matrix else Kind.F32)
    if architecture == "phi3":
        add_rope_factors(writer, LONGROPE["long_factor"], LONGROPE["short_factor"])
    write_out(writer)


@pytest.mark.parametrize("architecture", FAMILY)
def test_a_model_of_every_family_is_the_one_that_was_written(architecture, tmp_path):
    base, whole, plain = tmp_path / "base", tmp_path / "whole", tmp_path / "plain"
    saved(architecture, base)
    exported(base, tmp_path / "model.gguf", architecture, Kind.Q8_0)
    file, old = GgufFile(tmp_path / "model.gguf"), Unfolded(base)
    whole.mkdir()
    save_json(whole / GGUF_LIST, {"tensors": file.write_weights(whole / "model.safetensors", progress=False)})
    save_json(whole / "config.json", file.config)
    new = Unfolded(whole)
    sizes = LlamaConfig.read(old.config)

    assert str(LlamaConfig.read(new.config)) == str(replace(sizes, eps=float(np.float32(1e-5))))
    assert set(new.names()) == set(old.names())
    largest = [float(old.read(name).abs().max()) for name in old.names()]
    loss = 0.02 * max(largest)
    for name in old.names():
        exact = new.read(name).dim() == 1 or "router" in name
        expected = old.read(name).float()
        assert torch.allclose(new.read(name).float(), expected, atol=1e-6 if exact else loss), name
    if architecture != "gpt-oss":  # whose experts are written one by one
        published = Checkpoint(whole)
        plain.mkdir()
        save_json(plain / "config.json", file.config)
        save_file({name: published.read(name).float() for name in published.names()}, plain / "model.safetensors",
                  {"format": "pt"})
        again, report = transformers.AutoModelForCausalLM.from_pretrained(plain, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if FAMILY[architecture][3]:
        for name, weights in as_transformers_reads(tmp_path / "model.gguf").state_dict().items():
            assert torch.equal(again.state_dict()[name], weights), name


def worded(path: Path, architecture: str, tokens: list[str], types: list[int],
           words: Callable[[gguf.GGUFWriter], None]) -> GgufFile:
    """A file with these tokens, of which the first begins and ends a text, and hardly any weights."""
    writer = begun(path, architecture, tokens)
    writer.add_token_types(types)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    words(writer)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 64), np.float32))
    write_out(writer)
    return GgufFile(path)


@pytest.mark.parametrize("prefix, pieces", [(False, ["h", "el", "l", "o"]),
                                                (True, ["\u2581h", "el", "l", "o"])])
def test_pieces_of_gemma_are_merged_by_their_scores(tmp_path, prefix, pieces):
    scores = {"<s>": 0, "<unk>": 0, "\u2581": -9, "h": -9, "e": -9,
              "l": -9, "o": -9, "he": -3, "el": -1, "ll": -2,
              "\u2581h": -4, "<0xC3>": 0, "<0xA9>": 0}

    def words(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([float(score) for score in scores.values()])
        writer.add_unk_token_id(1)
        writer.add_add_space_prefix(prefix)

    saved("gemma3", tmp_path / "base")
    types = [3, 2, *[1] * 9, 6, 6]
    worded(tmp_path / "model.gguf", "gemma3", [*scores], types, words).write_text(tmp_path / "base")
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    ids = made("hello h\u00e9")["input_ids"]
    assert made.convert_ids_to_tokens(ids) == ["<s>", *pieces, "\u2581h", "<0xC3>", "<0xA9>"]
    assert made.decode(ids, skip_special_tokens=True) == "hello h\u00e9" and made.chat_template == TEMPLATE


def test_a_tokenizer_that_transformers_does_not_read_is_made_here(tmp_path):
    saved("granite", tmp_path / "base")

    def words(writer: gguf.GGUFWriter, pre: str) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(["h e", "l l", "1 1", "11 1"])

    def cut(pre: str) -> GgufFile:
        types = [3] + [1] * (len(TOKENS) + 1)
        return worded(tmp_path / f"{pre}.gguf", "granite", [*TOKENS, "11", "111"], types, partial(words, pre=pre))

    for pre, pieces in {"refact": ["1"] * 4, "llama-bpe": ["111", "1"]}.items():
        cut(pre).write_text(tmp_path / "base")
        made = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
        assert made.convert_ids_to_tokens(made("hello1111<|end|>")["input_ids"]) == [
            "<|end|>", "he", "ll", "o", *pieces, "<|end|>"]
        assert made.decode(made("hello 1")["input_ids"][1:]) == "hello 1" and made.chat_template == TEMPLATE
    with refused("its tokenizer splits texts in the way 'mine', which is not supported"):
        cut("mine").write_text(tmp_path / "base")


# --- metadata ---------------------------------------------------------------------------------------------------------

def config_with(path: Path, *keys: tuple[str, Any], architecture: str = "llama") -> dict[str, Any]:
    """The config of a small model with further keys in its metadata."""
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in keys:
            add_key(writer, key, value)

    return GgufFile(write(path / "model.gguf", architecture, change=change)).config


YARN_KEYS = (("llama.rope.scaling.type", "yarn"), ("llama.rope.scaling.factor", 4.0))


@pytest.mark.parametrize("keys, scaling", [
    ([("llama.rope.scale_linear", 4.0)], {"rope_type": "linear", "factor": 4.0}),
    ([("llama.rope.scaling.factor", 4.0)], {"rope_type": "linear", "factor": 4.0}),
    ([("llama.rope.scaling.type", "none"), ("llama.rope.scaling.factor", 4.0)], None),
    ([("llama.rope.scaling.type", "linear")], None),
    ([*YARN_KEYS, ("llama.rope.scaling.yarn_beta_fast", 16.0), ("llama.rope.scaling.yarn_beta_slow", 2.0),
      ("llama.rope.scaling.original_context_length", 40), ("llama.rope.scaling.finetuned", True)],
     {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0,
      "original_max_position_embeddings": 40}),
    ([*YARN_KEYS, ("llama.rope.scaling.attn_factor", 0.5)],
     {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4))}),
    ([*YARN_KEYS, ("llama.rope.scaling.yarn_log_multiplier", 0.0), ("llama.rope.scaling.yarn_ext_factor", 1.0)],
     {"rope_type": "yarn", "factor": 4.0})])
def test_scaled_positions_are_read_in_every_form(keys, scaling, tmp_path):
    config = config_with(tmp_path, *keys)
    assert config["rope_scaling"] == scaling
    LlamaConfig.read(config)


def test_the_sharpness_of_longrope_is_read(tmp_path):
    def change(writer):
        writer.add_float32("phi3.rope.scaling.attn_factor", 1.25)
        add_rope_factors(writer, [1.0] * 64, [1.0] * 64)

    config = GgufFile(write(tmp_path / "model.gguf", "phi3", change=change)).config
    assert Rotary(LlamaConfig.read(config).turns).attention_factor() == 1.25


@pytest.mark.parametrize("key, value", [
    ("llama.rope.scaling.yarn_log_multiplier", 0.5), ("llama.rope.scaling.attn_factor", 2.0),
    ("llama.rope.scaling.alpha", 1000.0), ("llama.rope.pattern", "new"), ("llama.rope.freq_base_swa", 500.0),
    ("llama.rope.scaling.type", "dynamic"), ("llama.attention.causal", False), ("llama.attention.value_length", 64),
    ("llama.expert_shared_count", 1), ("llama.attention.clamp_kqv", 8.0), ("tokenizer.ggml.eom_token_id", 1000)])
def test_what_would_change_the_model_and_is_not_read_is_named(key, value, tmp_path):
    with pytest.raises(ValueError, match=rf"{key.partition('.')[2].replace('ggml.', '')}|rope_scaling='dynamic'"):
        config_with(tmp_path, (key, value))


def test_positions_that_are_scaled_in_two_ways_are_refused(tmp_path):
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", llama3(32))
        writer.add_float32("llama.rope.scaling.factor", 2.0)

    with refused("has both rope_freqs.weight and rope.scaling.factor=2"):
        GgufFile(write(tmp_path / "model.gguf", change=change))


def test_the_windows_of_layers_are_read_as_a_number_and_as_a_list(tmp_path):
    window, key = ("gemma2.attention.sliding_window", 16), "gemma2.attention.sliding_window_pattern"
    by_list = config_with(tmp_path, window, (key, [False, True]), architecture="gemma2")
    assert LlamaConfig.read(by_list).windows == (0, 16)
    assert LlamaConfig.read(config_with(tmp_path, window, (key, 2), architecture="gemma2")).windows == (16, 0)


def test_every_end_token_of_the_file_ends_an_answer(tmp_path):
    config = config_with(tmp_path, ("tokenizer.ggml.eot_token_id", 5), ("tokenizer.ggml.eom_token_id", 6))
    assert config["eos_token_id"] == [0, 5, 6] and config["bos_token_id"] == 0
    folder = unpacked(tmp_path / "model.gguf")
    assert Text(folder).end_ids == {0, 5, 6}


# --- parts ------------------------------------------------------------------------------------------------------------

def parted(folder: Path) -> tuple[Path, list[Path]]:
    """A small model as one file, and as three parts that the library's writer splits."""
    whole = write(folder / "whole.gguf")
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama", split_max_tensors=8)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *of = field.types
        value = field.contents()
        writer.add_key_value(name, value, kind, *of[-1:])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write_out(writer)
    return whole, sorted(folder.glob("model-*.gguf"))


def test_all_parts_of_a_file_are_read_whichever_is_named(tmp_path):
    whole, parts = parted(tmp_path)
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    expected = Unfolded(unpacked(whole, "a"))
    for number in (0, 2):
        read = Unfolded(unpacked(parts[number], f"b{number}"))
        assert set(read.names()) == set(expected.names())
        assert all(torch.equal(read.read(name), expected.read(name)) for name in read.names())


def test_a_part_that_is_missing_or_renamed_is_named(tmp_path):
    _, parts = parted(tmp_path)
    parts[0].rename(tmp_path / "first.gguf")
    with refused("is one of 3 parts of a model, but ", "model-00001-of-00003.gguf is missing: download all parts"):
        unpacked(parts[1])
    with refused("one of several parts, without its name: join them with gguf-split --merge"):
        unpacked(tmp_path / "first.gguf")


def test_a_folder_of_an_older_form_is_made_again(tmp_path):
    """Its tokenizer split texts in another way; a split of it has another id, so it is written again, too."""
    path = write(tmp_path / "model.gguf")
    folder = unpacked(path)
    assert is_current(folder)
    good = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(good.replace("p{N}", "p{L}"))
    old = identify(Checkpoint(folder), None, [2], Layout())
    change_json(folder / "gguf.json", form=1)
    assert not is_current(folder)
    unpacked(path)
    assert (folder / "tokenizer.json").read_text() == good and is_current(folder)
    assert identify(Checkpoint(folder), None, [2], Layout()) != old
