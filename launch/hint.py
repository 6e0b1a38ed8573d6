"""What another number type would bring on this machine, in a sentence at the start: measured once, and remembered.

Measured is the product of one row with as many weights as no processor's cache holds, for that is what plain decoding
waits for.
"""
from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable, Mapping

import torch
import torch.nn.functional as F

from config.files import fits, whole, write_json
from launch.auto import machine
from launch.spec import RankSpec
from model.weights import int4
from model.weights.onednn import Packed, packable

LEAST = 512  # width of the narrowest model for which products say how fast it is
WEIGHTS = 1 << 24
ROUNDS = 5
GAIN = 0.8  # of the time: what takes more is no gain
HALF, FOUR = "dtype=bfloat16", "dtype=bfloat16 quant=int4"
Shares = Mapping[str, float]  # of the time in float32, by the words that one would type


def hint(spec: RankSpec, place: Path | None = None) -> str:
    """The sentence; empty where a type was chosen, times are not this machine's, or nothing is gained.

    What was measured is kept in `place`, or else in the user's cache.
    """
    config = spec.config
    chosen = config.dtype != "auto" or spec.quant != "none" or spec.device.type != "cpu"
    if chosen or config.cluster or config.hosts or spec.sizes.hidden < LEAST:
        return ""
    shares = _remembered(spec.sizes.hidden, place or _usual_place())
    gains = [f"{share:.2f} of its time with {words}" for words, share in shares.items() if share < GAIN]
    if not gains:
        return ""
    return (f"on this machine a product of one row takes {', '.join(gains)} (measured once); a text may then differ "
            "(docs/performance.md)")


def _remembered(width: int, place: Path) -> Shares:
    about = [*machine(), str(torch.get_num_threads()), str(width)]
    with suppress(ValueError, OSError):
        kept = whole(place, "delete it")
        if fits(kept, {"about": [str], "shares": dict}) and kept["about"] == about:
            if all(fits(share, float) for share in kept["shares"].values()):
                known = (words for words in (HALF, FOUR) if words in kept["shares"])
                return {words: kept["shares"][words] for words in known}
    shares = measured(width)
    with suppress(ValueError):  # then it is measured again at the next start
        write_json(place, {"about": about, "shares": shares})
    return shares


def _usual_place() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "flowspec" / "types.json"


def measured(width: int) -> Shares:
    """The time of one row's product in each type over that in float32; those without a kernel are left out."""
    outputs = WEIGHTS // width // 128 * 128
    weight = torch.randn(outputs, width)
    x_TD = torch.randn(1, width)
    half, half_TD = weight.bfloat16(), x_TD.bfloat16()
    packed: Callable[..., torch.Tensor] | None = Packed(half) if packable(half) else None
    products: dict[str, Callable[[], torch.Tensor]] = {
        "": lambda: F.linear(x_TD, weight),
        HALF: lambda: packed(half_TD) if packed else F.linear(half_TD, half)}
    kernel = int4.fitting("cpu", torch.bfloat16, outputs, width)
    if isinstance(kernel, int4.Kernel):
        codes = kernel.pack(*int4.quantize(weight))
        products[FOUR] = lambda: kernel(half_TD, *codes)
    took = {words: min(_seconds(product) for _ in range(ROUNDS))
            for words, product in products.items()}
    return {words: took[words] / took[""] for words in products if words}


def _seconds(product: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    product()
    return time.perf_counter() - start
