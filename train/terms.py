"""The terms that determine the result of a training, and files that keep results of long computations.

Terms are the settings of a command, and hashes that identify files. A file with other terms is rejected.
"""
from __future__ import annotations

import hashlib
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Collection, Mapping, TypeVar

import torch

from config.files import SPACE_REMEDY, make_private
from model.weights.checkpoint import Checkpoint

Terms = Mapping[str, Any]
Made = TypeVar("Made")
HALF = ".part"  # suffix of a file during writing


def digest(content: bytes) -> str:
    """Return a short hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def mark(source: Checkpoint, name: str = "") -> str:
    """Return a hash of some weights of the named or the last tensor, to distinguish files with the same sizes."""
    weights = source.read(name or source.names()[-1]).reshape(-1)[:4096]
    return digest(weights.double().numpy().tobytes())


def settings(args: Namespace, left_out: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a command except those that do not affect its result."""
    return {name: value for name, value in vars(args).items() if name not in left_out}


def check(path: Path, found: Terms, wanted: Terms, other: str) -> None:
    """Raise ValueError if the terms `found` in a file are not those `wanted`; `other` names the alternative."""
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(f"{path} belongs to a training with {name}={found.get(name)!r} instead of "
                             f"{wanted.get(name)!r}; repeat the same command as then, or give {other}")


def kept(path: Path, make: Callable[[], Made]) -> Made:
    """Return the result of an earlier call from a file; if the file is missing or damaged, call `make` and write it."""
    with suppress(Exception):  # torch does not document what it raises on a damaged file
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    store(path, made)
    return made


def store(path: Path, content: object) -> None:
    """Write a file of tensors; an interruption leaves the previous file intact.

    Only its user may read it, since it may hold conversations. Raises ValueError if it cannot be written.
    """
    place = path.resolve()  # so that a link stays
    new = place.with_name(place.name + HALF)
    try:
        make_private(new)
        torch.save(content, new)
        new.replace(place)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
        new.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written ({str(error).splitlines()[0]}): {SPACE_REMEDY}") from None
