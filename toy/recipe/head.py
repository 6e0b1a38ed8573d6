"""The EAGLE head: one decoder layer that guesses the base's next feature, and its training on its own guesses.

Legend: B rows of the batch, T pairs (token t[p+1], feature f[p]), D model, H heads, E head dim, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM


class Attention(nn.Module):
    """Attention over the keys of several passes; each pass has the same positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(dim, dim, bias=False))

    def split(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(self.split(self.k_proj(x_BTD))), self.split(self.v_proj(x_BTD))

    def forward(self, x_BTD: torch.Tensor, seen: list[tuple[torch.Tensor, torch.Tensor]],
                mask: torch.Tensor) -> torch.Tensor:
        q_BHTE = rotate(self.split(self.q_proj(x_BTD)))
        k, v = (torch.cat(parts, dim=2) for parts in zip(*seen))
        return self.o_proj(F.scaled_dot_product_attention(q_BHTE, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Gate(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, wide: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, wide, bias=False), nn.Linear(dim, wide, bias=False)
        self.down_proj = nn.Linear(wide, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A LLaMA layer without the norm before attention (the public heads have none)."""

    def __init__(self, dim: int, wide: int, heads: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(dim, heads), Gate(dim, wide)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=1e-6)


class Head(nn.Module):
    """Names as in the public checkpoints, so that the state dict is the file."""

    def __init__(self, vocabulary: int, dim: int, wide: int, heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(2 * dim, dim)
        self.layers = nn.ModuleList([Layer(dim, wide, heads)])

    def unroll(self, tokens_BT: torch.Tensor, features_BTD: torch.Tensor, passes: int) -> list[torch.Tensor]:
        """The guessed features of each pass; after the first, a pair's feature is what the last pass guessed for it."""
        layer, seen, guesses = self.layers[0], [], []
        embedded, length = self.embed_tokens(tokens_BT), tokens_BT.shape[1]
        for number in range(passes):
            x = self.fc(torch.cat([embedded, features_BTD], dim=-1))
            seen.append(layer.self_attn.keys(x))
            x = x + layer.self_attn(x, seen, visible(length, number))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            guesses.append(x)
            features_BTD = torch.cat([features_BTD[:, :1], x[:, :-1].to(features_BTD.dtype)], dim=1)
        return guesses


def rotate(x_BHTE: torch.Tensor) -> torch.Tensor:
    """Rotary positions 0, 1, ... (half-rotation layout); pair p stands at p, the place of its feature."""
    half = x_BHTE.shape[-1] // 2
    angles = torch.outer(torch.arange(x_BHTE.shape[2]), 10000.0 ** (-torch.arange(half) / half))
    cos, sin = angles.cos().to(x_BHTE.dtype), angles.sin().to(x_BHTE.dtype)
    a, b = x_BHTE[..., :half], x_BHTE[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def visible(length: int, number: int) -> torch.Tensor:
    """What pair p of a pass sees: itself, its forebear in each guessing pass, and of the first pass all before them."""
    eye = torch.ones(length, length, dtype=torch.bool)
    later = [eye.tril(j - number) & eye.triu(j - number) for j in range(1, number + 1)]
    return torch.cat([eye.tril(-number), *later], dim=1) | _first(length, number)


def _first(length: int, number: int) -> torch.Tensor:
    """The first pairs have no forebears so far back; they see the first pair of pass 0, as a row must see something."""
    first = torch.zeros(length, length * (number + 1), dtype=torch.bool)
    first[:number, 0] = True
    return first


@dataclass(frozen=True)
class Losses:
    """The two parts of EAGLE's loss, and how often the best guess is the base's own."""

    feature: torch.Tensor
    token: torch.Tensor
    agreement: torch.Tensor


def losses(base: LlamaForCausalLM, guess: torch.Tensor, truth: torch.Tensor, wanted: torch.Tensor) -> Losses:
    """SmoothL1 between features, and soft cross-entropy between the base's words for them."""
    logits = base.lm_head(guess).float()
    token = -(wanted * F.log_softmax(logits, dim=-1)).sum(-1)
    same = (logits.argmax(-1) == wanted.argmax(-1)).float()
    return Losses(F.smooth_l1_loss(guess.float(), truth.float()), token.mean(), same.mean())


def lesson(base: LlamaForCausalLM, head: Head, ids: torch.Tensor, weights: torch.Tensor, passes: int) -> list[Losses]:
    """One batch: the base's features are the truth, and answers alone count."""
    counts = (weights == 1)[:, 2:]  # pair p guesses token p + 2; the last pair guesses beyond the row
    with torch.no_grad():
        features = base.model(input_ids=ids, use_cache=False).last_hidden_state
        truth = features[:, 1:-1][counts]
        wanted = F.softmax(base.lm_head(truth).float(), dim=-1)
    guesses = head.unroll(ids[:, 1:-1], features[:, :-2].float(), passes)
    return [losses(base, guess[counts], truth, wanted) for guess in guesses]


def export(head: Head, base: LlamaForCausalLM, target: Path) -> None:
    """config.json and model.safetensors with the keys of the public heads."""
    target.mkdir(parents=True, exist_ok=True)
    shape = base.config
    config = {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": shape.hidden_size, "initializer_range": 0.02, "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": shape.vocab_size}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(state, str(target / "model.safetensors"), metadata={"format": "pt"})
