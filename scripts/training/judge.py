"""What a head is worth: the mean accepted length of trees that it really drafts for its base.

It knows nothing about training. The pipeline is the project's own, of one stage, in this process.
"""
from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Sequence

import torch
from tqdm import tqdm

from config.run_config import Growth, TreeConfig
from model.checkpoint import Checkpoint
from model.eagle import Eagle, Eagle3Head, inner_layers, load_head
from pipeline.decode import Decoder, Request
from pipeline.messages import Message
from pipeline.stage import Stage
from pipeline.strategies import serial
from pipeline.target import Ring
from scripts.training.teacher import Teacher

TREE = TreeConfig(init=Growth(nodes=59, depth=5, width=10))  # of EAGLE-2's paper: 60 nodes with the root, six levels


class Direct:
    """The wires of a ring of one stage: what is sent is computed at once, and waits."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._answers: deque[Message] = deque()

    @property
    def ready(self) -> bool:
        return bool(self._answers)

    def send(self, msg: Message) -> None:
        answer = self._stage.apply(msg)
        if answer is not None:
            self._answers.append(answer)

    def recv(self) -> Message:
        return self._answers.popleft()

    def urgent(self) -> None:
        return None

    def broadcast(self, msg: Message) -> None:
        self._stage.apply(msg)


def open_decoder(teacher: Teacher, folder: Path, length: int) -> Decoder:
    """The base with the head in `folder`, as they decode; texts have `length` tokens at most."""
    head = load_head(Checkpoint(folder), teacher.source.config, lambda: teacher.embedding, teacher.dtype,
                     teacher.device)
    c, capacity = teacher.config, length + 8 * TREE.init.nodes
    cache = c.cache(c.layers, capacity, teacher.embedding)
    ring = Ring(Direct(Stage(teacher.body, cache, keep=inner_layers(c.layers))), teacher.lm_head, 2, teacher.device)
    ring.inner = isinstance(head, Eagle3Head)
    lm_head = head.logits if isinstance(head, Eagle3Head) else teacher.lm_head
    return Decoder(ring, Eagle(head, lm_head, capacity), serial, TREE, length)


@torch.no_grad()
def accepted_length(decoder: Decoder, prompts: Sequence[Sequence[int]], ends: frozenset[int], new: int) -> float:
    """Tokens per pass of the base, its own included (EAGLE's tau), at temperature 0, for `new` tokens at most."""
    tokens = passes = 0
    for prompt in tqdm(prompts, desc="drafting", unit="answer", leave=False):
        answer, stream = decoder.decode(Request(prompt, max_new_tokens=new, end=ends))
        for _ in stream:
            pass
        tokens, passes = tokens + answer.new_tokens - 1, passes + answer.target_passes
    return tokens / passes if passes else 1.0
