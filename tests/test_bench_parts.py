"""Measurements of layers and of LM heads: every form has a row, and the parts of a layer their times."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from config.presets import ROOT
from config.profiles import Profile
from eval.bench import head, layers
from eval.bench.spd import over_plain, right, spd
from eval.bench.stage import Form, build, read

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


def test_a_stage_in_another_form_is_made_of_the_same_weights():
    forms = [Form(torch.float32, "none"), Form(torch.float32, "int4"), Form(torch.bfloat16, "none")]
    sizes = "--hidden 64 --intermediate 96 --heads 2 --context 8 --rows 1".split()
    plain, *others = (stage.segment(1).float() for stage in build(read(sizes, len(forms)), forms).values())
    for other in others:
        assert float((other - plain).norm() / plain.norm()) < 0.3


def test_a_head_in_float32_agrees_with_itself_and_every_form_has_a_row(monkeypatch, capsys):
    monkeypatch.setattr(head, "FORMS", [Form(torch.float32, "none"), Form(torch.float32, "int4")])
    assert head.head([TOY, "--tokens", "70", "--repeats", "1"]) == 0
    title, _, plain, int4 = capsys.readouterr().out.splitlines()
    assert "on 70 tokens of text" in title
    assert plain.split()[0] == "float32" and plain.endswith("100.00 %")
    same = float(int4.split()[-2])
    assert int4.split()[:2] == ["float32,", "int4"] and 50 < same <= 100


def test_a_guess_for_each_step_costs_a_step_if_it_is_right_and_the_whole_way_if_not(capsys):
    site = Profile("a test", layers=8, row_bytes=8, model=80, row=1,
                   free=8, token=0, level=4, verdict=1, latency=1,
                   mbps=1000, step=2)
    plain = 80 + 1 * 5 + 1
    assert over_plain(site, 4, 1.0) == pytest.approx(plain / 20)
    assert over_plain(site, 4, 0.5) == pytest.approx(plain / (0.5 * 20 + 0.5 * (plain + 4)))
    assert over_plain(replace(site, level=30), 4, 1.0) == pytest.approx(plain / 30)
    assert right(4, 4.0) == 1 and right(4, 1.0) == 0
    assert spd([]) == 0
    _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[4] for row in rows] == ["2.26", "2.53", "1.86"]
