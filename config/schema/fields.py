"""The fields of a `config.json`: what each may hold, in one table for models and for draft heads.

It knows nothing about which of them go together, or are supported: that is said in `families.py`.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Collection, Mapping

from config.files import fits
from config.schema.untrusted import is_name, read_json, shown


@dataclass(frozen=True)
class Kind:
    """What a field may hold, in words and as a question."""

    words: str
    fits: Callable[[Any], bool]


def whole(low: int, high: int) -> Kind:
    """The whole numbers from one to another, both of them included."""
    return Kind(f"a whole number from {low} to {high}", lambda value: fits(value, int) and low <= value <= high)


def number(low: float, high: float) -> Kind:
    """All numbers from one to another, both of them included; NaN is none of them."""
    return Kind(f"a number from {low:g} to {high:g}", lambda value: fits(value, float) and low <= value <= high)


def one_of(*texts: str) -> Kind:
    """One of some texts."""
    return Kind(f"one of {', '.join(texts)}", lambda value: fits(value, str) and value in texts)


def list_of(kind: Kind, most: int) -> Kind:
    """A list of at most so many values, all of one kind."""
    return Kind(f"a list of at most {most}, each of them {kind.words}",
                lambda value: fits(value, list) and len(value) <= most and all(map(kind.fits, value)))


FLAG = Kind("true or false", lambda value: fits(value, bool))
NAME = Kind("a name", is_name)
OBJECT = Kind("an object", lambda value: fits(value, dict))

# What torch can still allot or multiply without an overflow; no model comes near.
COUNT = whole(1, 1 << 16)
WIDTH = whole(1, 1 << 20)
ROWS = whole(1, 1 << 24)
TOKEN = whole(0, (1 << 24) - 1)
END_TOKENS = list_of(TOKEN, 1024)
TOKENS = Kind("a token id or a list of them", lambda value: TOKEN.fits(value) or END_TOKENS.fits(value))
WAVE = number(1, 1e12)  # below 1, the waves of rotary positions would be shorter than the step from one to the next
SCALE, PART = number(1, 1e6), number(0, 1)
CAP = number(1e-6, 1e6)
ROWS_OR_NONE = whole(0, 1 << 24)
STRETCHES = list_of(SCALE, 1 << 12)

CONFIG = {
    "architectures": list_of(NAME, 16), "model_type": NAME,
    "hidden_size": WIDTH, "intermediate_size": ROWS, "ffn_dim": ROWS, "vocab_size": ROWS, "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT, "num_key_value_heads": COUNT, "head_dim": COUNT,
    "max_position_embeddings": ROWS,  # positions are float32, which counts no further
    "sliding_window": whole(0, 1 << 24), "use_sliding_window": FLAG,
    "rms_norm_eps": number(1e-30, 1), "rope_theta": WAVE, "rope_scaling": OBJECT, "rope_parameters": OBJECT,
    "layer_types": list_of(one_of("full_attention", "sliding_attention"), 1 << 16), "max_window_layers": ROWS_OR_NONE,
    "num_experts": COUNT, "num_local_experts": COUNT, "num_experts_per_tok": COUNT, "moe_intermediate_size": ROWS,
    "norm_topk_prob": FLAG, "swiglu_limit": CAP, "quantization_config": OBJECT,
    "sliding_window_pattern": COUNT, "rope_local_base_freq": WAVE, "no_rope_layer_interval": COUNT,
    "no_rope_layers": list_of(whole(0, 1), 1 << 16), "query_pre_attn_scalar": SCALE,
    "attn_logit_softcapping": CAP, "final_logit_softcapping": CAP, "embedding_multiplier": CAP,
    "residual_multiplier": CAP, "attention_multiplier": CAP, "logits_scaling": CAP,
    "partial_rotary_factor": PART, "tie_word_embeddings": FLAG, "qkv_bias": FLAG, "eos_token_id": TOKENS,
    # a head's
    "draft_vocab_size": ROWS, "truncated_vocab_size": ROWS, "target_hidden_size": WIDTH, "eagle_config": OBJECT,
    "unrolled_passes": COUNT,
}
ROPE = {  # of `rope_scaling` and `rope_parameters`
    "rope_type": NAME, "type": NAME, "rope_theta": WAVE, "factor": SCALE,
    "low_freq_factor": number(1e-6, 1e6), "high_freq_factor": number(1e-6, 1e6),
    "beta_fast": SCALE, "beta_slow": SCALE,
    "mscale": number(0, 1e6), "mscale_all_dim": number(0, 1e6),
    "attention_factor": CAP, "truncate": FLAG, "short_factor": STRETCHES, "long_factor": STRETCHES,
    "full_attention": OBJECT, "sliding_attention": OBJECT,
    "original_max_position_embeddings": number(1, 1 << 24), "partial_rotary_factor": PART,
}
GENERATION = {"eos_token_id": TOKENS}


def check(given: Mapping[str, Any], table: Mapping[str, Kind], where: object,
          remedy: str = "copy it again from the model", needed: Collection[str] = ()) -> None:
    """Raise ValueError if a field does not hold what the table says, or a field that is `needed` is not there.

    `where` and `remedy` are how the sentence begins and ends.
    """
    for name in needed:
        if given.get(name) is None:
            raise ValueError(f"{where} does not give {name}; {remedy}")
    for name, kind in table.items():
        value = given.get(name)
        if value is not None and not kind.fits(value):
            raise ValueError(f"{where} says {name}={shown(value)}, which should be {kind.words}; {remedy}")


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json` at the top, where a head in the format of speculators nests those of its layers,
    and a model that also sees those of its text."""
    for where in ("transformer_layer_config", "text_config"):
        inner = config.get(where)
        if isinstance(inner, dict):
            said = {name: value for name, value in inner.items() if value is not None}
            said["architectures"] = config.get("architectures") if where != "text_config" else None
            return {**config, **said, where: None}
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model or a head; its fields are checked, and those of a `generation_config.json` too."""
    path, generation = folder / "config.json", folder / "generation_config.json"
    config = unwrapped(read_json(path))
    check(config, CONFIG, path)
    for name in ("rope_scaling", "rope_parameters"):
        rotary = config.get(name) or {}
        check(rotary, ROPE, f"{name} in {path}")
    if generation.is_file():
        check(read_json(generation), GENERATION, generation)
    return config
