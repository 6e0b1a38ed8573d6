"""Heads as they are published: what their config.json may say, and how one is refused that is another network."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from config.schema.families import head_problems
from model.drafts.draft import NoDraft
from model.drafts.eagle import Eagle, Eagle3Head, EagleHead, fit_head
from model.drafts.network import ModelDraft
from model.llama import LlamaConfig
from model.weights.checkpoint import Checkpoint
from tests.checkpoints import refused
from tests.tiny import weights

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 53, "rms_norm_eps": 1e-6,
         "hidden_act": "silu", "max_position_embeddings": 256, "num_hidden_layers": 1, "model_type": "llama"}
BASE = {**SIZES, "num_hidden_layers": 24, "num_key_value_heads": 2}
INNER, OUTPUTS = [2, 12, 21], [1, 11, 20]  # of a model of 24 layers
ORIGINAL = {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
            "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
            "transformers_version": "4.28.1"}
FORGE = {"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 8, "initializer_range": 0.02,
         "max_window_layers": 36, "num_key_value_heads": 2, "rope_scaling": None, "rope_theta": 1000000,
         "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
         "transformers_version": "4.51.0", "use_sliding_window": False}
PUBLISHED = {  # name: whether it is of EAGLE-3, and its fields beside the sizes
    "vicuna": (False, ORIGINAL),
    "llama 2 chat": (False, {**ORIGINAL, "num_key_value_heads": 2, "pretraining_tp": 1, "rope_scaling": None}),
    "llama 3": (False, {**ORIGINAL, "num_key_value_heads": 2, "rope_theta": 500000.0, "bias": False, "mlp_bias": False,
                        "attention_bias": False}),
    "qwen 2": (False, {**ORIGINAL, "num_key_value_heads": 2, "qkv_bias": False, "use_sliding_window": False,
                       "sliding_window": 131072, "max_window_layers": 28, "_name_or_path": "elsewhere"}),
    "llama 3.1": (True, {**ORIGINAL, "num_key_value_heads": 2, "draft_vocab_size": 53}),
    "llama 3.3": (True, {**ORIGINAL, "num_key_value_heads": 2, "draft_vocab_size": 53, "target_hidden_size": 32}),
    "qwen 3": (True, {**FORGE, "draft_vocab_size": 53}),
    "transformers 5": (True, {**{key: FORGE[key] for key in FORGE if key not in ("rope_theta", "torch_dtype")},
                              "dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                              "layer_types": ["full_attention"]}),
    "another's, with its options": (True, {**FORGE, "pretraining_tp": 1, "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": OUTPUTS, "use_aux_hidden_state": True, "next_layer_regular": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None}}),
    "layers as inputs": (True, {**FORGE, "eagle_aux_hidden_state_layer_ids": INNER}),
    "layers as outputs": (True, {**FORGE, "eagle_aux_hidden_state_layer_ids": OUTPUTS}),
    "layers left open": (True, {**FORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}),
}


def save(folder: Path, third: bool, config: dict, rename=lambda name: name) -> Checkpoint:
    """A head that fits BASE, with these fields in its config.json."""
    sizes = LlamaConfig.read({**SIZES, "num_key_value_heads": config.get("num_key_value_heads")})
    head = Eagle3Head(sizes, 32, 53) if third else EagleHead(sizes, bias=False)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SIZES, **config}))
    torch.save({rename(name): x for name, x in weights(head, seed=1).items()}, folder / "pytorch_model.bin")
    return Checkpoint(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_heads_as_they_are_published_are_taken(tmp_path, name):
    third, config = PUBLISHED[name]
    assert isinstance(fit_head(save(tmp_path / "head", third, config), BASE), Eagle3Head if third else EagleHead)


@pytest.mark.parametrize("third", [False, True], ids=["eagle", "eagle3"])
def test_a_head_drifts_unless_it_was_taught_on_its_own_outputs(tmp_path, third):
    for i, (passes, drifts) in enumerate([({}, True), ({"unrolled_passes": None}, True), ({"unrolled_passes": 3}, True),
                                          ({"unrolled_passes": 4}, False), ({"unrolled_passes": 8}, False)]):
        head = fit_head(save(tmp_path / str(i), third, {**ORIGINAL, **passes}), BASE).to_empty(device="cpu")
        assert Eagle(head, nn.Identity(), 8).drifts == (drifts and not third)
    assert (ModelDraft.drifts, NoDraft.drifts) == (False, False)
    with refused("unrolled_passes='8', which should be a whole number from 1"):
        save(tmp_path / "text", third, {**ORIGINAL, "unrolled_passes": "8"})


def test_what_transformers_writes_of_a_llama_in_full_is_taken():
    from transformers import LlamaConfig as Theirs
    from transformers import Qwen2Config

    for kind in (Theirs, Qwen2Config):
        config = kind(**{**SIZES, "num_key_value_heads": 2}).to_dict()
        assert list(head_problems(config, False, INNER, 256)) == []


OTHER = {  # what is reported: of EAGLE-3 or not, and the fields that say so
    "norm_before_residual=True, which is not supported (only False); take another head": (
        True, {"norm_before_residual": True}),
    "norm_output=True, which is not supported (only False)": (True, {"norm_output": True}),
    "fc_norm=True, which": (True, {"fc_norm": True}),
    "norm_before_fc=True, which": (True, {"norm_before_fc": True}),
    "logit_scale=0.0625, which is not supported (only 1)": (True, {"logit_scale": 0.0625}),
    "logit_scale=2, which": (False, {"logit_scale": 2}),
    "num_hidden_layers=2, which": (True, {"num_hidden_layers": 2}),
    "use_aux_hidden_state=False, which is not supported (only True)": (True, {"use_aux_hidden_state": False}),
    "use_last_layernorm=False, which": (True, {"eagle_config": {"use_last_layernorm": False}}),
    "use_last_layernorm=True, which is not supported (only False)": (False, {"use_last_layernorm": True}),
    "use_mtp_layernorm=True, which": (True, {"eagle_config": {"use_mtp_layernorm": True}}),
    "layer_types=['sliding_attention'], which": (True, {"layer_types": ["sliding_attention"]}),
    "sliding_window=255, which is not supported (only null, use_sliding_window=false or at least 256)": (
        True, {"sliding_window": 255, "use_sliding_window": True}),
    "sliding_window=64, which": (False, {"sliding_window": 64, "use_sliding_window": None}),
    "sliding_window='4096', which": (False, {"sliding_window": "4096"}),
    "eagle_aux_hidden_state_layer_ids=[1, 11, 21], which is not supported (only [2, 12, 21] is, or [1, 11, 20] where":
        (True, {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]}),
    "eagle_aux_hidden_state_layer_ids=[3, 13, 22], which": (
        True, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 13, 22]}}),
    "eagle_aux_hidden_state_layer_ids=5, which": (True, {"eagle_aux_hidden_state_layer_ids": 5}),
    "eagle_aux_hidden_state_layer_ids, which only a head of EAGLE-3 has": (
        False, {"eagle_aux_hidden_state_layer_ids": INNER}),
    "says 'rope_theta', of which it is not known": (True, {"eagle_config": {"rope_theta": 5}}),
    "eagle_config=[1], which should be an object": (True, {"eagle_config": [1]}),
    "says 'residual_multiplier', of which it is not known whether it changes what the head computes; if it does not, "
    "delete it there": (True, {"residual_multiplier": 0.5}),
    r"says '\x1b[2J', of which": (False, {"\x1b[2J": 1}),
    "draft_vocab_size=-3, which should be a whole number from 1": (True, {"draft_vocab_size": -3}),
    "draft_vocab_size='53', which": (True, {"draft_vocab_size": "53"}),
    "head: config.json says hidden_act='gelu'": (True, {"hidden_act": "gelu"}),
    "is not supported; take the head in the form in which EAGLE, SpecForge or AngelSlim publish it": (
        True, {"speculators_config": {}}),
    "in the format of the library speculators": (False, {"transformer_layer_config": {}, "hidden_size": None}),
}


@pytest.mark.parametrize("sentence", OTHER)
def test_a_head_that_describes_another_network_is_refused_by_name(tmp_path, sentence):
    third, config = OTHER[sentence]
    with refused(sentence):
        fit_head(save(tmp_path / "head", third, config), BASE)


def test_a_window_that_holds_the_whole_context_is_plain_attention(tmp_path):
    fit_head(save(tmp_path / "head", True, {"sliding_window": 256}), BASE)


def test_a_head_of_eagle_3_that_calls_its_layer_otherwise_is_reported_as_such(tmp_path):
    with refused("holds a head of EAGLE-3 that calls its layer layers.0, as vLLM does, instead of midlayer"):
        fit_head(save(tmp_path / "head", True, FORGE, lambda name: name.replace("midlayer.", "layers.0.")), BASE)


def test_a_table_of_tokens_that_is_no_list_of_whole_numbers_is_reported(tmp_path):
    source = save(tmp_path / "head", True, {**FORGE, "draft_vocab_size": 53})
    tensors = source.tensors()
    tensors.update(d2t=torch.zeros(53), t2d=torch.ones(53, dtype=torch.bool))
    torch.save(tensors, tmp_path / "head" / "pytorch_model.bin")
    with refused("d2t and t2d in"):
        fit_head(Checkpoint(tmp_path / "head"), BASE)
