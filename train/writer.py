"""Texts that a model writes behind prompts, many side by side, and the pipeline of one stage that writes them.

It knows nothing about what they are for.
"""
from __future__ import annotations

from pathlib import Path
from typing import Collection, Iterator, List, NamedTuple, Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from config.trees import TreeConfig
from model.drafts.draft import NoDraft
from model.sample import Sampler
from model.whole import Whole
from pipeline.decode import Decoder, Limits, Request
from pipeline.requests import Ring
from pipeline.stage import Stage
from pipeline.strategies import autoregressive
from tp.links import Loop

WRITTEN_AT_ONCE = 64  # texts; a step of a processor takes little longer for many
Prompts = Sequence[List[int]]


class Text(NamedTuple):
    """A prompt, and what the target wrote behind it, as token ids; an end token counts to the text."""

    prompt: list[int]
    ids: list[int]


def open_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """A model that can learn, in float32, without dropout."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    return model.to(device, torch.float32).eval()  # type: ignore[no-any-return, call-arg]


def ring_of(model: Whole, capacity: int, inner: Sequence[int] = (), requests: int = 1) -> Ring:
    """A pipeline of one stage in this process, for so many requests at once of at most `capacity` rows; a draft reads
    the inputs of its `inner` layers."""
    stage = Stage(model.body, lambda: model.cache(capacity), inner_layers=inner, requests=requests)
    return Ring(Loop(stage, None), model.lm_head, 2, model.device)


class Writer:
    """A target that writes texts: the likeliest tokens, or at a temperature drawn ones."""

    def __init__(self, model: Whole, ends: Collection[int], limit: int, temperature: float, seed: int) -> None:
        self.model, self.ends, self.limit = model, frozenset(ends), limit
        self.temperature, self.seed = temperature, seed

    @torch.no_grad()
    def write(self, prompts: Prompts, first: int = 0) -> Iterator[Text]:
        """The texts to some prompts, the `first` and following ones of all; they are drawn by their place there.

        Where one text ends, the next one begins.
        """
        length = max(map(len, prompts)) + self.limit
        ring = ring_of(self.model, length, requests=WRITTEN_AT_ONCE)
        limits = Limits(length, WRITTEN_AT_ONCE)
        decoder = Decoder(ring, NoDraft(), autoregressive, TreeConfig(), limits)
        written = []
        for place, prompt in enumerate(prompts, first):
            # not a sum: the texts of neighbouring seeds would be the same, moved by one place
            own = np.random.SeedSequence((self.seed, place)).generate_state(1, np.uint64)
            sampler = Sampler(self.temperature, seed=int(own[0]))
            written.append(decoder.submit(Request(prompt, sampler, self.limit, self.ends)))
        for prompt, (answer, settled) in zip(prompts, written):
            for _ in settled:
                pass
            yield Text(prompt, answer.token_ids)
