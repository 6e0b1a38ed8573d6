"""Published draft heads that guess a block of tokens in one pass: DFlash, JetSpec and DSpark, by their config.json.

DFlash is arXiv 2602.06036, JetSpec, a DFlash head whose block is causal, 2606.18394, and DSpark 2607.05147. Their
`target_layer_ids` count the outputs of the target's layers.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from config.files import fits
from config.schema.fields import CONFIG
from config.schema.heads import head_problems, only_supported

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"  # architectures
NESTED_KEYS = "dflash_config"  # an optional object in which a DFlash head nests the block's keys
LAYER_IDS, BLOCK_SIZE, MASK_TOKEN = "target_layer_ids", "block_size", "mask_token_id"
BLOCK_SIZES = range(2, 65)
CAUSAL_KEYS = ("causal_head", "causal")  # true for JetSpec, as its authors write it, and as vLLM reads it
MARKOV_RANK, MARKOV_TYPE = "markov_rank", "markov_head_type"
LARGEST_RANK = 8192
# of the training, of the confidence head, which is not read, and of the target
IGNORED_KEYS = ("num_target_layers", "num_anchors", "enable_confidence_head", "confidence_head_with_markov")


@dataclass(frozen=True)
class BlockForm:
    """The form of a head that guesses a block in one pass."""

    inner: tuple[int, ...]  # the target's layers of which it reads the inputs
    size: int  # rows of a block: the known token, then masks
    mask: int  # the token in the place of the guesses
    first_guess: int = 1  # the row whose output is the first guess: 1, the first mask, or 0, the known token (DSpark)
    is_causal: bool = False  # whether a row sees no later row of the block (JetSpec)
    markov_rank: int = 0  # of the bias that each guess adds to the logits of the next (DSpark); 0: none


def is_block(config: Mapping[str, Any]) -> bool:
    """Return whether the config is that of a head that guesses blocks."""
    return bool({DFLASH, DSPARK} & set(config.get("architectures") or []))


def _is_dspark(config: Mapping[str, Any]) -> bool:
    return DSPARK in (config.get("architectures") or [])


def _unnested(config: Mapping[str, Any]) -> dict[str, Any]:
    unnested = {**config, **(config.get(NESTED_KEYS) or {})}
    unnested.pop(NESTED_KEYS, None)
    return unnested


def read_block(config: Mapping[str, Any]) -> BlockForm:
    """Return the form of a head; `block_problems` has checked its config."""
    values = _unnested(config)
    inner_layers = tuple(layer + 1 for layer in values[LAYER_IDS])
    if _is_dspark(config):
        return BlockForm(inner_layers, values[BLOCK_SIZE], values[MASK_TOKEN], 0, markov_rank=values[MARKOV_RANK])

    is_causal = any(values.get(name) for name in CAUSAL_KEYS)
    return BlockForm(inner_layers, values[BLOCK_SIZE], values[MASK_TOKEN], is_causal=is_causal)


def block_problems(config: Mapping[str, Any], layers: int, context: int) -> Iterator[str]:
    """Yield the problems of a head; see `head_problems`."""
    for name, value in (config.get(NESTED_KEYS) or {}).items():  # `check` has only those outside
        kind = CONFIG.get(name)
        if kind and value is not None and not kind.fits(value):
            yield only_supported(name, value, kind.words)

    values = _unnested(config)
    layer_ids, block_size, mask_token = (values.pop(name, None) for name in (LAYER_IDS, BLOCK_SIZE, MASK_TOKEN))
    for name in IGNORED_KEYS:
        values.pop(name, None)
    if _is_dspark(config):
        yield from _markov_problems(values.pop(MARKOV_RANK, None), values.pop(MARKOV_TYPE, None))
    else:
        yield from _causal_problems({name: values.pop(name, None) for name in CAUSAL_KEYS})

    yield from head_problems(values, True, layers, context)
    is_rising = fits(layer_ids, [int]) and layer_ids == sorted(set(layer_ids))
    if not is_rising or not set(layer_ids) <= set(range(layers - 1)) or not layer_ids:
        yield only_supported(LAYER_IDS, layer_ids, f"layers in rising order, from 0 to {layers - 2}")
    if not (fits(block_size, int) and block_size in BLOCK_SIZES):
        yield only_supported(BLOCK_SIZE, block_size, f"{BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}")
    if not (fits(mask_token, int) and mask_token in range(config["vocab_size"])):
        yield only_supported(MASK_TOKEN, mask_token, "a token of the model")


def _causal_problems(causal_values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in causal_values.items():
        if value is not None and not fits(value, bool):
            yield only_supported(name, value, "true or false")


def _markov_problems(bias_size: Any, markov_type: Any) -> Iterator[str]:
    if not (fits(bias_size, int) and 1 <= bias_size <= LARGEST_RANK):
        yield only_supported(MARKOV_RANK, bias_size, f"1 to {LARGEST_RANK}")
    if markov_type != "vanilla":
        yield only_supported(MARKOV_TYPE, markov_type, "'vanilla'")
