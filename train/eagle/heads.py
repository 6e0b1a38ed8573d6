"""Heads to train: initialize a new one, load a given one, and write a folder in the format of EAGLE's published heads.

This module knows nothing about training.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Dict

import torch
from safetensors.torch import save
from torch import Tensor, nn

from config.schema.block_heads import DFLASH, NESTED_KEYS, BlockForm, is_block, read_block
from config.schema.heads import COUNTED, KIND, LAYERS, NORMS, PARTIAL, read_dialect
from launch.split.write import WEIGHTS, store
from model.drafts.dflash import DFlashHead
from model.drafts.head_files import MAPS, OWN_EMBEDDING, load_head
from model.drafts.heads import Eagle3Head, EagleHead
from model.llama import LlamaConfig, RMSNorm
from model.weights.checkpoint import Checkpoint
from train.data import TokenRow
from train.eagle.teacher import Teacher
from train.eagle.unroll import Trainable

Config = Dict[str, Any]  # the content of a `config.json`
DIALECTS: dict[str, Config] = {  # of EAGLE-3: the fields of a config.json in addition to the sizes
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"]},
    "eagle3.1": {"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True},
    "vllm": {"architectures": ["Eagle3LlamaForCausalLM"], "norm_before_residual": True},
    "speculators": {"architectures": ["Eagle3Speculator"], KIND: "eagle3", "norm_before_residual": True,
                    "norm_before_fc": True, "norm_output": True},
}
NUMBERED = ("Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")  # these call their first layer layers.0
OUTSIDE = ("architectures", "draft_vocab_size", "target_hidden_size", "unrolled_passes", KIND, *LAYERS, *NORMS)
LAYER = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "tie_word_embeddings": False}
SIZES = {  # fields of a `config.json`, and their names in LlamaConfig
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate",
    "max_position_embeddings": "context",
    "rms_norm_eps": "eps",
    "rope_theta": "theta",
    "vocab_size": "vocab"}


def describe(teacher: Teacher, vocab: int | None = None, dialect: str = "eagle3") -> Config:
    """Return the `config.json` of a head for this base: of EAGLE-3 with `vocab` words, or of EAGLE-1/2 if it is None.

    A head is one layer of a LLaMA for every family of base.
    """
    c, files = teacher.config, teacher.source.config
    found: Config = dict(LAYER)
    for field, size in SIZES.items():
        found[field] = getattr(c, size)
    is_usual = c.scaling and c.rope != "longrope"  # its factors only fit the partial rotation of the base
    found["rope_scaling"] = {"rope_type": c.rope, **c.scaling} if is_usual else None
    found["torch_dtype"] = str(teacher.written).partition(".")[2]
    for name in ("bos_token_id", "eos_token_id"):
        found[name] = files.get(name)
    if vocab is None:
        return {**found, "architectures": ["LlamaForCausalLM"]}
    return {**found, "draft_vocab_size": vocab, **DIALECTS[dialect]}


def nested(config: Config, base: Config) -> Config:
    """Return a `config.json` in its dialect's form: speculators nests the sizes of the layers, and names the base."""
    if KIND not in config:
        return config
    known: Config = {"architectures": base.get("architectures"), "name_or_path": base.get("_name_or_path")}
    outside = {name: config[name] for name in OUTSIDE if name in config}
    own = (*outside, "speculators_config", "transformer_layer_config")
    inside = {name: value for name, value in config.items() if name not in own and value is not None}
    return {**outside, "speculators_config": config.get("speculators_config") or {"verifier": known},
            "transformer_layer_config": inside}


def describe_block(teacher: Teacher, form: BlockForm, layers: int) -> Config:
    """Return the `config.json` of a DFlash head for this base, with layers of Qwen3."""
    inside = {"mask_token_id": form.mask, "target_layer_ids": [number - 1 for number in form.inner]}
    return {**describe(teacher), "architectures": [DFLASH], "model_type": "qwen3", "num_hidden_layers": layers,
            "num_target_layers": teacher.config.layers, "block_size": form.size, NESTED_KEYS: inside}


def describe_partial(teacher: Teacher, vocab: int, layers: Sequence[int]) -> Config:
    """Return the `config.json` of an SPD head, which reads the inputs of these layers as far as they are known."""
    return {**describe(teacher, vocab, "eagle3.1"), LAYERS[0]: list(layers), COUNTED: "inputs", PARTIAL: True}


def known_words(head: Eagle3Head) -> Tensor:
    """Return the base's ids of the words that an EAGLE-3 head knows, in the order of its own ids."""
    own = torch.arange(head.lm_head.out_features)
    return own if head.shift is None else own + head.shift.cpu()


def counts(rows: Iterable[TokenRow], known: int) -> Tensor:
    """Return how often answers use each of `known` tokens."""
    found = torch.zeros(known, dtype=torch.long)
    for row in rows:
        found += torch.bincount(row.ids[row.answers].long(), minlength=known)
    return found


def vocabulary(rows: Iterable[TokenRow], size: int, known: int) -> Tensor:
    """Return the `size` most used of `known` tokens in answers, in the order of their ids; ties go to the lower id."""
    return counts(rows, known).argsort(descending=True, stable=True)[:size].sort().values


def new_head(teacher: Teacher, config: Config, own: Tensor | None, seed: int) -> Trainable:
    """Return a new head to train, in float32 (float64 if the base is), with the base's frozen embedding.

    The LM head of an EAGLE-3 head begins with the rows of the base's LM head for its words `own`.
    """
    c = LlamaConfig.read(config)
    head: Trainable
    if is_block(config):
        head = DFlashHead(c, read_block(config))
    elif own is None:
        head = EagleHead(c, bias=True)
    else:
        dialect = read_dialect(config, teacher.config.layers)
        head = Eagle3Head(c, c.hidden, len(own), dialect)
    teacher.inner = head.inner or teacher.inner
    head.to_empty(device="cpu").to(_learning(teacher))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for part in head.modules():
            if isinstance(part, nn.Linear):
                part.reset_parameters()
            elif isinstance(part, RMSNorm):
                part.weight.fill_(1.0)
        head.embed_tokens.weight.copy_(teacher.embedding)
        if isinstance(head, Eagle3Head) and own is not None:
            head.lm_head.weight.copy_(teacher.lm_head.product.weight[own])
            if len(own) < c.vocab:
                head.shift = (own - torch.arange(len(own))).to(teacher.device)
    return _learner(head.to(teacher.device))


@torch.no_grad()
def inherit(head: Trainable, given: Trainable) -> None:
    """Copy the weights of another head of the base into `head`, except those that read features, if their inner layers
    differ. Raise ValueError if the sizes differ."""
    theirs = dict(given.named_parameters())
    reading = () if head.inner == given.inner else ("fc.", "fc_norm.")
    for name, parameter in head.named_parameters():
        if name.startswith(reading):
            continue
        if name not in theirs or theirs[name].shape != parameter.shape:
            raise ValueError(f"the head of --from has no {name} of the size that an SPD head needs; omit --from")
        parameter.copy_(theirs[name])


def _learning(teacher: Teacher) -> torch.dtype:
    """Return the number type for gradients."""
    return torch.float64 if teacher.dtype == torch.float64 else torch.float32


def _learner(head: Trainable) -> Trainable:
    """Make all parameters of a head trainable except its embedding."""
    head.requires_grad_(True)
    head.embed_tokens.requires_grad_(False)
    return head


def load_given(teacher: Teacher, source: Checkpoint) -> Trainable:
    """Load a trained head of this base for further training, in the number type of a new one; its embedding is frozen.
    Raise ValueError if it does not fit."""
    base, dtype = teacher.source.config, _learning(teacher)
    head = load_head(source, base, lambda: teacher.embedding, dtype, teacher.device)
    assert isinstance(head, (EagleHead, Eagle3Head)), "the command has checked its kind"
    teacher.inner = head.inner or teacher.inner
    return _learner(head)


def write(head: Trainable, config: Config, folder: Path, dtype: torch.dtype, borrows: bool = True) -> None:
    """Write config.json and model.safetensors, each atomically, with the names of tensors of the public heads.

    If `borrows`, heads other than EAGLE-1/2 are written without the embedding, which is that of their base.
    """
    tensors = {name: p.detach().to("cpu", dtype)
               for name, p in head.named_parameters()}
    if borrows and not isinstance(head, EagleHead):
        del tensors[OWN_EMBEDDING]
    if isinstance(head, Eagle3Head) and head.shift is not None:
        shift = head.shift.cpu()
        has_V = torch.zeros(head.config.vocab, dtype=torch.bool)
        has_V[torch.arange(len(shift)) + shift] = True
        tensors.update(zip(MAPS, (shift, has_V)))
    if config["architectures"][0] in NUMBERED:
        tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    content = json.dumps(config, indent=2) + "\n"
    store(folder / "config.json", content.encode())
    store(folder / WEIGHTS, save(tensors, {"format": "pt"}))
