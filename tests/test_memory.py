"""Memory before loading: the stated need is what is loaded, and too little memory is refused with what would fit."""
import re
from dataclasses import replace

import pytest
import torch

from cluster.folder import RENDEZVOUS
from config.run_config import RunConfig
from launch import available, memory
from launch.build import build_lm_head, build_stage
from launch.drafts import build_draft
from launch.memory import Need, check_memory, need, together
from launch.share import ModelShape
from launch.spec import RankSpec, local_ranks
from model import slots as slot_memory
from model.weights.checkpoint import Checkpoint
from model.weights.parts import Part
from model.weights.quant import BLOCKS
from pipeline.trace import OFF
from tests.checkpoints import refused, split_quietly
from tests.saved import here, models, ranks_of
from tests.test_families import Saved
from tests.tiny import admit_text

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models(tmp_path_factory.mktemp("memory") / "saved")


@pytest.fixture(scope="module")
def parts(saved):
    return ranks_of(saved / "0+2+2")


def held(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


def filled(cache):
    """The cache with a text in every slot."""
    admit_text(cache, cache.capacity)
    return cache


def total(config, parts):
    return sum(need(RankSpec(config, part)).total for part in parts)


@pytest.fixture
def leaving(monkeypatch):
    """Says how many bytes are free."""
    return lambda num_bytes: monkeypatch.setattr(memory, "free", lambda device: num_bytes)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("kind", ["none", "int8", "int4", "nf4"])
def test_the_need_of_a_stage_is_what_it_loads(kind, dtype, parts):
    if kind != "none":
        pytest.importorskip("bitsandbytes", reason="quantized weights need bitsandbytes")
    config = RunConfig(quant=kind, dtype=dtype, max_length=200)
    for part in parts[1:]:
        stated, stage = need(RankSpec(config, part)), build_stage(RankSpec(config, part), OFF)
        assert stated.weights == held(stage.part)
        cache = stage.cache(0)
        assert stated.cache == filled(cache).bytes
        mask_TS = cache._mask(0)
        assert stated.workspace > mask_TS.numel() * mask_TS.element_size() > 0


def test_weights_that_stay_in_blocks_or_as_stored_are_counted_so(tmp_path):
    saved = Saved("gpt-oss", tmp_path)  # whose attention is torch's
    saved.save_tensors({name: x.bfloat16() for name, x in saved.tensors.items()})
    stage_1 = Part(split_quietly(saved.base, tmp_path / "narrow", "0+4")[1])
    plain = RunConfig(dtype="float32", kernel="native", base_dir=str(saved.base), max_length=150)
    quantized = replace(plain, quant="int4")

    embedding = build_stage(RankSpec(plain, stage_1), OFF).part.embed_tokens
    by_torch, in_c = (need(RankSpec(replace(plain, kernel=kernel), stage_1)) for kernel in ("torch", "native"))
    assert by_torch.weights - in_c.weights == held(embedding) == 2 * embedding.weight.numel()

    assert RankSpec(quantized, stage_1).quant == BLOCKS
    saved_bytes = in_c.weights - need(RankSpec(quantized, stage_1)).weights
    plain_shape, quantized_shape = map(ModelShape.of, (plain, quantized))
    assert 4 * (plain_shape.layer_bytes - quantized_shape.layer_bytes) == saved_bytes > 0


@pytest.mark.parametrize("folder", ["0+4", "0+2+2"])
def test_there_is_memory_for_64_segments_in_flight_that_have_just_died_and_64_new_ones(folder, saved):
    spec = RankSpec(RunConfig(dtype="float32", max_length=200), ranks_of(saved / folder, 2)[1])
    cache = build_stage(spec, OFF).cache(0)
    num_guesses = 2 * 64 * spec.config.tree.stream.segment
    admit_text(cache, 200)
    nodes = list(range(200, 200 + num_guesses))
    cache.admit(nodes, [199] * num_guesses, text=0)
    assert need(spec).cache >= cache.bytes


def test_behind_a_window_less_is_needed_and_taken(parts, monkeypatch):
    for module in (slot_memory, memory):
        monkeypatch.setattr(module, "BLOCK_SLOTS", 4)
    changed = {**parts[1].config, "model_type": "mistral", "sliding_window": 16, "max_position_embeddings": 9999}
    monkeypatch.setattr(Part, "config", changed)
    config = RunConfig(dtype="float32", max_length=9999)
    spec = RankSpec(config, parts[1])
    cache = build_stage(spec, OFF).cache(0)
    for begin in range(0, 8000, 80):
        nodes = range(begin, begin + 80)
        cache.admit(nodes, [max(0, node - 1) for node in nodes], 80)
    stated = need(spec)
    whole = need(RankSpec(replace(config, reuse=True), parts[1]))

    assert cache.bytes <= stated.cache < whole.cache / 3
    assert RankSpec(replace(config, max_length=16), parts[1]).windows == (0, 0)


def test_the_need_of_rank_0_is_lm_head_and_draft(saved, parts):
    with_head = RankSpec(RunConfig(dtype="float32", max_length=200), parts[0])
    lm_head = build_lm_head(with_head)
    [eagle] = build_draft(with_head, lm_head).networks
    assert need(with_head).weights == held(lm_head) + held(eagle.network)
    assert need(with_head).cache == filled(eagle.cache).bytes
    alone = RankSpec(RunConfig(dtype="float32", draft="none"), parts[0])
    assert need(alone).weights == held(lm_head) and need(alone).cache == 0
    small = RunConfig(dtype="float32", draft="model", draft_dir=str(saved / "base"), max_length=200)
    with_model = RankSpec(small, parts[0])
    [draft] = build_draft(with_model, lm_head).networks

    assert need(with_model).weights == held(lm_head) + held(draft.network) + held(draft.lm_head)
    assert need(with_model).cache == filled(draft.cache).bytes


def test_each_of_several_requests_has_a_cache_in_every_stage_and_every_draft(parts):
    one = RunConfig(dtype="float32", max_length=200)
    three = RunConfig(dtype="float32", max_length=200, max_requests=3)
    for part in parts:
        single, several = need(RankSpec(one, part)), need(RankSpec(three, part))
        assert several.cache == 3 * single.cache > 0
        assert several.weights == single.weights and several.workspace > single.workspace
    stage = build_stage(RankSpec(three, parts[1]), OFF)
    caches = [stage.cache(request) for request in range(3)]
    assert need(RankSpec(three, parts[1])).cache == sum(filled(cache).bytes for cache in caches)


def test_fewer_requests_at_once_are_advised_where_they_fit(parts, leaving):
    many, five = (RunConfig(dtype="float32", max_requests=count) for count in (40, 5))
    leaving(total(five, parts))
    with refused("GB free: give max_requests=5 or less, or end other programs"):
        check(many, parts, parts)
    check(five, parts, parts)
    long = RunConfig(dtype="float32", max_requests=6, max_length=3000)
    with refused("give max_requests=3 or max_length=1494 or less, or end other programs"):
        check(long, parts, parts)


def check(config, parts, mine):
    specs = [RankSpec(config, part) for part in parts]
    check_memory(specs, specs[:len(mine)])


def test_the_refusal_names_need_free_and_the_largest_length_that_fits(parts, leaving):
    config = RunConfig(dtype="float32", max_length=8000)
    left = total(RunConfig(dtype="float32", max_length=1000), parts)
    leaving(left)
    stated = together(need(RankSpec(config, part)) for part in parts)
    with refused(f"ranks 0, 1, 2 need {stated} of memory on cpu, which has {left / 1e9:.2f} GB free: "
                 "give max_length=1000 or less"):
        check(config, parts, parts)
    check(RunConfig(dtype="float32", max_length=1000), parts, parts)
    with refused("give max_length=1000 or less"):
        check(RunConfig(dtype="float32", max_length=1001), parts, parts)


def test_ranks_of_one_machine_share_its_memory(parts, leaving):
    config = RunConfig(dtype="float32")
    leaving(total(config, parts) - 1)
    with refused("max_length"):
        check(config, parts, parts[:1])
    check(config, parts[:2], parts[:1])


def test_smaller_weights_are_advised_where_no_length_fits(parts, monkeypatch, leaving):
    config, short = RunConfig(dtype="float64"), {"max_length": memory.SHORTEST}
    leaving(total(RunConfig(dtype="float64", **short), parts) - 1)
    monkeypatch.setattr(memory, "SMALLER_WEIGHTS", ({"dtype": "bfloat16", **short},))
    with refused("GB free: give dtype=bfloat16"):
        check(config, parts, parts)


def test_more_devices_are_advised_where_nothing_smaller_fits(parts, monkeypatch, leaving):
    config = RunConfig(dtype="float32")
    monkeypatch.setattr(memory, "SMALLER_WEIGHTS", ())
    monkeypatch.setattr(memory, "need", lambda spec: Need(200, 0, 100))
    for ranks, left, advice in (
            (parts, 500, "spread the ranks over more devices, split the model into more stages, or free memory"),
            ([*parts[:1], *parts[1:] * 20], 500, f"ranks 0{', 1, 2' * 3}, 1 and 33 more need"),
            (parts[1:2], 150, "split the model into more stages")):
        leaving(left)
        with refused(advice):
            check(config, ranks, ranks)


def test_it_is_refused_before_a_weight_is_read(saved, monkeypatch, leaving, error_of):
    leaving(1_000_000)
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: pytest.fail(f"{name} was read"))
    said = error_of(here, f"model_dir={saved / '0+2+2'}", "prompt_ids=1,2,3")
    assert re.fullmatch(r"flowspec: ranks 0, 1, 2 need [\d.]+ GB .* which has 0.00 GB free: .*\n", said)


def test_with_debug_every_rank_states_its_need(saved, capsys):
    assert here(f"model_dir={saved / '0+2+2'}", "prompt_ids=1,2,3", "max_new_tokens=1", "debug=true") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" needs ")[0] for line in lines if " needs " in line] == ["rank 0", "rank 1", "rank 2"]


@pytest.fixture
def no_rank(monkeypatch):
    """As where nothing has started this process as a rank."""
    for name in ("RANK", RENDEZVOUS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_rank")
def test_all_ranks_are_of_this_machine_unless_it_is_a_board(monkeypatch):
    assert local_ranks(5) == range(5)
    monkeypatch.setenv("RANK", "3")
    assert local_ranks(5) == range(3, 4)
    monkeypatch.setenv(RENDEZVOUS, "/tmp")
    assert local_ranks(5) == range(5)


@pytest.mark.usefixtures("no_rank")
@pytest.mark.parametrize("words, threads", [({}, 4),
                                            ({"RANK": "1"}, 12), ({"RANK": "1", RENDEZVOUS: "/tmp"}, 4)])
def test_the_ranks_of_a_machine_share_its_cores(words, threads, saved, monkeypatch):
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    chosen = []
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    spec = RankSpec(RunConfig(), Part(saved / "0+2+2" / "stage_1"))
    spec.prepare_torch()
    assert chosen == [threads]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 2000 kB of memory, on which this process is in no control group."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 2000 kB\n")
    for name, path in (("MEMINFO", "meminfo"), ("OWN_GROUPS", "cgroup"), ("ALL_GROUPS", "groups")):
        monkeypatch.setattr(available, name, tmp_path / path)
    return tmp_path


def test_free_memory_is_what_the_kernel_says_is_available(machine):
    assert memory.free(CPU) == 2000 * 1024
    (machine / "meminfo").unlink()
    assert memory.free(CPU) > 0


FIRST, SECOND = available.VERSION_1, available.VERSION_2


@pytest.mark.parametrize("own, version, group, counts, free", [
    ("0::/a/b", SECOND, "a/b", ("5000", "3000", "inactive_file 40\nactive_file 2\nfile 90"), 2042),
    ("0::/a/b", SECOND, "a", ("5000", "3000", ""), 2000),
    ("0::/a", SECOND, "a", ("max", "3000", ""), 2000 * 1024),
    ("0::/a", SECOND, "elsewhere", ("100", "0", ""), 2000 * 1024),
    ("4:cpu,memory:/a", FIRST, "a", ("5000", "3000", "inactive_file 7\ntotal_inactive_file 50"), 2050),
    ("1:name=systemd:/a\n4:memory:/of/the/host\n0::/", FIRST, "", ("5000", "4000", ""), 1000),
    ("4:memory:/a", FIRST, "a", (str(2 ** 63 - 4096), "3000", ""), 2000 * 1024),
], ids=str)
def test_the_limit_of_a_container_is_obeyed_and_files_give_way(own, version, group, counts, free, machine):
    (machine / "cgroup").write_text(own)
    place, limit, used, _ = version
    folder = machine / "groups" / place / group
    folder.mkdir(parents=True)
    for name, text in zip((limit, used, "memory.stat"), counts):
        (folder / name).write_text(text)
    assert memory.free(CPU) == free
