"""What measurements share: a stage has the same weights in every form, and a run's processes are found."""
from __future__ import annotations

import os
import signal
import subprocess

import torch

from eval.bench import process_tree
from eval.bench.stage import Form, build, read
from tests.saved import wait_until


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
