"""A row has the same bits alone and in a tree, so all methods write exactly the same text in every number type."""
from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from config.schema.families import FAMILIES
from launch.timing import random_weights
from model.llama import LlamaConfig, Logits, Scales, Slice, fill
from model.precision import sigmoid, silu, softplus
from model.recurrent import DeltaSizes
from model.weights.onednn import packed
from model.weights.quant_layers import compress, fuse, pack
from tests.same_rows import LENGTH, alone, in_trees

SIZES = LlamaConfig(hidden=192, layers=2, heads=6,
                    kv_heads=2, head_dim=32, intermediate=1536, vocab=200, context=128,
                    eps=1e-6, theta=1e4)
FAMILY = {
    "llama": SIZES,
    "opt": replace(SIZES, family=FAMILIES["opt"], kv_heads=6),
    "gemma2": replace(SIZES, family=FAMILIES["gemma2"],
                      windows=(16, 0), scales=Scales(score_cap=5.0)),
    "gpt_oss": replace(SIZES, family=replace(FAMILIES["gpt_oss"], experts=()),
                       scales=Scales(clamp=7.0)),
    "recurrent": replace(SIZES, family=FAMILIES["qwen3_5_text"], recurrent=("linear_attention", "conv"), num_taps=4,
                         windows=(4, 4), delta=DeltaSizes(key_heads=8, value_heads=16, key_dim=16, value_dim=32)),
}


class Model:
    """Random layers and an LM head in one type; `read` gives the hidden states and logits of rows."""

    def __init__(self, sizes, dtype, kind="none", small=False):
        self.body, self.head = Slice(sizes, 0, 2), Logits(sizes)
        for part in (self.body, self.head):
            fill(part, random_weights(part), dtype, "cpu")
        compress(self.body, kind, dtype)
        fuse(self.body)
        pack(self.body)
        pack(self.head)
        self.cache = sizes.cache(2, 128, torch.empty(0, dtype=dtype), sizes.windows, torch.int8 if small else None)

    def read(self, rows, text):
        """Read rows of node, parent, position and token, of which the first `text` are settled."""
        nodes, parents, positions, tokens = zip(*rows)
        self.cache.admit(nodes, parents, text)
        out_TD = self.body(torch.tensor(tokens), torch.tensor(positions), self.cache)
        return torch.cat((out_TD, self.head(out_TD)), 1)


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def needs_packing(dtype):
    if packed(torch.ones(8, 8, dtype=dtype)) is None:
        pytest.skip("this processor, or torch, has no products with packed weights")


@pytest.mark.parametrize("family, dtype, kind, small", [
    *((family, torch.float32, "none", False) for family in FAMILY),
    *((family, torch.bfloat16, "none", True) for family in ("gemma2", "gpt_oss", "recurrent")),
    ("llama", torch.bfloat16, "Q4_1", False), ("llama", torch.float32, "Q4_1", True),
    ("llama", torch.float32, "Q8_0", False)], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_a_tree(family, dtype, kind, small):
    """Test also with a cache in 8 bits, in which a difference in the last bit would become a whole step."""
    needs_packing(dtype)
    torch.manual_seed(0)
    rng = random.Random(1)
    text = [rng.randrange(200) for _ in range(LENGTH)]
    model = Model(FAMILY[family], dtype, kind, small)
    assert torch.equal(in_trees(model, text, rng, 200), alone(model, text))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outputs, inputs", [(160, 96),
                                             (192, 1536), (1024, 1024)])
def test_a_packed_product_gives_a_row_the_same_bits_beside_any_number_of_others(outputs, inputs, dtype):
    needs_packing(dtype)
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(dtype)
    x_TD = torch.randn(130, inputs).to(dtype)
    product = packed(weight)
    product.bias = torch.nn.Parameter(-product(x_TD)[0], requires_grad=False)  # the last bits of the first row's sums
    whole = product(x_TD)
    for rows in (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 129):
        assert torch.equal(product(x_TD[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("function, by_numpy", [
    (sigmoid, lambda x: 1 / (1 + np.exp(-x))), (silu, lambda x: x / (1 + np.exp(-x))),
    (softplus, lambda x: np.logaddexp(0, x))], ids=["sigmoid", "silu", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 12, 33])
def test_a_sigmoid_of_a_row_has_the_same_bits_whatever_rows_are_beside_it(function, by_numpy, dtype, width):
    """Widths that leave numbers over where a processor takes 4, 8 or 16 at once."""
    x_TD = torch.linspace(-30, 30, 40 * width, dtype=dtype).view(width, 40).t().contiguous()
    whole_TD = function(x_TD)
    np.testing.assert_allclose(whole_TD.double().numpy(), by_numpy(x_TD.double().numpy()), rtol=1e-5, atol=1e-12)
    for row in range(40):
        for rows in (x_TD[row:row + 1], x_TD[max(0, row - 3):row + 1], x_TD.t().contiguous().t()[:row + 1]):
            assert torch.equal(function(rows)[-1], whole_TD[row])
