"""What the `config.json` of a model or of a draft head of EAGLE may say; the families of models.

It knows nothing about tensors. What `model/llama.py` or `model/drafts/eagle.py` would compute wrongly is refused here,
by name; of a head so is what nobody knows, since it may be the name of another network.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Iterator, Mapping, Sequence

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


# --- draft heads ------------------------------------------------------------------------------------------------------

# Of the library `speculators`, which puts the sizes elsewhere and may norm elsewhere.
SPECULATORS = ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config")
LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"  # where some put what others have at the top
ONLY = {  # keys that change what a head computes, and the one thing that they may say
    "num_hidden_layers": 1, "logit_scale": 1, "num_aux_hidden_states": 3, "parallel_draft_step": 1, "pruned_heads": {},
    "norm_before_residual": False, "norm_before_fc": False, "norm_output": False, "fc_norm": False,
    "use_mtp_layernorm": False, "next_layer_regular": True, "additional_fc": False, "reuse_target_lm_head": False,
}
THIRD = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")  # what EAGLE-3 does alone
READ = frozenset("""
    model_type hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size rms_norm_eps
    max_position_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor hidden_act attention_bias
    mlp_bias qkv_bias quantization_config draft_vocab_size target_hidden_size layer_types sliding_window
    use_sliding_window unrolled_passes""".split())
HARMLESS = frozenset("""
    architectures model_name_or_path target_model_type dtype torch_dtype transformers_version initializer_range
    bias tie_word_embeddings attention_dropout pretraining_tp use_cache max_window_layers
    parallel_draft_heads_num_layers use_bfloat16 torchscript tf_legacy_loss return_dict return_dict_in_generate
    output_attentions output_hidden_states output_scores chunk_size_feed_forward tokenizer_class prefix
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids
    is_decoder is_encoder_decoder tie_encoder_decoder add_cross_attention cross_attention_hidden_size
    finetuning_task task_specific_params problem_type id2label label2id
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences exponential_decay_length_penalty remove_invalid_values""".split())


def head_problems(config: Mapping[str, Any], third: bool, inner: Sequence[int], context: int) -> Iterator[str]:
    """What a head is not, as ends of a sentence that begins with its file.

    `third`: whether it is one of EAGLE-3, whose features are the inputs of the layers `inner`; `context`: the most
    tokens that it will look back on.
    """
    nested = config.get(NESTED) or {}
    only = {**ONLY, **dict.fromkeys(THIRD, third)}
    outer = [pair for pair in config.items() if pair[0] not in READ | {NESTED}]
    for key, value in chain(outer, nested.items()):
        if value is None or key in HARMLESS or key.startswith("_"):
            continue
        if key == LAYERS:
            yield from _layer_problems(value, third, inner)
        elif key not in only:
            yield (f"says {key!r}, of which it is not known whether it changes what the head computes; if it does not, "
                   "delete it there")
        elif value != only[key]:
            yield _only(key, value, repr(only[key]))
    yield from _window_problems(config, context)


def _layer_problems(ids: Any, third: bool, inner: Sequence[int]) -> Iterator[str]:
    """Other layers than those whose inputs a head gets; an empty list leaves them to the reader.

    The first of three shows how a file counts: output of layer 1, or input of layer 2, which is the same thing.
    """
    outputs = [layer - 1 for layer in inner]
    if not third and ids != []:
        yield f"says {LAYERS}, which only a head of EAGLE-3 has; take weights and config.json of one head"
    elif ids not in ([], list(inner), outputs):
        yield _only(LAYERS, ids, f"{list(inner)} is, or {outputs} where outputs are counted")


def _window_problems(config: Mapping[str, Any], context: int) -> Iterator[str]:
    """A head that looks back on a window only; within one window that is plain attention."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        yield _only("layer_types", kinds, "['full_attention']")
    used = window is not None and config.get("use_sliding_window") is not False
    if used and not (isinstance(window, int) and window >= context):
        yield _only("sliding_window", window, f"null, use_sliding_window=false or at least {context}")


def _only(key: str, value: Any, only: str) -> str:
    return f"says {key}={shown(value)}, which is not supported (only {only}); take another head for this model"
