"""Which small models may draft on ranks of their own, as the keys `ssm` and `ssm_ranks` say.

It knows nothing about where ranks are: `tp/links.py` places them.
"""
from __future__ import annotations

from typing import Iterator, Protocol, Sequence

from config.methods import METHODS
from config.trees import FIXED


class Asked(Protocol):
    """What a configuration says of small models."""

    @property
    def ssm(self) -> str:
        """The folders of the small models, with commas between."""

    @property
    def ssm_ranks(self) -> bool:
        """Whether each has a rank of its own."""

    @property
    def max_requests(self) -> int:
        """How many answers are made at once."""

    @property
    def draft(self) -> str:
        """The sum of sources of the guesses."""

    @property
    def small_models(self) -> tuple[str, ...]:
        """The folders that the key `ssm` lists."""

    @property
    def sources(self) -> Sequence[str]:
        """The sources of the draft's guesses."""

    @property
    def asked_methods(self) -> Sequence[str]:
        """The methods that may be run."""

    def policy_of(self, method: str) -> str:
        """How a method grows its trees."""


def drafting_ranks(c: Asked) -> int:
    """How many ranks hold a small model each, and nothing else."""
    return len(c.small_models) if c.ssm_ranks and "ssm" in c.sources else 0


def problems(c: Asked) -> Iterator[str]:
    """What is wrong with the keys, each in a sentence that names the fix."""
    if c.ssm and not c.small_models:
        yield f"ssm={c.ssm} names no folder: write ssm=DIR or ssm=DIR,DIR"
    if not c.ssm_ranks:
        return
    if not c.small_models:
        yield "ssm_ranks=true gives a rank to each small model, and none is named: add ssm=DIR,DIR, or leave it out"
    if c.max_requests > 1:
        yield (f"max_requests={c.max_requests} has no meaning with ssm_ranks=true, where small models draft for one "
               "request at a time: leave one of them out")
    using = [method for method in c.asked_methods if _uses(c, method)]
    if not using:
        yield (f"ssm_ranks=true has no meaning for {', '.join(c.asked_methods)} with draft={c.draft}, where no small "
               "models draft: take pipeline_type=specinfer, or leave it out")
    for method in using:
        if not METHODS[method].drafts_whole or c.policy_of(method) not in FIXED:
            yield (f"ssm_ranks=true wants trees that are drafted whole, in a shape that is known before, and {method} "
                   f"with policy={c.policy_of(method)} has none: take pipeline_type=specinfer, or leave it out")


def _uses(c: Asked, method: str) -> bool:
    """Whether small models draft for a method."""
    draft = METHODS[method].draft
    return "ssm" in (draft, c.draft) and draft != "none"
