"""What another type would bring: said only where it is a gain and nothing was chosen, measured once."""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from config.run_config import RunConfig
from launch import hint as module
from launch.hint import FOUR, HALF, hint


def spec(hidden=576, quant="none", device="cpu", **keys):
    return SimpleNamespace(config=replace(RunConfig(), **keys), quant=quant, device=torch.device(device),
                           sizes=SimpleNamespace(hidden=hidden))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What is found on this machine, and how often it was measured; the cache is a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = SimpleNamespace(shares={HALF: 0.5, FOUR: 0.25}, times=0)

    def measure(width):
        found.times += 1
        return found.shares

    monkeypatch.setattr(module, "measured", measure)
    return found


def test_gains_are_named_with_what_to_type_and_measured_once(measured):
    said = hint(spec())
    assert "0.50 of the time with dtype=bfloat16, 0.25 of the time with dtype=bfloat16 quant=int4" in said
    assert hint(spec()) == said and measured.times == 1
    hint(spec(hidden=4096))
    assert measured.times == 2, "another width is another measurement"


def test_what_is_no_gain_is_not_said(measured):
    measured.shares = {HALF: 0.9, FOUR: 0.5}
    said = hint(spec())
    assert FOUR in said and f"with {HALF}," not in said
    measured.shares = {HALF: 1.3}
    assert hint(spec(hidden=4096)) == ""


@pytest.mark.parametrize("keys", [{"dtype": "float32"},
                                  {"quant": "int8"}, {"device": "cuda:0"}, {"hosts": "boards"},
                                  {"profile": "jetson-7b"}, {"hidden": 192}])
def test_nothing_is_measured_where_something_was_chosen_or_times_are_others(keys, measured):
    assert hint(spec(**keys)) == ""
    assert measured.times == 0


@pytest.mark.parametrize("content", ["", "[]", '{"dtype=bfloat16": "x"}', "{}"])
def test_a_damaged_file_is_written_again(content, measured, tmp_path):
    said = hint(spec())
    place, = (tmp_path / "flowspec").glob("types-*.json")
    place.write_text(content)
    assert hint(spec()) == said and measured.times == 2
    assert hint(spec()) == said and measured.times == 2


def test_the_products_are_measured_in_each_type_that_has_a_kernel(monkeypatch):
    monkeypatch.setattr(module, "WEIGHTS", 1 << 16)
    shares = module.measured(512)
    assert HALF in shares and all(share > 0 for share in shares.values())
