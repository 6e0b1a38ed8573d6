"""Families that the project's `transformers` does not have, or has otherwise: a newer one computed the references."""
import re
from itertools import cycle

import gguf
import numpy as np
import pytest
import torch

from config.failure import PeerLost
from config.methods import METHODS
from launch.pipeline import Pipeline
from launch.split.gguf import GgufFile
from model.weights.checkpoint import GGUF_LIST
from model.weights.unfold import Unfolded
from model.whole import Whole
from pipeline import decode as prefixes
from tests.checkpoints import save_checkpoint, split_quietly
from tests.json_files import load_json, save_json
from tests.newest import DATA, MODELS, NUM_MODELS, TOLERANCE, TOLERANCES, tensors_of
from tests.test_families import MODELS as FAMILY_MODELS
from tests.test_families import PROMPT, random_model
from tests.test_prunes import delaying
from tests.test_recovery import losses_of, struck

pytestmark = pytest.mark.usefixtures("small_blocks")


def drawn_tensors(reference, stored):
    """The tensors of a model's checkpoint, drawn again."""
    return {name: torch.from_numpy(x) for name, x in tensors_of(reference, stored["seed"]).items()}


@torch.no_grad()
def assert_computes(stored, folder, tolerance):
    """The whole model gives each token of a text the reference's probability, and writes the same text."""
    whole = Whole(Unfolded(folder), torch.float32, "cpu", context=150)
    ids = stored["prompt"] + stored["text"]
    logits = whole.logits(ids, whole.cache(len(ids)), len(ids))[:-1].double()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, torch.tensor(stored["logprobs"]).double(), atol=tolerance, rtol=0)
    assert logits[len(stored["prompt"]) - 1:].argmax(-1).tolist() == stored["text"]


@pytest.mark.parametrize("name", MODELS)
def test_each_token_is_as_probable_as_in_the_newest_transformers(name, tmp_path):
    reference = load_json(DATA / f"{name}.json")
    assert len(reference["models"]) == NUM_MODELS
    for stored in reference["models"]:
        folder = save_checkpoint(tmp_path / str(stored["seed"]), reference["config"], drawn_tensors(reference, stored),
                                 "model.safetensors")
        assert_computes(stored, folder, TOLERANCES.get(name, TOLERANCE))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_a_model_that_also_sees_is_as_probable(name, tmp_path):
    reference = load_json(DATA / f"{name}.json")
    stored, text_names = reference["models"][0], re.compile(r"^model\.")
    tensors = {text_names.sub("model.language_model.", key): x for key, x in drawn_tensors(reference, stored).items()}
    tensors.update({"model.visual.patch_embed.proj.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(3)})
    config = {"model_type": name, "architectures": [reference["config"]["architectures"][0].replace(
        "ForCausalLM", "ForConditionalGeneration")], "vision_config": {}, "text_config": reference["config"]}
    folder = save_checkpoint(tmp_path / "seeing", config, tensors, "model.safetensors")
    assert_computes(stored, folder, TOLERANCES[name])


# --- every method -----------------------------------------------------------------------------------------------------

RECENT = ["olmo3", "seed-oss", "ernie 4.5", "granite 4", "minimax_m2", "qwen3_5_moe"]
GUESSING = [name for name, method in METHODS.items() if method.target == "ring" and method.draft != "none"]


def save_recent(folder, name):
    """A model's folder, of this transformers or with the weights of a newer one's reference."""
    if name not in MODELS:
        class_name, fields = FAMILY_MODELS[name]
        random_model(class_name, {**fields, "hidden_size": 64}).save_pretrained(folder)
        return folder
    reference = load_json(DATA / f"{name}.json")
    tensors = drawn_tensors(reference, reference["models"][0])
    return save_checkpoint(folder, reference["config"], tensors, "model.safetensors")


@pytest.mark.parametrize("name, method, quant, temperature", [*zip(
    RECENT, GUESSING, cycle(["int8", "int4"]), cycle([0.0, 1.0, 0.7]))])
def test_quantized_models_write_one_text_whatever_is_lost_late_or_reused(name, method, quant, temperature, tmp_path,
                                                                         monkeypatch):
    monkeypatch.setattr(prefixes, "MIN_SHARED_TOKENS", 1)
    base = save_recent(tmp_path / "base", name)
    split_quietly(base, tmp_path / "parts", "0+2+1+1")
    words = {"model_dir": str(tmp_path / "parts"), "quant": quant, "temperature": temperature, "seed": 3,
             "link": "threads", "threads_per_rank": 1, "max_length": 150, "ignore_eos": True, "max_new_tokens": 8,
             "prompt_ids": "5"}
    prompts = [PROMPT[:20], PROMPT[10:30], [*PROMPT[:17], 7], PROMPT[:26]]
    with Pipeline.open(pipeline_type="ar", **words) as opened:
        texts = [opened.generate(prompt).answer.token_ids for prompt in prompts]

    with Pipeline.open(pipeline_type=method, draft="model", draft_dir=str(base), ablate="thrift", max_requests=4,
                       reuse=True, **words) as opened:
        delaying(6, seed=9)(opened.ring.link)
        losses = losses_of(opened.ring)
        answers = [opened.submit(prompt) for prompt in prompts]
        next(answers[1])
        losses.append(PeerLost("rank 2 was lost"))
        assert list(map(struck, answers)) == texts
        assert opened.ring.num_reconnections == 1
        again = opened.generate([*prompts[3], *texts[3][:5], 9]).answer
    assert again.reused_tokens > 20


# --- files of llama.cpp -----------------------------------------------------------------------------------------------

ARCHITECTURES = {"lfm2_moe": "lfm2moe", "minimax_m2": "minimax-m2", "qwen3_next": "qwen3next", "qwen3_5": "qwen35",
                 "qwen3_5_moe": "qwen35moe"}
METADATA = {  # fields of a config, and their keys in a file
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "num_experts_per_tok": "expert_used_count", "num_experts": "expert_count", "num_local_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length", "num_dense_layers": "leading_dense_block_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "conv_L_cache": "shortconv.l_cache",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "norm_eps": "attention.layer_norm_rms_epsilon",
    "routed_scaling_factor": "expert_weights_scale", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank"}
ENDED = {".A_log": ".A_log", ".dt_bias": ".dt_proj.bias", "expert_bias": "expert_bias.bias",
         "e_score_correction_bias": "e_score_correction.bias"}  # names that the converter changes


def converted(name, x, config):
    """A tensor as llama.cpp's converter changes it; those of delta nets may become two."""
    key_heads, key_dim = config.get("linear_num_key_heads", 1), config.get("linear_key_head_dim", 0)
    values_per_key = config.get("linear_num_value_heads", 1) // key_heads
    value_dim, key_width = config.get("linear_value_head_dim", 0), key_heads * key_dim
    is_plus_one = config["model_type"].startswith("qwen3") and "linear_attn" not in name
    if name.endswith("A_log"):
        x = -torch.exp(x)
    if name.endswith("norm.weight") and is_plus_one:
        x = x + 1
    if x.dim() == 3:  # a convolution
        x = x[:, 0]
    if "in_proj_qkvz" in name:
        q, k, v, z = x.unflatten(0, (key_heads, -1)).split([key_dim, key_dim] + [values_per_key * value_dim] * 2, 1)
        return {name.replace("qkvz", "qkv"): torch.cat([rows.flatten(0, 1) for rows in (q, k, v)]),
                name.replace("qkvz", "z"): z.flatten(0, 1)}

    def tiled(x, dim, size):
        return x.unflatten(dim, (key_heads, values_per_key, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)

    if config["model_type"].startswith("qwen3_5") and "linear_attn" in name:
        if "in_proj_qkv" in name or "conv1d" in name:
            x = torch.cat([x[:2 * key_width], tiled(x[2 * key_width:], 0, value_dim)])
        elif "out_proj" in name:
            x = tiled(x, 1, value_dim)
        elif "norm" not in name:
            x = tiled(x, 0, value_dim if "in_proj_z" in name else 1)
    return {name: x}


def write_gguf(path, architecture, config, tensors):
    """Write a model as llama.cpp's converter does, in float32."""
    writer = gguf.GGUFWriter(str(path), architecture)
    values = {key: config[field] for field, key in METADATA.items() if field in config}
    if "conv_L_cache" in config:
        values["attention.head_count_kv"] = [
            0 if layer_type == "conv" else config["num_key_value_heads"] for layer_type in config["layer_types"]]
    if "linear_num_value_heads" in config:
        values["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        values["rope.dimension_sections"] = [1, 1, 0, 0]
        values.update(block_count=config["num_hidden_layers"] + 1, nextn_predict_layers=1)  # of one that is not read
        writer.add_tensor(f"blk.{config['num_hidden_layers']}.attn_norm.weight", np.zeros(3, np.float32))
    if architecture == "minimax-m2":
        values["expert_feed_forward_length"] = config["intermediate_size"]
    rope = config["rope_parameters"]
    if "head_dim" in config:
        values["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
    for key, value in {**values, "rope.freq_base": rope["rope_theta"]}.items():
        add = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_token_list([f"{number}" for number in range(config["vocab_size"])])

    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names, written = gguf.get_tensor_name_map(number, config["num_hidden_layers"]), {}
    for name, x in tensors.items():
        for ending, other in ENDED.items():
            name = name[:-len(ending)] + other if name.endswith(ending) else name
        for theirs, changed in converted(name, x, config).items():
            theirs = re.sub(r"\.experts\.\d+\.", ".experts.", theirs)
            found_names = (names.get_name(each, (".weight", ".bias")) for each in (theirs, theirs[len("model."):]))
            written.setdefault(next(filter(None, found_names)), []).append(changed)
    for name, parts in written.items():
        writer.add_tensor(name, (torch.stack(parts) if "_exps" in name else parts[0]).contiguous().numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
                  writer.close):
        write()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_as_llama_cpp_writes_it_is_the_same_model(name, tmp_path):
    reference = load_json(DATA / f"{name}.json")
    stored, folder = reference["models"][1], tmp_path / "whole"
    write_gguf(tmp_path / "model.gguf", ARCHITECTURES[name], reference["config"], drawn_tensors(reference, stored))
    file = GgufFile(tmp_path / "model.gguf")
    folder.mkdir()
    left_in_file = file.write_weights(folder / "model.safetensors", progress=False)
    save_json(folder / GGUF_LIST, {"tensors": left_in_file})
    save_json(folder / "config.json", file.config)
    assert_computes(stored, folder, TOLERANCES.get(name, TOLERANCE))
