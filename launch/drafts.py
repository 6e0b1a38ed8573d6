"""Build the draft of rank 0: a head, small models, copies of earlier text, or a sum of them.

It knows nothing about pipelines. A source of guesses is a row of `DRAFTS`, with the function that builds its networks.
"""
from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Callable, Sequence

import torch
from torch import Tensor, nn

from config.cli import no_head, other_head
from config.console import say
from config.schema.untrusted import short_repr
from config.trees import FIXED_POLICIES
from launch.spec import RankSpec
from model.drafts.dflash import DFlashHead
from model.drafts.draft import Draft, NoDraft
from model.drafts.eagle import Fit
from model.drafts.head_files import draft_with, load_head
from model.drafts.mixture import Mixture
from model.drafts.network import LMHead, ModelDraft, Network, TreeDraft
from model.drafts.retokenized import Retokenized
from model.drafts.suffix import KEPT_TOKENS, SUFFIX, Suffix, add_texts, load_texts
from model.native.linear import NativeProducts
from model.text import VOCABULARIES, Text
from model.weights.blocks import QUANTIZERS
from model.weights.checkpoint import Checkpoint
from model.weights.parts import EMBED, HEAD, read_sizes
from model.weights.quant_layers import compress, fuse, pack
from model.weights.unfold import Unfolded
from model.whole import Whole

OTHER_MODEL = "take a small model that was made for the same tokenizer"


def build_draft(spec: RankSpec, lm_head: LMHead) -> Draft:
    """Build the configured draft, which may share the target's LM head."""
    if not spec.sources:
        return NoDraft()
    networks = [*chain.from_iterable(DRAFTS[name](spec, lm_head) for name in spec.sources if name in DRAFTS)]

    policy = spec.config.growth_policy
    if policy in (*FIXED_POLICIES, "opt") and not all(network.by_level for network in networks):
        raise ValueError(f"policy={policy} grows trees level by level, and draft={spec.config.draft} does not: leave "
                         "policy out")

    for number, network in enumerate(networks):
        network.number = number
    return Mixture(networks, _suffix(spec) if SUFFIX in spec.sources else None)


def _suffix(spec: RankSpec) -> Suffix:
    """Build the automaton over a request's text and, if `answers` names a file, over earlier answers."""
    answers_file, vocab_size = spec.config.answers, spec.sizes.vocab
    if not answers_file:
        return Suffix()
    earlier_texts = load_texts(answers_file, vocab_size, KEPT_TOKENS)
    return Suffix(earlier_texts, lambda text: add_texts(answers_file, [text], vocab_size, KEPT_TOKENS))


def _pack(spec: RankSpec, module: nn.Module, kind: str = "none") -> None:
    """Pack the plain linear layers of a draft; weights that were rounded to a type of blocks are computed from these.
    """
    block_kind = kind if kind in QUANTIZERS else "none"
    if spec.has_native_products(block_kind):
        products = NativeProducts(torch.get_num_threads())
        pack(module, partial(products.quantized, block_kind), products.linear)
    else:
        pack(module)


# --- heads ------------------------------------------------------------------------------------------------------------

def _head(supported_heads: str, sources: Sequence[str], spec: RankSpec, lm_head: LMHead) -> list[TreeDraft]:
    """Build the draft with the head of this model; raises ValueError unless it is one of these sources."""
    draft = _head_draft(spec, lm_head)
    if draft.source not in sources:
        raise ValueError(f"draft={spec.config.draft} needs a head of {supported_heads}, and this model has another "
                         f"kind: take draft={draft.source}, or {other_head(spec.config)}")
    return [draft]


def _head_draft(spec: RankSpec, lm_head: LMHead) -> TreeDraft:
    """Load the draft head of the specification, or that in rank 0's folder; raises ValueError if there is none."""
    part = spec.part
    if not spec.head and not part.eagle:
        raise ValueError(no_head(spec.config))
    source = Checkpoint(spec.head) if spec.head else part.open_head()

    def read_embedding() -> Tensor:
        name = HEAD if spec.sizes.tied else EMBED
        if name not in part.weights.names():
            raise ValueError(f"{part.folder} lacks the embedding, which its draft head needs: split the model again")
        is_readable = not part.is_in_blocks(name) or spec.keeps_blocks(name)
        return part.weights.map_stored(name) if is_readable else part.weights.read(name)

    head = load_head(source, part.config, read_embedding, spec.dtype, spec.device)
    if head.inner and head.inner != part.inner:
        raise ValueError(f"the head in {source.folder} reads layers {list(head.inner)}, but the stages of this split "
                         f"pass on {list(part.inner)}: split the model again with --eagle {source.folder}")

    kind = spec.draft_quant()
    compress(head, kind, spec.dtype)
    if not isinstance(head, DFlashHead):
        fuse(head)
        _pack(spec, head, kind)
    return draft_with(head, lm_head, spec.slots, Fit(str(source.folder), say))


# --- small models -----------------------------------------------------------------------------------------------------

def _small_models(spec: RankSpec, lm_head: LMHead) -> list[ModelDraft]:
    """Build all small models of the key `ssm`, in order: drafts that are called ssm1, ssm2 and so on."""
    drafts = [_small_model(spec, folder, "ssm") for folder in spec.small_models]
    for number, draft in enumerate(drafts, 1):
        draft.source = f"ssm{number}"
    return drafts


def _single_model(spec: RankSpec, lm_head: LMHead) -> list[Network]:
    """Load the small model of the key `draft_dir`. If its tokenizer differs, its guesses are retokenized."""
    folder, target_folder = spec.draft_folder, spec.part.folder
    if folder.is_dir() and _vocabulary_file(folder) and _vocabulary_file(target_folder):
        source = Unfolded(folder)
        try:
            _check_tokens(source, spec)
        except ValueError as error:
            difference = str(error).rpartition(": ")[0]
            say(f"{difference}: that model's guesses are decoded, and encoded again in the tokens of the target")
            context = _context(source, spec)
            return [Retokenized(_model_draft(source, spec, context), Text(folder), Text(target_folder), context)]

    return [_small_model(spec, folder, "draft_dir")]


def _small_model(spec: RankSpec, folder: Path, key_name: str) -> ModelDraft:
    """Load the small model in the folder of the key `key_name`; raises ValueError if it is missing or does not fit."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give {key_name}=FOLDER, a small model in Hugging Face form")
    source = Unfolded(folder)
    _check_tokens(source, spec)
    context = _context(source, spec)
    if context < spec.context:
        raise ValueError(f"the draft model in {folder} has only {context} positions: give max_length={context} or less")
    return _within(spec.sizes.vocab, _model_draft(source, spec, context), read_sizes(source).vocab)


def _within(target_vocab: int, draft: ModelDraft, vocab: int) -> ModelDraft:
    """Let a draft read and guess only tokens that both models have, as either vocabulary may be padded."""
    network, lm_head = draft.network, draft.lm_head
    if vocab < target_vocab:
        draft.network = lambda token_T, pos_T, cache: network(token_T.clamp(max=vocab - 1), pos_T, cache)
    if vocab > target_vocab:
        draft.lm_head = lambda out_TD: lm_head(out_TD)[:, :target_vocab]
    return draft


def _model_draft(source: Checkpoint, spec: RankSpec, context: int) -> ModelDraft:
    """Load a small model with its weights, as a draft."""
    kind = spec.draft_quant()
    whole = Whole(source, spec.dtype, spec.device, kind, context)
    _pack(spec, whole.body, kind)
    _pack(spec, whole.lm_head)
    return ModelDraft(whole.body, whole.lm_head, whole.cache(spec.slots))


def _context(source: Checkpoint, spec: RankSpec) -> int:
    """Return the positions of a draft model; if it has no limit of its own, those of the target."""
    sizes = read_sizes(source)
    return spec.sizes.context if sizes.family.rotary else sizes.context


def _check_tokens(small_model: Checkpoint, spec: RankSpec) -> None:
    """Raise ValueError if a small model numbers its tokens in another way than the target.

    A small model without tokenizer files is trusted if its size is the target's; with them, it may be padded otherwise.
    """
    target, vocab_size = spec.part, read_sizes(small_model).vocab
    its_file, target_file = _vocabulary_file(small_model.folder), _vocabulary_file(target.folder)
    if its_file is None or target_file is None:
        if vocab_size != spec.sizes.vocab:
            raise ValueError(f"the draft model in {small_model.folder} has vocab_size {vocab_size}, but the model has "
                             f"{spec.sizes.vocab}: take one with the same tokenizer")
        return
    if its_file.name == target_file.name and its_file.read_bytes() == target_file.read_bytes():
        return

    its_tokens, target_tokens = _tokens_by_id(small_model.folder), _tokens_by_id(target.folder)
    shared_ids = sorted(its_tokens.keys() & target_tokens.keys())
    wrong_id = next((number for number in shared_ids if its_tokens[number] != target_tokens[number]), None)
    if wrong_id is not None:
        raise ValueError(f"{its_file} calls token {wrong_id} {short_repr(its_tokens[wrong_id])}, but the model's "
                         f"{target_file.name} calls it {short_repr(target_tokens[wrong_id])}: {OTHER_MODEL}")


def _vocabulary_file(folder: Path) -> Path | None:
    return next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)


def _tokens_by_id(folder: Path) -> dict[int, str]:
    return {number: token for token, number in Text(folder).tokenizer.get_vocab().items()}


DRAFTS: dict[str, Callable[[RankSpec, LMHead], Sequence[Network]]] = {
    "eagle": partial(_head, "EAGLE, DFlash or DSpark", ("eagle", "dflash", "dspark")),
    "dflash": partial(_head, "DFlash", ("dflash",)),
    "dspark": partial(_head, "DSpark", ("dspark",)),
    "model": _single_model,
    "ssm": _small_models,
}
