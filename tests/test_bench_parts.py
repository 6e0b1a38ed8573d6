"""Measurements of layers and of LM heads: every form has a row, and the parts of a layer their times."""
from __future__ import annotations

import pytest
import torch

from config.presets import ROOT
from eval.bench import head, layers
from eval.bench.stage import Form

TOY = str(ROOT / "toy" / "llama")


@pytest.fixture(autouse=True)
def as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


def test_a_layer_s_time_is_kernels_dispatch_and_python(monkeypatch, capsys):
    monkeypatch.setattr(layers, "WIDTHS", {64: (96, 2)})
    monkeypatch.setattr(layers, "CONTEXT", 8)
    monkeypatch.setattr(layers, "FORMS", layers.FORMS[:1])
    assert layers.layers("--widths 64 --repeats 2".split()) == 0
    _, heading, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows] == [["64,", "float32", "1"], ["64,", "float32", "16"]]
    whole, kernels, dispatch, _ = map(float, rows[0].split()[3:])
    assert whole > 0 and kernels > 0 and dispatch > 0


def test_a_head_in_float32_agrees_with_itself_and_every_form_has_a_row(monkeypatch, capsys):
    monkeypatch.setattr(head, "FORMS", [Form(torch.float32, "none"), Form(torch.float32, "int4")])
    assert head.head([TOY, "--tokens", "70", "--repeats", "1"]) == 0
    title, _, plain, int4 = capsys.readouterr().out.splitlines()
    assert "on 70 tokens of text" in title
    assert plain.split()[0] == "float32" and plain.endswith("100.00 %")
    same = float(int4.split()[-2])
    assert int4.split()[:2] == ["float32,", "int4"] and 50 < same <= 100
