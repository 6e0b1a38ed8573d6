"""Ranks of one ring with different instruction sets, and one that computes by torch, write one text."""
from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest

from cluster import rendezvous
from config.cli import parse
from launch import build
from launch.spec import RankSpec
from model.native.compiler import levels, reason_against_library
from model.native.layers import NativeSlice
from tests.saved import answer_of

pytestmark = pytest.mark.skipif(bool(reason_against_library()), reason="there are no native kernels")
WORDS = ("toy", "stages=0+2+2+2+2", "kernel=native", "threads_per_rank=1", "max_new_tokens=20", "temperature=0.8",
         "seed=3", "prompt=Tell me a short story about a curious fox called Maya.")


@pytest.fixture
def mixed_levels(monkeypatch):
    """Each rank gets another level of this machine, the plain one included; returns the levels by their first layer."""
    used_levels = {}

    def slice_of_another_level(empty_slice, *words):
        first_layer = min(map(int, empty_slice.layers))
        level = used_levels[first_layer] = by_layer[first_layer]
        return NativeSlice(empty_slice, *words, level=level)

    by_layer = dict(zip((0, 2, 4, 6), cycle(reversed(levels()))))
    monkeypatch.setattr(build, "NativeSlice", slice_of_another_level)
    return used_levels


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_levels_on_the_ranks_of_a_ring_write_the_text_of_one_level(quant, tmp_path, mixed_levels, monkeypatch):
    mixed = answer_of(tmp_path, *WORDS, f"quant={quant}")
    assert {level.name for level in mixed_levels.values()} == {level.name for level in levels()} >= {"plain"}
    monkeypatch.setattr(build, "NativeSlice", NativeSlice)
    assert answer_of(tmp_path, *WORDS, f"quant={quant}")["token_ids"] == mixed["token_ids"]


def test_a_rank_that_computes_by_torch_writes_the_same_text(tmp_path, mixed_levels, monkeypatch):
    native = answer_of(tmp_path, *WORDS)
    assert len(mixed_levels) == 4
    mixed_levels.clear()
    monkeypatch.setattr(RankSpec, "reason_for_torch", property(
        lambda spec: "there is no C compiler" if spec.part.rank == 2 else reason_of(spec)))
    assert answer_of(tmp_path, *WORDS)["token_ids"] == native["token_ids"]
    assert sorted(mixed_levels) == [0, 4, 6]


reason_of = RankSpec.reason_for_torch.fget


def test_a_worker_without_a_compiler_computes_by_torch_and_says_so(monkeypatch, capsys):
    worker_keys, version = parse(["model_dir=mine"]), rendezvous.code_version()
    worker = SimpleNamespace(_root_facts={"code": version, "settings": {"kernel": "native"}}, board=None, _client=None,
                             _prepare=lambda config: config)
    monkeypatch.setattr(rendezvous.Rendezvous, "_prepared", lambda self, config: config)
    for reason, kernel in (("", "native"), ("there is no C compiler (install it)", "torch")):
        monkeypatch.setattr(rendezvous, "reason_against_library", lambda reason=reason: reason)
        taken = rendezvous.WorkerBoard._prepared(subclass_of(worker), worker_keys)
        assert taken == replace(taken, kernel=kernel)
    assert capsys.readouterr().err == (
        "flowspec: this board computes by torch, since there is no C compiler (install it)\n")


def subclass_of(worker):
    """A worker's side of the rendezvous with these fields, and without a network."""
    board = object.__new__(rendezvous.WorkerBoard)
    vars(board).update(vars(worker))
    return board
