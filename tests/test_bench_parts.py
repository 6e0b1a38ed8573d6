"""Measurements of layers and of LM heads: every form has a row, and the parts of a layer their times."""
from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from config.presets import ROOT
from config.profiles import Profile
from eval.bench import head, layers, long
from eval.bench.spd import acceptance_rate, over_plain, spd
from eval.bench.stage import Form, build, read
from model.text import Text
from tests.checkpoints import save_llama
from tests.forked import CONTEXT

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
    assert acceptance_rate(4, 4.0) == 1 and acceptance_rate(4, 1.0) == 0
    assert spd([]) == 0
    _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[4] for row in rows] == ["2.26", "2.53", "1.86"]


def test_long_texts_are_read_in_memory_that_was_stated_and_8_bits_are_compared(monkeypatch, capsys):
    monkeypatch.setattr(long, "get_context", lambda kind: CONTEXT)  # where a process has torch already
    words = [TOY, "--positions", "2100", "--chunks", "512", "--tokens", "120"]  # more than the 2048 that it has
    assert long.long(words) == 0
    title, heading, plain, small, said = capsys.readouterr().out.splitlines()
    assert "all layers of llama, float32" in title and "stated" in heading
    assert plain.split()[:3] == ["2100", "512", "none"] and small.split()[:3] == ["2100", "512", "int8"]
    for row in (plain, small):
        cache, of_cache, taken, of_all = map(int, row.split()[-4:])
        assert cache <= of_cache and taken <= of_all
    assert re.fullmatch(r"reading 120 tokens of text, quant_kv=int8 finds the same token likeliest after \S+ %", said)


def test_a_model_that_learned_its_positions_is_not_given_more(tmp_path):
    save_llama(tmp_path)
    config = tmp_path / "config.json"
    learned = {"model_type": "opt", "ffn_dim": 24, "hidden_act": None}
    config.write_text(json.dumps({**json.loads(config.read_text()), **learned}))
    with pytest.raises(ValueError, match="has 64 trained positions: give --positions 48 or less"):
        long.long([str(tmp_path), "--positions", "8192"])


def test_the_text_that_a_head_reads_is_what_people_asked_and_what_was_answered():
    ids = head.text_of(ROOT / "toy" / "llama", 300)
    said = Text(ROOT / "toy" / "llama").tokenizer.decode(ids)
    assert len(ids) == 300 and "question_id" not in said
    assert "Rewrite this sentence" in said and "Gladly: A more polite version" in said
