"""Checkpoints of every layout are read tensor by tensor, and files are written atomically."""
import hashlib
import os
import zipfile
from itertools import accumulate, combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model.weights import checkpoint
from model.weights.checkpoint import WORD_BYTES, WORDS_PER_PAGE, Checkpoint, TensorForm, checksum, writing
from model.weights.parts import EMBED, HEAD, assign, check_model, plan_stages
from model.weights.split import balance, is_split_as, parse_stages
from tests.checkpoints import refused, same, save_llama, tensors_of
from tests.json_files import load_json

NORM = "model.norm.weight"
LAYOUTS = {
    "one safetensors file": {},
    "safetensors shards": {"max_shard_size": "4KB"},
    "one .bin file": {"bins": True},
    ".bin shards": {"bins": True, "max_shard_size": "4KB"},
}


@pytest.fixture
def model(tmp_path):
    save_llama(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_same_tensors(tmp_path, options):
    whole = save_llama(tmp_path, **options)
    source = Checkpoint(tmp_path)
    assert same(tensors_of(source), whole)
    assert all(source.form(name) == TensorForm(whole[name].dtype, tuple(whole[name].shape))
               for name in source.names())
    assert source.config["vocab_size"] == 40
    assert len(source.files) > 1 or "max_shard_size" not in options


@pytest.mark.parametrize("lacking", ["zip", "mmap"])
def test_a_bin_file_that_cannot_be_mapped_is_read_whole(tmp_path, monkeypatch, lacking):
    whole = save_llama(tmp_path, bins=True)
    if lacking == "zip":
        torch.save(whole, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        load = torch.load
        monkeypatch.setattr(torch, "load", lambda f, map_location=None, weights_only=False: load(
            f, map_location=map_location, weights_only=weights_only))
    assert same(tensors_of(Checkpoint(tmp_path)), whole)


def test_every_type_and_shape_survives_the_writer(tmp_path):
    tensors = {f"x.{dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.uint8, torch.bool)}
    tensors.update(number=torch.tensor(2.5), nothing=torch.empty(0, 4),
                   turned=torch.rand(3, 5).t())
    forms = {name: TensorForm(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    with writing(tmp_path / "model.safetensors", forms) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)
    data = (tmp_path / "model.safetensors").read_bytes()
    sums = {name: checksum(bytearray(x.contiguous().reshape(-1).view(torch.uint8).tolist()))
            for name, x in tensors.items()}
    assert file.entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "checksums": sums}
    assert same(load_file(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text("{}")
    source = Checkpoint(tmp_path)

    assert same(tensors_of(source), tensors)
    assert same({name: source.map_stored(name) for name in source.names()}, tensors)


def test_a_checksum_finds_every_changed_bit_and_pages_in_another_order():
    page = WORD_BYTES * WORDS_PER_PAGE
    data = bytearray(i * i % 251 for i in range(3 * page + 5))
    whole, damaged = checksum(data), []
    for at in (0, 1, page - 1, page, 2 * page + 77, 3 * page, len(data) - 1):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            damaged.append(changed)
    first, second, rest = data[:page], data[page:2 * page], data[2 * page:]
    damaged += [second + first + rest, bytearray(page) + second + rest, first + first + rest, data[:-1]]

    assert whole not in map(checksum, damaged)
    assert whole == checksum(bytearray(data)), "the same bytes have the same checksum"


def test_a_writer_that_is_interrupted_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("old")
    with pytest.raises(RuntimeError), writing(path,
                                              {"a": TensorForm(torch.float32, (2,))}) as file:
        file.write("a", torch.zeros(2))
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# Bad input


def test_a_missing_folder_and_a_folder_without_weights_are_refused(tmp_path):
    with refused("there is no folder"):
        Checkpoint(tmp_path / "nowhere")
    with refused("holds no weights"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with refused("config.json is a file; name its folder, or a GGUF file"):
        Checkpoint(tmp_path / "config.json")


@pytest.mark.parametrize("name, step", [
    ("stage_0/manifest.json", "is a split model: name it with model_dir="), ("m.Q4_1.gguf", "name the file"),
    ("consolidated.00.pth", "convert_llama_weights_to_hf.py"), ("adapter_model.safetensors", "merge_and_unload"),
    ("weights.safetensors", "save_pretrained"), ("model.onnx", "holds a model in ONNX"),
    ("checkpoint-5/model.safetensors", "name the folder of one of them"), ("model.pt", "save_pretrained"),
    ("tf_model.h5", "holds no weights; one of model.safetensors, model")])
def test_a_model_of_another_form_is_refused_with_the_step_from_there(tmp_path, name, step):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    with refused(step):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name, length, sentence", [
    *(("model.safetensors", length, "is cut off") for length in (4, 100, -8)),
    *(("pytorch_model.bin", length, "cannot be read") for length in (0, 100, -8))])
def test_a_file_that_is_cut_off_is_refused(tmp_path, name, length, sentence):
    save_llama(tmp_path, bins=name.endswith(".bin"))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:length])
    with refused(sentence):
        Checkpoint(tmp_path)


def test_a_shard_that_is_missing_and_a_shard_that_lacks_a_tensor_are_refused(tmp_path):
    save_llama(tmp_path, max_shard_size="4KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / load_json(index)["weight_map"][NORM]
    shard.rename(tmp_path / "elsewhere")
    with refused(f"{shard} is missing, but {index.name} names it"):
        Checkpoint(tmp_path)
    save_file({"other": torch.zeros(1)}, shard)
    with refused(f"{shard} does not hold"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_refused_with_its_name_and_file(tmp_path, monkeypatch, dtype, broken):
    monkeypatch.setattr(checkpoint, "ELEMENTS_AT_ONCE", 4)
    tensors = {"good": torch.full((3, 3), torch.finfo(dtype).max, dtype=dtype),
               "bad": torch.zeros(3, 3, dtype=dtype),
               "ids": torch.arange(3), "nothing": torch.zeros(0, 3, dtype=dtype)}
    tensors["bad"][2, 2] = broken
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = Checkpoint(tmp_path)

    assert all(torch.equal(source.read_finite(name), tensors[name])
               for name in ("good", "ids", "nothing"))
    with refused(f"bad in {tmp_path / 'model.safetensors'} is not finite (NaN or infinity); download the model again"):
        source.read_finite("bad")


@pytest.mark.parametrize("key, value, sentence", [
    ("architectures", ["GPT2LMHeadModel"], "holds a GPT2LMHeadModel, which is not supported"),
    ("vocab_size", 41, "has shape (40, 16) instead of (41, 16)"),
    ("hidden_size", None, "does not give hidden_size"),
    ("num_hidden_layers", 4, "lacks model.layers.3.input_layernorm.weight"),
])
def test_a_model_that_would_run_wrongly_is_refused(model, key, value, sentence):
    source = Checkpoint(model)
    check_model(source)
    source.config[key] = value
    with refused(sentence):
        check_model(source)


# Assignment of tensors to ranks


def counts_of(stages):
    return [int(count) for count in stages.split("+")]


@pytest.mark.parametrize("text, counts", [
    ("0+1+1+6", "0+1+1+6"), ("0+8", "0+8"), ("1", "0+8"), ("4", "0+2+2+2+2"), ("3", "0+2+3+3"),
    ("8", "0+1+1+1+1+1+1+1+1")])
def test_a_split_is_written_as_layers_per_rank_or_as_a_number_of_stages(text, counts):
    assert parse_stages(text, 8) == counts_of(counts)


@pytest.mark.parametrize("text, sentence", [
    ("4+4", "is not possible: give the layers of every rank, as 0+2+2+2+2, where rank 0 has none"),
    ("0+2+2", "adds up to 4 layers, but the model has 8; try 0+4+4"),
    ("0+9+9", "adds up to 18 layers"),
    ("0+4+0+4", "and the others at least one"),
    ("9", "the model has 8 layers, so choose 1 to 8"),
    *((text, "is not possible: give the layers") for text in ("0", "", "two", "0+2+", "0+-8+16")),
])
def test_a_bad_split_is_refused_with_the_fix(text, sentence):
    with refused(sentence):
        parse_stages(text, 8)


@given(st.integers(1, 60), st.data())
def test_near_equal_shares_use_every_layer_and_larger_ones_come_last(layers, data):
    shares = parse_stages(str(data.draw(st.integers(1, layers))), layers)
    assert shares[0] == 0 and sum(shares) == layers
    assert shares == sorted(shares) and shares[-1] - shares[1] <= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9),
       st.data())
def test_a_split_by_bytes_has_the_smallest_largest_stage_that_is_possible(loads, data):
    shares = data.draw(st.integers(1, len(loads)))

    def largest(ends):
        return max(sum(loads[a:b])
                   for a, b in zip((0, *ends), (*ends, len(loads))))

    counts = balance(loads, [1] * shares)
    assert len(counts) == shares and min(counts) >= 1 and sum(counts) == len(loads)
    assert largest([*accumulate(counts)][:-1]) == min(map(largest, combinations(range(1, len(loads)), shares - 1)))


@pytest.mark.parametrize("text, counts", [
    ("auto:2", "0+2+4"), ("auto", "0+1+2+2+1"), ("auto:6", "0+1+1+1+1+1+1"), ("auto:1", "0+6"), ("auto:1,3", "0+1+5"),
    ("auto:3,1", "0+4+2"), ("auto:0.5,0.25,8", "0+1+1+4"), ("auto:8,8", "0+2+4"), ("2", "0+3+3"), ("0+1+5", "0+1+5")])
def test_a_split_by_bytes_counts_the_embedding_with_the_first_stage(tmp_path, text, counts):
    save_llama(tmp_path, layers=6, vocab=300)  # an embedding as large as about two layers
    planned = plan_stages(text, Checkpoint(tmp_path))
    assert planned == counts_of(counts)
    assert is_split_as(text, planned)
    assert not is_split_as("auto:5", planned) and not is_split_as("0+5+1", planned)


def test_a_split_by_bytes_into_more_stages_than_layers_is_refused(model):
    assert plan_stages("auto", Checkpoint(model)) == [0, 1, 1, 1]
    for text in ("auto:4", "auto:8,8,8,16"):
        with refused(f"stages={text} does not fit: the model has 3 layers, so choose at most auto:3"):
            plan_stages(text, Checkpoint(model))


def test_every_tensor_has_one_holder_and_buffers_have_none():
    layer = "model.layers.{}.self_attn.q_proj.weight".format
    names = [HEAD, EMBED, NORM, "model.layers.0.self_attn.rotary_emb.inv_freq", *map(layer, range(3))]
    parts = assign(names, [0, 2, 1], tied=False)
    assert [set(part) for part in parts] == [{HEAD},
                                             {EMBED, layer(0), layer(1)}, {layer(2), NORM}]
    tied = assign(names, [0, 2, 1], tied=True)
    assert tied[0] == {HEAD: EMBED} and tied[1:] == parts[1:]
    for extra in ("vision.weight", layer(3)):
        with refused(f"holds {extra}, which belongs to no rank"):
            assign([*names, extra], [0, 2, 1], tied=False)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_weights_is_named_without_waiting_for_it(model, name):
    (model / "model.safetensors").unlink()
    os.mkfifo(model / name)
    with refused(f"{model / name} is a folder, a device or a pipe: copy the file itself there"):
        Checkpoint(model)


def test_a_bin_file_with_compressed_entries_is_refused_before_they_are_read(model):
    (model / "model.safetensors").unlink()
    path = model / "pytorch_model.bin"
    torch.save({"x": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as whole:
        entries = {entry.filename: whole.read(entry) for entry in whole.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in entries.items():
            bomb.writestr(name, bytes(1 << 24) if name.endswith("data.pkl") else content)
    with refused("pytorch_model.bin cannot be read (") as error:
        Checkpoint(model)
    assert "data.pkl' is compressed" in str(error.value).replace('"', "'")
