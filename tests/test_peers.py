"""The comparison with what people would take instead: everyone reads the same file, and missing ones are named."""
from __future__ import annotations

import gguf
import pytest

from eval.bench import Cost, peers, shapes
from eval.bench.peers import AnswerCost, table
from launch.split.gguf import unpack
from model.weights.parts import read_sizes
from model.weights.unfold import Unfolded
from tests.checkpoints import refused
from tests.test_gguf import TOKENS, write


def test_ratios_are_over_the_first_by_the_clock_and_by_the_processor():
    def costs(factor):
        return AnswerCost(Cost(0.5, 2 * factor), Cost(factor, 0.25)), AnswerCost(Cost(99, 99), Cost(99, 99))

    took = {(name, length): costs(factor * length)
            for name, factor in (("first", 0.25), ("second", 0.5)) for length in (1, 3)}
    first, second = table(took, [1, 3], "wall")
    assert first == ["first", "500.0 (1.00)", "250.0 (1.00)", "500.0 (1.00)", "750.0 (1.00)"]
    assert second == ["second", "500.0 (1.00)", "500.0 (0.50)", "500.0 (1.00)", "1500.0 (0.50)"]
    first, second = table(took, [1, 3], "processor")
    assert first == ["first", "500.0 (1.00)", "250.0 (1.00)", "1500.0 (1.00)", "250.0 (1.00)"]
    assert second == ["second", "1000.0 (0.50)", "250.0 (1.00)", "3000.0 (0.50)", "250.0 (1.00)"]


def test_tokens_after_the_last_first_one_are_what_a_token_costs(monkeypatch):
    readings = iter([Cost(1, 1), Cost(2, 1.5), Cost(2 + 2 * 3 * 31, 1.5 + 31)])
    monkeypatch.setattr(peers.Stopwatch, "read", lambda stopwatch: next(readings))
    cost = peers.answer_cost(lambda prompts, note_first: [note_first() for _ in prompts], [[1], [2]])
    assert cost == AnswerCost(Cost(2, 1.5), Cost(3, 0.5))


def test_requests_at_once_are_answered_together(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "NUM_TOKENS", 3)
    path = write(tmp_path / "model.gguf")
    words = [str(path), "--threads", "1", "--repeats", "1", "--forms", "file", "--requests", "2", "--prompts", "4", "8"]
    assert peers.peers(words) == 0
    printed = capsys.readouterr().out
    assert "2 request(s) at once" in printed
    assert "8 tokens read" in printed
    assert printed.count("ours, as in the file") == 2


def test_without_llama_cpp_the_others_are_compared_and_the_way_to_get_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "FORMS", (("float32", "none", "none"),))
    monkeypatch.setattr(peers, "NUM_TOKENS", 3)
    path = write(tmp_path / "model.gguf")
    assert peers.peers([str(path), "--threads", "1", "--repeats", "1", "--prompts", "4", "8"]) == 0
    said = capsys.readouterr()
    assert "llama.cpp is not installed, and is left out: type pip install xllamacpp" in said.err
    names = [line.strip().split("  ")[0] for line in said.out.splitlines()]
    assert names[-2:] == ["transformers, float32", "ours, float32"]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with refused("there is no file ", ": give the path of a GGUF file"):
        peers.peers([str(tmp_path / "none.gguf")])


@pytest.mark.parametrize("kind_name", shapes.KINDS)
def test_random_weights_have_the_asked_shapes_and_the_tokenizer_of_the_file(kind_name, tmp_path, monkeypatch):
    sizes = {"embedding_length": 256, "feed_forward_length": 512, "attention.head_count": 4,
             "attention.head_count_kv": 4, "rope.dimension_count": 64, "attention.key_length": 64}
    monkeypatch.setattr(shapes, "SIZES_7B", sizes)
    made = tmp_path / "random.gguf"
    shapes.write_random(write(tmp_path / "model.gguf"), made, 3, kind_name)

    tensor = next(tensor for tensor in gguf.GGUFReader(made).tensors if tensor.name == "blk.0.ffn_up.weight")
    weights = gguf.dequantize(tensor.data, tensor.tensor_type)
    assert (tensor.tensor_type.name, weights.shape) == (kind_name, (512, 256))
    assert 0.3 < weights.std() * 16 < 3, "a row's output is about as large as its input"

    found = read_sizes(Unfolded(unpack(made, tmp_path / "whole", progress=False)))
    assert (found.hidden, found.intermediate, found.layers, found.heads, found.kv_heads) == (256, 512, 3, 4, 4)
    assert found.vocab == len(TOKENS) and found.tied


def test_a_comparison_over_processes_is_answered_by_where_its_figures_are(error_of):
    for words in (["--over", "4"], ["over=4"]):
        printed = error_of(peers.peers, ["m.gguf", *words])
        assert "is not measured any more: leave it out; docs/performance.md has the last" in printed
