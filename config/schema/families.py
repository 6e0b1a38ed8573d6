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
    for pattern, ours in reversed(family.names):
        name = name.replace(ours, pattern.replace("\\", ""))
    return name


def accepted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` under uniform names. Raises ValueError if it is not supported."""
    family = FAMILIES.get(config.get("model_type") or "llama")
    unread = DISTINCT.difference(family.reads if family else ())
    config = {**(family.defaults if family else {}), **config}
    config = {name: value for name, value in config.items() if name not in unread}
    # transformers 4 has rope_theta next to `rope_scaling`, transformers 5 in `rope_parameters`, per kind of layer
    parameters = config.get("rope_parameters") or {}
    local = (parameters.get("sliding_attention") or {}).get("rope_theta")
    rotary = dict(config.get("rope_scaling") or {})
    rotary.update(parameters.get("full_attention", parameters))
    known = {name: value for name, value in rotary.items() if name in ROPE}
    elsewhere = dict.fromkeys(ROPE.keys() - CONFIG.keys())  # fields that have no effect outside of rope_scaling
    given = {**config, **elsewhere, **known}
    given["model_type"] = given.get("model_type") or "llama"
    given["rope_local_base_freq"] = local or given.get("rope_local_base_freq")
    given["rope_type"] = rotary.get("rope_type") or rotary.get("type") or "default"
    if given["rope_type"] == "longrope":  # its trained length may be outside of rope_scaling
        trained = rotary.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        longest, factor = config.get("max_position_embeddings") or 0, rotary.get("factor") or 1
        given["original_max_position_embeddings"] = trained or longest
        if not trained and factor > 1 and longest > 1 and not given.get("attention_factor"):
            given["attention_factor"] = (1 + log(factor) / log(longest)) ** 0.5
    experts = family.experts if family else ()
    if experts:  # transformers 5 always names their number num_local_experts
        given[experts[0]] = given.get(experts[0]) or given.get("num_local_experts")
    _refuse_others(given, rotary)
    if given["model_type"] == "opt":  # it calls the first ffn_dim, and has no field for the second
        given.update(intermediate_size=given.get("ffn_dim"), rms_norm_eps=1e-5)
    sparse = (*experts, "num_experts_per_tok") if experts else ()
    turning = ROTARY[given["rope_type"]]
    check(given, {}, "config.json", needed=(*NEEDED, *turning, *sparse))
    misfit = next(_misfits(given), "")
    if misfit:
        raise ValueError(f"config.json says {misfit}; copy it again from the model")
    return given


def _refuse_others(given: Mapping[str, Any], rotary: Mapping[str, Any]) -> None:
    """Raise ValueError if a field has a value that is not supported for its family."""
    unknown = {name: value for name, value in rotary.items() if name not in ROPE and value is not None}
    checks: list[tuple[str, Any, Any]] = [
        ("model_type", given["model_type"], FAMILIES), ("rope_scaling", given["rope_type"], ROTARY),
        ("rope_scaling", unknown, ({},))]
    family = FAMILIES.get(given["model_type"])
    of_family = family.allowed if family else {}
    allowed = {**SUPPORTED, **of_family, "word_embed_proj_dim": given.get("hidden_size")}
    checks += [(name, given.get(name), (only, None)) for name, only in allowed.items() if only is not ANY]
    for name, got, fine in checks:
        if got not in fine:
            only = " or ".join(repr(value) for value in fine if value is not None) or "unquantized weights"
            raise ValueError(f"config.json says {name}={short_repr(got)}, which is not supported (only {only})")


def _misfits(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the contradictions between fields that are valid alone."""
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    shared, size = given.get("num_key_value_heads") or heads, given.get("head_dim") or hidden // heads
    if heads % shared:
        yield f"num_attention_heads={heads}, which is not a multiple of num_key_value_heads={shared}"
    if not given.get("head_dim") and hidden % heads:
        yield f"hidden_size={hidden}, which is not a multiple of num_attention_heads={heads}"
    turned = int(size * (given.get("partial_rotary_factor") or 1))
    if FAMILIES[given["model_type"]].rotary and (turned % 2 or not turned):
        yield f"head_dim={size}, but rotary positions rotate dimensions in pairs"
    for name in ROTARY["longrope"] if given["rope_type"] == "longrope" else ():
        if len(given[name]) != turned // 2:
            yield f"{len(given[name])} numbers in {name}, but {turned} dimensions rotate in pairs"
    kinds = FAMILIES[given["model_type"]].experts
    if kinds and given["num_experts_per_tok"] > given[kinds[0]]:
        yield f"num_experts_per_tok={given['num_experts_per_tok']}, but {kinds[0]}={given[kinds[0]]}"
    for name in ("layer_types", "no_rope_layers"):
        entries, layers = given.get(name) or (), given["num_hidden_layers"]
        if len(set(entries)) > 1 and len(entries) != layers:
            yield f"{len(entries)} entries in {name}, but num_hidden_layers={layers}"
    if given["rope_type"] == "yarn" and given.get("rope_theta") == 1:
        yield "rope_theta=1, which makes all waves equally long, so that yarn cannot separate long ones from short ones"
    if given["rope_type"] == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        yield (f"low_freq_factor={given['low_freq_factor']}, which is not below "
               f"high_freq_factor={given['high_freq_factor']}")


# --- differences between layers ---------------------------------------------------------------------------------------

def windows(given: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Return the attention window of each layer in positions, 0 for none; empty if no layer has a window."""
    window, layers = given.get("sliding_window"), given["num_hidden_layers"]
    if not window or not given.get("use_sliding_window", True):
        return ()
    kinds = given.get("layer_types")
    every = given.get("sliding_window_pattern") or family.windows
    first = given.get("max_window_layers") or 0
    if kinds is not None:
        slides = [kind == "sliding_attention" for kind in kinds]
    elif "no_rope_layers" in family.reads:
        slides = list(unturned(given))
    else:
        full = range(every - 1, layers, every) if every else ()
        slides = [layer >= first and layer not in full for layer in range(layers)]
    return tuple(window if slide else 0 for slide in slides) if any(slides) else ()


def unturned(given: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it has no rotary positions; empty if all layers have them."""
    turns = given.get("no_rope_layers")  # 1 for a layer with rotary positions
    every, layers = given.get("no_rope_layer_interval"), given["num_hidden_layers"]
    if turns is None and every:
        turns = [(layer + 1) % every for layer in range(layers)]
    return tuple(not turn for turn in turns or ())
