"""Copies between devices."""
from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Return `x` on a device; from host to CUDA it is copied asynchronously, through pinned memory."""
    if torch.device(device).type == "cuda" and not x.is_cuda and x.numel():
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
