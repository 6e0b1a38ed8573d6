"""The head's training: the base's own features are the lesson, and the head's own guesses are the exercise."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from toy.recipe.head import Head, Losses, export, lesson
from toy.recipe.llama import ATTENTION
from toy.recipe.pack import Rows
from toy.recipe.train import Course, Plan, join, launch

PASSES = 2
# EAGLE weighs the words 0.1 beside the features. Here the steps are few and the words count for more; the two weights
# were not compared.
WORD_WEIGHT = 1.0


def total(parts: list[Losses]) -> torch.Tensor:
    return torch.stack([part.feature + WORD_WEIGHT * part.token for part in parts]).mean()


def _lesson(base: LlamaForCausalLM, head: Head, ids: torch.Tensor, weights: torch.Tensor) -> list[Losses]:
    with torch.autocast("cpu", torch.bfloat16):
        return lesson(base, head, ids, weights, PASSES)


@torch.no_grad()
def agreement(base: LlamaForCausalLM, head: Head, rows: Rows) -> list[float]:
    """How often the head's best guess is the base's, one and two steps ahead, on answers kept back."""
    found = [[part.agreement for part in _lesson(base, head, ids, weights)] for ids, weights in rows.held()]
    return [float(torch.stack(part).mean()) for part in zip(*found)]


def _train(rank: int, plan: Plan, port: int, work: Path, base_dir: Path, target: Path) -> None:
    join(rank, plan, port)
    base = LlamaForCausalLM.from_pretrained(str(base_dir), dtype=torch.float32, attn_implementation=ATTENTION)
    base.requires_grad_(False)
    shape = base.config
    head = Head(shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_attention_heads)
    head.embed_tokens.weight.data.copy_(base.model.embed_tokens.weight)
    rows, course = Rows(work, plan.seed), Course(plan, head, work / f"{plan.name}.pt")
    course.run(rows, lambda ids, weights: total(_lesson(base, head, ids, weights)), rank)
    if rank == 0:
        one, two = agreement(base, head, rows)
        print(f"{plan.name}: {course.seconds:.0f} s, agreement {one:.3f}, one step further {two:.3f}", flush=True)
        export(head, base, target)


def fit(plan: Plan, work: Path, base_dir: Path, target: Path) -> None:
    """Train to the end, from the last checkpoint if there is one; write `target`."""
    launch(_train, plan, work, base_dir, target)
