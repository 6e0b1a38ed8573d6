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
from model.whole import WholeModel
from pipeline.answers import Request
from pipeline.decode import Decoder, PipelineLimits
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


def ring_of(model: WholeModel, capacity: int, inner_layers: Sequence[int] = (), num_requests: int = 1) -> Ring:
    """Return a pipeline of one stage in this process, for requests of at most `capacity` rows each.

    It has at most `num_requests` at once. A draft reads the inputs of the layers `inner_layers`.
    """
    stage = Stage(model.body, lambda: model.cache(capacity), inner_layers=inner_layers, num_requests=num_requests)
    return Ring(Loop(stage, None), model.lm_head, 2, model.device)


class TextWriter:
    """A target that generates texts, by greedy decoding or sampled at a temperature."""

    def __init__(self, model: WholeModel, end_ids: Collection[int], max_new_tokens: int,
                 temperature: float, seed: int) -> None:
        self.model, self.end_ids, self.max_new_tokens = model, frozenset(end_ids), max_new_tokens
        self.temperature, self.seed = temperature, seed

    @torch.no_grad()
    def write(self, prompts: Prompts, first_number: int = 0) -> Iterator[SampledText]:
        """Yield the texts for some prompts, numbered from `first_number`; the number determines the noise of sampling.

        When one text ends, the next one begins in its place.
        """
        max_length = max(map(len, prompts)) + self.max_new_tokens
        ring = ring_of(self.model, max_length, num_requests=WRITTEN_AT_ONCE)
        limits = PipelineLimits(max_length, WRITTEN_AT_ONCE)
        decoder = Decoder(ring, NoDraft(), autoregressive, TreeConfig(), limits)

        submitted = []
        for text_number, prompt in enumerate(prompts, first_number):
            # not a sum: neighbouring seeds would give the same texts, shifted by one place
            noise_seed = np.random.SeedSequence((self.seed, text_number)).generate_state(1, np.uint64)
            sampler = Sampler(self.temperature, seed=int(noise_seed[0]))
            submitted.append(decoder.submit(Request(prompt, sampler, self.max_new_tokens, self.end_ids)))

        for prompt, (answer, settled) in zip(prompts, submitted):
            for _ in settled:
                pass
            yield SampledText(prompt, answer.token_ids)
