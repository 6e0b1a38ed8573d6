"""The comparison with what people would take instead: everyone reads the same file, and missing ones are named."""
from __future__ import annotations

from eval.bench import Cost, peers
from eval.bench.peers import table, write_random
from launch.split.gguf import unpack
from model.weights.parts import read_sizes
from model.weights.unfold import Unfolded
from tests.checkpoints import refused
from tests.test_gguf import TOKENS, write


def test_ratios_are_over_the_first_by_the_clock_and_by_the_processor():
    short, long = peers.PROMPT_LENGTHS
    jobs = [(short, peers.NUM_TOKENS), (short, 1), (long, 1)]

    def costs(factor):
        decoded = 0.5 + factor * (peers.NUM_TOKENS - 1)
        return [Cost(decoded, 2 * decoded - 0.5), Cost(0.5, 0.5), Cost(2 * factor, factor)]

    took = {(name, *job): [cost, Cost(99, 99)]
            for name, factor in (("first", 0.25), ("second", 0.5))
            for job, cost in zip(jobs, costs(factor))}
    first, second = table(took)
    assert first == ["first", "4.0 (1.00)", "500.0 (1.00)", "500.0 (1.00)",
                     "500.0 (1.00)", "500.0 (1.00)", "250.0 (1.00)"]
    assert second == ["second", "2.0 (0.50)", "500.0 (1.00)", "1000.0 (0.50)",
                      "1000.0 (0.50)", "500.0 (1.00)", "500.0 (0.50)"]


def test_without_llama_cpp_the_others_are_compared_and_the_way_to_get_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "FORMS", (("float32", "none", "none"),))
    monkeypatch.setattr(peers, "PROMPT_LENGTHS", (4, 8))
    monkeypatch.setattr(peers, "NUM_TOKENS", 3)
    path = write(tmp_path / "model.gguf")
    assert peers.peers([str(path), "--threads", "1", "--repeats", "1"]) == 0
    said = capsys.readouterr()
    assert "llama.cpp is not installed, and is left out: type pip install xllamacpp" in said.err
    names = [line.strip().split("  ")[0] for line in said.out.splitlines()]
    assert names[-2:] == ["transformers, float32", "ours, float32"]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with refused("there is no file ", ": give the path of a GGUF file"):
        peers.peers([str(tmp_path / "none.gguf")])


def test_random_weights_have_the_asked_shapes_and_the_tokenizer_of_the_file(tmp_path, monkeypatch):
    sizes = {"embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 2,
             "attention.head_count_kv": 2, "rope.dimension_count": 32, "attention.key_length": 32}
    monkeypatch.setattr(peers, "SIZES_7B", sizes)
    made = tmp_path / "random.gguf"
    write_random(write(tmp_path / "model.gguf"), made, 3)
    found = read_sizes(Unfolded(unpack(made, tmp_path / "whole", progress=False)))
    assert (found.hidden, found.intermediate, found.layers, found.heads, found.kv_heads) == (64, 96, 3, 2, 2)
    assert found.vocab == len(TOKENS) and found.tied


def test_a_comparison_over_processes_is_answered_by_where_its_figures_are(error_of):
    for words in (["--over", "4"], ["over=4"]):
        printed = error_of(peers.peers, ["m.gguf", *words])
        assert "is not measured any more: leave it out; docs/performance.md has the last" in printed
