"""What decides the result of a training, and files that keep what took long.

Terms are the settings of a command and hashes that tell files apart. What was begun with other terms is refused.
"""
from __future__ import annotations

import hashlib
import io
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Collection, Mapping, TypeVar

import torch

from config.files import ROOM, make_private, write
from model.weights.checkpoint import Checkpoint

Terms = Mapping[str, Any]
Made = TypeVar("Made")


def digest(content: bytes) -> str:
    """A short hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def mark(source: Checkpoint, name: str = "") -> str:
    """A hash of some weights of that tensor, or the last, which tells one file from another of the same sizes."""
    weights = source.read(name or source.names()[-1]).reshape(-1)[:4096]
    return digest(weights.double().numpy().tobytes())


def settings(args: Namespace, left_out: Collection[str]) -> dict[str, Any]:
    """The words of a command but those that do not decide its result."""
    return {name: value for name, value in vars(args).items() if name not in left_out}


def check(path: Path, found: Terms, wanted: Terms, other: str) -> None:
    """Raise ValueError if what was `found` in a file is not what is `wanted`; `other` is what to give instead."""
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(f"{path} is of a training with {name}={found.get(name)!r} instead of "
                             f"{wanted.get(name)!r}; give the same command as then, or {other}")


def kept(path: Path, make: Callable[[], Made]) -> Made:
    """What a file has kept of an earlier call; if there is none or a broken one, what `make` gives, to be kept there.

    Only its user may read it, since it may hold conversations. Raises ValueError if it cannot be written.
    """
    with suppress(Exception):  # what torch raises on a broken file is not written anywhere
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    made, content = make(), io.BytesIO()
    torch.save(made, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)
    write(path, content.getvalue(), ROOM)
    return made
