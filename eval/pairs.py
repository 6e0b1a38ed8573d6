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
from eval.prompts import DrawnPrompt, draw
from launch.memory import GB, free
from launch.progress import ProgressBar
from launch.spec import device_named, number_type
from model.sample import Sampler
from model.text import Text
from model.weights.unfold import Unfolded
from model.whole import Whole


class Model(NamedTuple):
    """A model and its tokenizer."""

    whole: Whole
    text: Text

    @property
    def name(self) -> str:
        """The folder from which the model was read."""
        return str(self.text.folder)

    def ids(self, prompt: DrawnPrompt, template: str) -> list[int]:
        """Return the token ids of a prompt."""
        return self.text.prompt_ids([prompt.text], "none" if prompt.ready else template)

    def logits(self, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        """Return the logits `[N, V]` at each token of a text after a prompt, which are read in one pass."""
        input_ids = [*prompt, *text[:-1]]
        return self.whole.logits(input_ids, self.whole.cache(len(input_ids)), len(text))


def open_model(folder: str, config: MeasureKeys, target: Model | None = None) -> Model:
    """Open the model in a folder; if `target` is given, as its drafter.

    Raise ValueError if the model is damaged, unsupported, too large for the device, or if its tokens are not the
    target's.
    """
    if not folder or not Path(folder).is_dir():
        raise ValueError(f"there is no folder {short_repr(folder)}: name the folder of a model in Hugging Face form")
    device = device_named(config.device)
    dtype = number_type(config.dtype, device)
    if config.threads:
        torch.set_num_threads(config.threads)

    text, source = Text(folder), Unfolded(folder)
    dtype_bytes = torch.empty(0, dtype=dtype).element_size()
    forms = map(source.form, source.names())
    needed_bytes = dtype_bytes * sum(form.bytes // form.width for form in forms)
    if needed_bytes > free(device):
        dtype_name = str(dtype)[len("torch."):]
        raise ValueError(f"the weights of {folder} take {needed_bytes / GB:,.1f} GB in {dtype_name}, and {device} has "
                         f"{free(device) / GB:,.1f} GB free: choose a smaller model or another device=")

    model = Model(Whole(source, dtype, device), text)
    if target:
        check_pair(target, model)
    return model


def check_pair(target: Model, drafter: Model) -> None:
    """Raise ValueError if the drafter's tokens are not the target's."""
    draft_tokenizer, target_tokenizer = drafter.text.tokenizer, target.text.tokenizer
    vocabularies = [
        ("numbers of tokens", drafter.whole.config.vocab, target.whole.config.vocab),
        ("tokens", draft_tokenizer.get_vocab(), target_tokenizer.get_vocab()),
        ("special tokens", draft_tokenizer.special_tokens_map, target_tokenizer.special_tokens_map)]

    for subject, of_drafter, of_target in vocabularies:
        if of_drafter != of_target:
            raise ValueError(f"the drafter in {drafter.name} has other {subject} than the target in {target.name}: "
                             "take a drafter with the same tokenizer")


def sampler_of(config: MeasureKeys) -> Sampler:
    """Return the sampler of a measurement."""
    return Sampler(config.temperature, config.top_p, seed=config.seed) if config.do_sample else Sampler()


def check_sets(names: Iterable[str], config: MeasureKeys) -> None:
    """Raise ValueError if a data set is missing, invalid or too short, before a model is loaded for it."""
    for name in names:
        draw(name, config.folder, config.num_examples, config.seed)


def prompts_of(set_name: str, config: MeasureKeys,
               models: Sequence[Model]) -> list[list[int]]:
    """Return the prompts of a data set as token ids of the first of these models.

    Prompts that leave no room for an answer in the context of any model are left out with a warning. Raise ValueError
    if none is left.
    """
    context_length = min(model.whole.config.context for model in models)
    prompts = [models[0].ids(prompt, config.template)
               for prompt in draw(set_name, config.folder, config.num_examples, config.seed)]
    fitting_prompts = [token_ids for token_ids in prompts if len(token_ids) + config.max_new_tokens <= context_length]
    num_left_out = len(prompts) - len(fitting_prompts)

    if not fitting_prompts:
        raise ValueError(f"no prompt of {set_name} leaves room for {config.max_new_tokens} tokens in a context of "
                         f"{context_length}: give a smaller max_new_tokens=, or other sets=")
    if num_left_out:
        ProgressBar.write(f"{set_name}: {num_left_out} of {len(prompts)} prompts are too long for a context of "
                          f"{context_length}, and left out", file=sys.stderr)
    return fitting_prompts


def answer(model: Model, prompt: Sequence[int],
           max_new_tokens: int, sampler: Sampler) -> list[int]:
    """Return the token ids that a model writes after a prompt: `max_new_tokens` of them, or up to an end token."""
    cache = model.whole.cache(len(prompt) + max_new_tokens)
    end_ids, text = model.text.end_ids, []
    for token in islice(model.whole.generate(prompt, cache, sampler), max_new_tokens):
        text.append(token)
        if token in end_ids:
            break
    return text


def record(drafter: Model, prompt: Sequence[int],
           text: Sequence[int], sampler: Sampler) -> list[int]:
    """Return, for each token of a target's text, whether the drafter chooses it, too, after the text before it.

    The drafter reads prompt and text in one pass. The target's sampler also applies its noise to the drafter, so above
    temperature 0 this is coupled acceptance.
    """
    positions = range(len(prompt), len(prompt) + len(text))
    draft_choices = sampler(drafter.logits(prompt, text), positions)
    return [int(choice == token) for choice, token in zip(draft_choices, text)]
