"""The measurement of LM heads: every form has a row."""
from __future__ import annotations

import pytest
import torch

from config.presets import ROOT
from eval.bench import head
from eval.bench.stage import Form

TOY = str(ROOT / "toy" / "llama")


@pytest.fixture(autouse=True)
def as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


def test_a_head_in_float32_agrees_with_itself_and_every_form_has_a_row(monkeypatch, capsys):
    monkeypatch.setattr(head, "FORMS", [Form(torch.float32, "none"), Form(torch.float32, "int4")])
    assert head.head([TOY, "--tokens", "70", "--repeats", "1"]) == 0
    title, _, plain, int4 = capsys.readouterr().out.splitlines()
    assert "on 70 tokens of text" in title
    assert plain.split()[0] == "float32" and plain.endswith("100.00 %")
    same = float(int4.split()[-2])
    assert int4.split()[:2] == ["float32,", "int4"] and 50 < same <= 100
