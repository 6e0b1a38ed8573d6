"""What measurements share: a stage has the same weights in every form."""
from __future__ import annotations

import torch

from eval.bench.stage import Form, build, read


def test_a_stage_in_another_form_is_made_of_the_same_weights():
    forms = [Form(torch.float32, "none"), Form(torch.float32, "int4"), Form(torch.bfloat16, "none")]
    sizes = "--hidden 64 --intermediate 96 --heads 2 --context 8 --rows 1".split()
    plain, *others = (stage.segment(1).float() for stage in build(read(sizes, len(forms)), forms).values())
    for other in others:
        assert float((other - plain).norm() / plain.norm()) < 0.3
