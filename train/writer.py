"""Texts that a model generates for prompts, many at once, and the pipeline of one stage that generates them.

This module knows nothing about their use.
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
from pipeline.decode import Decoder, PipelineLimits, Request
from pipeline.requests import Ring
from pipeline.stage import Stage
from pipeline.strategies import autoregressive
from tp.links import Loop

WRITTEN_AT_ONCE = 64  # texts; a step on a CPU takes little longer for many
Prompts = Sequence[List[int]]


class SampledText(NamedTuple):
    """A prompt, and the target's text after it, as token ids, with its end token."""

    prompt: list[int]
    ids: list[int]


def open_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """Open a model for training, in float32, without dropout."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    return model.to(device, torch.float32).eval()  # type: ignore[no-any-return, call-arg]


def ring_of(model: Whole, capacity: int, inner: Sequence[int] = (), requests: int = 1) -> Ring:
    """Return a pipeline of one stage in this process, for `requests` requests at once of at most `capacity` rows each.
    A draft reads the inputs of its `inner` layers."""
    stage = Stage(model.body, lambda: model.cache(capacity), inner_layers=inner, num_requests=requests)
    return Ring(Loop(stage, None), model.lm_head, 2, model.device)


class TextWriter:
    """A target that generates texts, by greedy decoding or sampled at a temperature."""

    def __init__(self, model: Whole, ends: Collection[int], limit: int, temperature: float, seed: int) -> None:
        self.model, self.ends, self.limit = model, frozenset(ends), limit
        self.temperature, self.seed = temperature, seed

    @torch.no_grad()
    def write(self, prompts: Prompts, first: int = 0) -> Iterator[SampledText]:
        """Yield the texts for some prompts, numbered from `first`; the number determines the noise of sampling.

        When one text ends, the next one begins in its place.
        """
        length = max(map(len, prompts)) + self.limit
        ring = ring_of(self.model, length, requests=WRITTEN_AT_ONCE)
        limits = PipelineLimits(length, WRITTEN_AT_ONCE)
        decoder = Decoder(ring, NoDraft(), autoregressive, TreeConfig(), limits)
        written = []
        for place, prompt in enumerate(prompts, first):
            # not a sum: neighbouring seeds would give the same texts, shifted by one place
            own = np.random.SeedSequence((self.seed, place)).generate_state(1, np.uint64)
            sampler = Sampler(self.temperature, seed=int(own[0]))
            written.append(decoder.submit(Request(prompt, sampler, self.limit, self.ends)))
        for prompt, (answer, settled) in zip(prompts, written):
            for _ in settled:
                pass
            yield SampledText(prompt, answer.token_ids)
