"""Evaluation of a head: the mean accepted length of trees that it drafts for its base, and the base's own texts, along
which its agreement is counted.

This module knows nothing about training. The pipeline is the project's own, of one stage, in this process.
"""
from __future__ import annotations

from pathlib import Path
from typing import List, Sequence, Tuple

import torch

from config.run_config import Growth, TreeConfig
from launch.progress import ProgressBar
from model.drafts.head_files import draft_with, load_head
from model.drafts.heads import MtpHead
from model.drafts.mixture import Mixture
from model.weights.checkpoint import Checkpoint
from pipeline.answers import Request
from pipeline.decode import Decoder, PipelineLimits
from pipeline.strategies import serial
from train.data import TokenRow, answer_row
from train.eagle.teacher import Teacher
from train.writer import ring_of

TREE = TreeConfig(init=Growth(nodes=59, depth=5, width=10))  # as in EAGLE-2's paper: 60 nodes with the root, 6 levels

JudgedPrompts = Sequence[Sequence[int]]
Answered = Tuple[List[TokenRow], float]


def open_decoder(teacher: Teacher, folder: Path, max_length: int) -> Decoder:
    """Return a decoder of the base with the head in `folder`, for texts of at most `max_length` tokens."""
    head = load_head(Checkpoint(folder), teacher.source.config, lambda: teacher.embedding, teacher.dtype,
                     teacher.device)
    assert not isinstance(head, MtpHead), "MTP heads are not trained here"

    capacity = max_length + 8 * TREE.init.nodes
    ring = ring_of(teacher, capacity, head.inner)
    network = draft_with(head, teacher.lm_head, capacity)
    draft = network if network.by_level else Mixture([network])
    return Decoder(ring, draft, serial, TREE, PipelineLimits(max_length))


@torch.no_grad()
def evaluate(decoder: Decoder, prompts: JudgedPrompts, end_ids: frozenset[int], max_new_tokens: int) -> Answered:
    """Return the base's answers, of at most `max_new_tokens` tokens, at temperature 0, and the accepted length.

    The mean accepted length is tokens per verification, the base's own included (EAGLE's tau). The first token is not
    counted, since the prefill settles it.
    """
    rows, accepted_lengths = [], []
    for prompt in ProgressBar(prompts, desc="drafting", unit="answer", leave=False):
        answer = decoder.complete(Request(prompt, max_new_tokens=max_new_tokens, end=end_ids))
        rows.append(answer_row(prompt, answer.token_ids))
        accepted_lengths += answer.accepted_lengths
    return rows, sum(accepted_lengths) / len(accepted_lengths) if accepted_lengths else 1.0
