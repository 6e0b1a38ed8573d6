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
KeptResult = TypeVar("KeptResult")
PARTIAL_SUFFIX = ".part"  # suffix of a file during writing


def digest(content: bytes) -> str:
    """Return a short hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def mark(source: Checkpoint, name: str = "") -> str:
    """Return a hash of some weights of the named or the last tensor, to distinguish files with the same sizes."""
    weights = source.read(name or source.names()[-1]).reshape(-1)[:4096]
    return digest(weights.double().numpy().tobytes())


def settings(args: Namespace, left_out: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a command except those that do not affect its result."""
    return {option_name: value for option_name, value in vars(args).items() if option_name not in left_out}


def check(path: Path, file_terms: Terms, expected_terms: Terms, alternative: str) -> None:
    """Raise ValueError if the terms in a file are not the expected ones; `alternative` says what to give instead."""
    for term_name in sorted(file_terms.keys() | expected_terms.keys()):
        in_file, expected = file_terms.get(term_name), expected_terms.get(term_name)
        if in_file != expected:
            raise ValueError(f"{path} belongs to a training with {term_name}={in_file!r} instead of {expected!r}; "
                             f"repeat the same command as then, or give {alternative}")


def kept(path: Path, make: Callable[[], KeptResult]) -> KeptResult:
    """Return the result of an earlier call from a file; if the file is missing or damaged, call `make` and write it."""
    with suppress(Exception):  # torch does not document what it raises on a damaged file
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    store(path, result)
    return result


def store(path: Path, content: object) -> None:
    """Write a file of tensors; an interruption leaves the previous file intact.

    Only its user may read it, since it may hold conversations. Raises ValueError if it cannot be written.
    """
    real_path = path.resolve()  # so that a link stays
    new_path = real_path.with_name(real_path.name + PARTIAL_SUFFIX)
    try:
        make_private(new_path)
        torch.save(content, new_path)
        new_path.replace(real_path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
        new_path.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written ({str(error).splitlines()[0]}): {SPACE_REMEDY}") from None
