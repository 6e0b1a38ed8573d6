"""A target and its drafter, whole on one device: what the target writes, and which of its tokens the drafter foresees.

It knows nothing about pipelines or time.
"""
from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple, Sequence

import torch

from config.prompts import Prompt
from launch.devices import usable
from launch.memory import GB, free
from model.checkpoint import Checkpoint
from model.sample import Sampler
from model.text import Text
from model.whole import Whole

TAKE = "take a drafter with the same tokenizer"


class Model(NamedTuple):
    """A model and its tokenizer."""

    whole: Whole
    text: Text

    @property
    def name(self) -> str:
        """The folder that it was read from."""
        return str(self.text.folder)

    def ids(self, prompt: Prompt, template: str) -> list[int]:
        """The token ids of a prompt."""
        return self.text.prompt_ids([prompt.text], "none" if prompt.ready else template)


def open_model(folder: str, dtype: str, device: str) -> Model:
    """The model in a folder. Raises ValueError for one that is damaged, not supported or too large for the device.

    `auto` is a CUDA device if there is one, and then float16, else float32.
    """
    place = usable(device)
    if dtype == "auto":
        dtype = "float16" if place.type == "cuda" else "float32"
    number: torch.dtype = getattr(torch, dtype)
    text, source = Text(folder), Checkpoint(folder)
    width = torch.empty(0, dtype=number).element_size()
    forms = [source.form(name) for name in source.names()]
    need = sum(form.bytes // form.width for form in forms) * width
    if need > free(place):
        raise ValueError(f"the weights of {folder} take {need / GB:,.1f} GB in {dtype}, and {place} has "
                         f"{free(place) / GB:,.1f} GB free: choose a smaller model or another device=")
    return Model(Whole(source, number, place), text)


def check_pair(target: Model, drafter: Model) -> None:
    """Raise ValueError for a drafter whose tokens are not the target's."""
    mine, theirs = drafter.whole.config.vocab, target.whole.config.vocab
    if mine != theirs:
        raise ValueError(f"the drafter in {drafter.name} has vocab_size {mine}, but the target in {target.name} has "
                         f"{theirs}: {TAKE}")
    _check_same(target, drafter, "token", target.text.tokenizer.get_vocab(), drafter.text.tokenizer.get_vocab())
    _check_same(target, drafter, "special token", target.text.tokenizer.special_tokens_map,
                drafter.text.tokenizer.special_tokens_map)


def _check_same(target: Model, drafter: Model, what: str, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise ValueError for the first name that does not mean the same in both tables."""
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            raise ValueError(f"the {what} {name!r} is {mine.get(name)!r} for the drafter in {drafter.name}, but "
                             f"{theirs.get(name)!r} for the target in {target.name}: {TAKE}")


def answer(model: Model, prompt: Sequence[int], limit: int, sampler: Sampler) -> list[int]:
    """The token ids that a model writes behind a prompt: `limit` of them, or up to an end token."""
    cache = model.whole.cache(len(prompt) + limit)
    ends, text = model.text.end_ids, []
    for token in islice(model.whole.words(prompt, cache, sampler), limit):
        text.append(token)
        if token in ends:
            break
    return text


def record(drafter: Model, prompt: Sequence[int], text: Sequence[int], sampler: Sampler) -> list[int]:
    """For each token of a target's text, whether the drafter has it, too, once it has read the text up to there.

    The drafter reads prompt and text in one pass. With the sampler of the target it draws with the target's noise, so
    that above temperature 0 this is coupled acceptance.
    """
    read = [*prompt, *text[:-1]]
    logits_TV = drafter.whole.logits(read, drafter.whole.cache(len(read)), len(text))
    places = range(len(prompt), len(prompt) + len(text))
    return [int(mine == theirs) for mine, theirs in zip(sampler(logits_TV, places), text)]
