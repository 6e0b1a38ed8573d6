"""The chat model and the drafters: LLaMAs, or OPTs, of a few layers, and their training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from toy.recipe.pack import Rows
from toy.recipe.tokenizer import VOCABULARY
from toy.recipe.train import Hyperparameters, begin, join, launch

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    wide: int

    def config(self) -> PretrainedConfig:
        return LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=self.hidden, intermediate_size=self.wide, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.heads, max_position_embeddings=2048,
            rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, **SPECIAL)


@dataclass(frozen=True)
class OptShape(Shape):
    """The sizes of an OPT; its LM head is the embedding."""

    def config(self) -> PretrainedConfig:
        return OPTConfig(
            vocab_size=VOCABULARY, hidden_size=self.hidden, ffn_dim=self.wide, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, max_position_embeddings=2048, word_embed_proj_dim=self.hidden, dropout=0.0,
            **SPECIAL)


def half_precision(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                   mask: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, None]:
    """Causal attention in bfloat16: rotation returns float32, where the backward pass takes three times as long."""
    rows = (x.to(torch.bfloat16) for x in (query, key, value))
    return F.scaled_dot_product_attention(*rows, is_causal=True, scale=options.get("scaling")).transpose(1, 2), None


ATTENTION = "half_precision"
AttentionInterface.register(ATTENTION, half_precision)


def loss_of(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean cross-entropy of next tokens, in nats; logits `[B, T, V]`, ids and weights `[B, T]`."""
    each = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1),
                           reduction="none")
    weight = weights[:, 1:].reshape(-1)
    return (each * weight).sum() / weight.sum()


def words_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits `[B, T, V]` of ids `[B, T]`, in the precision of training."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, rows: Rows) -> tuple[float, float]:
    """Return nats per token on the held-out rows: as weighted in training, and on answers and source code only."""
    pairs = []
    for ids, weights in rows.held():
        logits = words_of(model, ids)
        pairs.append((loss_of(logits, ids, weights), loss_of(logits, ids, (weights == 1).float())))
    weighted, answers = (float(torch.stack(part).mean()) for part in zip(*pairs))
    return weighted, answers


def export(model: PreTrainedModel, target: Path) -> None:
    """Write a model's folder in Hugging Face format, in bfloat16."""
    model.generation_config.update(**SPECIAL)
    model.to(torch.bfloat16).save_pretrained(str(target), safe_serialization=True)
    described = json.loads((target / "config.json").read_text())
    described["torch_dtype"] = described.pop("dtype", "bfloat16")  # old and new versions both read this name
    (target / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _train(rank: int, plan: Hyperparameters, port: int, shape: Shape, work: Path, target: Path) -> None:
    join(rank, plan, port)
    model = AutoModelForCausalLM.from_config(shape.config(), attn_implementation=ATTENTION)
    rows, course = Rows(work, plan.seed), begin(plan, model, work)

    def lesson(step: int) -> dict[str, float]:
        ids, weights = rows.batch(step, plan.batch, rank, plan.processes)
        loss = loss_of(words_of(model, ids), ids, weights)
        loss.backward()
        return {"loss": float(loss.detach())}

    course.run(lesson)
    if rank == 0:
        weighted, answers = held_out_loss(model.eval(), rows)
        print(f"{plan.name}: {course.seconds:.0f} s, held-out loss {weighted:.3f} (answers {answers:.3f})", flush=True)
        export(model, target)


def fit(plan: Hyperparameters, shape: Shape, work: Path, target: Path) -> None:
    """Train a model to the end, from the last checkpoint if one exists, and write it to `target`."""
    launch(_train, plan, shape, work, target)
