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
        rotated_dim = int(c.head_dim * c.share)
        exponents = torch.arange(0, rotated_dim, 2, dtype=torch.float32) / rotated_dim
        wave_lengths = c.theta ** exponents
        plain_frequency = 1.0 / wave_lengths
        if c.rope == "longrope":
            is_long = c.context > scaling["original_max_position_embeddings"]
            factors = scaling["long_factor" if is_long else "short_factor"]
            return 1.0 / (torch.tensor(factors) * wave_lengths)

        # the share of the plain frequency that each pair of dimensions keeps
        if c.rope == "yarn":
            kept_share = 1 - self._ramp(rotated_dim)
        elif c.rope == "llama3":
            trained_context = scaling["original_max_position_embeddings"]
            num_cycles = trained_context / (2 * math.pi) * plain_frequency  # within the training context
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept_share = ((num_cycles - low) / (high - low)).clamp(0, 1)
        else:
            return plain_frequency / scaling.get("factor", 1.0)

        # bit for bit as published, since far positions multiply errors
        slow_frequency = 1.0 / (scaling["factor"] * wave_lengths)
        return slow_frequency * (1 - kept_share) + plain_frequency * kept_share

    def _ramp(self, rotated_dim: int) -> Tensor:
        """Return the degree `[R / 2]`, from 0 to 1, by which each pair is slowed (YaRN, section 3.2), depending on its
        full rotations within the training context."""
        c, scaling = self.config, self.config.scaling
        trained_context = scaling["original_max_position_embeddings"]
        num_turns = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        cycle_lengths = [trained_context / (2 * math.pi * turns) for turns in num_turns]
        log_base = 2 * math.log(c.theta)
        low, high = (rotated_dim * math.log(length) / log_base for length in cycle_lengths)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)

        low, high = max(low, 0), min(high, rotated_dim - 1)
        pair_numbers = torch.arange(rotated_dim // 2, dtype=torch.float32)
        return ((pair_numbers - low) / (high - low or 0.001)).clamp(0, 1)

    def attention_factor(self) -> float:
        """Return the factor of cosines and sines that keeps attention as sharp as in training."""
        scaling = self.config.scaling
        if scaling.get("attention_factor"):
            return float(scaling["attention_factor"])

        factor = scaling.get("factor") or 1.0
        if self.config.rope == "longrope":
            trained_context = scaling["original_max_position_embeddings"]
            growth = max(0.0, math.log(factor) / math.log(trained_context))
            return math.sqrt(1 + growth)

        if self.config.rope != "yarn" or factor <= 1:
            return 1.0
        mscales = [float(scaling.get(name) or 0) for name in ("mscale", "mscale_all_dim")]
        mscale, mscale_all_dim = mscales if all(mscales) else [1.0, 0.0]
        log_factor = 0.1 * math.log(factor)
        return (mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1)

    def at(self, pos_T: Tensor, like: Tensor) -> Rotation:
        """Return the rows of both tables at these positions, in the type and on the device of `like`."""
        if self.cos.dtype != like.dtype or self.cos.device != like.device:
            frequency = self.frequency()
            all_positions = torch.arange(self.config.context, dtype=torch.float32)[:, None]
            angle_SR = all_positions * torch.cat((frequency, frequency))
            factor = self.attention_factor()
            cos, sin = angle_SR.cos() * factor, angle_SR.sin() * factor
            sin[:, :len(frequency)] *= -1  # so that `rotate` is one roll and two products
            self.cos, self.sin = cos.to(like), sin.to(like)
        return self.cos[pos_T, None], self.sin[pos_T, None]


def rotate(x_THE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate queries or keys by their positions; `sin_T1R` includes the sign of the swapped halves."""
    rotated_dim = cos_T1R.shape[-1]
    if rotated_dim < x_THE.shape[-1]:
        rotated_THR = rotate(x_THE[..., :rotated_dim], cos_T1R, sin_T1R)
        return torch.cat((rotated_THR, x_THE[..., rotated_dim:]), -1)

    return x_THE * cos_T1R + x_THE.roll(rotated_dim // 2, -1) * sin_T1R
