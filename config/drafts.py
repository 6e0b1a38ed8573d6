"""The names of drafts, and where each of them lies.

It knows nothing about models: what a kind of draft is, the key `draft` says.
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Sequence

from config.files import absolute
from config.presets import ROOT
from config.run_config import RunConfig

FOLDERS = ("eagle", "model")  # the kinds of drafts that lie in folders


class NamedDraft(NamedTuple):
    """A draft by its kind, as the key `draft` takes it, and by the folders of its head and of its model, if named."""

    kind: str
    head: str = ""
    model: str = ""


def parts(name: str) -> NamedDraft:
    """A draft by its name, as `model:DIR`. Raises ValueError for a folder that is none's."""
    kinds, folders = [], {}
    for part in name.split("+"):
        kind, colon, folder = part.partition(":")
        kinds.append(kind)
        if colon and kind not in FOLDERS:
            raise ValueError(f"{part} names a folder, but only {' and '.join(FOLDERS)} lie in one: write {kind}")
        if colon and not folder.strip():
            raise ValueError(f"{part} names no folder: write {kind}:DIR, or {kind} alone")
        if colon:
            folders[kind] = _found(folder)
    head, model = folders.get("eagle", ""), folders.get("model", "")
    return NamedDraft("+".join(kinds), head, model)


def _found(folder: str) -> str:
    """The absolute path of a folder; one of the bundled models is found from anywhere."""
    bundled = ROOT / folder
    if folder.startswith("toy/") and not os.path.isdir(folder) and bundled.is_dir():
        return str(bundled)
    return absolute(folder)


def headless(config: RunConfig) -> bool:
    """Whether no draft head is there: not in rank 0's part of the split, and none is named for a split to be made."""
    if not config.model_dir:
        return not config.eagle_dir and Path(config.base_dir or os.devnull).is_dir()
    part = config.first_folder  # which other boards than rank 0's do not have
    return part.is_dir() and not (part / "eagle" / "config.json").is_file()


def needs_head(draft: str) -> bool:
    """Whether a draft of this name needs the head that belongs to the split."""
    return "eagle" in draft.split("+")


def no_head(config: RunConfig) -> str:
    """The sentence that refuses a draft head that is not there, with the remedies."""
    remedy = "split the model again with --eagle DIR" if config.model_dir else "add eagle_dir=DIR"
    model = config.model_dir or config.base_dir
    return f"{model} has no draft head: take draft=suffix, which needs none, draft=model or draft=none, or {remedy}"


def starting(names: Sequence[str]) -> str:
    """The first of these drafts that needs no folder of its own, with which a pipeline can start; else none."""
    return next((name for name in names if ":" not in name), "none")
