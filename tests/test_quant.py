"""Quantized weights: their errors, equality of split and load, and the same text for every method."""
from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from config.run_config import QUANTIZATIONS, RunConfig
from launch.build import build_lm_head, build_stage
from launch.drafts import build_draft
from launch.run import run
from launch.spec import RankSpec
from launch.split.write import Layout, split
from model.llama import fill
from model.native import packing
from model.native.linear import NativeLinear
from model.weights import blocks, quant, quant_layers
from model.weights.checkpoint import Checkpoint
from model.weights.onednn import Packed
from model.weights.parts import HEAD, Part
from model.weights.quant import (
    BLOCK_SIZE,
    IN_BLOCKS,
    LIBRARY_KINDS,
    kind_on,
    quantize,
    rounded,
    running_quantization,
)
from model.weights.quant_layers import FourBit, Quantized, compress, probe
from pipeline.trace import OFF
from scripts import generate
from tests.checkpoints import refused, same
from tests.json_files import change_json
from tests.saved import here, token_ids
from tests.test_families import MODELS, Saved

pytestmark = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="quantized weights need bitsandbytes")
QUANTIZED = QUANTIZATIONS[1:]
KINDS = (*LIBRARY_KINDS, *blocks.QUANTIZERS)
FAR = {"int8": 0.012, "nf4": 0.11, "fp4": 0.14, "Q8_0": 0.01, "Q4_1": 0.09}  # error of outputs, random weights
FAR_BEHIND = {"int8": 0.05, "int4": 0.6, "nf4": 0.6, "fp4": 0.6}  # and of a layer of large weights
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = "prompt_ids=5,17,40,3,28,11,9,50,2,31,7,7,19"


def split_quantized(saved, folder, quantization, stages="0+4", head=None):
    """The folders of the tiny model's ranks, with quantized weights."""
    return split(saved / "base", folder, stages, head, progress=False, layout=Layout(quantization))


def spec_of(folder, rank=1, dtype="float32", **keys):
    """What a rank of a split builds itself from."""
    return RankSpec(RunConfig(dtype=dtype, **keys), Part(folder / f"stage_{rank}"))


def parameters_of(stage):
    return dict(stage.part.named_parameters())


@pytest.fixture(scope="module")
def quantized(saved, tmp_path_factory):
    """The tiny model, split once for every quantization."""
    out = tmp_path_factory.mktemp("quantized")
    for quantization in QUANTIZED:
        split_quantized(saved, out / quantization, quantization, "0+2+2", saved / "head")
    return out


def linear(inputs, outputs, dtype, bias=True):
    generator = torch.Generator().manual_seed(inputs)
    module = nn.ModuleDict({"linear": nn.Linear(inputs, outputs, bias=bias)})
    fill(module, {f"linear.{name}": torch.randn(p.shape, generator=generator)
                  for name, p in module["linear"].named_parameters()}, dtype, "cpu")
    return module, torch.randn(40, inputs, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("inputs, outputs", [(256, 96), (32, 53)])
def test_a_quantized_linear_is_near_the_plain_one(quantization, inputs, outputs, dtype):
    module, x = linear(inputs, outputs, dtype)
    wanted = module["linear"](x).double()
    compress(module, quantization, dtype)
    got = module["linear"](x)
    assert isinstance(module["linear"], Quantized) == (quantization in LIBRARY_KINDS) and got.dtype == dtype
    assert 0 < (got.double() - wanted).norm() / wanted.norm() < FAR[quantization]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_row_of_int8_is_the_same_in_every_batch(dtype):
    module, x = linear(256, 96, dtype)
    compress(module, "int8", dtype)
    whole = module["linear"](x)
    for rows in (1, 3, 16, 39):
        assert torch.equal(module["linear"](x[:rows]), whole[:rows])


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
@pytest.mark.parametrize("inputs", [48, 64, 32])
def test_the_weights_of_four_bits_are_codes_times_the_scale_of_their_block(quantization, inputs):
    module, _ = linear(inputs, 24, torch.float64)
    weight = module["linear"].weight
    held = quantize(quantization, weight)
    codes = torch.stack((held["weight"] >> 4, held["weight"] & 15), -1).reshape(-1).long()
    values = quant.library().get_4bit_type(quantization, device="cpu")
    wanted = values[codes] * held["scale"].repeat_interleave(BLOCK_SIZE)
    compress(module, quantization, torch.float64)
    assert torch.equal(module["linear"].unfolded(torch.float32), wanted.view(24, inputs))
    blocks = weight.reshape(-1, BLOCK_SIZE)
    assert torch.equal(held["scale"], blocks.abs().amax(1).float())


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
def test_a_kernel_that_reads_four_bits_computes_what_unfolded_weights_do(quantization):
    module, x = linear(256, 96, torch.float32)
    compress(module, quantization, torch.float32)
    wanted, module["linear"].has_kernel = module["linear"](x), True
    assert torch.allclose(module["linear"](x), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("quantization", KINDS)
def test_a_weight_is_quantized_alike_in_pieces(quantization, monkeypatch):
    weight = linear(96, 80, torch.float32)[0]["linear"].weight
    whole = quantize(quantization, weight)
    for module in (quant, blocks):
        monkeypatch.setattr(module, "WEIGHTS_AT_ONCE", 4 * BLOCK_SIZE)
    assert same(quantize(quantization, weight), whole)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_quantized_split_holds_what_loading_would_make(quantization, saved, quantized):
    for rank in (1, 2):
        stages = (build_stage(spec_of(folder, rank, "float64", **keys), OFF)
                  for folder, keys in ((quantized / quantization, {}), (saved / "0+2+2", {"quant": quantization})))
        assert same(*map(parameters_of, stages))
        small, large = [(folder / f"stage_{rank}" / "model.safetensors").stat().st_size
                        for folder in (quantized / quantization, saved / "0+2+2")]
        assert small < 0.6 * large


def test_only_the_layers_linears_are_quantized(quantized):
    forms = {name: part.weights.form(name).dtype
             for part in map(Part, sorted((quantized / "nf4").glob("stage_*")))
             for name in part.weights.names()}
    few = {name for name, dtype in forms.items() if dtype == torch.uint8}
    assert few == {f"model.layers.{i}.{name}_proj.weight" for i in range(4) for name in (
        "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")}
    assert all(forms[name] == torch.float64
               for name in forms.keys() - few if not name.endswith(".scale"))
    head = Checkpoint(quantized / "nf4" / "stage_0" / "eagle")
    assert all(head.form(name).dtype == torch.float64 for name in head.names())


def test_another_kind_is_another_split(saved, tmp_path):
    first = Part(split_quantized(saved, tmp_path, "nf4")[1])
    before = (first.folder / "manifest.json").stat().st_mtime_ns
    split_quantized(saved, tmp_path, "nf4")
    assert (first.folder / "manifest.json").stat().st_mtime_ns == before, "a finished split was written again"
    second = Part(split_quantized(saved, tmp_path, "int8")[1])
    assert (first.quant, second.quant) == ("nf4", "int8") and first.split_id != second.split_id
    second.verify()


def text(folder, tmp_path, *words):
    words = (f"model_dir={folder}", "link=threads", IDS, "ignore_eos=true", "max_new_tokens=20", "seed=3",
             "init_total_token=12", "width=3", "init_depth=3", f"output={tmp_path / 'answer.json'}", *words)
    assert run(generate.GENERATE, words) == 0
    return token_ids(tmp_path / "answer.json")


@pytest.mark.parametrize("setting", [
    "int8 float64 0.8 serial naive", "int4 float64 0.8 pruned continuous", "fp4 float64 0.8 naive pruned",
    "int8 float32 0 continuous pipedec", "nf4 float32 0 serial continuous"])
def test_every_method_writes_the_text_of_ar_over_quantized_stages(setting, saved, quantized, tmp_path):
    quantization, dtype, temperature, *methods = setting.split()
    words = [f"dtype={dtype}", f"temperature={temperature}"]
    wanted = text(quantized / quantization, tmp_path, "pipeline_type=ar", *words)
    assert text(saved / "0+2+2", tmp_path, "pipeline_type=ar", f"quant={quantization}", *words) == wanted
    assert text(saved / "0+2+2", tmp_path, "pipeline_type=ar", *words) != wanted, "nothing was quantized"
    for method in methods:
        got = text(quantized / quantization, tmp_path, f"pipeline_type={method}", "quant_draft=true", *words)
        assert got == wanted, method
    small = ("draft=model", f"draft_dir={saved / 'base'}", "quant_draft=true")
    assert text(quantized / quantization, tmp_path, *small, *words) == wanted


OLDER = ("llama 3.2, tied", "mistral", "qwen2.5", "qwen3", "opt")
NEWER = ("phi3", "granite", "gemma3", "mixtral", "gpt-oss")


@pytest.mark.parametrize("name, quantization", [
    *((name, quantization) for place, name in enumerate(OLDER)
      for quantization in QUANTIZED[place % 2::2]),
    *((name, QUANTIZED[place % 2]) for place, name in enumerate(NEWER))])
def test_every_family_can_be_quantized(name, quantization, tmp_path, monkeypatch):
    class_name, fields = MODELS[name]
    widths = {key: 64 for key in ("hidden_size", "word_embed_proj_dim") if key in fields}  # whole groups of inputs
    monkeypatch.setitem(MODELS, name, (class_name, {**fields, **widths}))
    family = Saved(name, tmp_path)
    split(family.base, tmp_path / "quantized", "0+1+1+2", progress=False, layout=Layout(quantization))
    x, off = torch.arange(12), []
    states = dict.fromkeys((family.parts, tmp_path / "quantized"), x)
    for rank in (1, 2, 3):
        for folder in states:
            stage = build_stage(spec_of(folder, rank, "float64"), OFF)
            stage.cache(0).admit(list(range(12)), [0, *range(11)], 12)
            states[folder] = stage.part(states[folder], x, stage.cache(0))
        plain, rough = states.values()
        off.append(float((rough - plain).norm() / plain.norm()))
        loaded = build_stage(spec_of(family.parts, rank, "float64", quant=quantization), OFF)
        assert same(parameters_of(loaded), parameters_of(stage))
    assert 0 < off[0] < FAR_BEHIND[quantization], off


def test_a_draft_is_quantized_only_when_asked(saved):
    for asked in (False, True):
        spec = spec_of(saved / "0+2+2", 0, quant="nf4", quant_draft=asked)
        lm_head = build_lm_head(spec)
        [network] = build_draft(spec, lm_head).networks
        head = network.network
        kinds = {type(module)
                 for module in head.modules() if isinstance(module, (nn.Linear, Packed, Quantized))}
        assert kinds in ([{FourBit}] if asked else [{nn.Linear}, {Packed}])
        assert not isinstance(lm_head.product, Quantized)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_a_head_is_quantized_to_blocks_when_asked(quantization, kernel, saved):
    specs = [spec_of(saved / "0+2+2", 0, quant_head=asked, kernel=kernel) for asked in ("none", quantization)]
    plain, rough = map(build_lm_head, specs)
    x_TD = torch.randn(7, plain.product.in_features)
    off = (rough(x_TD) - plain(x_TD)).norm() / plain(x_TD).norm()
    assert 0 < float(off) < quant_layers.MAX_ERROR
    assert torch.equal(rough(x_TD)[:1], rough(x_TD[:1])), "a row's bits do not depend on the rows beside it"
    unfolded = rounded(IN_BLOCKS[quantization], specs[0].part.weights.read(HEAD))
    expected = x_TD @ unfolded.t()
    assert (rough(x_TD) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("quantization, form", [("int8", packing.INT8), ("int4", packing.INT4)])
@pytest.mark.parametrize("keys", [{"draft": "eagle"}, {"draft": "model", "draft_dir": "base"}], ids=str)
def test_a_draft_is_computed_from_its_blocks_by_native_kernels(quantization, form, keys, saved):
    draft_keys = {**keys, "draft_dir": str(saved / "base")} if "draft_dir" in keys else keys
    spec = spec_of(saved / "0+2+2", 0, quant=quantization, quant_draft=True, kernel="native", **draft_keys)
    [draft] = build_draft(spec, build_lm_head(spec)).networks

    products = {name: module for name, module in draft.network.named_modules() if isinstance(module, NativeLinear)}
    forms = {name.rpartition(".")[2]: module._weight.form for name, module in products.items()}
    assert forms["o_proj"] == form
    assert forms["down_proj"] == packing.FLOAT32, "its 48 inputs are no whole groups"
    if "draft_dir" in keys:
        assert draft.lm_head.product._weight.form == packing.FLOAT32


def test_auto_is_what_the_split_holds(quantized):
    assert running_quantization("auto", "nf4", "x") == running_quantization("nf4", "nf4", "x") == "nf4"
    assert running_quantization("nf4", "none", "x") == "nf4"
    assert running_quantization("auto", "none", "x") == running_quantization("none", "none", "x") == "none"


def test_int8_and_int4_are_blocks_but_for_int8_on_cuda():
    assert [kind_on(CPU, quantization) for quantization in QUANTIZATIONS] == ["none", "Q8_0", "Q4_1", "nf4", "fp4"]
    assert [kind_on(CUDA, quantization) for quantization in QUANTIZATIONS] == ["none", "int8", "Q4_1", "nf4", "fp4"]


@pytest.mark.parametrize("stored, keys, expected_kinds", [  # what is computed, and quantized to while loading
    ("none", "cpu native int8", ("blocks", "Q8_0")), ("int8", "cpu native int8", ("blocks", "none")),
    ("int4", "cpu native auto", ("blocks", "none")), ("int4", "cpu torch auto", ("none", "none")),
    ("none", "cpu torch int4", ("none", "Q4_1")), ("nf4", "cpu native auto", ("nf4", "none")),
    ("int8", "cuda native auto", ("int8", "int8")), ("none", "cuda native int8", ("int8", "int8")),
    ("int4", "cuda native auto", ("none", "none")), ("none", "cuda native int4", ("none", "Q4_1")),
    ("nf4", "cuda native auto", ("nf4", "none"))])
def test_what_a_rank_does_with_a_split(stored, keys, expected_kinds, saved, quantized):
    device, kernel, quantization = keys.split()
    folder = saved / "0+2+2" if stored == "none" else quantized / stored
    spec = spec_of(folder, device=device, kernel=kernel, quant=quantization)
    assert (spec.quant, spec.quantizes) == expected_kinds


@pytest.mark.parametrize("quantization", IN_BLOCKS)
def test_a_split_of_the_former_form_is_refused(quantization, saved, tmp_path):
    """It has weights in two dimensions, and scales beside them."""
    folder = split_quantized(saved, tmp_path, "nf4")[1]
    change_json(folder / "manifest.json", quant=quantization)
    with refused(f"holds {quantization} weights in a form that is no longer read; split again: python3 "
                 f"split_and_save_models.py MODEL_DIR {tmp_path} --stages 0+4 --quant {quantization}"):
        Part(folder)


@pytest.mark.parametrize("asked, fix", [("none", "without --quant"), ("int8", "with --quant int8")])
def test_another_kind_than_the_split_holds_is_refused(asked, fix, quantized, sentence_of):
    sentence = sentence_of(here, f"model_dir={quantized / 'nf4'}", f"quant={asked}", IDS)
    assert f"holds nf4 weights, which cannot be run with quant={asked}" in sentence and fix in sentence


def test_a_device_that_cannot_compute_them_is_refused_with_the_fix(saved, monkeypatch):
    spec = spec_of(saved / "0+2+2", quant="nf4")
    with monkeypatch.context() as patch:
        patch.setattr(FourBit, "forward", lambda self, x_TD: x_TD * 0)
        with refused("nf4 weights cannot be computed on cpu (the result is incorrect): install"):
            build_stage(spec, OFF)

    def absent():
        raise ImportError("No module named 'bitsandbytes'")

    monkeypatch.setattr(quant, "library", absent)
    with refused("nf4 weights cannot be computed on cpu (No module named 'bitsandbytes'): install the bitsandbytes"):
        build_stage(spec, OFF)
    with refused("nf4 weights cannot be computed"):
        split_quantized(saved, saved / "never", "nf4")
    for quantization in ("none", *blocks.QUANTIZERS):
        probe(quantization, torch.float32, "cpu")
