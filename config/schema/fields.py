"""The fields of a `config.json`, and the kind of value that each may hold, in one table for models and draft heads.

Which of them go together, or are supported, is defined in `families.py`.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Collection, Mapping

from config.files import fits
from config.schema.untrusted import is_name, read_json, short_repr


@dataclass(frozen=True)
class Kind:
    """The values that a field may hold: their description, and a predicate."""

    words: str  # as in "a whole number from 1 to 9"
    fits: Callable[[Any], bool]


def integer(min_value: int, max_value: int) -> Kind:
    """Return the kind of whole numbers from `min_value` to `max_value`, inclusive."""
    return Kind(f"a whole number from {min_value} to {max_value}",
                lambda value: fits(value, int) and min_value <= value <= max_value)


def number(min_value: float, max_value: float) -> Kind:
    """Return the kind of numbers from `min_value` to `max_value`, inclusive; NaN is not one."""
    return Kind(f"a number from {min_value:g} to {max_value:g}",
                lambda value: fits(value, float) and min_value <= value <= max_value)


def one_of(*texts: str) -> Kind:
    """Return the kind of these texts."""
    return Kind(f"one of {', '.join(texts)}", lambda value: fits(value, str) and value in texts)


def list_of(kind: Kind, max_length: int) -> Kind:
    """Return the kind of lists of at most `max_length` values of one kind."""
    return Kind(f"a list of at most {max_length}, each of them {kind.words}",
                lambda value: fits(value, list) and len(value) <= max_length and all(map(kind.fits, value)))


def _by_name(*rows: tuple[Kind, str]) -> dict[str, Kind]:
    """Return a table of fields and their kinds, from rows of a kind and the names of its fields."""
    return {name: kind for kind, names in rows for name in names.split()}


FLAG = Kind("true or false", lambda value: fits(value, bool))
NAME = Kind("a name", is_name)
OBJECT = Kind("an object", lambda value: fits(value, dict))

# Bounds far above those of any model, within which torch can allocate and multiply without overflow.
COUNT = integer(1, 1 << 16)
WIDTH = integer(1, 1 << 20)
ROWS = integer(1, 1 << 24)
TOKEN = integer(0, (1 << 24) - 1)
END_TOKENS = list_of(TOKEN, 1024)
TOKENS = Kind("a token id or a list of them", lambda value: TOKEN.fits(value) or END_TOKENS.fits(value))
WAVE = number(1, 1e12)  # below 1, waves of rotary positions would be shorter than the distance between positions
SCALE, PART, TRAINED = number(1, 1e6), number(1e-6, 1), number(2, 1 << 24)
CAP = number(1e-6, 1e6)
ROWS_OR_NONE = integer(0, 1 << 24)
STRETCHES = list_of(SCALE, 1 << 12)

CONFIG = _by_name(
    (COUNT, """num_hidden_layers num_attention_heads num_key_value_heads head_dim num_experts
     sliding_window_pattern no_rope_layer_interval unrolled_passes conv_L_cache rotary_dim
     full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
     linear_num_value_heads"""),
    (WIDTH, "hidden_size target_hidden_size"),
    (ROWS, """intermediate_size moe_intermediate_size ffn_dim vocab_size draft_vocab_size truncated_vocab_size
     block_ff_dim block_multiple_of shared_intermediate_size shared_expert_intermediate_size
     max_position_embeddings"""),
    # float32 positions are not exact beyond
    (ROWS_OR_NONE, "max_window_layers sliding_window num_dense_layers num_local_experts num_experts_per_tok"),
    (CAP, """swiglu_limit attn_logit_softcapping final_logit_softcapping embedding_multiplier residual_multiplier
     attention_multiplier logits_scaling block_ffn_dim_multiplier routed_scaling_factor"""),
    (FLAG, """use_sliding_window norm_topk_prob tie_word_embeddings tie_embedding block_auto_adjust_ff_dim
     conv_bias use_expert_bias tiled_value_heads"""),
    (OBJECT, "rope_scaling rope_parameters quantization_config eagle_config dflash_config"),
    (WAVE, "rope_theta rope_local_base_freq theta"),
    (NAME, "model_type"), (list_of(NAME, 16), "architectures"), (TOKENS, "eos_token_id"),
    (number(1e-30, 1), "rms_norm_eps norm_eps"), (SCALE, "query_pre_attn_scalar"), (PART, "partial_rotary_factor"),
    (TRAINED, "original_max_position_embeddings"),
    (list_of(NAME, 1 << 16), "layer_types"),
    (list_of(ROWS_OR_NONE, 1 << 16), "full_attn_idxs"),
    (list_of(integer(0, 1), 1 << 16), "no_rope_layers"))
ROPE = _by_name(  # of `rope_scaling` and `rope_parameters`
    (NAME, "rope_type type"), (WAVE, "rope_theta"), (SCALE, "factor beta_fast beta_slow"),
    (FLAG, "truncate"),
    (CAP, "low_freq_factor high_freq_factor attention_factor"), (number(0, 1e6), "mscale mscale_all_dim"),
    (STRETCHES, "short_factor long_factor"), (OBJECT, "full_attention sliding_attention"),
    (TRAINED, "original_max_position_embeddings"), (PART, "partial_rotary_factor"))
GENERATION = {"eos_token_id": TOKENS}
SAMPLING_FIELDS = _by_name(  # recommended by a `generation_config.json`
    (number(0, 1000), "temperature"), (integer(-1, 100_000), "top_k"), (PART, "top_p"), (number(0, 1), "min_p"),
    (FLAG, "do_sample"))


def check(fields: Mapping[str, Any], table: Mapping[str, Kind], source_name: object,
          remedy: str = "copy it again from the model", needed: Collection[str] = ()) -> None:
    """Raise ValueError if a field is not of its kind, or a needed one is missing.

    The sentence begins with `source_name`, a file or what else holds the fields, and ends with `remedy`.
    """
    for name in needed:
        if fields.get(name) is None:
            raise ValueError(f"{source_name} does not give {name}; {remedy}")

    for name, kind in table.items():
        value = fields.get(name)
        if value is not None and not kind.fits(value):
            raise ValueError(f"{source_name} says {name}={short_repr(value)}, which should be {kind.words}; {remedy}")


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with nested fields moved to the top: heads in the format of speculators nest those of
    their layers, and multimodal models those of their text."""
    for outer_name in ("transformer_layer_config", "text_config"):
        nested = config.get(outer_name)
        if isinstance(nested, dict):
            nested_fields = {name: value for name, value in nested.items() if value is not None}
            is_text = outer_name == "text_config"
            nested_fields["architectures"] = None if is_text else config.get("architectures")
            return {**config, **nested_fields, outer_name: None}

    return config


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a model or a head, and check its fields and those of a `generation_config.json`."""
    config_path, generation_path = folder / "config.json", folder / "generation_config.json"
    config = unwrapped(read_json(config_path))

    check(config, CONFIG, config_path)
    for name in ("rope_scaling", "rope_parameters"):
        check(config.get(name) or {}, ROPE, f"{name} in {config_path}")
    if generation_path.is_file():
        check(read_json(generation_path), GENERATION, generation_path)
    return config
