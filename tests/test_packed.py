"""Quantized checkpoints are unfolded to the values of their codes, a tensor at a time, or refused by name."""
from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.weights.unfold import Unfolded
from tests.checkpoints import edited_tensors, refused, same, split_quietly
from tests.json_files import change_json, edited_json
from tests.test_families import Saved

LINEAR = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
          "down_proj.weight", "qkv_proj.weight", "gate_up_proj.weight")
GROUP = 16  # inputs that share a scale


@pytest.fixture(scope="module", params=["llama 3.1", "phi3"])
def plain(request, tmp_path_factory):
    return Saved(request.param, tmp_path_factory.mktemp("plain"))


def words(codes, bits):
    """Pack rows of codes into words of 32 bits, the first codes in the lowest bits."""
    per = 32 // bits
    groups = codes.long().reshape(*codes.shape[:-1], -1, per)
    whole = (groups << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def gptq(weight, bits, shuffled, zero_offset=1):
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    codes = torch.randint(2 ** bits, (outputs, inputs))
    zeros = torch.randint(1, 2 ** bits, (outputs, groups))
    scales = torch.rand(outputs, groups).half()
    group = torch.arange(inputs) // GROUP
    if shuffled:
        group = group[torch.randperm(inputs)]
    made = {"qweight": words(codes, bits).T, "qzeros": words(zeros.T - zero_offset, bits),
            "scales": scales.T, "g_idx": group.int()}
    if shuffled is None:  # as old files have it
        del made["g_idx"]
    off = codes - zeros[:, group]
    return made, (off * scales.float()[:, group]).half()


def awq(weight):
    outputs, inputs = weight.shape
    shape = inputs // GROUP, outputs
    codes, zeros = torch.randint(16, (inputs, outputs)), torch.randint(16, shape)
    scales = torch.rand(shape).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    eights = [x.unflatten(1, (-1, 8))[..., order]
              for x in (codes, zeros)]
    packed = [words(x.flatten(1), 4) for x in eights]
    made = {"qweight": packed[0], "qzeros": packed[1], "scales": scales}
    wide = [x.repeat_interleave(GROUP, 0) for x in (zeros, scales.float())]
    return made, ((codes - wide[0]) * wide[1]).T.half()


def compressed(weight, order=""):
    outputs, inputs = weight.shape
    group = torch.arange(inputs) // GROUP
    if order == "shuffled":
        group = group[torch.randperm(inputs)]
    codes = torch.randint(16, (outputs, inputs))
    scales = torch.rand(outputs, inputs // GROUP).bfloat16()
    made = {"weight_packed": words(codes, 4), "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape)}
    if order:
        made["weight_g_idx"] = group.int() if order == "shuffled" else -torch.ones(inputs).int()
    return made, ((codes - 8) * scales.float()[:, group]).bfloat16()


def bytes_of(weight, dtype, shape, block=None):
    codes = weight.clamp(-100, 100).mul(8).round().to(dtype)
    scale = torch.rand(shape or (1,)).bfloat16()
    blocks = shape or (1, 1)
    tall, wide = block or (-(-size // part) for size, part in zip(weight.shape, blocks))
    spread = scale.float().view(blocks).repeat_interleave(tall, 0)
    spread = spread.repeat_interleave(wide, 1)
    spread = spread[:weight.shape[0], :weight.shape[1]]
    scale_name = "weight_scale_inv" if shape and shape[1] > 1 else "weight_scale"
    return {"weight": codes, scale_name: scale}, (codes.float() * spread).bfloat16()


def flat(packed_weight):
    """The same weight, with its scales in one dimension."""
    stored, meant = packed_weight
    return {name: x.flatten() if name == "weight_scale" else x for name, x in stored.items()}, meant


def blocks_of(weight):
    """Return the number of blocks of 24 rows and 16 columns of a weight."""
    return -(-len(weight) // 24), -(-weight.shape[1] // 16)


FORMS = {
    "gptq": ({"quant_method": "gptq", "bits": 4},
             lambda x: gptq(x, 4, False)),
    "gptq by activations, 8 bits": ({"quant_method": "gptq", "bits": 8, "desc_act": True},
                                    lambda x: gptq(x, 8, True)),
    "gptq, zeros as they are": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
                                lambda x: gptq(x, 4, True, 0)),
    "gptq without an order": ({"quant_method": "gptq"}, lambda x: gptq(x, 4, None)),
    "gptq, other bits in some layers": (  # as GPTQModel's `dynamic` has it
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}},
        lambda x: gptq(x, 8 if len(x) > x.shape[1] else 4, True)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, awq),
    "awq, no version": ({"quant_method": "awq"}, awq),
    "compressed-tensors, int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, compressed),
    "compressed-tensors, int4 by activations": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}, lambda x: compressed(x, "shuffled")),
    "compressed-tensors, int4, no order": ({"quant_method": "compressed-tensors"}, lambda x: compressed(x, "none")),
    "compressed-tensors, int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"},
                                 lambda x: bytes_of(x, torch.int8, (len(x), 1))),
    "compressed-tensors, fp8": ({"quant_method": "compressed-tensors", "format": "float-quantized"},
                                lambda x: bytes_of(x, torch.float8_e4m3fn, None)),
    "fp8, a scale for each row": ({"quant_method": "fp8"},
                                  lambda x: flat(bytes_of(x, torch.float8_e4m3fn, (len(x), 1)))),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [24, 16]},
                      lambda x: bytes_of(x, torch.float8_e4m3fn, blocks_of(x), (24, 16))),
}


def packed(plain, folder, form):
    """Return the model with its linear layers in this form, and with the unfolded weights."""
    said, make = FORMS[form]
    tensors = load_file(plain.base / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if name.endswith(LINEAR)]:
        written, meant[name] = make(tensors.pop(name))
        tensors.update({name.replace("weight", ending): x for ending, x in written.items()})
    extra = {"quantization_config": said}
    for which, content, more in (("packed", tensors, extra), ("meant", meant, {})):
        shutil.copytree(plain.base, folder / which)
        change_json(folder / which / "config.json", **more)
        save_file({name: x.contiguous() for name, x in content.items()}, folder / which / "model.safetensors")
    return Unfolded(folder / "packed"), Unfolded(folder / "meant")


def name_with_end(tensors, end):
    """The first tensor whose name ends so."""
    return next(name for name in tensors if name.endswith(end))


@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_checkpoint_is_unfolded_to_what_its_codes_mean(plain, tmp_path, form):
    got, wanted = packed(plain, tmp_path, form)
    assert sorted(got.names()) == sorted(wanted.names())
    for name in wanted.names():
        assert got.form(name) == wanted.form(name)
        assert torch.equal(got.read(name), wanted.read(name)), name
        assert torch.equal(wanted.map_stored(name), wanted.read(name)), name
    for source in (got, wanted):
        split_quietly(source.folder, tmp_path / f"{source.folder.name} split", "0+2+2")
    for rank in range(3):
        files = [load_file(tmp_path / f"{which} split" / f"stage_{rank}" / "model.safetensors")
                 for which in ("packed", "meant")]
        assert same(*files)


REFUSED = {
    "quant_method='bitsandbytes', which is not supported (only gptq, awq,": {"quant_method": "bitsandbytes"},
    "quant_method=None, which is not": {"bits": 4},
    "gptq with bits=3, which is not supported (only 4, and 8 of gptq); take the model unquantized": {
        "quant_method": "gptq", "bits": 3},
    "awq with bits=8, which": {"quant_method": "awq", "bits": 8},
    "awq with version='gemv', which": {"quant_method": "awq", "version": "gemv"},
    "gptq with checkpoint_format='marlin', which is not supported (only gptq, gptq_v2)": {
        "quant_method": "gptq", "checkpoint_format": "marlin"},
    "compressed-tensors with format='nvfp4-pack-quantized', which": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_another_way_of_quantizing_is_refused_by_name_and_nothing_is_written(plain, tmp_path, sentence):
    shutil.copytree(plain.base, tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", quantization_config=REFUSED[sentence])
    with refused(sentence):
        split_quietly(tmp_path / "model", tmp_path / "out", "2")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form, lost", [("gptq", ".scales"), ("awq", ".qzeros"),
                                        ("compressed-tensors, int4", ".weight_scale")])
def test_a_quantized_checkpoint_that_lacks_a_tensor_is_refused(plain, tmp_path, form, lost):
    source, _ = packed(plain, tmp_path, form)
    with edited_tensors(source.folder) as tensors:
        name = name_with_end(tensors, lost)
        del tensors[name]
    with refused(f"packed lacks {name}, which "):
        split_quietly(source.folder, tmp_path / "out", "2")


def test_zero_points_of_compressed_tensors_are_refused(plain, tmp_path):
    source, _ = packed(plain, tmp_path, "compressed-tensors, int4")
    with edited_tensors(source.folder) as tensors:
        name = name_with_end(tensors, "weight_scale")
        tensors[name.replace("scale", "zero_point")] = torch.zeros(1, dtype=torch.int32)
    with refused("has zero points in addition to scales, which is not supported; take the model unquantized"):
        split_quietly(source.folder, tmp_path / "out", "2")


def test_a_bias_of_zeros_and_scales_of_keys_are_left_out_and_other_biases_refused(plain, tmp_path):
    """Writers of GPTQ add such biases, and those of FP8 scales for the cache."""
    source, _ = packed(plain, tmp_path, "gptq")
    names = source.names()
    with edited_tensors(source.folder) as tensors:
        name = name_with_end(tensors, "o_proj.scales")
        bias_name = name.replace("scales", "bias")
        tensors[bias_name] = torch.zeros(tensors[name].shape[1]).half()
        tensors[name.replace("o_proj.scales", "k_scale")] = torch.ones(1)
    assert sorted(Unfolded(source.folder).names()) == sorted(names)
    split_quietly(source.folder, tmp_path / "out", "2")
    with edited_tensors(source.folder) as tensors:
        tensors[bias_name][3] = 1
    with refused(f"holds {bias_name}, which its config.json has no place for"):
        split_quietly(source.folder, tmp_path / "other", "2")


@pytest.mark.parametrize("packing", ["gptq", "compressed-tensors, int4", "fp8 in blocks"])
def test_packed_weights_without_a_word_on_it_are_named(plain, tmp_path, packing):
    source, _ = packed(plain, tmp_path, packing)
    with edited_json(source.folder / "config.json") as content:
        del content["quantization_config"]
    with refused("of a quantized weight, but its config.json has no quantization_config: add it there"):
        split_quietly(source.folder, tmp_path / "out", "2")


MISFIT, AGAIN = "which does not fit the tensors that belong to it; download", "evenly; download the model again"
INT4, FP8 = "compressed-tensors, int4", "fp8 in blocks"
HARM = {  # form of the checkpoint, the end of a tensor's name, a change to it, and the error message
    "words that are floats": ("gptq", ".qweight", lambda x: x.float(), MISFIT),
    "words of 64 bits": ("gptq", ".qweight", lambda x: x.long(), MISFIT),
    "a scale too many": ("gptq", ".scales", lambda x: torch.cat([x, x[:1]]), MISFIT),
    "groups of too few inputs": ("gptq", ".g_idx", lambda x: x[:3], MISFIT),
    "a group that there is not": ("gptq", ".g_idx", lambda x: x + 1000, "numbered from 0; download the model again"),
    "AWQ's zeros of other groups": ("awq", ".qzeros", lambda x: x[:1], MISFIT),
    "AWQ's scales of other outputs": ("awq", ".scales", lambda x: x[:, :5], MISFIT),
    "packed scales of other outputs": (INT4, ".weight_scale", lambda x: x[:3], MISFIT),
    "no scales": (INT4, ".weight_scale", lambda x: x[:, :0], MISFIT),
    "uneven groups": (INT4, ".weight_scale",
                      lambda x: torch.cat([x] * 3, 1)[:, :7], AGAIN),
    "scales of other rows": ("fp8, a scale for each row", ".weight_scale", lambda x: x[:5], MISFIT),
    "no blocks": (FP8, ".weight_scale_inv", lambda x: x[:0], MISFIT),
    "blocks of another size": (FP8, ".weight_scale_inv", lambda x: torch.cat([x, x]), MISFIT),
}


@pytest.mark.parametrize("packing", ["gptq without an order", "awq"])
def test_groups_that_share_the_inputs_unevenly_are_refused(plain, tmp_path, packing):
    source, _ = packed(plain, tmp_path, packing)
    with edited_tensors(source.folder) as tensors:
        scale_name = name_with_end(tensors, ".scales")
        zeros_name = scale_name.replace("scales", "qzeros")
        tensors.update({name: torch.cat([tensors[name]] * 3)[:7].contiguous() for name in (scale_name, zeros_name)})
    with refused(f"{scale_name} has 7 groups, which do not share", AGAIN):
        split_quietly(source.folder, tmp_path / "out", "2")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Write a checkpoint of each form in HARM."""
    plain = Saved("llama 3.1", tmp_path_factory.mktemp("sound"))
    forms = sorted({form for form, *_ in HARM.values()})
    return {form: packed(plain, tmp_path_factory.mktemp("form"), form)[0].folder for form in forms}


@pytest.mark.parametrize("harm", HARM)
def test_tensors_that_do_not_fit_together_are_refused(sound, tmp_path, harm):
    form, end, change, sentence = HARM[harm]
    shutil.copytree(sound[form], tmp_path / "model")
    with edited_tensors(tmp_path / "model") as tensors:
        name = name_with_end(tensors, end)
        tensors[name] = change(tensors[name]).contiguous()
    with refused(sentence):
        split_quietly(tmp_path / "model", tmp_path / "out", "2")
    assert not (tmp_path / "out" / "stage_1" / "manifest.json").exists()
