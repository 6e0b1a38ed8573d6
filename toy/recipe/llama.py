"""The chat model and the drafters: LLaMAs, or OPTs, of a few layers, and their training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from toy.recipe.pack import PackedRows
from toy.recipe.tokenizer import VOCABULARY_SIZE
from toy.recipe.train import ToyHyperparameters, begin, join, launch

SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MAX_POSITIONS = 2048


@dataclass(frozen=True)
class Shape:
    """The sizes of a LLaMA."""

    layers: int
    hidden: int
    heads: int
    wide: int  # the width of the feed-forward networks

    def config(self) -> PretrainedConfig:
        return LlamaConfig(
            vocab_size=VOCABULARY_SIZE, hidden_size=self.hidden, intermediate_size=self.wide,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads,
            max_position_embeddings=MAX_POSITIONS, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False,
            **SPECIAL_IDS)


@dataclass(frozen=True)
class OptShape(Shape):
    """The sizes of an OPT; its LM head is the embedding."""

    def config(self) -> PretrainedConfig:
        return OPTConfig(
            vocab_size=VOCABULARY_SIZE, hidden_size=self.hidden, ffn_dim=self.wide, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, max_position_embeddings=MAX_POSITIONS, word_embed_proj_dim=self.hidden,
            dropout=0.0, **SPECIAL_IDS)


def half_precision(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                   **options: Any) -> tuple[Tensor, None]:
    """Causal attention in bfloat16: rotation returns float32, where the backward pass takes three times as long."""
    half_tensors = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    attended = F.scaled_dot_product_attention(*half_tensors, is_causal=True, scale=options.get("scaling"))
    return attended.transpose(1, 2), None


ATTENTION = "half_precision"
AttentionInterface.register(ATTENTION, half_precision)


def loss_of(logits: Tensor, token_ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy of next tokens, in nats; logits `[B, T, V]`, ids and weights `[B, T]`."""
    next_logits = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    next_ids, next_weights = token_ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
    token_losses = F.cross_entropy(next_logits, next_ids, reduction="none")
    return (token_losses * next_weights).sum() / next_weights.sum()


def logits_of(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Return the logits `[B, T, V]` of ids `[B, T]`, in the precision of training."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=token_ids, use_cache=False).logits


@torch.no_grad()
def held_out_losses(model: PreTrainedModel, rows: PackedRows) -> tuple[float, float]:
    """Return nats per token on the held-out rows: as weighted in training, and on answers and source code only."""
    loss_pairs = []
    for token_ids, weights in rows.held_out():
        logits = logits_of(model, token_ids)
        is_answer = (weights == 1).float()
        loss_pairs.append((loss_of(logits, token_ids, weights), loss_of(logits, token_ids, is_answer)))

    weighted_loss, answer_loss = (float(torch.stack(losses).mean()) for losses in zip(*loss_pairs))
    return weighted_loss, answer_loss


def export(model: PreTrainedModel, target_dir: Path) -> None:
    """Write a model's folder in Hugging Face format, in bfloat16."""
    model.generation_config.update(**SPECIAL_IDS)
    model.to(torch.bfloat16).save_pretrained(str(target_dir), safe_serialization=True)

    config_path = target_dir / "config.json"
    config = json.loads(config_path.read_text())
    config["torch_dtype"] = config.pop("dtype", "bfloat16")  # old and new versions both read this name
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def _train(rank: int, plan: ToyHyperparameters, port: int, shape: Shape, work_dir: Path, target_dir: Path) -> None:
    join(rank, plan, port)
    model = AutoModelForCausalLM.from_config(shape.config(), attn_implementation=ATTENTION)
    rows, course = PackedRows(work_dir, plan.seed), begin(plan, model, work_dir)

    def lesson(step: int) -> dict[str, float]:
        token_ids, weights = rows.batch(plan.batch_number(step, rank), plan.batch)
        loss = loss_of(logits_of(model, token_ids), token_ids, weights)
        loss.backward()
        return {"loss": float(loss.detach())}

    course.run(lesson)
    if rank == 0:
        weighted_loss, answer_loss = held_out_losses(model.eval(), rows)
        print(f"{plan.name}: {course.seconds:.0f} s, held-out loss {weighted_loss:.3f} (answers {answer_loss:.3f})",
              flush=True)
        export(model, target_dir)


def fit(plan: ToyHyperparameters, shape: Shape, work_dir: Path, target_dir: Path) -> None:
    """Train a model to the end, from the last checkpoint if one exists, and write it to `target_dir`."""
    launch(_train, plan, shape, work_dir, target_dir)
