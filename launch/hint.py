"""A message at the start on what another number type would gain on this machine: measured once, and stored.

The measured products have more weights than any processor's cache holds. They are of one row, which decides the speed
of plain decoding, and of as many rows as a segment of a tree has.
"""
from __future__ import annotations

from contextlib import suppress
from functools import partial
from timeit import repeat
from typing import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from config.files import fits, read_json_file, write_json
from launch.auto import cached, machine
from launch.spec import RankSpec
from model.weights import int4
from model.weights.onednn import packed

LEAST = 512  # width of the narrowest model for which products decide the speed
WEIGHTS = 1 << 24
ROWS = 1, 16  # rows of a product
ROUNDS = 5
GAIN = 0.8  # share of the time in float32 below which a type is a gain
HALF, FOUR = "dtype=bfloat16", "dtype=bfloat16 quant=int4"
Shares = Mapping[str, float]  # of the time in float32, by the words to type for a type
Product = Callable[[Tensor], Tensor]  # multiplies rows with a weight


def hint(spec: RankSpec) -> str:
    """Return the message; empty if a type was chosen, if times are not only this machine's, or if nothing is gained."""
    config = spec.config
    chosen = config.dtype != "auto" or spec.quant != "none" or spec.device.type != "cpu"
    if chosen or config.cluster or config.hosts or spec.sizes.hidden < LEAST:
        return ""
    shares = _remembered(spec.sizes.hidden)
    gains = [f"{share:.2f} of the time with {words}" for words, share in shares.items() if share < GAIN]
    if not gains:
        return ""
    return (f"on this machine products of {' and '.join(map(str, ROWS))} rows take at most {', '.join(gains)} "
            "(measured once); a text may then differ (docs/performance.md)")


def _remembered(width: int) -> Shares:
    place = cached("types", [*machine(), torch.get_num_threads(), width, ROWS])
    with suppress(ValueError, OSError):
        kept: Shares = read_json_file(place, "delete it")
        if fits(kept, {float}) and {HALF} <= kept.keys() <= {HALF, FOUR}:
            return kept
    shares = measured(width)
    with suppress(ValueError):  # then it is measured again at the next start
        write_json(place, shares)
    return shares


def measured(width: int) -> Shares:
    """Return the time of a product in each type with a kernel, relative to float32: the largest ratio over `ROWS`."""
    outputs = WEIGHTS // width // 128 * 128
    weight = torch.randn(outputs, width)
    plain = _product(weight)
    products = {HALF: _product(weight.bfloat16())}
    kernel = int4.fitting("cpu", torch.bfloat16, outputs, width)
    if not kernel.why:
        codes, scale = kernel.pack(*int4.quantize(weight))
        products[FOUR] = partial(kernel, weight=codes, scale=scale)
    shares = dict.fromkeys(products, 0.0)
    for rows in ROWS:
        x_TD = torch.randn(rows, width)
        usual = _least_seconds(plain, x_TD)
        for words, product in products.items():
            share = _least_seconds(product, x_TD.bfloat16()) / usual
            shares[words] = max(shares[words], share)
    return shares


def _product(weight: Tensor) -> Product:
    """Return the product with a plain weight, as a stage computes it."""
    return packed(weight) or partial(F.linear, weight=weight)


def _least_seconds(product: Product, x_TD: Tensor) -> float:
    return min(repeat(partial(product, x_TD), number=1, repeat=ROUNDS))
