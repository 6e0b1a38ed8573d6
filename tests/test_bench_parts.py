"""Measurements of layers: the parts of a layer have their times, and every form has the same weights."""
from __future__ import annotations

import os
import signal
import subprocess

import pytest
import torch

from eval.bench import layers, process_tree
from eval.bench.stage import Form, build, read
from tests.saved import wait_until


@pytest.fixture(autouse=True)
def as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


def test_a_layer_s_time_is_kernels_dispatch_and_python(monkeypatch, capsys):
    monkeypatch.setattr(layers, "LAYER_SIZES", {64: (96, 2)})
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


def test_the_processes_of_a_run_are_its_own_and_their_children():
    shells = "sh -c 'sleep 60; true' & wait"
    with subprocess.Popen(["sh", "-c", shells], start_new_session=True) as process:
        try:
            assert wait_until(lambda: len(process_tree(process.pid)) == 3, 10)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
