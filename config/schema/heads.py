"""Published draft heads: the dialects of EAGLE-3, and the keys of their config.json.

Every key is harmless, supported, or refused by name, since an unknown key may change the network.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from config.files import fits
from config.schema.untrusted import short_repr

LAYERS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
COUNTED = "aux_layer_ids_are"  # inputs or outputs: our own key, which a user may add, since no format specifies it
NESTED = "eagle_config"  # in which some heads nest keys that others have at the top
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
VOCAB = ("draft_vocab_size", "truncated_vocab_size")
KIND = "speculators_model_type"
ONLY = {  # keys that change what a head computes, and their only supported values
    "logit_scale": 1, "parallel_draft_step": 1, "pruned_heads": {}, "use_mtp_layernorm": False,
    "next_layer_regular": True, "additional_fc": False, "reuse_target_lm_head": False, KIND: "eagle3",
    "quantization_config": None, "partial_features": False,
}
FIRST_ONLY = {  # of EAGLE-1 and 2
    "num_hidden_layers": 1, "truncated_vocab_size": None, **dict.fromkeys(NORMS, False)}
THIRD = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")  # true only in EAGLE-3
INSIDE = frozenset((*LAYERS, *NORMS, COUNTED, "num_aux_hidden_states"))  # keys that `NESTED` may hold, too
READ = INSIDE.union("""
    model_type hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size rms_norm_eps
    max_position_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor hidden_act attention_bias
    mlp_bias qkv_bias target_hidden_size layer_types sliding_window use_sliding_window
    unrolled_passes num_hidden_layers""".split(), VOCAB, (NESTED,))
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
    num_return_sequences exponential_decay_length_penalty remove_invalid_values
    speculators_config speculators_version embed_requires_grad has_no_defaults_at_init enable_sp_ulysses auto_map
    """.split())


@dataclass(frozen=True)
class HeadDialect:
    """The variant of an EAGLE-3 head; the defaults are those of the first published heads."""

    inner: tuple[int, ...]  # the target's layers of which it reads the inputs; the number of layers: the last output
    norm_before_residual: bool = False  # the residual of its first layer is the normed feature
    norm_before_fc: bool = False  # one norm over all inner features, concatenated
    fc_norm: bool = False  # one norm for each inner feature (EAGLE-3.1)
    norm_output: bool = False  # the feature that it feeds to itself is normed, as its LM head's input (EAGLE-3.1)


def usual_layers(layers: int) -> tuple[int, ...]:
    """Return the layers of which a head reads the inputs by default; empty if the target has too few layers."""
    return (2, layers // 2, layers - 3) if layers >= 7 else ()


def read_dialect(config: Mapping[str, Any], layers: int) -> HeadDialect:
    """Return the dialect of an EAGLE-3 head for a target with `layers` layers; `head_problems` has checked `config`."""
    flat_config = {**config, **(config.get(NESTED) or {})}
    norms = {name: bool(flat_config.get(name)) for name in NORMS}
    return HeadDialect(_inner_layers(flat_config, layers), **norms)


def _inner_layers(flat_config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers of which a head reads the inputs; the input of layer 2 is the output of layer 1.

    A list that equals the default one, counted either way, means the default. Otherwise `COUNTED` decides, and then
    the writer of the file: vLLM and speculators count inputs, SGLang, SpecForge and all others outputs.
    """
    id_lists = [tuple(flat_config[key]) for key in LAYERS if flat_config.get(key)]
    layer_ids = id_lists[0] if id_lists else ()

    default_ids = usual_layers(layers)
    default_as_outputs = tuple(layer - 1 for layer in default_ids)
    if not layer_ids or layer_ids in (default_ids, default_as_outputs):
        return default_ids

    counts_inputs = KIND in flat_config or layer_ids[-1] == layers
    if flat_config.get(COUNTED):
        counts_inputs = flat_config[COUNTED] == "inputs"
    return layer_ids if counts_inputs else tuple(layer_id + 1 for layer_id in layer_ids)


def verifier(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description, in a head in the format of speculators, of the model for which it was trained."""
    writer_config = config.get("speculators_config")
    description = writer_config.get("verifier") if isinstance(writer_config, dict) else None
    return description if isinstance(description, dict) else {}


def head_problems(config: Mapping[str, Any], is_eagle3: bool, layers: int, context: int) -> Iterator[str]:
    """Yield the problems of a head as ends of a sentence, for a target of `layers` layers and a longest `context`."""
    nested_config = config.get(NESTED) or {}
    flat_config = {**config, **nested_config}
    only_values = {**ONLY, **dict.fromkeys(THIRD, is_eagle3)}
    if not is_eagle3:
        only_values.update(FIRST_ONLY)

    # each key
    outer_entries = [(key, value, READ) for key, value in config.items()]
    nested_entries = [(key, value, INSIDE) for key, value in nested_config.items()]
    for key, value, read_keys in outer_entries + nested_entries:
        if value is None or key in HARMLESS or key.startswith("_"):
            continue
        if key in only_values:
            if value != only_values[key]:
                yield only_supported(key, value, repr(only_values[key]))
        elif key not in read_keys:
            yield (f"has the unknown key {key!r}, which may change what the head computes; if it does not, "
                   "delete it there")
        else:
            yield from _value_problems(key, value, is_eagle3)

    # keys together
    if is_eagle3:
        yield from _reach_problems(flat_config, layers)
    yield from _window_problems(config, context)


def _value_problems(key: str, value: Any, is_eagle3: bool) -> Iterator[str]:
    """Yield the problems of the value of a key that is read."""
    if key in LAYERS:
        yield from _layer_problems(key, value, is_eagle3)
    elif key in NORMS and not fits(value, bool):
        yield only_supported(key, value, "true or false")
    elif key == COUNTED and value not in ("inputs", "outputs"):
        yield only_supported(key, value, "inputs or outputs")


def _layer_problems(key: str, layer_ids: Any, is_eagle3: bool) -> Iterator[str]:
    """Yield the problems of a list of layers; an empty list means the default."""
    if not is_eagle3 and layer_ids != []:
        yield f"says {key}, which only an EAGLE-3 head has; take weights and config.json of the same head"
        return

    is_rising = fits(layer_ids, [int]) and sorted(set(layer_ids)) == layer_ids
    if not is_rising or len(layer_ids) == 1 or layer_ids and layer_ids[0] < 0:
        yield only_supported(key, layer_ids, "two or more layers in rising order")


def _reach_problems(flat_config: Mapping[str, Any], layers: int) -> Iterator[str]:
    """Yield problems of layers that the target does not have, or of a number of layers given elsewhere."""
    inner_layers, count = _inner_layers(flat_config, layers), flat_config.get("num_aux_hidden_states")
    if inner_layers and inner_layers[-1] > layers:
        yield (f"reads the inputs of layers {list(inner_layers)}, but the model has {layers}; "
               "take the head for this model")
    if count is not None and count != len(inner_layers or (0, 0, 0)):
        yield only_supported("num_aux_hidden_states", count, f"{len(inner_layers)}, one for each listed layer")


def _window_problems(config: Mapping[str, Any], context: int) -> Iterator[str]:
    """Yield the problems of sliding windows; a window of at least `context` is plain attention."""
    layer_types, window_size = config.get("layer_types"), config.get("sliding_window")
    if layer_types is not None and any(layer_type != "full_attention" for layer_type in layer_types):
        yield only_supported("layer_types", layer_types, "['full_attention']")

    has_window = window_size is not None and config.get("use_sliding_window") is not False
    if has_window and not (isinstance(window_size, int) and window_size >= context):
        yield only_supported("sliding_window", window_size, f"null, use_sliding_window=false or at least {context}")


def only_supported(key: str, value: Any, only_value: str) -> str:
    """Return the problem of a value that is not supported, as the end of a sentence."""
    return (f"says {key}={short_repr(value)}, which is not supported (only {only_value}); "
            "take another head for this model")
