"""Texts that a model writes behind prompts, many side by side.

It knows nothing about what they are for.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

WRITTEN_AT_ONCE = 64  # texts; a step of a processor takes little longer for many
ABSENT = -1  # in place of a token before a prompt that is shorter than others
Prompts = Sequence[List[int]]


class Text(NamedTuple):
    """A prompt, and what the target wrote behind it, as token ids; an end token counts to the text."""

    prompt: list[int]
    ids: list[int]


def open_model(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model without dropout."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    return model.to(device=device, dtype=dtype).eval()  # type: ignore[no-any-return, call-arg]


class Writer:
    """A target that writes texts: the likeliest tokens, or at a temperature drawn ones."""

    def __init__(self, model: PreTrainedModel, ends: Sequence[int], limit: int, temperature: float, seed: int) -> None:
        self.model, self.ends, self.seed = model, frozenset(ends), seed
        chosen: dict[str, Any] = {"do_sample": False}
        if temperature:
            chosen = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        begin = model.generation_config.bos_token_id  # type: ignore[union-attr]
        self.how = GenerationConfig(max_new_tokens=limit, bos_token_id=begin, eos_token_id=sorted(ends),
                                    pad_token_id=0, **chosen)

    def write(self, prompts: Prompts, first: int = 0) -> Iterator[Text]:
        """The texts to some prompts, the `first` and following ones of all; they are drawn by their place there."""
        for begin in range(0, len(prompts), WRITTEN_AT_ONCE):
            yield from self._write(prompts[begin:begin + WRITTEN_AT_ONCE], first + begin)

    @torch.no_grad()
    def _write(self, prompts: Prompts, first: int) -> Iterator[Text]:
        """Those that are written beside each other."""
        torch.manual_seed((self.seed + first) % (1 << 63))
        width = max(map(len, prompts))
        device = self.model.device
        padded = [[ABSENT] * (width - len(prompt)) + prompt for prompt in prompts]
        ids_BN = torch.tensor(padded, device=device)
        mask_BN = (ids_BN != ABSENT).long()
        ids_BN = ids_BN * mask_BN
        out_BN = self.model.generate(ids_BN, attention_mask=mask_BN, generation_config=self.how)  # type: ignore[operator]
        for prompt, ids in zip(prompts, out_BN[:, width:].tolist()):
            ended = [place for place, token in enumerate(ids) if token in self.ends]
            yield Text(prompt, ids[:ended[0] + 1] if ended else ids)
