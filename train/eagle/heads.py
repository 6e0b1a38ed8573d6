"""Heads to train: initialize a new one, load a given one, and write a folder in the format of EAGLE's published heads.

This module knows nothing about training.
"""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Dict

import torch
from safetensors.torch import save
from torch import Tensor, nn

from config.files import replace, write_json
from config.schema.block_heads import DFLASH, NESTED_KEYS, BlockForm, is_block, read_block
from config.schema.heads import KIND, LAYERS, NORMS, read_dialect
from launch.split.write import WEIGHTS
from model.drafts.dflash import DFlashHead
from model.drafts.head_files import MAPS, OWN_EMBEDDING, load_head
from model.drafts.heads import Eagle3Head, EagleHead
from model.llama import LlamaConfig
from model.plain_layers import RMSNorm
from model.weights.checkpoint import Checkpoint
from train.data import TokenRow
from train.eagle.teacher import Teacher
from train.eagle.unroll import Trainable

HeadConfig = Dict[str, Any]  # the content of a `config.json`
DIALECTS: dict[str, HeadConfig] = {  # of EAGLE-3: the fields of a config.json in addition to the sizes
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"]},
    "eagle3.1": {"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True},
    "vllm": {"architectures": ["Eagle3LlamaForCausalLM"], "norm_before_residual": True},
    "speculators": {"architectures": ["Eagle3Speculator"], KIND: "eagle3", "norm_before_residual": True,
                    "norm_before_fc": True, "norm_output": True},
}
# These architectures call their first layer layers.0.
NUMBERED_LAYER_HEADS = ("Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
OUTER_FIELDS = ("architectures", "draft_vocab_size", "target_hidden_size", "unrolled_passes", KIND, *LAYERS, *NORMS)
LAYER_FIELDS = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "tie_word_embeddings": False}
SIZE_FIELDS = {  # fields of a `config.json`, and their names in LlamaConfig
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate",
    "max_position_embeddings": "context",
    "rms_norm_eps": "eps",
    "rope_theta": "theta",
    "vocab_size": "vocab"}


def describe(teacher: Teacher, vocab_size: int | None = None, dialect: str = "eagle3") -> HeadConfig:
    """Return the `config.json` of a head for this base: of EAGLE-3 with `vocab_size` words, or of EAGLE-1/2 if None.

    A head is one layer of a LLaMA for every family of base.
    """
    base_sizes, base_config = teacher.config, teacher.source.config
    head_config: HeadConfig = dict(LAYER_FIELDS)
    for field_name, size_name in SIZE_FIELDS.items():
        head_config[field_name] = getattr(base_sizes, size_name)

    # the factors of longrope only fit the partial rotation of the base
    is_usual = base_sizes.scaling and base_sizes.rope != "longrope"
    head_config["rope_scaling"] = {"rope_type": base_sizes.rope, **base_sizes.scaling} if is_usual else None
    head_config["torch_dtype"] = str(teacher.written).partition(".")[2]
    for token_name in ("bos_token_id", "eos_token_id"):
        head_config[token_name] = base_config.get(token_name)

    if vocab_size is None:
        return {**head_config, "architectures": ["LlamaForCausalLM"]}
    return {**head_config, "draft_vocab_size": vocab_size, **DIALECTS[dialect]}


def nested(config: HeadConfig, base_config: HeadConfig) -> HeadConfig:
    """Return a `config.json` in its dialect's form: speculators nests the sizes of the layers, and names the base."""
    if KIND not in config:
        return config

    base_names: HeadConfig = {"architectures": base_config.get("architectures"),
                          "name_or_path": base_config.get("_name_or_path")}
    outer_fields = {name: config[name] for name in OUTER_FIELDS if name in config}
    outer_names = (*outer_fields, "speculators_config", "transformer_layer_config")

    layer_fields = {name: value for name, value in config.items() if name not in outer_names and value is not None}
    speculators_config = config.get("speculators_config") or {"verifier": base_names}
    return {**outer_fields, "speculators_config": speculators_config, "transformer_layer_config": layer_fields}


def describe_block(teacher: Teacher, form: BlockForm, layers: int) -> HeadConfig:
    """Return the `config.json` of a DFlash head for this base, with layers of Qwen3."""
    dflash_fields = {"mask_token_id": form.mask, "target_layer_ids": [layer - 1 for layer in form.inner]}
    return {**describe(teacher), "architectures": [DFLASH], "model_type": "qwen3", "num_hidden_layers": layers,
            "num_target_layers": teacher.config.layers, "block_size": form.size, NESTED_KEYS: dflash_fields}


def known_words(head: Eagle3Head) -> Tensor:
    """Return the base's ids of the words that an EAGLE-3 head knows, in the order of its own ids."""
    word_ids = torch.arange(head.lm_head.out_features)
    return word_ids if head.shift is None else word_ids + head.shift.cpu()


def counts(rows: Iterable[TokenRow], vocab_size: int) -> Tensor:
    """Return how often answers use each of `vocab_size` tokens."""
    token_counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        token_counts += torch.bincount(row.ids[row.answers].long(), minlength=vocab_size)
    return token_counts


def vocabulary(rows: Iterable[TokenRow], num_words: int, vocab_size: int) -> Tensor:
    """Return the `num_words` most used tokens in answers, in the order of their ids; ties go to the lower id."""
    return counts(rows, vocab_size).argsort(descending=True, stable=True)[:num_words].sort().values


def new_head(teacher: Teacher, config: HeadConfig, word_ids: Tensor | None, seed: int) -> Trainable:
    """Return a new head to train, in float32 (float64 if the base is), with the base's frozen embedding.

    The LM head of an EAGLE-3 head begins with the rows of the base's LM head for its words `word_ids`.
    """
    head_sizes = LlamaConfig.read(config)
    head: Trainable
    if is_block(config):
        head = DFlashHead(head_sizes, read_block(config))
    elif word_ids is None:
        head = EagleHead(head_sizes, bias=True)
    else:
        dialect = read_dialect(config, teacher.config.layers)
        head = Eagle3Head(head_sizes, head_sizes.hidden, len(word_ids), dialect)

    teacher.inner = head.inner or teacher.inner
    head.to_empty(device="cpu").to(_learning(teacher))

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
        head.embed_tokens.weight.copy_(teacher.embedding)
        if isinstance(head, Eagle3Head) and word_ids is not None:
            head.lm_head.weight.copy_(teacher.lm_head.product.weight[word_ids])
            if len(word_ids) < head_sizes.vocab:
                head.shift = (word_ids - torch.arange(len(word_ids))).to(teacher.device)
    return _learner(head.to(teacher.device))


def _learning(teacher: Teacher) -> torch.dtype:
    """Return the number type for gradients."""
    return torch.float64 if teacher.dtype == torch.float64 else torch.float32


def _learner(head: Trainable) -> Trainable:
    """Make all parameters of a head trainable except its embedding."""
    head.requires_grad_(True)
    head.embed_tokens.requires_grad_(False)
    return head


def load_trained(teacher: Teacher, source: Checkpoint) -> Trainable:
    """Load a trained head of this base for further training, in the number type of a new one; its embedding is frozen.
    Raise ValueError if it does not fit."""
    base_config, dtype = teacher.source.config, _learning(teacher)
    head = load_head(source, base_config, lambda: teacher.embedding, dtype, teacher.device)
    assert isinstance(head, (EagleHead, Eagle3Head)), "the command has checked its kind"
    teacher.inner = head.inner or teacher.inner
    return _learner(head)


def write(head: Trainable, config: HeadConfig, folder: Path, dtype: torch.dtype,
          borrows_embedding: bool = True) -> None:
    """Write config.json and model.safetensors, each atomically, with the names of tensors of the public heads.

    If `borrows_embedding`, heads other than EAGLE-1/2 are written without the embedding, which is that of their base.
    """
    tensors = {name: parameter.detach().to("cpu", dtype) for name, parameter in head.named_parameters()}
    if borrows_embedding and not isinstance(head, EagleHead):
        del tensors[OWN_EMBEDDING]

    if isinstance(head, Eagle3Head) and head.shift is not None:
        shift = head.shift.cpu()
        has_V = torch.zeros(head.config.vocab, dtype=torch.bool)
        has_V[torch.arange(len(shift)) + shift] = True
        tensors.update(zip(MAPS, (shift, has_V)))
    if config["architectures"][0] in NUMBERED_LAYER_HEADS:
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}

    write_json(folder / "config.json", config, indent=2)
    replace(folder / WEIGHTS, save(tensors, {"format": "pt"}))
