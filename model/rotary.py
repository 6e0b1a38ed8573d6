"""Rotary positions in the half-rotation layout: tables of cosines and sines, computed once in float32.

Shapes: T rows, H heads, E head dimension, R rotated dimensions of a head, all of them or the first ones.
"""
from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, Mapping, NamedTuple, Tuple

import torch
from torch import Tensor, nn

Rotation = Tuple[Tensor, Tensor]  # the cosines and the sines `[T, 1, R]` of rotary positions


class Turns(NamedTuple):
    """The parameters of a model's rotary positions."""

    head_dim: int
    context: int
    theta: float
    rope: str = "default"  # one of ROTARY
    scaling: Mapping[str, Any] = MappingProxyType({})
    share: float = 1.0  # of a head's dimensions that are rotated


class Rotary(nn.Module):
    """The tables of one kind of rotary positions, for all positions of the context."""

    def __init__(self, c: Turns) -> None:
        super().__init__()
        self.config = c
        self.cos = self.sin = torch.empty(0, device="meta")  # until they are needed

    def frequency(self) -> Tensor:
        """Return the radians per position of each pair of dimensions `[R / 2]`, scaled as the config specifies."""
        c, scaling = self.config, self.config.scaling
        size = int(c.head_dim * c.share)
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        waves = c.theta ** exponents
        plain = 1.0 / waves
        if c.rope == "longrope":
            factors = "long_factor" if c.context > scaling["original_max_position_embeddings"] else "short_factor"
            return 1.0 / (torch.tensor(scaling[factors]) * waves)
        if c.rope == "yarn":
            kept = 1 - self._ramp(size)
        elif c.rope == "llama3":
            trained = scaling["original_max_position_embeddings"]
            cycles = trained / (2 * math.pi) * plain  # full rotations within the training context
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = ((cycles - low) / (high - low)).clamp(0, 1)
        else:
            return plain / scaling.get("factor", 1.0)
        slow = 1.0 / (scaling["factor"] * waves)
        return slow * (1 - kept) + plain * kept  # bit for bit as published, since far positions multiply errors

    def _ramp(self, size: int) -> Tensor:
        """Return the degree `[R / 2]`, from 0 to 1, by which each pair is slowed (YaRN, section 3.2), depending on its
        full rotations within the training context."""
        c, scaling = self.config, self.config.scaling
        trained = scaling["original_max_position_embeddings"]
        turns = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        cycles = [trained / (2 * math.pi * turn) for turn in turns]
        wave = 2 * math.log(c.theta)
        low, high = (size * math.log(cycle) / wave for cycle in cycles)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        places = torch.arange(size // 2, dtype=torch.float32)
        return ((places - low) / max(high - low, 0.001)).clamp(0, 1)

    def loudness(self) -> float:
        """Return the factor of cosines and sines that keeps attention as sharp as in training."""
        scaling = self.config.scaling
        if scaling.get("attention_factor"):
            return float(scaling["attention_factor"])
        factor = scaling.get("factor") or 1.0
        if self.config.rope == "longrope":
            trained = scaling["original_max_position_embeddings"]
            grown = max(0.0, math.log(factor) / math.log(trained))
            return math.sqrt(1 + grown)
        if self.config.rope != "yarn" or factor <= 1:
            return 1.0
        scales = [float(scaling.get(name) or 0) for name in ("mscale", "mscale_all_dim")]
        above, below = scales if all(scales) else [1.0, 0.0]
        step = 0.1 * math.log(factor)
        return (above * step + 1) / (below * step + 1)

    def at(self, pos_T: Tensor, like: Tensor) -> Rotation:
        """Return the rows of both tables at these positions, in the type and on the device of `like`."""
        if self.cos.dtype != like.dtype or self.cos.device != like.device:
            frequency = self.frequency()
            position = torch.arange(self.config.context, dtype=torch.float32)[:, None]
            angle = position * torch.cat((frequency, frequency))
            loudness = self.loudness()
            cos, sin = angle.cos() * loudness, angle.sin() * loudness
            sin[:, :len(frequency)] *= -1  # so that `rotate` is one roll and two products
            self.cos, self.sin = cos.to(like), sin.to(like)
        return self.cos[pos_T, None], self.sin[pos_T, None]


def rotate(x_THE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate queries or keys by their positions; `sin_T1R` includes the sign of the swapped halves."""
    size = cos_T1R.shape[-1]
    if size < x_THE.shape[-1]:
        turned_THR = rotate(x_THE[..., :size], cos_T1R, sin_T1R)
        return torch.cat((turned_THR, x_THE[..., size:]), -1)
    return x_THE * cos_T1R + x_THE.roll(size // 2, -1) * sin_T1R
