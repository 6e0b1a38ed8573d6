"""The devices of this machine, by the names that a person gives them.

It knows nothing about ranks, and takes no memory of a device by looking.
"""
from __future__ import annotations

import re

import torch


def usable(name: str, key: str = "device=") -> torch.device:
    """The device of that name; `auto` is a CUDA device if there is one. Raises ValueError for one that is not here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"{key}{name} is unknown: choose cpu, cuda or cuda:N")
    there = ", ".join(f"cuda:{number}" for number in range(count)) or "none that this torch can use"
    if name != "cpu" and int(name[len("cuda:"):] or 0) >= count:
        raise ValueError(f"{key}{name} is not here (CUDA devices: {there}): choose another, or {key}cpu")
    return torch.device(name)
