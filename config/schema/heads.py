"""Draft heads as they are published: the dialects of EAGLE-3, and the keys of their config.json.

Every key is harmless, supported, or refused by name: what nobody knows may be the name of another network.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from config.files import fits
from config.schema.untrusted import shown

LAYERS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
COUNTED = "aux_layer_ids_are"  # inputs or outputs: may be added to a config.json, since nobody else writes which
NESTED = "eagle_config"  # where some put what others have at the top
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PARTIAL = "partial_features"  # of a head that was trained here for draft=spd
VOCAB = ("draft_vocab_size", "truncated_vocab_size")
KIND = "speculators_model_type"
ONLY = {  # keys that change what a head computes, and the one thing that they may say
    "logit_scale": 1, "parallel_draft_step": 1, "pruned_heads": {}, "use_mtp_layernorm": False,
    "next_layer_regular": True, "additional_fc": False, "reuse_target_lm_head": False, KIND: "eagle3",
    "quantization_config": None,
}
FIRST_ONLY = {  # of EAGLE-1 and 2
    "num_hidden_layers": 1, "truncated_vocab_size": None, **dict.fromkeys((*NORMS, PARTIAL), False)}
THIRD = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")  # what EAGLE-3 does alone
BLOCK, BLOCK_NESTED = "DFlashDraftModel", "dflash_config"  # the architecture of DFlash's heads, and where some say more
BLOCK_KEYS, BLOCK_SIZES = ("target_layer_ids", "block_size", "mask_token_id"), range(2, 65)
INSIDE = frozenset((*LAYERS, *NORMS, COUNTED, "num_aux_hidden_states"))  # what may stand in `NESTED`, too
READ = INSIDE.union("""
    model_type hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size rms_norm_eps
    max_position_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor hidden_act attention_bias
    mlp_bias qkv_bias target_hidden_size layer_types sliding_window use_sliding_window
    unrolled_passes num_hidden_layers""".split(), VOCAB, (NESTED, PARTIAL))
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
class Dialect:
    """How a head of EAGLE-3 differs from the first ones; the defaults are theirs."""

    inner: tuple[int, ...]  # the target's layers whose inputs it reads; the number of layers is the last one's output
    norm_before_residual: bool = False  # the residual of its first layer is the normed feature
    norm_before_fc: bool = False  # one norm over all inner features side by side
    fc_norm: bool = False  # one norm for each of them (EAGLE-3.1)
    norm_output: bool = False  # what it feeds itself is normed, as what its LM head reads (EAGLE-3.1)
    partial: bool = False  # it was trained on rows of which only some of these layers are known (SPD)


@dataclass(frozen=True)
class BlockForm:
    """The form of a head that guesses a block in one pass, as DFlash's are."""

    inner: tuple[int, ...]  # the target's layers whose inputs it reads
    size: int  # tokens of a block, the one before it included
    mask: int  # the token in the place of those that it guesses


def usual_layers(layers: int) -> tuple[int, ...]:
    """The layers of a target whose inputs a head reads that names none; a target too small for that has none."""
    return (2, layers // 2, layers - 3) if layers >= 7 else ()


def read_dialect(config: Mapping[str, Any], layers: int) -> Dialect:
    """The dialect of a head of EAGLE-3 for a target of so many layers; what it says was checked by `head_problems`."""
    given = {**config, **(config.get(NESTED) or {})}
    norms = {name: bool(given.get(name)) for name in NORMS}
    return Dialect(_inner(given, layers), **norms, partial=bool(config.get(PARTIAL)))


def _inner(given: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read; the input of layer 2 is the output of layer 1.

    A list that is the usual one in either way of counting is that. Else `COUNTED` decides, and then who wrote the
    file: vLLM and speculators count inputs, SGLang, SpecForge and all others outputs.
    """
    named = [tuple(given[key]) for key in LAYERS if given.get(key)]
    ids = named[0] if named else ()
    usual = usual_layers(layers)
    if not ids or ids in (usual, tuple(layer - 1 for layer in usual)):
        return usual
    inputs = KIND in given or ids[-1] == layers
    if given.get(COUNTED):
        inputs = given[COUNTED] == "inputs"
    return ids if inputs else tuple(number + 1 for number in ids)


def is_block(config: Mapping[str, Any]) -> bool:
    """Whether a head says that it is one of DFlash's."""
    return BLOCK in (config.get("architectures") or [])


def _block_fields(config: Mapping[str, Any]) -> list[Any]:
    """What DFlash's head says under each of `BLOCK_KEYS`."""
    given = {**config, **(config.get(BLOCK_NESTED) or {})}
    return [given.get(key) for key in BLOCK_KEYS]


def read_block(config: Mapping[str, Any]) -> BlockForm:
    """The form of DFlash's head, whose `target_layer_ids` count outputs; it was checked by `block_problems`."""
    ids, size, mask = _block_fields(config)
    return BlockForm(tuple(number + 1 for number in ids), size, mask)


def block_problems(config: Mapping[str, Any], layers: int, context: int) -> Iterator[str]:
    """What a head of DFlash is not; see `head_problems`."""
    others = {**config, **(config.get(BLOCK_NESTED) or {})}
    ids, size, mask = _block_fields(config)
    for key in (BLOCK_NESTED, *BLOCK_KEYS, "num_target_layers"):
        others.pop(key, None)
    yield from head_problems(others, True, layers, context)
    rising = fits(ids, [int]) and ids == sorted(set(ids))
    if not rising or not set(ids) <= set(range(layers - 1)) or not ids:
        yield _only(BLOCK_KEYS[0], ids, f"layers in rising order, from 0 to {layers - 2}")
    if not (fits(size, int) and size in BLOCK_SIZES):
        yield _only(BLOCK_KEYS[1], size, f"{BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}")
    if not (fits(mask, int) and mask in range(config["vocab_size"])):
        yield _only(BLOCK_KEYS[2], mask, "a token of the model")


def verifier(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a head in the format of speculators says of the model that it was trained for."""
    outer = config.get("speculators_config")
    named = outer.get("verifier") if isinstance(outer, dict) else None
    return named if isinstance(named, dict) else {}


def head_problems(config: Mapping[str, Any], third: bool, layers: int, context: int) -> Iterator[str]:
    """What a head is not, as ends of a sentence; `layers` are its target's, `context` how far it will look back."""
    nested = config.get(NESTED) or {}
    only = {**ONLY, **dict.fromkeys(THIRD, third)}
    if not third:
        only.update(FIRST_ONLY)
    outer = [(key, value, READ) for key, value in config.items()]
    inner = [(key, value, INSIDE) for key, value in nested.items()]
    for key, value, read in outer + inner:
        if value is None or key in HARMLESS or key.startswith("_"):
            continue
        if key in only:
            if value != only[key]:
                yield _only(key, value, repr(only[key]))
        elif key not in read:
            yield (f"says {key!r}, of which it is not known whether it changes what the head computes; if it does not, "
                   "delete it there")
        elif key in LAYERS:
            yield from _layer_problems(key, value, third)
        elif key in (*NORMS, PARTIAL) and not fits(value, bool):
            yield _only(key, value, "true or false")
        elif key == COUNTED and value not in ("inputs", "outputs"):
            yield _only(key, value, "inputs or outputs")
    if third:
        yield from _reach_problems({**config, **nested}, layers)
    if third and config.get(PARTIAL) and not {**config, **nested}.get("fc_norm"):
        yield _only("fc_norm", False, f"true, with {PARTIAL}")
    yield from _window_problems(config, context)


def _layer_problems(key: str, ids: Any, third: bool) -> Iterator[str]:
    """Layers that cannot be meant; an empty list leaves them to the reader."""
    if not third and ids != []:
        yield f"says {key}, which only a head of EAGLE-3 has; take weights and config.json of one head"
        return
    rising = fits(ids, [int]) and sorted(set(ids)) == ids
    if not rising or len(ids) == 1 or ids and ids[0] < 0:
        yield _only(key, ids, "two or more layers in rising order")


def _reach_problems(given: Mapping[str, Any], layers: int) -> Iterator[str]:
    """Layers that its target does not have, or more or fewer of them than the head says elsewhere."""
    inner, count = _inner(given, layers), given.get("num_aux_hidden_states")
    if inner and inner[-1] > layers:
        yield f"reads the inputs of layers {list(inner)}, but the model has {layers}; take the head for this model"
    if count is not None and count != len(inner or (0, 0, 0)):
        yield _only("num_aux_hidden_states", count, f"{len(inner)}, one for each layer that it names")


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
