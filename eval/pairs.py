"""A target and its drafter, whole on one device: texts of the target, and the tokens that the drafter predicts."""
from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Iterable, NamedTuple, Sequence

import torch
from torch import Tensor

from config.schema.untrusted import short_repr
from eval.pair_keys import MeasureKeys
from eval.prompts import Prompt, draw
from launch.memory import GB, free
from launch.progress import ProgressBar
from launch.spec import device_named, number_type
from model.sample import Sampler
from model.text import Text
from model.weights.unfold import Unfolded
from model.whole import Whole

TAKE = "take a drafter with the same tokenizer"


class Model(NamedTuple):
    """A model and its tokenizer."""

    whole: Whole
    text: Text

    @property
    def name(self) -> str:
        """The folder from which the model was read."""
        return str(self.text.folder)

    def ids(self, prompt: Prompt, template: str) -> list[int]:
        """Return the token ids of a prompt."""
        return self.text.prompt_ids([prompt.text], "none" if prompt.ready else template)

    def logits(self, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        """Return the logits `[N, V]` at each token of a text after a prompt, which are read in one pass."""
        read = [*prompt, *text[:-1]]
        return self.whole.logits(read, self.whole.cache(len(read)), len(text))


def open_model(folder: str, config: MeasureKeys, target: Model | None = None) -> Model:
    """Open the model in a folder; if `target` is given, as its drafter.

    Raise ValueError if the model is damaged, unsupported, too large for the device, or if its tokens are not the
    target's.
    """
    if not folder or not Path(folder).is_dir():
        raise ValueError(f"there is no folder {short_repr(folder)}: name the folder of a model in Hugging Face form")
    place = device_named(config.device)
    number = number_type(config.dtype, place)
    if config.threads:
        torch.set_num_threads(config.threads)
    text, source = Text(folder), Unfolded(folder)
    width = torch.empty(0, dtype=number).element_size()
    need = sum(form.bytes // form.width
               for form in map(source.form, source.names())) * width
    if need > free(place):
        name = str(number)[len("torch."):]
        raise ValueError(f"the weights of {folder} take {need / GB:,.1f} GB in {name}, and {place} has "
                         f"{free(place) / GB:,.1f} GB free: choose a smaller model or another device=")
    model = Model(Whole(source, number, place), text)
    if target:
        check_pair(target, model)
    return model


def check_pair(target: Model, drafter: Model) -> None:
    """Raise ValueError if the drafter's tokens are not the target's."""
    mine, theirs = drafter.whole.config.vocab, target.whole.config.vocab
    if mine != theirs:
        raise ValueError(f"the drafter in {drafter.name} has vocab_size {mine}, but the target in {target.name} has "
                         f"{theirs}: {TAKE}")
    own, other = drafter.text.tokenizer, target.text.tokenizer
    for what, meant, expected in (("token", own.get_vocab(), other.get_vocab()),
                                  ("special token", own.special_tokens_map, other.special_tokens_map)):
        for name in sorted(expected.keys() | meant.keys()):
            if expected.get(name) != meant.get(name):
                raise ValueError(f"the {what} {name!r} is {meant.get(name)!r} for the drafter in {drafter.name}, but "
                                 f"{expected.get(name)!r} for the target in {target.name}: {TAKE}")


def sampler_of(config: MeasureKeys) -> Sampler:
    """Return the sampler of a measurement."""
    return Sampler(config.temperature, config.top_p, seed=config.seed) if config.do_sample else Sampler()


def check_sets(names: Iterable[str], config: MeasureKeys) -> None:
    """Raise ValueError if a data set is missing, invalid or too short, before a model is loaded for it."""
    for name in names:
        draw(name, config.folder, config.num_examples, config.seed)


def prompts_of(name: str, config: MeasureKeys,
               models: Sequence[Model]) -> list[list[int]]:
    """Return the prompts of a data set as token ids of the first of these models.

    Prompts that leave no room for an answer in the context of any model are left out with a warning. Raise ValueError
    if none is left.
    """
    context = min(model.whole.config.context for model in models)
    found = [models[0].ids(prompt, config.template)
             for prompt in draw(name, config.folder, config.num_examples, config.seed)]
    fitting = [ids for ids in found if len(ids) + config.max_new_tokens <= context]
    left_out = len(found) - len(fitting)
    if not fitting:
        raise ValueError(f"no prompt of {name} leaves room for {config.max_new_tokens} tokens in a context of "
                         f"{context}: give a smaller max_new_tokens=, or other sets=")
    if left_out:
        ProgressBar.write(f"{name}: {left_out} of {len(found)} prompts are too long for a context of {context}, and "
                          "left out", file=sys.stderr)
    return fitting


def answer(model: Model, prompt: Sequence[int],
           limit: int, sampler: Sampler) -> list[int]:
    """Return the token ids that a model writes after a prompt: `limit` of them, or up to an end token."""
    cache = model.whole.cache(len(prompt) + limit)
    ends, text = model.text.end_ids, []
    for token in islice(model.whole.generate(prompt, cache, sampler), limit):
        text.append(token)
        if token in ends:
            break
    return text


def record(drafter: Model, prompt: Sequence[int],
           text: Sequence[int], sampler: Sampler) -> list[int]:
    """Return, for each token of a target's text, whether the drafter chooses it, too, after the text before it.

    The drafter reads prompt and text in one pass. The target's sampler also applies its noise to the drafter, so above
    temperature 0 this is coupled acceptance.
    """
    places = range(len(prompt), len(prompt) + len(text))
    mine = sampler(drafter.logits(prompt, text), places)
    return [int(one == other) for one, other in zip(mine, text)]
