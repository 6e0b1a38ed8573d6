"""The families of models, and the supported content of a model's `config.json`.

It knows nothing about tensors. A field that `model/llama.py` would compute incorrectly is refused by name.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from typing import Any, Iterator, Mapping, Sequence, Tuple

from config.schema.fields import CONFIG, ROPE, check
from config.schema.untrusted import short_repr

RECURRENT = CONVOLUTION, DELTA_NET = "conv", "linear_attention"  # kinds of layers without attention in configs
Renamed = Tuple[Tuple[str, str], ...]  # patterns in the names of tensors, and LLaMA's words for them, applied in order
AFTER = (r"\.post_attention_layernorm\.", ".after_attention."), (r"\.post_feedforward_layernorm\.", ".after_mlp.")
SANDWICH = *AFTER, (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm.")
OPT = (
    (r"^(model\.)?decoder\.final_layer_norm\.", "model.norm."), (r"^(model\.)?decoder\.", "model."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."), (r"\.final_layer_norm\.", ".post_attention_layernorm."),
    (r"\.out_proj\.", ".o_proj."), (r"\.fc1\.", ".mlp.up_proj."), (r"\.fc2\.", ".mlp.down_proj."))
GLM4 = (r"\.post_self_attn_layernorm\.", ".after_attention."), (r"\.post_mlp_layernorm\.", ".after_mlp.")
SIZES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
         "max_position_embeddings", "tie_word_embeddings")  # which every family reads
POSITIONS = "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"
ROTATED = (*POSITIONS, "intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps")  # all but OPT read these
GEMMA3 = {  # most of which published configs of Gemma 3 omit
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
    "sliding_window": 4096}
GPT_OSS = {
    "swiglu_limit": 7.0, "sliding_window": 128, "rope_theta": 150000.0, "num_key_value_heads": 8, "head_dim": 64,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096}}
MIXTRAL = (
    (r"\.block_sparse_moe\.", ".mlp."), (r"\.mlp\.gate\.", ".mlp.router."),
    (r"\.w1\.", ".gate_proj."), (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."))
LFM2 = (
    (r"\.operator_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.embedding_norm\.", ".norm."), (r"\.q_layernorm\.", ".q_norm."), (r"\.k_layernorm\.", ".k_norm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."), (r"\.feed_forward\.", ".mlp."), *MIXTRAL[1:])
LFM2_ADJUSTED = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
LFM2_MOE = {"num_dense_layers": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
LFM2_DEFAULTS = {"conv_L_cache": 3, "rope_theta": 1e6, "num_key_value_heads": 8, "norm_eps": 1e-5}
LFM2_FIELDS = {  # as the first published configs name them
    "norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size", "theta": "rope_theta",
    "tie_embedding": "tie_word_embeddings"}
FLAGGED = "use_sliding_window", "sliding_window"
QWEN_WINDOWS = (*FLAGGED, "max_window_layers", "layer_types")
QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32}
GLM = {"partial_rotary_factor": 0.5, "attention_bias": True, "num_key_value_heads": 2, "head_dim": 128}
MULTIPLIERS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
LOCAL_EXPERTS, EXPERTS = ("num_local_experts", "intermediate_size"), ("num_experts", "moe_intermediate_size")

# fields that a family reads, but with which only some values are supported
Supported = Mapping[str, Tuple[Any, ...]]
GATE: Supported = {"hidden_act": ("silu", "swish")}
PLAIN: Supported = {**GATE, "partial_rotary_factor": (1, None)}
UNBIASED: Supported = {**PLAIN, "attention_bias": (False, None)}
LLAMA: Supported = {**UNBIASED, "mlp_bias": (False, None)}
SHORT_CONVOLUTIONS: Supported = {"partial_rotary_factor": (1, None), "conv_bias": (False, None)}
GEMMA: Supported = {
    "hidden_activation": ("gelu_pytorch_tanh",), "partial_rotary_factor": (1, None), "attention_bias": (False, None),
    "use_bidirectional_attention": (False, None)}


DELTA_FIELDS = (
    "layer_types", "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads")
TILED = "tiled_value_heads"  # a field of ours: llama.cpp's files have a delta net's value heads in another order
DELTA_DEFAULTS = {
    "partial_rotary_factor": 0.25, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
PARTIAL: Supported = {**GATE, "attention_bias": (False, None)}
DELTA: dict[str, Any] = {
    "head_norms": True, "norm_weight_plus_one": True, "output_gate": True, "layer_kinds": ("full_attention", DELTA_NET),
    "ignored_rope": ("mrope_section", "mrope_interleaved")}  # of images


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
    scales_windows: bool = True  # scaled rotary positions are also those of layers with a window
    experts: tuple[str, ...] = ()  # config fields of the number of experts per layer, and of their width
    output_gate: bool = False  # each head's output is multiplied by a gate, which is a part of its query
    sinks: bool = False  # each head has a score without a value
    sigmoid_router: bool = False  # experts are chosen by sigmoids and a bias, not by softmax
    clamped: bool = False  # the feed-forward's activation is GPT-OSS's
    layer_kinds: tuple[str, ...] = ("full_attention", "sliding_attention")  # that its layers may be
    ignored_rope: tuple[str, ...] = ()  # fields of rotary positions without effect on text
    names: Renamed = ()  # of tensors
    renamed_fields: Mapping[str, str] = field(default_factory=dict)  # of its configs, and their usual names
    reads: tuple[str, ...] = ()  # fields in addition to those of every family; any other has no effect
    supported: Supported = field(default_factory=lambda: LLAMA)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of omitted fields, not of null ones

    @property
    def fields(self) -> frozenset[str]:
        """The fields of a `config.json` that its class in `transformers` reads, as far as they change what it computes;
        a value that is not `supported` is refused."""
        expert_fields = (*self.experts, "num_experts_per_tok", "num_local_experts") if self.experts else ()
        rotary_fields = ROTATED if self.rotary else ()
        own_fields = frozenset((*self.reads, *self.supported, *self.renamed_fields))
        return own_fields.union(SIZES, rotary_fields, expert_fields)


FAMILIES = {  # Vicuna is a LLaMA, Qwen2.5 a Qwen2
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", reads=("sliding_window",), supported=PLAIN,
                      defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, reads=QWEN_WINDOWS, supported=PLAIN, defaults=QWEN),
    "qwen3": Family("Qwen3ForCausalLM", head_norms=True, reads=QWEN_WINDOWS, supported=UNBIASED,
                    defaults={**QWEN, "head_dim": 128}),
    "mimo": Family("MiMoForCausalLM", qkv_bias=True,  # a Qwen2 with additional layers for multi-token prediction
                   reads=QWEN_WINDOWS, supported=PLAIN, defaults=QWEN),
    "opt": Family("OPTForCausalLM", qkv_bias=True, bias=True, rotary=False, rms=False,
                  gated=False, tied=True, names=OPT, reads=("ffn_dim", "word_embed_proj_dim"),
                  supported={"activation_function": ("relu",), "enable_bias": (True,),
                             "layer_norm_elementwise_affine": (True,),
                             # OPT-350m differs in these
                             "do_layer_norm_before": (True,), "_remove_final_layer_norm": (False, None)}),
    "smollm3": Family("SmolLM3ForCausalLM", tied=True,
                      reads=(*FLAGGED, "layer_types", "no_rope_layers", "no_rope_layer_interval"),
                      defaults={"no_rope_layer_interval": 4, "use_sliding_window": False, "rope_theta": 2e6,
                                "num_key_value_heads": 4}),
    "phi3": Family("Phi3ForCausalLM", reads=("sliding_window",), supported=GATE,
                   defaults={"original_max_position_embeddings": 4096}),
    "olmo2": Family("Olmo2ForCausalLM", before=False, after=True, wide_norms=True, names=AFTER, supported=UNBIASED),
    "olmo3": Family("Olmo3ForCausalLM", before=False, after=True, wide_norms=True, windows=4, scales_windows=False,
                    names=AFTER, reads=("sliding_window", "layer_types"), supported=UNBIASED,
                    defaults={"sliding_window": 4096}),
    "seed_oss": Family("SeedOssForCausalLM", qkv_bias=True, reads=("attention_bias",),
                       supported={**PLAIN, "attention_out_bias": (False, None), "mlp_bias": (False, None)},
                       defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8}),
    "ernie4_5": Family("Ernie4_5ForCausalLM", tied=True, neighbours=True,
                       supported={**PLAIN, "use_bias": (False, None)},
                       defaults={"rope_theta": 5e5, "head_dim": 128, "num_key_value_heads": 2}),
    "granite": Family("GraniteForCausalLM", reads=MULTIPLIERS, defaults={"attention_multiplier": 1.0}),
    "glm": Family("GlmForCausalLM", neighbours=True, reads=("attention_bias",), supported=GATE, defaults=GLM),
    "glm4": Family("Glm4ForCausalLM", neighbours=True, after=True, names=GLM4,
                   reads=("attention_bias",), supported=GATE, defaults=GLM),
    "ministral": Family("MinistralForCausalLM", reads=("sliding_window", "layer_types"), supported=PLAIN,
                        defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "gemma2": Family("Gemma2ForCausalLM", tied=True, after=True, norm_weight_plus_one=True, scaled=True,
                     gelu=True, windows=2, names=SANDWICH, supported=GEMMA,
                     reads=("sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping",
                            "final_logit_softcapping"),
                     defaults={"query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
                               "final_logit_softcapping": 30.0, "num_key_value_heads": 4, "head_dim": 256}),
    "gemma3_text": Family("Gemma3ForCausalLM", tied=True, after=True, norm_weight_plus_one=True, scaled=True,
                          gelu=True, head_norms=True, windows=6, names=SANDWICH, supported=GEMMA, defaults=GEMMA3,
                          reads=("sliding_window", "layer_types", "sliding_window_pattern", "query_pre_attn_scalar",
                                 "final_logit_softcapping", "rope_local_base_freq")),
    "mixtral": Family("MixtralForCausalLM", experts=LOCAL_EXPERTS, names=MIXTRAL,
                      reads=("sliding_window",), supported=PLAIN,
                      defaults={"num_experts_per_tok": 2, "rope_theta": 1e6, "num_key_value_heads": 8}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", head_norms=True, experts=EXPERTS, reads=(*FLAGGED, "norm_topk_prob"),
                        supported={**UNBIASED, "mlp_only_layers": ([], None), "decoder_sparse_step": (1,)},
                        defaults={"norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096,
                                  "num_key_value_heads": 4},
                        names=((r"\.mlp\.gate\.", ".mlp.router."),)),
    "granitemoehybrid": Family(  # Granite 4, as far as it has neither recurrent layers nor experts
        "GraniteMoeHybridForCausalLM", reads=(*MULTIPLIERS, "layer_types"), layer_kinds=("attention",),
        renamed_fields={"shared_intermediate_size": "intermediate_size"},
        names=((r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
               (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj.")),
        supported={**UNBIASED, "num_local_experts": (0,), "position_embedding_type": ("rope",)},
        defaults={"num_local_experts": 8, "position_embedding_type": None, "attention_multiplier": 1.0}),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", wide_norms=True, experts=LOCAL_EXPERTS, sigmoid_router=True,
                         names=(*MIXTRAL, (r"\.e_score_correction_bias", ".expert_bias")), reads=("rotary_dim",),
                         supported=GATE, defaults={"rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8,
                                                   "num_experts_per_tok": 8, "num_local_experts": 256}),
    "lfm2": Family("Lfm2ForCausalLM", tied=True, head_norms=True, layer_kinds=("full_attention", CONVOLUTION),
                   names=LFM2, renamed_fields=LFM2_FIELDS, supported=SHORT_CONVOLUTIONS,
                   defaults={**LFM2_DEFAULTS, **LFM2_ADJUSTED},
                   reads=("layer_types", "full_attn_idxs", "conv_L_cache", *LFM2_ADJUSTED)),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", tied=True, head_norms=True, layer_kinds=("full_attention", CONVOLUTION),
                       experts=EXPERTS, sigmoid_router=True, names=(*LFM2, (r"\.mlp\.gate\.", ".mlp.router.")),
                       renamed_fields=LFM2_FIELDS, defaults={**LFM2_DEFAULTS, **LFM2_MOE},
                       supported={**SHORT_CONVOLUTIONS, "use_expert_bias": (True,)},
                       reads=("layer_types", "conv_L_cache", *LFM2_MOE)),
    "qwen3_next": Family("Qwen3NextForCausalLM", experts=EXPERTS, names=((r"\.mlp\.gate\.", ".mlp.router."),), **DELTA,
                         reads=(*DELTA_FIELDS, "norm_topk_prob", "shared_expert_intermediate_size"),
                         supported={**PARTIAL, "mlp_only_layers": ([], None), "decoder_sparse_step": (1,)},
                         defaults={**DELTA_DEFAULTS, "num_key_value_heads": 2, "norm_topk_prob": True}),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", **DELTA, reads=(*DELTA_FIELDS, TILED), supported=PARTIAL,
                           defaults={**DELTA_DEFAULTS, "num_key_value_heads": 4}),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", experts=EXPERTS, supported=PARTIAL, **DELTA,
                               names=((r"\.mlp\.gate\.", ".mlp.router."),),
                               reads=(*DELTA_FIELDS, TILED, "shared_expert_intermediate_size"),
                               defaults={**DELTA_DEFAULTS, "num_key_value_heads": 2}),
    "gpt_oss": Family("GptOssForCausalLM", qkv_bias=True, bias=True, sinks=True, clamped=True,
                      windows=2, experts=LOCAL_EXPERTS, reads=("sliding_window", "layer_types"),
                      supported={"partial_rotary_factor": (1, None), "attention_bias": (True,),
                                 "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)}, defaults=GPT_OSS),
}
ROTARY: dict[str, tuple[str, ...]] = {  # kinds of rotary positions, and the fields that each requires
    "default": (), "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",), "longrope": ("short_factor", "long_factor"),
}
TRAINED_LENGTH = "original_max_position_embeddings"  # of yarn and longrope; by default max_position_embeddings
YARN = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate")  # optional fields in addition to its factor
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")


def published(name: str, family: Family) -> str:
    """Return the name of one of the decoder's tensors in a checkpoint of its family: `names`, applied backwards."""
    for pattern, llama_name in reversed(family.names):
        name = name.replace(llama_name, pattern.replace("\\", ""))
    return name


def accepted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` that its family reads, under uniform names. Raises ValueError if it is not
    supported."""
    model_type = config.get("model_type") or "llama"
    _refuse_others("model_type", model_type, tuple(FAMILIES))

    family = FAMILIES[model_type]
    if config.get("rope_parameters"):  # then rope_scaling is not omitted, but has another name
        config = {"rope_scaling": None, **config}
    config = {name: value for name, value in {**family.defaults, **config}.items() if name in family.fields}

    # uniform names
    all_rope_fields = _rope_fields(config)
    rope_fields = {name: value for name, value in all_rope_fields.items() if name not in family.ignored_rope}
    check(rope_fields, ROPE, "config.json")
    fields = {**config, "model_type": model_type, **_uniform_rope_fields(config, rope_fields)}
    if family.experts:  # transformers 5 always names their number num_local_experts
        fields[family.experts[0]] = fields.get(family.experts[0]) or fields.get("num_local_experts")
    fields.update((usual_name, fields[name]) for name, usual_name in family.renamed_fields.items()
                  if fields.get(name) is not None)
    if fields.get("rotary_dim"):
        fields["partial_rotary_factor"] = fields["rotary_dim"] / fields["head_dim"]
    if fields.get("block_auto_adjust_ff_dim"):
        fields["intermediate_size"] = _adjusted_width(fields)
    if not family.rotary:  # OPT calls the first ffn_dim, and has no field for the second
        fields.update(intermediate_size=fields.get("ffn_dim"), rms_norm_eps=1e-5)

    # checks
    rope_type = fields["rope_type"]
    _refuse_rope(rope_type, rope_fields)
    _refuse_ambiguous(config, rope_type)
    for name, supported_values in family.supported.items():
        if name in fields:
            _refuse_others(name, fields[name], supported_values)
    for layer_kind in fields.get("layer_types") or ():
        _refuse_others("a layer of layer_types", layer_kind, family.layer_kinds)

    # what must be there
    needed_for_mlp = (*family.experts, "num_experts_per_tok") if family.experts else ("intermediate_size",)
    needs_max_length = rope_type == "longrope" or rope_type == "yarn" and not fields.get(TRAINED_LENGTH)
    needed_for_rope = (*ROTARY[rope_type], *(("max_position_embeddings",) if needs_max_length else ()))
    check(fields, {**CONFIG, **ROPE}, "config.json", needed=(*NEEDED, *needed_for_rope, *needed_for_mlp))

    contradiction = next(_contradictions(fields), "")
    if contradiction:
        raise ValueError(f"config.json says {contradiction}; copy it again from the model")
    return fields


def _adjusted_width(fields: Mapping[str, Any]) -> int:
    """Return the width of LFM2's feed-forward: two thirds of the given one, in whole multiples."""
    width = int(fields["block_ffn_dim_multiplier"] * int(2 * fields["intermediate_size"] / 3))
    multiple: int = fields["block_multiple_of"]
    return -(-width // multiple) * multiple


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions: of `rope_scaling`, or in transformers 5 of `rope_parameters`.

    The latter may be those of the kinds of layers; then they are the fields of layers with full attention.
    """
    parameters = config.get("rope_parameters") or {}
    full_layers = parameters.get("full_attention") or {}
    return {**full_layers, **(config.get("rope_scaling") or ({} if full_layers else parameters))}


def _uniform_rope_fields(config: Mapping[str, Any], rope_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what replaces fields of the config: those of rotary positions, under transformers 4's names."""
    without_effect = {TRAINED_LENGTH: None}  # outside of rope_scaling, but for longrope
    uniform = {**without_effect, **{name: value for name, value in rope_fields.items() if name in ROPE}}
    if "truncate" in rope_fields:
        uniform["truncate"] = bool(rope_fields["truncate"])

    sliding_layers = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    _refuse_others("rope_type of sliding_attention", sliding_layers.get("rope_type"), ("default", None))
    uniform["rope_local_base_freq"] = sliding_layers.get("rope_theta") or config.get("rope_local_base_freq")
    uniform["rope_type"] = rope_fields.get("rope_type") or rope_fields.get("type") or "default"

    if uniform["rope_type"] == "longrope":
        uniform.update(_longrope_fields(config, rope_fields))
    return uniform


def _longrope_fields(config: Mapping[str, Any], rope_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trained length, by preference that outside of `rope_scaling`, and the factor of attention scores."""
    length_outside, factor = config.get(TRAINED_LENGTH), rope_fields.get("factor")
    trained_length = length_outside or rope_fields.get(TRAINED_LENGTH) or config.get("max_position_embeddings") or 0

    fields = {TRAINED_LENGTH: trained_length or None}
    if factor and trained_length > 1 and not length_outside and not rope_fields.get("attention_factor"):
        fields["attention_factor"] = (1 + max(0.0, log(factor) / log(trained_length))) ** 0.5
    return fields


def _refuse_rope(rope_type: str, rope_fields: Mapping[str, Any]) -> None:
    """Raise ValueError if rotary positions are of an unsupported kind, or have fields that are not read."""
    unknown_fields = {name: value for name, value in rope_fields.items() if name not in ROPE and value is not None}
    _refuse_others("rope_scaling", rope_type, tuple(ROTARY))
    _refuse_others("rope_scaling", unknown_fields, ({},))
    _refuse_others("type in rope_scaling", rope_fields.get("type"), (rope_type, None))


def _refuse_ambiguous(config: Mapping[str, Any], rope_type: str) -> None:
    """Raise ValueError if a field inside `rope_scaling` is another outside, since versions of transformers differ in
    which counts."""
    inside, max_length = config.get("rope_scaling") or {}, config.get("max_position_embeddings")
    if not inside:
        return

    length_outside = config.get(TRAINED_LENGTH) or (max_length if rope_type == "longrope" else None)
    length_inside = inside.get(TRAINED_LENGTH) or (max_length if rope_type == "yarn" else None)
    outside_values = {
        "rope_theta": (inside.get("rope_theta"), config.get("rope_theta") or 10000),
        "partial_rotary_factor": (inside.get("partial_rotary_factor"), config.get("partial_rotary_factor") or 1),
        TRAINED_LENGTH: (length_inside, length_outside)}
    if rope_type == "longrope" and config.get(TRAINED_LENGTH) and max_length:
        outside_values["factor"] = inside.get("factor"), max_length / length_outside

    for name, (value, outside_value) in outside_values.items():
        if outside_value is not None:
            _refuse_others(f"{name} in rope_scaling", value, (outside_value, None))


def _refuse_others(name: str, value: Any, supported_values: Sequence[Any]) -> None:
    """Raise ValueError if a field has a value that is not supported."""
    if value not in supported_values:
        advice = " or ".join(repr(each) for each in supported_values if each is not None)
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

    num_key_heads, num_value_heads = (fields.get(f"linear_num_{name}_heads") or 1 for name in ("key", "value"))
    if num_value_heads % num_key_heads:
        yield (f"linear_num_value_heads={num_value_heads}, which is not a multiple of "
               f"linear_num_key_heads={num_key_heads}")

    # experts, and lists of layers
    if family.experts and not 0 < fields["num_experts_per_tok"] <= fields[family.experts[0]]:
        yield (f"num_experts_per_tok={fields['num_experts_per_tok']}, but "
               f"{family.experts[0]}={fields[family.experts[0]]}")
    if fields.get("sliding_window") == 0 and windows({**fields, "sliding_window": 1}, family):
        yield "sliding_window=0, with which no token would see another (without windows it is null)"
    if fields.get("word_embed_proj_dim") not in (None, hidden_size):
        yield f"word_embed_proj_dim={fields['word_embed_proj_dim']}, but hidden_size={hidden_size}"
    for name in ("layer_types", "no_rope_layers"):
        entries, num_layers = fields.get(name) or (), fields["num_hidden_layers"]
        is_same_in_all = len(set(entries)) < 2 and not recurrent(fields)
        if entries and not is_same_in_all and len(entries) != num_layers:
            yield f"{len(entries)} entries in {name}, but num_hidden_layers={num_layers}"


# --- differences between layers ---------------------------------------------------------------------------------------

def windows(fields: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Return the attention window of each layer in positions, 0 for none; empty if no layer has a window."""
    window_size, num_layers = fields.get("sliding_window"), fields["num_hidden_layers"]
    layer_types, is_smollm3 = fields.get("layer_types"), "no_rope_layers" in family.reads
    has_flag = fields.get("use_sliding_window", True) or is_smollm3 and layer_types is not None
    if not window_size or not has_flag:
        return ()

    if layer_types is not None:
        has_window = [layer_type == "sliding_attention" for layer_type in layer_types]
    elif is_smollm3:
        has_window = list(unturned(fields))
    else:
        full_interval = fields.get("sliding_window_pattern") or family.windows
        full_layers = range(full_interval - 1, num_layers, full_interval) if full_interval else ()
        first_window_layer = fields.get("max_window_layers") or 0
        has_window = [layer >= first_window_layer and layer not in full_layers for layer in range(num_layers)]

    return tuple(window_size if slides else 0 for slides in has_window) if any(has_window) else ()


def recurrent(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return for each layer the kind of recurrent layer that it is, or ""; empty if all layers have attention."""
    layer_types, attention_layers = fields.get("layer_types"), fields.get("full_attn_idxs")
    interval, num_layers = fields.get("full_attention_interval"), fields["num_hidden_layers"]
    if layer_types is None and attention_layers is not None:
        layer_types = ["" if layer in attention_layers else CONVOLUTION for layer in range(num_layers)]
    if layer_types is None and interval:
        layer_types = [DELTA_NET if (layer + 1) % interval else "" for layer in range(num_layers)]

    kinds = tuple(layer_type if layer_type in RECURRENT else "" for layer_type in layer_types or ())
    return kinds if any(kinds) else ()


def unturned(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it has no rotary positions; empty if all layers have them."""
    has_rope = fields.get("no_rope_layers")  # 1 for a layer with rotary positions
    interval, num_layers = fields.get("no_rope_layer_interval"), fields["num_hidden_layers"]
    if has_rope is None and interval:
        has_rope = [(layer + 1) % interval for layer in range(num_layers)]
    return tuple(not turns for turns in has_rope or ())
