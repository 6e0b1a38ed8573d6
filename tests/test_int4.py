"""Weights in int4: their codes, torch's kernels compared with unfolded weights, and rows with bits of their own."""
from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch
from torch import nn

from config.presets import ROOT
from config.run_config import RunConfig
from launch.build import build_stage
from launch.run import run
from launch.spec import RankSpec
from launch.split.write import Layout, split
from launch.timing import random_weights
from model.llama import LlamaConfig, Slice, fill
from model.weights import int4
from model.weights.parts import Part
from model.weights.quant_layers import Int4, compress, fuse, probe
from pipeline.trace import OFF
from scripts import generate
from tests.checkpoints import refused, same

TOY = ROOT / "toy" / "llama"
MOST = 130  # rows
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def forgotten():
    torch.manual_seed(0)
    yield
    int4.kernel.cache_clear()


def layer(inputs, outputs, dtype):
    generator = torch.Generator().manual_seed(outputs)
    module = nn.ModuleDict({"linear": nn.Linear(inputs, outputs)})
    parameters = module["linear"].named_parameters()
    drawn = {f"linear.{name}": torch.randn(p.shape, generator=generator) for name, p in parameters}
    fill(module, drawn, dtype, "cpu")
    weight = module["linear"].weight
    compress(module, "int4", dtype)
    return module["linear"], weight, torch.randn(MOST, inputs, generator=generator).to(dtype)


def kernels():
    """Yield the kernels that this machine can test; ARM's has a portable form."""
    made = int4._x86(), int4._arm()
    for kernel in made:
        with suppress(RuntimeError):
            yield int4.tried(kernel, "cpu")


def test_a_weight_is_its_code_times_the_scale_of_its_group_and_an_offset():
    weight = torch.randn(6, 2 * int4.GROUP)
    weight[2] = 0.25
    pairs, scale = int4.quantize(weight)
    assert pairs.shape == (6, int4.GROUP)
    assert scale.shape == (2, 6, 2) and scale.dtype == torch.bfloat16
    codes = int4.codes(pairs)
    high, low = pairs >> 4, pairs & 15
    assert torch.equal(codes[:, ::2], high)
    assert torch.equal(codes[:, 1::2], low)
    assert int(codes.max()) == int4.LEVELS
    group, row, place = 1, 4, 40
    steps = int(codes[row, place]) - 8
    factor, offset = scale[group, row].double()
    found = int4.unfold(pairs, scale, 64, torch.float64)
    assert float(found[row, place]) == float(steps * factor + offset)
    groups = weight.view(6, 2, -1)
    step = (groups.amax(-1) - groups.amin(-1)) / int4.LEVELS
    far = (found - weight).abs()
    off = far.view(6, 2, -1).amax(-1)
    assert bool((off <= 0.6 * step + 2 ** -9).all()), "more than half a step, and bfloat16's rounding"
    assert torch.equal(found[2].float(), weight[2])


def test_inputs_that_fill_no_group_are_padded_and_cut_off():
    weight = torch.randn(16, 48)
    pairs, scale = int4.quantize(weight)
    assert [*pairs.shape, *scale.shape] == [16, 32, 2, 16, 2]
    assert int4.unfold(pairs, scale, 48, torch.float32).shape == weight.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs, outputs", [(64, 96), (576, 192), (1536, 576)])
def test_a_row_has_the_same_bits_in_every_batch(inputs, outputs, dtype):
    linear, _, x = layer(inputs, outputs, dtype)
    if linear.kernel.why:
        pytest.skip(f"no kernel for int4 here: {linear.kernel.why}")
    whole = linear(x)
    for rows in range(1, MOST + 1):
        assert torch.equal(linear(x[:rows]), whole[:rows])


def test_every_kernel_that_runs_here_computes_what_unfolded_weights_do():
    weight, x = torch.randn(64, 96), torch.randn(5, 96)
    pairs, scale = int4.quantize(weight)
    wanted = x @ int4.unfold(pairs, scale, 96, torch.float32).t()
    for kernel in kernels():
        found = kernel(x, *kernel.pack(pairs, scale))
        assert float((found - wanted).norm() / wanted.norm()) < int4.CLOSE
        half = kernel.pack(pairs[32:], scale[:, 32:])
        assert torch.equal(kernel(x, *half), found[:, 32:])


def test_rows_are_padded_where_a_kernel_lets_them_depend_on_each_other():
    def multiply(x_TK, packed, scale):
        out = kernel.multiply(x_TK, packed, scale)
        return out if len(x_TK) % 4 == 0 else out * (1 + 2 ** -6)

    def exact(x_TK, pairs, scale):
        weight = int4.unfold(pairs, scale, x_TK.shape[1], torch.float64)
        return (x_TK.double() @ weight.t()).float()

    kernel = int4.Kernel(torch.float32, 1, 1,
                         lambda *packed: packed, exact)
    assert int4.tried(kernel, "cpu").unit == 1
    unsteady = int4.replace(kernel, multiply=multiply)
    steady = int4.tried(unsteady, "cpu")
    assert steady.unit == 4
    pairs, scale = int4.quantize(torch.randn(8, 32))
    x = torch.randn(4, 32)
    whole = steady(x, pairs, scale)
    assert torch.equal(steady(x[:3], pairs, scale), whole[:3])
    wrong = int4.replace(kernel, multiply=lambda *args: kernel.multiply(*args) * 2)
    with pytest.raises(RuntimeError, match="its result is incorrect"):
        int4.tried(wrong, "cpu")


@pytest.mark.parametrize("dtype, inputs, outputs, why", [
    (torch.float64, 64, 32, "there is none for float64"),
    (torch.float32, 48, 32, "it needs multiples of 16 outputs and 32 inputs, not 32 and 48"),
])
def test_without_a_kernel_weights_are_unfolded(dtype, inputs, outputs, why, monkeypatch):
    monkeypatch.setattr(int4, "_named", lambda device: int4._x86)
    linear, weight, x = layer(inputs, outputs, dtype)
    if linear.kernel.why != why:
        pytest.skip(f"no kernel for int4 here: {linear.kernel.why}")
    pairs, scale = int4.quantize(weight)
    unfolded = int4.unfold(pairs, scale, inputs, dtype)
    wanted = nn.functional.linear(x, unfolded, linear.bias)
    assert torch.equal(linear(x), wanted)


def blockwise(block, outputs=1):
    """Return a kernel that packs blocks of outputs: whole blocks in reverse order, the rest unchanged."""
    def mixed(pairs):
        whole = len(pairs) // block * block
        blocks = pairs[:whole].view(-1, block, pairs.shape[1])
        return torch.cat((blocks.flip(1).flatten(0, 1), pairs[whole:]))

    def multiply(x_TK, packed, scale):
        weight = int4.unfold(mixed(packed), scale, x_TK.shape[1], torch.float64)
        products = [(row.double() * weight).sum(-1) for row in x_TK]
        return torch.stack(products).float()

    return int4.Kernel(torch.float32, 32, outputs,
                       lambda pairs, scale: (mixed(pairs), scale), multiply, block=block)


def test_the_kernel_of_this_machine_packs_blocks_of_outputs_apart():
    kernel, (outputs, inputs) = int4._x86(), int4.TRIAL_SHAPE
    try:
        pairs, scale = int4.quantize(torch.randn(outputs, inputs))
        whole, _ = kernel.pack(pairs, scale)
    except (AttributeError, RuntimeError):
        pytest.skip("this torch has no kernel")
    parts = [kernel.pack(part, scale)[0] for part in pairs.split(kernel.block)]
    assert torch.equal(torch.cat(parts), whole)


ALL = {"self_attn", "mlp"}


@pytest.mark.parametrize("kind, dtype, unit, kernel, fused", [
    ("none", torch.float64, 16, None, ALL),
    ("int4", torch.float64, 16, None, ALL),
    ("int4", torch.float32, 16, None, None),  # as this machine's kernel wants
    ("int4", torch.float32, 64, None, None),
    ("int4", torch.float32, 16, blockwise(32), ALL),
    ("int4", torch.float32, 16, blockwise(64), set()),
    ("int4", torch.float32, 64, blockwise(64), ALL),
    ("int4", torch.float32, 16, blockwise(16, outputs=64), {"mlp"}),  # of which no part fits, but queries do
])
def test_products_of_the_same_rows_are_put_together_where_that_keeps_them(kind, dtype, unit, kernel, fused,
                                                                         monkeypatch):
    if kernel:
        monkeypatch.setattr(int4, "_named", lambda device: lambda: kernel)
    sizes = LlamaConfig(hidden=64, layers=3, heads=4,
                        kv_heads=2, head_dim=unit, intermediate=6 * unit, vocab=8,
                        context=32, eps=1e-6, theta=1e4)
    body = Slice(sizes, 1, 2)
    fill(body, random_weights(body), dtype, "cpu")
    compress(body, kind, dtype)
    before = {name: parameter.clone() for name, parameter in body.named_parameters()}
    x = torch.randn(MOST, 64, dtype=dtype)
    fuse(body)
    assert same(dict(body.named_parameters()), before)
    blocks = {name: getattr(body.layers["1"], name) for name in ("self_attn", "mlp")}
    assert fused in (None, {name for name, block in blocks.items() if block.fused_product})
    for block in filter(lambda block: block.fused_product, blocks.values()):
        parts = [getattr(block, name) for name in block.fusible]
        for rows in (1, 5, 16, MOST):
            apart = torch.cat([part(x[:rows]) for part in parts], -1)
            torch.testing.assert_close(block.fused_product(x[:rows]), apart, rtol=1e-9, atol=1e-9)
        starts = {part.weight.untyped_storage().data_ptr() for part in parts}
        assert len(starts) == 1, "they are views of one tensor"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The bundled model, which has shapes with a kernel, split in two stages, and shared by two ranks."""
    out = tmp_path_factory.mktemp("toy")
    split(TOY, out / "stages", "0+4+4", progress=False, layout=Layout("int4"))
    halves = Layout("int4", (1, 1))
    split(TOY, out / "shared", "", progress=False, layout=halves)
    return out


def test_a_torch_without_kernels_is_named_at_the_start(toy, monkeypatch, capsys):
    def absent():
        raise AttributeError("no such operator")

    def stage():
        return build_stage(RankSpec(RunConfig(dtype="float32"), Part(toy / "stages" / "stage_1")), OFF)

    stage()
    assert capsys.readouterr().err == ""
    int4.kernel.cache_clear()
    monkeypatch.setattr(int4, "_named", lambda device: absent)
    stage()
    assert capsys.readouterr().err == ("flowspec: rank 1 unfolds int4 weights for every product, which is slow: cpu "
                                       "has no kernel for them here (no such operator)\n")


@pytest.mark.parametrize("form, words, methods", [
    ("stages", ("temperature=0",), ("ar", "serial", "naive", "pruned", "continuous", "streaming", "pipedec")),
    ("stages", ("temperature=0", "quant_head=int4"), ("ar", "serial", "continuous", "streaming")),
    ("stages", ("temperature=0.8", "seed=3"), ("ar", "naive", "continuous", "streaming")),
    ("stages", ("temperature=0.8", "quant_kv=int8"), ("ar", "serial", "continuous", "streaming")),
    ("shared", ("temperature=0",), ("tp", "continuous", "pruned")),
])
def test_every_method_writes_one_text_by_the_kernel(form, words, methods, toy, tmp_path, capsys):
    output = tmp_path / "answer.json"

    def text(method):
        asked = (f"model_dir={toy / form}", "link=threads", "dtype=float32", "draft=suffix", "prompt=Tell a story.",
                 "ignore_eos=true", "max_new_tokens=24", f"pipeline_type={method}", f"output={output}")
        assert run(generate.GENERATE, (*asked, *words)) == 0
        return json.loads(output.read_text())["token_ids"]

    wanted, *others = map(text, methods)
    assert others == [wanted] * len(others)
    assert "unfolds" not in capsys.readouterr().err


def test_what_computes_wrongly_is_refused(monkeypatch):
    monkeypatch.setattr(Int4, "forward", lambda self, x_TD: x_TD * 0)
    with refused("int4 weights cannot be computed on cpu (the result is incorrect): run unquantized weights: "):
        probe("int4", torch.float32, "cpu")
