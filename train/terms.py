"""What decides the result of a training, and files that keep what took long.

Terms are the settings of a command and hashes that tell files apart. What was begun with other terms is refused.
"""
from __future__ import annotations

import hashlib
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Collection, Mapping, TypeVar

import torch

from config.files import ROOM, make_private
from model.weights.checkpoint import Checkpoint

Terms = Mapping[str, Any]
Made = TypeVar("Made")
HALF = ".part"  # ends the name of a file that is being written


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
    """What a file has kept of an earlier call; without a sound one, what `make` gives, to be kept there."""
    with suppress(Exception):  # what torch raises on a broken file is not written anywhere
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    store(path, made)
    return made


def store(path: Path, content: object) -> None:
    """Write a file of tensors; an interruption leaves the older one whole.

    Only its user may read it, since it may hold conversations. Raises ValueError if it cannot be written.
    """
    place = path.resolve()  # a link is followed
    new = place.with_name(place.name + HALF)
    try:
        make_private(new)
        torch.save(content, new)
        new.replace(place)
    except (OSError, RuntimeError) as error:  # torch reports a full disk by the latter
        new.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written ({str(error).splitlines()[0]}): {ROOM}") from None
