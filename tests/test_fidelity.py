"""The comparison of a GGUF file's logits with float32 arithmetic: what is counted, and that wrong logits show."""
from __future__ import annotations

import math

import pytest
import torch

from eval.bench import fidelity
from tests.checkpoints import refused
from tests.test_gguf import write


def test_positions_and_divergences_are_counted():
    exact_laws = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]])
    laws = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    is_same, divergence = fidelity.compared(laws.log() + 3, exact_laws.log() - 1)
    assert is_same.tolist() == [True, False]
    assert divergence.tolist() == pytest.approx([0, 0.25 * math.log(0.5) + 0.5 * math.log(2)], abs=1e-6)


@pytest.mark.parametrize("factor", [1, 1.5])
def test_a_model_is_compared_with_transformers(factor, tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "model.gguf")
    own_logits = fidelity.logits_of
    monkeypatch.setattr(fidelity, "logits_of", lambda *args: factor * own_logits(*args))
    assert fidelity.fidelity([str(path), "--positions", "300"]) == 0
    printed = capsys.readouterr().out
    share = float(printed.split("model.gguf, 300 positions: ")[1].split(" % keep the likeliest token")[0])
    assert share > 99, "random weights may leave two tokens equally likely"
    mean_divergence = float(printed.split("mean KL divergence from float32 ")[1].split()[0])
    assert mean_divergence < 1e-6 if factor == 1 else mean_divergence > 1e-3


def test_more_positions_than_there_are_tokens_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf")
    with refused("the bundled questions have ", " tokens: give --positions at most that"):
        fidelity.fidelity([str(path), "--positions", "999999"])
