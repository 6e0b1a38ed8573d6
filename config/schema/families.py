"""The families of models, and the supported content of a model's `config.json`.

It knows nothing about tensors. A field that `model/llama.py` would compute incorrectly is refused by name.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from typing import Any, Iterator, Mapping, Tuple

from config.schema.fields import CONFIG, ROPE, check
from config.schema.untrusted import short_repr

Renamed = Tuple[Tuple[str, str], ...]  # patterns in the names of tensors, and LLaMA's words for them, applied in order
AFTER = (r"\.post_attention_layernorm\.", ".after_attention."), (r"\.post_feedforward_layernorm\.", ".after_mlp.")
SANDWICH = *AFTER, (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm.")
OPT = (
    (r"^(model\.)?decoder\.final_layer_norm\.", "model.norm."), (r"^(model\.)?decoder\.", "model."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."), (r"\.final_layer_norm\.", ".post_attention_layernorm."),
    (r"\.out_proj\.", ".o_proj."), (r"\.fc1\.", ".mlp.up_proj."), (r"\.fc2\.", ".mlp.down_proj."))
GLM4 = (r"\.post_self_attn_layernorm\.", ".after_attention."), (r"\.post_mlp_layernorm\.", ".after_mlp.")
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
GEMMA3 = {  # most of which published configs of Gemma 3 omit
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
    "sliding_window": 4096}
GPT_OSS = {
    "attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 128, "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096}}
MIXTRAL = (
    (r"\.block_sparse_moe\.", ".mlp."), (r"\.mlp\.gate\.", ".mlp.router."),
    (r"\.w1\.", ".gate_proj."), (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."))
FLAGGED = "use_sliding_window", "sliding_window"
QWEN_WINDOWS = (*FLAGGED, "max_window_layers", "layer_types")
WINDOWS_OF_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
MULTIPLIERS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
LOCAL_EXPERTS, EXPERTS = ("num_local_experts", "intermediate_size"), ("num_experts", "moe_intermediate_size")
ANY = object()  # for a field that may have any value of its kind


@dataclass(frozen=True)
class Family:
    """The properties that the models of one `model_type` share; the defaults are LLaMA's."""

    architecture: str
    qkv_bias: bool = False
    bias: bool = False  # of all other linear layers of a decoder layer
    head_norms: bool = False  # queries and keys are normed, each head separately
    rotary: bool = True  # else positions are learned, and added to the embedding
    rms: bool = True  # RMSNorm, else LayerNorm
    gated: bool = True  # else the feed-forward has no gate, and ReLU
    gelu: bool = False  # the gate's activation is GELU by tanh, not SiLU
    tied: bool = False  # whether the LM head is the embedding, if the config does not specify it
    before: bool = True  # attention and feed-forward read normed rows
    after: bool = False  # their output is normed before it is added
    wide_norms: bool = False  # queries and keys are normed, all heads together
    norm_weight_plus_one: bool = False  # the weight of a norm is the stored one plus 1
    scaled: bool = False  # the embedding is multiplied by the square root of its size
    neighbours: bool = False  # the two dimensions that rotate together are adjacent
    windows: int = 0  # default: every layer has a window but each `windows`-th; 0: every layer
    experts: tuple[str, ...] = ()  # config fields of the number of experts per layer, and of their width
    sinks: bool = False  # each head has a score without a value
    clamped: bool = False  # the feed-forward's activation is GPT-OSS's
    names: Renamed = ()  # of tensors
    reads: tuple[str, ...] = ()  # fields that only some families read; in a config of another they have no effect
    allowed: Mapping[str, Any] = field(default_factory=dict)  # allowed values that differ from `SUPPORTED`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of omitted fields, not of null ones


FAMILIES = {  # Vicuna is a LLaMA, Qwen2.5 a Qwen2
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", reads=("sliding_window",), defaults={"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, reads=QWEN_WINDOWS, defaults=WINDOWS_OF_QWEN),
    "qwen3": Family("Qwen3ForCausalLM", head_norms=True, reads=QWEN_WINDOWS, defaults=WINDOWS_OF_QWEN),
    "mimo": Family("MiMoForCausalLM", qkv_bias=True,  # a Qwen2 with additional layers for multi-token prediction
                   reads=QWEN_WINDOWS, defaults=WINDOWS_OF_QWEN),
    "opt": Family("OPTForCausalLM", qkv_bias=True, bias=True, rotary=False, rms=False,
                  gated=False, tied=True, names=OPT),
    "smollm3": Family("SmolLM3ForCausalLM", tied=True,
                      reads=(*FLAGGED, "layer_types", "no_rope_layers", "no_rope_layer_interval"),
                      defaults={"no_rope_layer_interval": 4, "use_sliding_window": False, "rope_theta": 2e6}),
    "phi3": Family("Phi3ForCausalLM", reads=("sliding_window",), allowed={"partial_rotary_factor": ANY},
                   defaults={"original_max_position_embeddings": 4096}),
    "olmo2": Family("Olmo2ForCausalLM", before=False, after=True, wide_norms=True, names=AFTER),
    "granite": Family("GraniteForCausalLM", reads=MULTIPLIERS, defaults={"attention_multiplier": 1.0}),
    "glm": Family("GlmForCausalLM", neighbours=True, allowed={"partial_rotary_factor": ANY, "attention_bias": ANY},
                  defaults={"partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4": Family("Glm4ForCausalLM", neighbours=True, after=True, names=GLM4,
                   allowed={"partial_rotary_factor": ANY, "attention_bias": ANY},
                   defaults={"partial_rotary_factor": 0.5, "attention_bias": True}),
    "ministral": Family("MinistralForCausalLM", reads=("sliding_window", "layer_types"),
                        defaults={"sliding_window": 4096}),
    "gemma2": Family("Gemma2ForCausalLM", tied=True, after=True, norm_weight_plus_one=True, scaled=True,
                     gelu=True, windows=2, names=SANDWICH, allowed=GELU,
                     reads=("sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping",
                            "final_logit_softcapping"),
                     defaults={"query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
                               "final_logit_softcapping": 30.0}),
    "gemma3_text": Family("Gemma3ForCausalLM", tied=True, after=True, norm_weight_plus_one=True, scaled=True,
                          gelu=True, head_norms=True, windows=6, names=SANDWICH, defaults=GEMMA3,
                          reads=("sliding_window", "layer_types", "sliding_window_pattern", "query_pre_attn_scalar",
                                 "final_logit_softcapping", "rope_local_base_freq"),
                          allowed={**GELU, "use_bidirectional_attention": False}),
    "mixtral": Family("MixtralForCausalLM", experts=LOCAL_EXPERTS, names=MIXTRAL, reads=("sliding_window",),
                      defaults={"num_experts_per_tok": 2, "rope_theta": 1e6}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", head_norms=True, experts=EXPERTS, reads=(*FLAGGED, "norm_topk_prob"),
                        defaults={"norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096},
                        names=((r"\.mlp\.gate\.", ".mlp.router."),)),
    "gpt_oss": Family("GptOssForCausalLM", qkv_bias=True, bias=True, sinks=True, clamped=True,
                      windows=2, experts=LOCAL_EXPERTS, reads=("sliding_window", "layer_types"),
                      allowed={"attention_bias": ANY}, defaults=GPT_OSS),
}
DISTINCT = {name for family in FAMILIES.values() for name in family.reads}
SUPPORTED = {  # optional fields, and their only supported values
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1,
    "mlp_only_layers": [], "decoder_sparse_step": 1,
    # OPT's; its 350m differs in the first two
    "do_layer_norm_before": True, "_remove_final_layer_norm": False, "activation_function": "relu",
    "enable_bias": True, "layer_norm_elementwise_affine": True,
}
ROTARY: dict[str, tuple[str, ...]] = {  # kinds of rotary positions, and the fields that each requires
    "default": (), "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",), "longrope": ("short_factor", "long_factor"),
}
YARN = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate")  # optional fields in addition to its factor
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "rms_norm_eps")


def published(name: str, family: Family) -> str:
    """Return the name of one of the decoder's tensors in a checkpoint of its family: `names`, applied backwards."""
    for pattern, llama_name in reversed(family.names):
        name = name.replace(llama_name, pattern.replace("\\", ""))
    return name


def accepted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` under uniform names. Raises ValueError if it is not supported."""
    family = FAMILIES.get(config.get("model_type") or "llama")
    expert_fields = family.experts if family else ()

    # fields that the family reads, with its defaults
    ignored_fields = DISTINCT.difference(family.reads if family else ())
    with_defaults = {**(family.defaults if family else {}), **config}
    config = {name: value for name, value in with_defaults.items() if name not in ignored_fields}

    # uniform names
    rope_fields = _rope_fields(config)
    fields = {**config, **_uniform_rope_fields(config, rope_fields)}
    fields["model_type"] = fields.get("model_type") or "llama"
    if expert_fields:  # transformers 5 always names their number num_local_experts
        fields[expert_fields[0]] = fields.get(expert_fields[0]) or fields.get("num_local_experts")

    # checks
    _refuse_others(fields, rope_fields)
    if fields["model_type"] == "opt":  # it calls the first ffn_dim, and has no field for the second
        fields.update(intermediate_size=fields.get("ffn_dim"), rms_norm_eps=1e-5)
    needed_for_experts = (*expert_fields, "num_experts_per_tok") if expert_fields else ()
    needed_for_rope = ROTARY[fields["rope_type"]]
    check(fields, {}, "config.json", needed=(*NEEDED, *needed_for_rope, *needed_for_experts))
    contradiction = next(_contradictions(fields), "")
    if contradiction:
        raise ValueError(f"config.json says {contradiction}; copy it again from the model")
    return fields


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions: of `rope_scaling`, or in transformers 5 of `rope_parameters`.

    The latter may be those of the kinds of layers; then they are the fields of layers with full attention.
    """
    parameters = config.get("rope_parameters") or {}
    rope_fields = dict(config.get("rope_scaling") or {})
    rope_fields.update(parameters.get("full_attention", parameters))
    return rope_fields


def _uniform_rope_fields(config: Mapping[str, Any], rope_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what replaces fields of the config: those of rotary positions, under transformers 4's names."""
    without_effect = dict.fromkeys(ROPE.keys() - CONFIG.keys())  # outside of rope_scaling
    uniform = {**without_effect, **{name: value for name, value in rope_fields.items() if name in ROPE}}

    sliding_layers = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    uniform["rope_local_base_freq"] = sliding_layers.get("rope_theta") or config.get("rope_local_base_freq")
    uniform["rope_type"] = rope_fields.get("rope_type") or rope_fields.get("type") or "default"
    if uniform["rope_type"] == "longrope":
        uniform.update(_longrope_fields(config, rope_fields))
    return uniform


def _longrope_fields(config: Mapping[str, Any], rope_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trained length, which may be outside of `rope_scaling`, and the factor of attention scores."""
    key = "original_max_position_embeddings"
    trained_length = rope_fields.get(key) or config.get(key)
    max_length, factor = config.get("max_position_embeddings") or 0, rope_fields.get("factor") or 1

    fields = {key: trained_length or max_length}
    has_factor = rope_fields.get("attention_factor")
    if not trained_length and factor > 1 and max_length > 1 and not has_factor:
        fields["attention_factor"] = (1 + log(factor) / log(max_length)) ** 0.5
    return fields


def _refuse_others(fields: Mapping[str, Any], rope_fields: Mapping[str, Any]) -> None:
    """Raise ValueError if a field has a value that is not supported for its family."""
    unknown_rope_fields = {
        name: value for name, value in rope_fields.items() if name not in ROPE and value is not None}
    checks: list[tuple[str, Any, Any]] = [  # name, value, supported values
        ("model_type", fields["model_type"], FAMILIES),
        ("rope_scaling", fields["rope_type"], ROTARY),
        ("rope_scaling", unknown_rope_fields, ({},))]

    family = FAMILIES.get(fields["model_type"])
    allowed_by_family = family.allowed if family else {}
    supported = {**SUPPORTED, **allowed_by_family, "word_embed_proj_dim": fields.get("hidden_size")}
    checks += [(name, fields.get(name), (only_value, None))
               for name, only_value in supported.items() if only_value is not ANY]

    for name, value, supported_values in checks:
        if value not in supported_values:
            advice = " or ".join(repr(each) for each in supported_values if each is not None) or "unquantized weights"
            raise ValueError(f"config.json says {name}={short_repr(value)}, which is not supported (only {advice})")


def _contradictions(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the contradictions between fields that are valid alone."""
    family, rope_type = FAMILIES[fields["model_type"]], fields["rope_type"]
    hidden_size, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    num_kv_heads = fields.get("num_key_value_heads") or num_heads
    head_dim = fields.get("head_dim") or hidden_size // num_heads

    # heads
    if num_heads % num_kv_heads:
        yield f"num_attention_heads={num_heads}, which is not a multiple of num_key_value_heads={num_kv_heads}"
    if not fields.get("head_dim") and hidden_size % num_heads:
        yield f"hidden_size={hidden_size}, which is not a multiple of num_attention_heads={num_heads}"

    # rotary positions
    rotary_dim = int(head_dim * (fields.get("partial_rotary_factor") or 1))
    if family.rotary and (rotary_dim % 2 or not rotary_dim):
        yield f"head_dim={head_dim}, but rotary positions rotate dimensions in pairs"
    for name in ROTARY["longrope"] if rope_type == "longrope" else ():
        if len(fields[name]) != rotary_dim // 2:
            yield f"{len(fields[name])} numbers in {name}, but {rotary_dim} dimensions rotate in pairs"
    if rope_type == "yarn" and fields.get("rope_theta") == 1:
        yield "rope_theta=1, which makes all waves equally long, so that yarn cannot separate long ones from short ones"
    if rope_type == "llama3" and fields["low_freq_factor"] >= fields["high_freq_factor"]:
        yield (f"low_freq_factor={fields['low_freq_factor']}, which is not below "
               f"high_freq_factor={fields['high_freq_factor']}")

    # experts, and lists of layers
    if family.experts and fields["num_experts_per_tok"] > fields[family.experts[0]]:
        yield (f"num_experts_per_tok={fields['num_experts_per_tok']}, but "
               f"{family.experts[0]}={fields[family.experts[0]]}")
    for name in ("layer_types", "no_rope_layers"):
        entries, num_layers = fields.get(name) or (), fields["num_hidden_layers"]
        if len(set(entries)) > 1 and len(entries) != num_layers:
            yield f"{len(entries)} entries in {name}, but num_hidden_layers={num_layers}"


# --- differences between layers ---------------------------------------------------------------------------------------

def windows(fields: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Return the attention window of each layer in positions, 0 for none; empty if no layer has a window."""
    window_size, num_layers = fields.get("sliding_window"), fields["num_hidden_layers"]
    if not window_size or not fields.get("use_sliding_window", True):
        return ()

    layer_types = fields.get("layer_types")
    if layer_types is not None:
        has_window = [layer_type == "sliding_attention" for layer_type in layer_types]
    elif "no_rope_layers" in family.reads:
        has_window = list(unturned(fields))
    else:
        full_interval = fields.get("sliding_window_pattern") or family.windows
        full_layers = range(full_interval - 1, num_layers, full_interval) if full_interval else ()
        first_window_layer = fields.get("max_window_layers") or 0
        has_window = [layer >= first_window_layer and layer not in full_layers for layer in range(num_layers)]

    return tuple(window_size if slides else 0 for slides in has_window) if any(has_window) else ()


def unturned(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it has no rotary positions; empty if all layers have them."""
    has_rope = fields.get("no_rope_layers")  # 1 for a layer with rotary positions
    interval, num_layers = fields.get("no_rope_layer_interval"), fields["num_hidden_layers"]
    if has_rope is None and interval:
        has_rope = [(layer + 1) % interval for layer in range(num_layers)]
    return tuple(not turns for turns in has_rope or ())
