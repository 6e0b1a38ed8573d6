"""Copies of the bundled chat model with noise on its weights: artificial drafts, of which it accepts the fewer guesses,
the more noise they have.

Usage: python3 -m toy.recipe.noise FOLDER AMOUNT [AMOUNT ...]

The copy with an AMOUNT is FOLDER/AMOUNT. The standard deviation of its noise is AMOUNT times that of each matrix.
"""
from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from config.presets import TOY

WEIGHTS = "model.safetensors"


def write_copy(copy_folder: Path, noise_amount: float) -> None:
    """Write a copy of the chat model with this amount of noise, which is the same each time."""
    shutil.copytree(TOY / "llama", copy_folder, dirs_exist_ok=True)
    noise_generator = torch.Generator().manual_seed(0)

    weights = load_file(TOY / "llama" / WEIGHTS)
    for tensor_name, tensor in weights.items():
        if tensor.dim() > 1:
            noise = torch.randn(tensor.shape, generator=noise_generator)
            weights[tensor_name] = (tensor + noise_amount * tensor.float().std() * noise).to(tensor.dtype)
    save_file(weights, copy_folder / WEIGHTS, {"format": "pt"})


if __name__ == "__main__":
    for number_text in sys.argv[2:]:
        write_copy(Path(sys.argv[1]) / number_text, float(number_text))
