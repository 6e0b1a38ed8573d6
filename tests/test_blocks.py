"""Weights stay in the blocks of a GGUF file: on the disk, in memory, and in products, which are llama.cpp's numbers."""
from math import prod
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from config.run_config import RunConfig
from launch.build import build_stage
from launch.memory import PACKED_BYTES, need
from launch.spec import RankSpec
from launch.split.write import Layout, check
from model.native.compiler import library
from model.native.packing import INT8
from model.weights.blocks import BLOCK_TYPES, QUANTIZERS, block_type, coded_weight, plain_shape, quantize, unfold
from model.weights.checkpoint import GGUF_LIST, Checkpoint
from model.weights.parts import Part
from model.weights.quant import IN_BLOCKS, LINEAR_WEIGHT
from model.weights.unfold import Unfolded
from model.whole import NativeWhole, Whole, open_whole
from pipeline.trace import OFF
from tests.checkpoints import refused, same, split_quietly
from tests.json_files import edited_json
from tests.saved import answer_of, save_model
from tests.test_gguf import as_transformers_reads, quantized, unpacked, write
from train.writer import TextWriter

try:
    library()
except ValueError as error:
    NO_KERNELS = f"no native kernels: {error}"
else:
    NO_KERNELS = ""

needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=NO_KERNELS)
of_each_word = pytest.mark.parametrize("quant_word", IN_BLOCKS)
NAMES = [each.name for each in BLOCK_TYPES]
NUM_OUTPUTS, NUM_INPUTS = 40, 512
MIXED = (Kind.Q4_0, Kind.Q6_K, Kind.Q8_0, Kind.Q4_K, Kind.Q5_0, Kind.F16, Kind.Q4_1)


def blocks_of(name):
    """Random weights in blocks of this type."""
    num_bytes = next(each.num_bytes for each in BLOCK_TYPES if each.name == name)
    stored = quantized(Kind[name], (NUM_OUTPUTS, NUM_INPUTS), np.random.default_rng(1))
    return torch.from_numpy(stored.view(np.uint8).reshape(NUM_OUTPUTS, -1, num_bytes).copy())


def described_in(folder, kinds=(Kind.Q4_1,)):
    """A small model as a GGUF file in a folder, and the folder beside it that says where its tensors are."""
    return unpacked(write(folder / "model.gguf", kinds=kinds), "described")


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_that_is_unfolded_has_the_numbers_of_llama_cpp(name):
    blocks = blocks_of(name)
    expected = gguf.dequantize(blocks.numpy().reshape(NUM_OUTPUTS, -1), Kind[name])

    assert plain_shape(blocks.shape) == (NUM_OUTPUTS, NUM_INPUTS)
    assert torch.equal(unfold(blocks), torch.from_numpy(expected.copy()))
    assert torch.equal(coded_weight(blocks[3:5]).unfold(), unfold(blocks)[3:5])


# --- quantizing -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("scale, dtype", [
    (1, torch.float32), (0.02, torch.bfloat16), (1e-6, torch.float32), (0, torch.float32), (300, torch.float16),
    (1, torch.float64)], ids=str)
def test_a_weight_is_quantized_to_the_bytes_of_llama_cpp(name, scale, dtype):
    noise = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=torch.Generator().manual_seed(3))
    weight = (noise * scale + 0).to(dtype)  # there is no -0
    weight[2] = 0.25
    weight[3] = torch.arange(NUM_INPUTS) % 9 - 4  # halves between two codes

    blocks = quantize(name, weight)
    expected = gguf.quantize(weight.float().numpy(), Kind[name])
    assert np.array_equal(blocks.flatten(1).numpy(), expected)
    assert torch.equal(unfold(quantize(name, unfold(blocks))), unfold(blocks)), "quantized again, nothing moves"


@of_each_word
def test_a_quantized_split_holds_blocks_of_llama_cpp_and_other_weights_as_they_were(quant_word, tmp_path):
    save_model(tmp_path / "base")
    split_quietly(tmp_path / "base", tmp_path / "out", "0+2+2", layout=Layout(quant_word))
    source, type_name, num_quantized = Unfolded(tmp_path / "base"), IN_BLOCKS[quant_word], 0
    for part in check(tmp_path / "out"):
        assert part.quant == quant_word
        for name in part.weights.names():
            weight, stored = source.read(name), part.weights.read_stored(name)
            if LINEAR_WEIGHT.search(name) and weight.shape[1] % 32 == 0:
                assert np.array_equal(stored.flatten(1).numpy(), gguf.quantize(weight.float().numpy(), Kind[type_name]))
                num_quantized += 1
            else:
                assert torch.equal(stored, weight), name

    assert num_quantized == 4 * 6, "all linear layers but down_proj, whose 48 inputs are no whole groups"


@of_each_word
def test_a_gguf_file_that_is_quantized_keeps_its_other_blocks(quant_word, tmp_path):
    split_quietly(write(tmp_path / "model.gguf", kinds=MIXED), tmp_path / "out", "0+1+1", layout=Layout(quant_word))
    source = Unfolded(tmp_path / "out" / "whole")
    for part in check(tmp_path / "out"):
        for name in part.weights.names():
            if LINEAR_WEIGHT.search(name):
                assert block_type(part.weights.stored_form(name).shape).name == IN_BLOCKS[quant_word]
            else:
                assert torch.equal(part.weights.read_stored(name), source.read_stored(name)), name


@needs_kernels
@of_each_word
def test_a_split_in_blocks_loads_what_quantizing_at_loading_gives_in_the_memory_that_was_said(quant_word, tmp_path):
    folder = described_in(tmp_path, (Kind.F32,))
    packed_tensors = []
    for name, layout, quant in (("blocks", Layout(quant_word), "auto"), ("plain", Layout(), quant_word)):
        split_quietly(folder, tmp_path / name, "0+2", layout=layout)
        config = RunConfig(quant=quant, kernel="native", dtype="float32", max_length=200)
        spec = RankSpec(config, Part(tmp_path / name / "stage_1"))
        stage = build_stage(spec, OFF)
        packed_tensors.append(dict(enumerate(stage.part._weights.tensors)))

        source = spec.part.weights
        num_weights = sum(prod(source.form(each).shape) for each in source.names() if LINEAR_WEIGHT.search(each))
        num_bytes = sum(x.numel() * x.element_size() for x in stage.part._weights.tensors if x.dim() > 1)
        assert num_bytes == num_weights * PACKED_BYTES[IN_BLOCKS[quant_word]]
        assert need(spec).weights >= num_bytes
    assert same(*packed_tensors)


@needs_kernels
@pytest.mark.parametrize("kernel, words", [("native", ("temperature=1", "seed=3")), ("torch", ("temperature=0",))])
@of_each_word
def test_all_methods_and_stages_write_one_text_with_quantized_weights(quant_word, kernel, words, tmp_path):
    save_model(tmp_path / "base")

    def text(method, folder, *others):
        return answer_of(tmp_path, "prompt_ids=5,17,40,3,28", f"kernel={kernel}", "dtype=float32", "draft=suffix",
                         "max_new_tokens=24", "ignore_eos=true", f"pipeline_type={method}", f"model_dir={folder}",
                         *words, *others)["token_ids"]

    for stages in ("0+4", "0+1+1+2"):
        split_quietly(tmp_path / "base", tmp_path / stages, stages, layout=Layout(quant_word))
    split_quietly(tmp_path / "base", tmp_path / "plain", "0+2+2")
    expected = text("ar", tmp_path / "0+4")
    assert text("ar", tmp_path / "plain", f"quant={quant_word}") == expected
    assert quant_word == "int8" or text("ar", tmp_path / "plain") != expected, "nothing was quantized"
    for method in ("ar", "continuous", "streaming", "pipedec"):
        assert text(method, tmp_path / "0+1+1+2") == expected
    assert len(expected) == 24


# --- products ---------------------------------------------------------------------------------------------------------

@needs_kernels
@pytest.mark.parametrize("names", [*((name,) for name in NAMES), ("Q4_K", "Q6_K"), ("Q8_0", "Q5_0"), ("Q8_0", "F32")])
def test_a_product_is_that_of_the_unfolded_weight_with_one_set_of_bits(names):
    from model.native.compiler import levels
    from model.native.linear import NativeLinear, NativeProducts
    from model.native.structures import Weights

    weights = [blocks_of(name) if name != "F32" else torch.randn(NUM_OUTPUTS, NUM_INPUTS) for name in names]
    plain = torch.cat([unfold(weight) if weight.dtype == torch.uint8 else weight for weight in weights])
    rows = torch.randn(19, NUM_INPUTS, generator=torch.Generator().manual_seed(2))

    def product(level, num_rows):
        products = NativeProducts(2, level)
        joined = NativeLinear.__new__(NativeLinear)
        torch.nn.Module.__init__(joined)
        joined.in_features, joined.out_features = NUM_INPUTS, len(plain)
        joined._products, joined._weights = products, Weights()
        layers = [SimpleNamespace(weight=weight, bias=None) for weight in weights]
        joined._weight = joined._weights.linear_weight(*layers)
        return joined(rows[:num_rows])

    expected = product(levels()[0], 19)
    for level in levels():
        for num_rows in (1, 2, 8, 19):
            assert torch.equal(product(level, num_rows), expected[:num_rows]), level.name
    exact = rows.double() @ plain.double().t()
    assert (expected - exact).norm() < 3e-5 * exact.norm()


@needs_kernels
@pytest.mark.parametrize("words", [("temperature=0",), ("temperature=1", "seed=3")], ids=str)
def test_all_methods_and_stages_write_one_text_with_the_weights_of_a_file(words, tmp_path):
    folder = described_in(tmp_path, MIXED)

    def text(method, stages):
        return answer_of(tmp_path, "template=none", "kernel=native", "draft=suffix", "max_new_tokens=24",
                         "ignore_eos=true", f"pipeline_type={method}", f"stages={stages}",
                         f"model_dir={tmp_path / stages}", *words)["token_ids"]

    for stages in ("0+2", "0+1+1"):
        split_quietly(folder, tmp_path / stages, stages)
    expected = text("ar", "0+2")
    for method in ("ar", "continuous", "streaming"):
        assert text(method, "0+1+1") == expected
    assert len(expected) == 24


@needs_kernels
def test_the_texts_for_a_training_are_those_of_a_run(tmp_path):
    folder = described_in(tmp_path, MIXED)
    split_quietly(folder, tmp_path / "parts", "0+2")
    answer = answer_of(tmp_path, "prompt_ids=5,6,7", "kernel=native", "draft=none", "max_new_tokens=24",
                       "ignore_eos=true", f"model_dir={tmp_path / 'parts'}")

    model = NativeWhole(Unfolded(folder))
    other_prompt = [8] * 9  # the two are written together
    texts = list(TextWriter(model, [], 24, 0.0, 0).write([[5, 6, 7], other_prompt]))
    assert texts[0].ids == answer["token_ids"]


@needs_kernels
def test_a_wide_model_is_opened_in_c_only_if_it_is_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("model.native.structures.WIDEST_FLOAT32", 8)
    save_model(tmp_path / "plain")
    cpu, types = torch.device("cpu"), []
    for folder in (tmp_path / "plain", described_in(tmp_path, MIXED)):
        types.append(type(open_whole(Unfolded(folder), torch.float32, cpu)))
    assert types == [Whole, NativeWhole]


# --- files ------------------------------------------------------------------------------------------------------------

def test_a_split_has_the_size_of_the_file_and_nothing_whole_stays(tmp_path):
    file = write(tmp_path / "model.gguf", kinds=MIXED)
    split_quietly(file, tmp_path / "out", "0+1+1")

    weight_files = [*tmp_path.glob("out/**/*.safetensors")]
    assert sum(path.stat().st_size for path in weight_files) < 1.2 * file.stat().st_size
    assert (tmp_path / "out/whole/model.safetensors").stat().st_size < 0.1 * file.stat().st_size
    assert all(part.quant == "none" and part.has_blocks for part in check(tmp_path / "out"))


def test_a_split_holds_the_numbers_of_the_file(tmp_path):
    file = write(tmp_path / "model.gguf", kinds=MIXED)
    split_quietly(file, tmp_path / "out", "0+1+1")
    file.rename(tmp_path / "moved.gguf")  # a finished split does not need it

    expected = as_transformers_reads(tmp_path / "moved.gguf").state_dict()
    parts = check(tmp_path / "out")
    assert {name for part in parts for name in part.weights.names()} == expected.keys()
    for part in parts:
        for name in part.weights.names():
            assert torch.equal(part.weights.read(name).float(), expected[name]), name


@needs_kernels
@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output.weight"])
def test_a_scale_in_blocks_that_is_no_number_is_refused(tmp_path, name):
    folder = described_in(tmp_path, (Kind.Q8_0,))
    assert NativeWhole(Unfolded(folder)).lm_head.product._weight.form == INT8
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf", "r+").tensors}
    tensors[name][0, :2] = np.array([np.nan], np.float16).view(np.uint8)
    with refused("is not finite (NaN or infinity)"):
        NativeWhole(Unfolded(folder))


def test_a_gguf_file_that_is_gone_is_named(tmp_path):
    folder = described_in(tmp_path)
    (tmp_path / "model.gguf").unlink()
    with refused("described needs ", "model.gguf, which is missing or cut off; copy it there ag"):
        Checkpoint(folder)


@pytest.mark.parametrize("key, value", [
    ("start", -1), ("start", 1 << 47), ("shape", [4, -4]), ("shape", [1 << 30, 1 << 30]), ("dtype", "I64"),
    ("file", "/dev/zero"), ("file", 3), ("turned", None)])
def test_a_damaged_list_of_tensors_is_refused(key, value, tmp_path):
    folder = described_in(tmp_path)
    with edited_json(folder / GGUF_LIST) as content:
        next(iter(content["tensors"].values()))[key] = value
    with pytest.raises(ValueError, match="is damaged; delete its folder|is missing or cut off"):
        Checkpoint(folder)
