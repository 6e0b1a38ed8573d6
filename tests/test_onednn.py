"""Weights that are packed for oneDNN: the same products, once in memory, wherever the processor has them."""
from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch

from config.schema.families import FAMILIES
from launch.timing import random_weights
from model.llama import LlamaConfig, Logits, Slice, fill
from model.weights import onednn
from model.weights.onednn import Packed, packed
from model.weights.quant_layers import compress, fuse, pack
from tests.checkpoints import same
from tests.saved import run_program
from tests.test_bits import needs_packing

SIZES = LlamaConfig(hidden=64, layers=3, heads=4,
                    kv_heads=2, head_dim=16, intermediate=96, vocab=40, context=32,
                    eps=1e-6, theta=1e4)
BIASED = replace(SIZES, family=replace(FAMILIES["llama"], qkv_bias=True, bias=True))


@pytest.fixture(autouse=True)
def forgotten():
    torch.manual_seed(0)
    onednn._known_units.clear()
    yield
    onednn._known_units.clear()


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    """A type whose weights this machine packs."""
    needs_packing(request.param)
    return request.param


def filled(module, dtype):
    fill(module, random_weights(module), dtype, "cpu")
    return module


@pytest.mark.parametrize("sizes", [SIZES, BIASED])
def test_a_packed_slice_computes_what_the_plain_one_does(sizes, dtype):
    body = filled(Slice(sizes, 1, 2), dtype)
    x_TD, pos_T = torch.randn(7, 64).to(dtype), torch.arange(7)

    def computed():
        cache = sizes.cache(1, 32, x_TD)
        cache.admit([*range(7)], [0, *range(6)], 7)
        return body(x_TD, pos_T, cache).float() - x_TD.float()

    plain = computed()
    fuse(body)
    pack(body)
    products = [module for module in body.modules() if isinstance(module, Packed)]
    assert len(products) == 4, "query, key and value; their output; gate and up; down"
    assert float((computed() - plain).norm()) < onednn.CLOSE * float(plain.norm())


def test_packed_weights_are_in_memory_once(dtype):
    body = filled(Slice(SIZES, 1, 2), dtype)
    before = sum(parameter.numel() for parameter in body.parameters())
    fuse(body)
    pack(body)
    assert sum(parameter.numel() for parameter in body.parameters()) == before


def test_a_packed_head_says_what_the_plain_one_does(dtype):
    head = filled(Logits(SIZES), dtype)
    x_TD = torch.randn(5, 64).to(dtype)
    plain = head(x_TD).float()
    pack(head)
    assert isinstance(head.product, Packed)
    assert float((head(x_TD).float() - plain).norm()) < onednn.CLOSE * float(plain.norm())


@pytest.mark.parametrize("other, kind", [(torch.float64, "none"), (torch.bfloat16, "nf4")])
def test_other_types_and_quantized_weights_stay_as_they_are(other, kind):
    if kind != "none":
        pytest.importorskip("bitsandbytes", reason="nf4 needs bitsandbytes")
    body = filled(Slice(SIZES, 1, 2), other)
    compress(body, kind, other)
    fuse(body)
    before = dict(body.named_parameters())
    pack(body)
    assert same(dict(body.named_parameters()), before)


@pytest.mark.parametrize("wrong", ["no such operator", "another product"])
def test_where_it_does_not_work_nothing_is_packed(wrong, monkeypatch):
    def failing(self, x_TK):
        if wrong == "another product":
            return torch.zeros(len(x_TK), self.out_features)
        raise RuntimeError(wrong)

    monkeypatch.setattr(Packed, "forward", failing)
    assert packed(torch.ones(8, 8, dtype=torch.bfloat16)) is None


EACH_BATCH_SIZE = """
import torch
from model.weights.onednn import packed
product = packed(torch.ones(64, 64))
for rows in [*range(66, 166), 66]:
    product(torch.zeros(rows, 64))
"""


def test_kernels_for_many_numbers_of_rows_do_not_fill_the_memory():
    needs_packing(torch.float32)
    environment = {**os.environ, "ONEDNN_VERBOSE": "2"}
    environment.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)  # which this process has set
    shown = run_program(sys.executable, "-c", EACH_BATCH_SIZE, env=environment, check=True).stdout
    created = [line for line in shown.splitlines() if ",create:" in line]
    assert "create:cache_miss" in created[-1], created[-1]  # the first one is forgotten
