"""What the `config.json` of a model may say; the families of models.

It knows nothing about tensors. What `model/llama.py` would compute wrongly is refused here, by name.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from config.schema.fields import CONFIG, ROPE, check
from config.schema.untrusted import shown


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` have in common; the defaults are LLaMA."""

    architecture: str
    qkv_bias: bool = False
    bias: bool = False  # of all other products of a layer
    head_norms: bool = False  # queries and keys are normed, each head by itself
    rotary: bool = True  # else positions are learned, and added to the embedding
    rms: bool = True  # else LayerNorm
    gated: bool = True  # else the feed-forward has one way in, and ReLU
    tied: bool = False  # whether the LM head is the embedding if the config does not say


FAMILIES = {  # Vicuna is a LLaMA, Qwen2.5 a Qwen2
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", head_norms=True),
    "opt": Family("OPTForCausalLM", qkv_bias=True, bias=True, rotary=False, rms=False,
                  gated=False, tied=True),
}
SUPPORTED = {  # fields that may be left out, and all that they may say
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1,
    "quantization_config": None,
    # OPT's; its 350m differs in the first two
    "do_layer_norm_before": True, "_remove_final_layer_norm": False, "activation_function": "relu",
    "enable_bias": True, "layer_norm_elementwise_affine": True,
}
ROTARY: dict[str, tuple[str, ...]] = {  # kinds of rotary positions, and the numbers that each needs
    "default": (), "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "rms_norm_eps")


def accepted(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json` under one set of names, whatever wrote it; a ValueError if it is not supported.

    What a field may hold by itself was checked when the file was read (`fields.py`).
    """
    # transformers 4 says it beside `rope_scaling`, transformers 5 in `rope_parameters`
    rotary = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    known = {name: value for name, value in rotary.items() if name in ROPE}
    elsewhere = dict.fromkeys(ROPE.keys() - CONFIG.keys())  # outside of rope_scaling these fields say nothing
    given = {**config, **elsewhere, **known}
    given["model_type"] = given.get("model_type") or "llama"
    given["rope_type"] = rotary.get("rope_type") or rotary.get("type") or "default"
    _refuse_others(given, rotary)
    if given["model_type"] == "opt":  # the same things under other names; all its models have one epsilon
        given.update(intermediate_size=given.get("ffn_dim"), rms_norm_eps=1e-5)
    check(given, {}, "config.json", needed=(*NEEDED, *ROTARY[given["rope_type"]]))
    misfit = next(_misfits(given), "")
    if misfit:
        raise ValueError(f"config.json says {misfit}; copy it again from the model")
    return given


def _refuse_others(given: Mapping[str, Any], rotary: Mapping[str, Any]) -> None:
    """Raise ValueError if a field says what no family here does."""
    strange = {name: value for name, value in rotary.items() if name not in ROPE}
    unknown = {name: value for name, value in strange.items() if value is not None}
    checks: list[tuple[str, Any, Any]] = [
        ("model_type", given["model_type"], FAMILIES), ("rope_scaling", given["rope_type"], ROTARY),
        ("rope_scaling", unknown, ({},))]
    for name, only in SUPPORTED.items():
        checks.append((name, given.get(name), (only, None)))
    width = given.get("hidden_size")
    checks.append(("word_embed_proj_dim", given.get("word_embed_proj_dim"), (width, None)))
    for name, got, fine in checks:
        if got not in fine:
            only = " or ".join(repr(value) for value in fine if value is not None) or "unquantized weights"
            raise ValueError(f"config.json says {name}={shown(got)}, which is not supported (only {only})")


def _misfits(given: Mapping[str, Any]) -> Iterator[str]:
    """Fields that are sound by themselves, but not together."""
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    shared, size = given.get("num_key_value_heads") or heads, given.get("head_dim") or hidden // heads
    if heads % shared:
        yield f"num_attention_heads={heads}, which is no multiple of num_key_value_heads={shared}"
    if not given.get("head_dim") and hidden % heads:
        yield f"hidden_size={hidden}, which is no multiple of num_attention_heads={heads}"
    if FAMILIES[given["model_type"]].rotary and size % 2:
        yield f"head_dim={size}, but rotary positions turn dimensions in pairs"
    if given["rope_type"] == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        yield (f"low_freq_factor={given['low_freq_factor']}, which is not below "
               f"high_freq_factor={given['high_freq_factor']}")
