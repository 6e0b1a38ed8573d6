"""What a stranger put into a model's files is refused in one sentence: configs, indexes, headers, pickles, names.

Nothing in them is executed, nothing leads out of its folder, and nothing of them is printed that a terminal obeys.
"""
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from config.schema.fields import CONFIG, GENERATION, ROPE, read_config
from config.schema.untrusted import read_json, short_repr, stays_inside
from model.llama import LlamaConfig
from model.weights.checkpoint import Checkpoint
from model.weights.parts import check_model, plan_stages
from split_and_save_models import main
from tests.checkpoints import refused, same, save_head, save_llama, save_tensors, split_quietly, tensors_of
from tests.json_files import change_json, json_values, load_json, save_json
from tests.test_families import LLAMA3

DEEP = 20_000
NESTED = {"a list": "[" * DEEP + "]" * DEEP, "an object": '{"a":' * DEEP + "1" + "}" * DEEP,
          "a list that the parser takes": "[" * 100 + "]" * 100}
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The tiny model, whole and sharded, and a draft head, in folders that no test changes."""
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "whole")
    save_llama(folder / "shards", max_shard_size="4KB")
    save_head(folder / "head")
    return folder


@pytest.fixture
def model(models, tmp_path):
    return Path(shutil.copytree(models / "whole", tmp_path / "model"))


@pytest.fixture
def sharded(models, tmp_path):
    return Path(shutil.copytree(models / "shards", tmp_path / "sharded"))


# config.json and generation_config.json


WRONG = [  # fields of a config, and the error messages
    *(({name: value}, f"{name}={value!r}, which should be a whole number from 1")
      for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "draft_vocab_size")
      for value in (-192, 192.5, 0, "192", True, [192], 10 ** 30)),
    *(({name: value}, f"{name}={value!r}, which should be a number from")
      for name in ("rms_norm_eps", "rope_theta") for value in (*NOT_FINITE, 0, -1e-6, "1e-6", True)),
    *(({"rope_parameters": {**LLAMA3, name: value}}, f"{name}={value!r}, which should be a number")
      for name in ("factor", "low_freq_factor", "original_max_position_embeddings")
      for value in (float("nan"), 0, "1")),
    *(({name: value}, f"{name}={value!r}, which should be an object")
      for name in ("rope_scaling", "rope_parameters", "eagle_config") for value in ([], "linear", 0)),
    ({"rope_scaling": {"type": ["linear"]}}, "type=['linear'], which should be a name"),
    *(({"model_type": value}, f"model_type={value!r}, which should be a name") for value in (["llama"], "", "a\x1bb")),
    *(({"architectures": value}, "architectures=") for value in ("LlamaForCausalLM", [3], {})),
    *(({"eos_token_id": value}, f"eos_token_id={value!r}, which should be a token id or a list of them")
      for value in ([[2]], "2", -1, 2.0, [2, None], True)),
    *(({name: value}, f"{name}={value!r}, which should be true or false")
      for name in ("tie_word_embeddings", "use_sliding_window") for value in ("false", 0)),
    ({"sliding_window": -1}, "sliding_window=-1"), ({"partial_rotary_factor": "1"}, "partial_rotary_factor='1'"),
]


@pytest.mark.parametrize("kind", ["whole", "head"])
def test_a_field_of_another_type_or_out_of_its_range_is_refused_by_name(models, tmp_path, kind):
    shutil.copytree(models / kind, tmp_path / "it")
    path = tmp_path / "it" / "config.json"
    before = path.read_text()
    for fields, sentence in WRONG:
        path.write_text(before)
        change_json(path, **fields)
        with refused(sentence) as found:
            Checkpoint(tmp_path / "it")
        assert str(path) in str(found.value), fields


@pytest.mark.parametrize("fields, sentence", [
    ({"num_key_value_heads": 4, "num_attention_heads": 6, "head_dim": 4}, "is not a multiple of num_key_value_heads=4"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
     "hidden_size=16, which is not a multiple of num_attention_heads=5"),
    ({"head_dim": 7}, "head_dim=7, but rotary positions rotate dimensions in pairs"),
    ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor=1.0, which is not below"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "rope_scaling={'mrope_section': [1]}"),
    ({"rope_parameters": {"rope_type": "linear"}, "factor": "8"}, "does not give factor"),
])
def test_fields_that_do_not_go_together_are_refused_with_the_folder(model, fields, sentence):
    change_json(model / "config.json", **fields)
    with refused(sentence) as found:
        check_model(Checkpoint(model))
    assert str(found.value).startswith(str(model))


def test_fields_at_the_edge_of_what_is_sound_are_taken(model):
    change_json(model / "config.json", eos_token_id=[2, 3], sliding_window=None, rope_scaling=None,
                num_key_value_heads=None, rope_theta=1, rms_norm_eps=1, anything={"at": ["all"]})
    check_model(Checkpoint(model))
    change_json(model / "config.json", rope_scaling={}, eos_token_id=None)
    check_model(Checkpoint(model))


@pytest.mark.parametrize("ends", [[[2]], "2", -1])
def test_end_tokens_of_generation_config_are_checked_too(model, ends):
    change_json(model / "generation_config.json", eos_token_id=ends)
    with refused(f"generation_config.json says eos_token_id={ends!r}"):
        Checkpoint(model)


def test_layers_without_end_are_refused_at_once(model):
    for layers, sentence in ((10 ** 12, "num_hidden_layers=1000000000000"), (60_000, "lacks model.layers.3.")):
        change_json(model / "config.json", num_hidden_layers=layers)
        for stages in ("4", "auto:4", "60000"):
            with refused(sentence):
                plan_stages(stages, Checkpoint(model))
        with refused(sentence):
            split_quietly(model, model / "split", "4")


VALUES = json_values(st.text() | st.sampled_from(["llama", "linear", 1, 16]), keys=st.sampled_from(sorted(ROPE)))


@given(st.dictionaries(st.sampled_from(sorted({*CONFIG, "quantization_config", "hidden_act"})),
                       VALUES, max_size=4))
def test_any_config_is_read_or_refused_in_one_sentence(tmp_path_factory, fields):
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 40,
             "intermediate_size": 24, "rms_norm_eps": 1e-6}
    folder = tmp_path_factory.getbasetemp()
    save_json(folder / "config.json", {**sizes, **fields})
    try:
        LlamaConfig.read(read_config(folder))
    except ValueError as error:
        assert str(error).isprintable() and len(str(error)) < 1000


# JSON


FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("what", NESTED)
@pytest.mark.parametrize("name", FILES)
def test_json_nested_without_end_is_refused(models, tmp_path, name, what):
    folder = Path(shutil.copytree(models / ("shards" if name.endswith("index.json") else "whole"), tmp_path / "model"))
    content = NESTED[what].encode()
    (folder / name).write_bytes(content if name.endswith("json")
                                else len(content).to_bytes(8, "little") + content)
    deep = "is nested too deeply (more than 64 lists and objects within each other)"
    with refused(f"{folder / name} {deep if name.endswith('json') else 'is cut off, damaged or not in safetensors'}"):
        Checkpoint(folder)


@pytest.mark.parametrize("content, sentence", [
    (b"\xff\xfe{\x00}\x00", "is not UTF-8 (invalid start byte at byte 0): copy it again"),
    (b'{"a": 1', "is not JSON"), (b"", "is not JSON"),
    (b"null", "is not a JSON object"), (b'"text"', "is not a JSON object"),
])
def test_a_file_without_a_json_object_is_refused(tmp_path, content, sentence):
    (tmp_path / "x.json").write_bytes(content)
    with refused(f"x.json {sentence}"):
        read_json(tmp_path / "x.json")


def test_a_byte_order_mark_is_harmless_and_a_folder_or_a_file_without_end_is_none_to_read(tmp_path, monkeypatch):
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": [1]}')
    assert read_json(tmp_path / "x.json") == {"a": [1]}
    with refused("is a folder, a device or a pipe: copy the folder again"):
        read_json(tmp_path)
    monkeypatch.setattr("config.schema.untrusted.LARGEST", 10)
    with refused("has 13 bytes, too many for a file of its kind"):
        read_json(tmp_path / "x.json")


def test_values_are_shown_short_and_harmless():
    assert short_repr("\x1b[2J\n\u202e") == r"'\x1b[2J\n\u202e'"
    for value in ("x" * 10 ** 6, list(range(10 ** 5)),
                  {"a" * 999: ["b" * 999] * 99}):
        assert len(short_repr(value)) < 300


# Names


OUTSIDE = ["../other/model.safetensors", "/etc/passwd", "a/../../b", "..", "", "a\\b", "a\0b", "\x1b[2J", "x" * 300, 3,
           "\ud800"]


@pytest.mark.parametrize("shard", OUTSIDE, ids=repr)
def test_a_shard_whose_name_leaves_the_folder_is_refused_and_not_read(models, sharded, tmp_path, shard):
    shutil.copytree(models / "whole", tmp_path / "other")
    index = sharded / "model.safetensors.index.json"
    places = load_json(index)["weight_map"]
    change_json(index, weight_map={**places, "lm_head.weight": shard})
    with refused("which is not a file of its folder; take a model that you trust"):
        split_quietly(sharded, tmp_path / "split", "1")
    assert not (tmp_path / "split").exists() and not stays_inside(shard)


@pytest.mark.parametrize("places", [[], {}, None, "model.safetensors"])
def test_an_index_without_a_weight_map_is_refused(sharded, places):
    change_json(sharded / "model.safetensors.index.json", weight_map=places)
    with refused("has no weight_map from tensors to files"):
        Checkpoint(sharded)


def test_a_cache_of_links_is_read_and_a_shard_may_stand_in_a_folder_below(models, tmp_path):
    whole = Checkpoint(models / "shards")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((models / "shards").iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    assert same(tensors_of(Checkpoint(snapshot)), tensors_of(whole))
    shutil.copytree(models / "shards", tmp_path / "below" / "a")
    shutil.copy(models / "shards" / "config.json", tmp_path / "below")
    places = load_json(tmp_path / "below" / "a" / "model.safetensors.index.json")["weight_map"]
    save_json(tmp_path / "below" / "model.safetensors.index.json",
              {"weight_map": {name: f"a/{shard}" for name, shard in places.items()}})

    assert same(tensors_of(Checkpoint(tmp_path / "below")), tensors_of(whole))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_tensor_whose_name_a_terminal_would_obey_is_refused(model, name):
    tensors = {**load_file(model / "model.safetensors"), "\x1b]0;owned\x07": torch.zeros(1)}
    (model / "model.safetensors").unlink()
    save_tensors(tensors, model / name)
    with refused(r"'\x1b]0;owned\x07'"):
        Checkpoint(model)


# The header of a safetensors file


def write_header(path, header, data=24):
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(data))


def entry(shape=(2, 3), offsets=(0, 24), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("header", [
    *({"a": value} for value in (None, [], {"dtype": "F32"})),
    *({"a": entry(dtype=dtype)} for dtype in (["F32"], "F33")),
    *({"a": entry(shape=shape)} for shape in (6, [2, "3"], [2.0, 3.0], [-2, -3], [True, 6], [6, 10 ** 40])),
    *({"a": entry(offsets=offsets)} for offsets in ([0.0, 24.0], [-24, 0], [0, 24, 48], 24, [False, 24])),
    {"a": entry(), "b": entry([1], [20, 24])},
    {"a": entry(offsets=[8, 32])},
    {"a": entry([1], [0, 4]), "b": entry([4], [8, 24])},
    {"a": entry([5], [0, 20])},
    [], {"": entry()},
], ids=str)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(model, header):
    write_header(model / "model.safetensors", header)
    with refused("copy or download it again") as found:
        Checkpoint(model)
    assert str(model / "model.safetensors") in str(found.value)


def test_a_sound_header_is_taken_in_any_order_with_tensors_of_no_bytes(model):
    write_header(model / "model.safetensors", {
        "b": entry([1], [20, 24]),
        "none": entry([0, 7], [20, 20]), "__metadata__": {"format": "pt"},
        "a": entry([5], [0, 20])})
    assert {name: tuple(x.shape) for name, x in tensors_of(Checkpoint(model)).items()} == {
        "a": (5,), "none": (0, 7), "b": (1,)}


def test_a_file_without_tensors_or_with_a_header_of_gigabytes_is_refused(model):
    write_header(model / "model.safetensors", {}, 0)
    with refused("holds no tensor"):
        Checkpoint(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 31)  # which takes no room on a disk
        file.write((1 << 30).to_bytes(8, "little"))
    with refused("is cut off, damaged or not in safetensors"):
        Checkpoint(model)


def test_a_type_that_no_weight_has_is_refused(model):
    path = model / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"BF16"', b'"I16" ', 1))
    with refused("has type I16 instead of BF16 or F16 or F32 or F64"):
        check_model(Checkpoint(model))
    path.write_bytes(data.replace(b'"BF16"', b'"F16" ', 1))  # as wide, and weights may have it: nothing can tell
    check_model(Checkpoint(model))


def test_a_type_that_no_weight_of_a_head_has_is_refused_by_the_split(models, tmp_path):
    folder = Path(shutil.copytree(models / "head", tmp_path / "head"))
    tensors = torch.load(folder / "pytorch_model.bin")
    torch.save({**tensors, "fc.weight": tensors["fc.weight"].to(torch.int32)}, folder / "pytorch_model.bin")
    with refused("fc.weight in"):
        split_quietly(models / "whole", tmp_path / "split", "1", folder)
    assert not (tmp_path / "split").exists()


# .bin files


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def folder(model):
    """A model without its weights, which a test writes into a `.bin`."""
    (model / "model.safetensors").unlink()
    return model


JUNK = {"nothing": b"", "text": b"junk" * 99, "a zip without sense": b"PK\x03\x04" + bytes(99),
        "half a pickle": pickle.dumps([1, 2, 3])[:-3], "opcodes": b"\x80\x02cos\nsystem\n(S'true'\ntR."}


@pytest.mark.parametrize("what", JUNK)
def test_a_bin_file_of_junk_is_refused(folder, what):
    (folder / "pytorch_model.bin").write_bytes(JUNK[what])
    with refused("pytorch_model.bin cannot be read"):
        Checkpoint(folder)


@pytest.mark.parametrize("content, sentence", [
    ([torch.zeros(2)], "holds a list instead of tensors with names"), (torch.zeros(2), "holds a Tensor instead"),
    ({}, "holds no tensor"), ({"a": 3}, "holds no tensor"),
    ({3: torch.zeros(2)}, "holds 3 in an unsupported form"),
    ({"a": torch.zeros(2, dtype=torch.complex64)}, "holds 'a' in an unsupported form"),
    ({"a": torch.zeros(2, device="meta")}, "holds 'a' in an unsupported form"),
])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_bin_file_without_a_table_of_tensors_is_refused(folder, content, sentence, zipped):
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with refused(sentence):
        Checkpoint(folder)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_no_bin_file_is_executed_and_a_torch_that_would_is_not_asked(folder, monkeypatch, zipped, old):
    torch.save({"a": Evil(folder / "done")}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    if old:
        load = torch.load
        monkeypatch.setattr(torch, "load", lambda f, map_location=None: load(f, map_location, weights_only=False))
    with refused("is too old to prevent" if old else "cannot be read"):
        Checkpoint(folder)
    assert not (folder / "done").exists()


def test_the_command_tells_it_in_one_sentence(model, tmp_path, error_of):
    change_json(model / "config.json", hidden_size=192.5)
    printed = error_of(main, [str(model), str(tmp_path / "split"), "--stages", "1"])
    assert "says hidden_size=192.5, which should be a whole number" in printed and printed.count("\n") == 1
    assert set(GENERATION) <= set(CONFIG)


# Other folders and files, named by mistake


def test_a_pointer_of_git_lfs_is_no_damaged_file(model, tmp_path):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    with refused("is only a Git LFS pointer to the file: type git lfs pull there"):
        split_quietly(model, tmp_path / "split", "1")


HEADS = {  # a head given in the wrong place, or one that does not match, and the error message
    "a head as the model": ({}, True, "is a draft head, which needs its model: name the model's folder"),
    "of a larger vocabulary": ({"vocab": 50}, False, "has vocab_size 50, but the model has 40"),
    "of a larger size": ({"hidden": 32}, False, "has hidden_size 32, but the model has 16"),
}


@pytest.mark.parametrize("what", HEADS)
def test_a_head_in_the_place_of_a_model_or_of_another_model_is_refused(models, tmp_path, what):
    sizes, is_model, said = HEADS[what]
    save_head(tmp_path / "own", **sizes)
    named = (tmp_path / "own", None) if is_model else (models / "whole", tmp_path / "own")
    with refused(said):
        split_quietly(named[0], tmp_path / "split", "1", named[1])
    assert not (tmp_path / "split").exists()


def test_a_model_in_the_place_of_a_head_is_refused(models, tmp_path):
    with refused("is not an EAGLE draft head (it has no fc.weight)"):
        split_quietly(models / "whole", tmp_path / "split", "1", models / "whole")


ROTARY = {  # kinds of rotary positions, and the error messages
    "unknown": ({"rope_type": "su", "factor": 2.0}, "rope_scaling='su', which is not supported"),
    "yarn that stretches too far": ({"rope_type": "yarn", "factor": 1e30}, "factor=1e+30, which should be a number"),
    "yarn over equal waves": ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}, "rope_theta=1, which makes all"),
    "longrope of another size": ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
                                 "1 numbers in short_factor, but 8 dimensions rotate in pairs"),
}


@pytest.mark.parametrize("what", ROTARY)
def test_rotary_positions_that_nobody_can_turn_are_refused(model, tmp_path, what):
    scaling, said = ROTARY[what]
    change_json(model / "config.json", rope_scaling=None, rope_parameters=scaling)
    with refused(said):
        split_quietly(model, tmp_path / "split", "1")
    assert not (tmp_path / "split").exists()
