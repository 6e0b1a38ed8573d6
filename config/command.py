"""The keys of a command that runs models: its own, beside those of its runs; and the names of drafts.

It knows nothing about how words are read, see `cli.py`. What a kind of draft is, the key `draft` says.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Iterator, Mapping, NamedTuple, Sequence, TypeVar

from config.files import absolute
from config.methods import METHODS
from config.presets import ROOT
from config.ranges import Checked, listed
from config.run_config import RunConfig

Own = TypeVar("Own", bound="CommandKeys")
FOLDERS = ("eagle", "model")  # the kinds of drafts that lie in folders


# --- drafts -----------------------------------------------------------------------------------------------------------

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


# --- keys -------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class CommandKeys(Checked):
    """The base of a command's keys; `EXAMPLES` are shown by the help."""

    USUAL: ClassVar[Mapping[str, Any]] = {}  # keys of a run that have another default here
    REFUSED: ClassVar[Sequence[str]] = ()  # and those that may not be given

    run: RunConfig

    @classmethod
    def of(cls: type[Own], **values: Any) -> Own:
        """These keys with all others at their defaults; the run is one of a named method, rather one with a draft."""
        names = {key.name for key in fields(cls)}
        own = {name: values.pop(name) for name in names & values.keys()}
        named = listed(own.get("methods", getattr(cls, "methods", "")))
        known = [name for name in named if name in METHODS]
        if known and RunConfig.pipeline_type not in known:
            drafting = [name for name in known if METHODS[name].draft != "none"]
            values = {"pipeline_type": (drafting or known)[0], **values}
        return cls(run=RunConfig(**{**cls.USUAL, **values}), **own)

    @property
    def asked_methods(self) -> tuple[str, ...]:
        """The methods that may be run."""
        return (self.run.pipeline_type,)

    @property
    def asked_drafts(self) -> tuple[str, ...]:
        """The drafts that may guess beside or instead of the key draft; empty: that alone."""
        return ()

    def method_problems(self) -> Iterator[str]:
        """What is wrong with a run of any of the methods."""
        for method in self.asked_methods:
            try:
                replace(self.run, pipeline_type=method)
            except ValueError as error:
                yield str(error)


@dataclass(frozen=True)
class ComparedDrafts(CommandKeys):
    """Runs with several drafts, one after the other."""

    # What is compared (commas between)
    drafts: str = ""  # who guesses, as eagle,eagle:DIR,model:DIR (head or model in that folder); empty: the key draft

    @property
    def asked_drafts(self) -> tuple[str, ...]:
        """The names of the drafts, in the order in which they were asked for."""
        return listed(self.drafts) or (self.run.draft,)

    @property
    def first_draft(self) -> str:
        """The kind of draft that a pipeline starts with, before the others are asked for."""
        return self.run.draft if self.run.draft_dir else starting(self.asked_drafts)

    def with_draft(self, name: str, **changes: Any) -> RunConfig:
        """The configuration of a run with this draft alone. Raises ValueError for one that cannot be."""
        kind, _, model = parts(name)
        if "model" in kind.split("+"):
            model = model or self.run.draft_dir
        return replace(self.run, draft=kind, draft_dir=model, **changes)

    def draft_problems(self) -> list[str]:
        """What is wrong with the drafts, each in a sentence that names the fix."""
        found, used = [], set()
        for name in listed(self.drafts):
            try:
                used.add(self.with_draft(name).draft_dir)
            except ValueError as error:
                found.append(f"drafts={self.drafts}: {error}")
        if any(needs_head(name) for name in listed(self.drafts)) and headless(self.run):
            found.append(f"drafts={self.drafts}: {no_head(self.run)}")
        if self.drafts and not listed(self.drafts):
            found.append("drafts is empty: name at least one, or leave it out")
        if self.drafts and self.run.draft_dir not in ("", *used):
            found.append(f"draft_dir={self.run.draft_dir} is ignored with drafts={self.drafts}: write model:DIR there")
        return found


def flat(config: CommandKeys | RunConfig) -> dict[str, Any]:
    """The values of all keys, those of the run among them."""
    own = {key: value for key, value in vars(config).items() if key != "run"}
    return {**vars(config.run), **own}
