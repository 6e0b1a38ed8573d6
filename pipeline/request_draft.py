"""The draft of a request as its strategy sees it: each growth is traced, and rests where guessing is slower."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, ContextManager, Iterator

from config.trees import Growth
from model.drafts.draft import Draft, Steps, WorthDrafting, all_of
from model.tree import TokenTree
from pipeline.requests import RequestTarget
from pipeline.trace import OFF

GROWTH_FACTS = ("nodes", "tokens", "parents", "scores", "gone")  # lists in the trace span of a growth


class RequestDraft(Draft):
    """The draft of a request as seen by its strategy: it traces each growth, and rests while guessing is slower.

    While it rests, it adds only nearly certain guesses, once after each new tip.
    """

    def __init__(self, draft: Draft, target: RequestTarget) -> None:
        self._draft, self._target = draft, target
        self._resting_tip = -1  # at the last growth while resting
        self._traced_guesses: set[int] = set()  # live after the last traced growth

    def refresh(self) -> None:
        self._draft.refresh()

    def grow(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting = all_of) -> Steps[bool]:
        if self._target.guesses:
            if self._target.is_late:
                return False
            with self._span(tree):
                return (yield from self._draft.grow(tree, growth, worth_drafting))

        if tree.tip == self._resting_tip:
            return False

        self._resting_tip = tree.tip
        tree.forget()
        self._draft.refresh()
        with self._span(tree):
            return self._draft.offer_sure(tree, growth)

    def _span(self, tree: TokenTree) -> ContextManager[object]:
        trace = self._target.ring.trace
        return trace.span("grow") if trace is OFF else self._traced(tree)

    @contextmanager
    def _traced(self, tree: TokenTree) -> Iterator[None]:
        """Trace a span with the added guesses, and the guesses that died since the previous growth."""
        num_live, first_new = len(tree.live), tree.horizon
        facts: dict[str, list[Any]] = {name: [] for name in GROWTH_FACTS}
        with self._target.ring.trace.span("grow", live=num_live, **facts):
            yield

            new_guesses = [(node, tree.nodes[node]) for node in range(first_new, tree.horizon) if node in tree.live]
            rows = [(node, guess.token, guess.parent, guess.score) for node, guess in new_guesses]
            for name, column in zip(GROWTH_FACTS, zip(*rows)):
                facts[name] += column
            facts["gone"] += self._traced_guesses - tree.live
            self._traced_guesses = set(tree.live)
