"""The keys of a command that runs models: its own, beside those of its runs.

It knows nothing about how words are read, see `cli.py`.
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Iterator, Mapping, Sequence, TypeVar

from config.drafts import headless, needs_head, no_head, parts, starting
from config.methods import METHODS
from config.ranges import Checked, listed
from config.run_config import RunConfig

Own = TypeVar("Own", bound="CommandKeys")


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
