"""Draft heads of EAGLE: what their `config.json` may say.

It knows nothing about tensors. What the heads in `model/drafts/eagle.py` would compute wrongly is refused here, by
name; so is what nobody knows, since it may be the name of another network.
"""
from __future__ import annotations

from itertools import chain
from typing import Any, Iterator, Mapping, Sequence

from config.schema.untrusted import shown

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
