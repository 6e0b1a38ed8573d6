"""What no candidate can be faster than: a closed form over a recorded text, in place of a trial.

A token that no guess foresees is known only once the target has answered for the one before it, and what follows it
only once its own row has been round. So each such token takes the time of a row, the first one as well. A method that
sends a tree and waits for all of it takes that time, and that of a level, for every tree. A guess of a network stands
on another level than the one before it, and rank 0 drafts one level at a time.
"""
from __future__ import annotations

from typing import Sequence

from config.boards import Boards
from config.methods import METHODS
from eval.plan.candidates import Candidate
from eval.plan.record import Written, kind_of
from sim.stages import Held, work_of


class Bounds:
    """The bounds of candidates on one cluster."""

    def __init__(self, site: Boards) -> None:
        self._site = site
        self._known: dict[tuple[int, str, bool], list[bool]] = {}  # what is foreseen, by answer, draft, and width

    def fastest(self, candidate: Candidate, answers: Sequence[Written], tokens: int) -> float:
        """The most tokens per second with which these answers, of so many tokens at most, may come."""
        sizes = [min(tokens, len(one.text)) for one in answers]
        least = sum(self._least(candidate, one, size) for one, size in zip(answers, sizes))
        return sum(sizes) / least

    def _least(self, candidate: Candidate, one: Written, tokens: int) -> float:
        """The fewest seconds that an answer takes."""
        row = self.row(candidate, len(one.prompt))
        method = METHODS[candidate.method]
        if method.tree == "none":
            return tokens * row
        chain = method.tree == "chain"
        draft = "ssm" if method.draft == "ssm" else candidate.draft
        foreseen = self._foreseen(one, draft, chain)[:tokens]
        level = 0.0 if "suffix" in draft else self._level(draft) / 1e3
        if method.tree == "round":
            depth = candidate.levels
            return _rounds(foreseen, depth) * (row + level)
        missed = tokens - sum(foreseen[1:])
        drafted = tokens * row * level / (row + level)
        return max(missed * row, drafted)

    def row(self, candidate: Candidate, text: int) -> float:
        """Seconds of one row behind so many tokens, once round a copy of the model and judged."""
        site, total = self._site, sum(candidate.layers)
        stages = candidate.groups[:len(candidate.layers)]
        works = [work_of(site, Held(ranks, held / total, 0, 1 / len(ranks))).seconds(1, text)
                 for ranks, held in zip(stages, candidate.layers)]
        ring = [] if candidate.whole else [0, *(ranks[0] for ranks in stages), 0]
        wires = sum(site.link(a, b).latency for a, b in zip(ring, ring[1:]))
        return sum(works) + (wires + site.verdict) / 1e3

    def _level(self, draft: str) -> float:
        return min(self._site.drafting(name).level for name in draft.split("+"))

    def _foreseen(self, one: Written, draft: str, chain: bool) -> list[bool]:
        """Of each token of a text whether a source of the draft may guess it, at whatever depth."""
        key = id(one), draft, chain
        if key not in self._known:
            sources = draft.split("+")
            copied = _copied(one) if "suffix" in sources else [False] * len(one.text)
            tables = [table for name, table in one.guesses.items() if kind_of(name) in sources]
            width = 1 if chain else None
            self._known[key] = [
                copied[place] or any(token in tokens[:width] for table in tables for tokens, _ in table[place])
                for place, token in enumerate(one.text)]
        return self._known[key]


def _copied(one: Written) -> list[bool]:
    """Of each token of a text whether it has followed the token before it earlier."""
    words = [*one.prompt, *one.text]
    seen: set[tuple[int, int]] = set()
    found = []
    for pair in zip(words, words[1:]):
        found.append(pair in seen)
        seen.add(pair)
    return found[len(one.prompt) - 1:]


def _rounds(foreseen: Sequence[bool], depth: int) -> int:
    """How many trees a text takes at least, each of which settles a token of the target and guesses above it."""
    place = rounds = 1  # the first round is the prompt's, and settles the first token
    while place < len(foreseen):
        run = 0
        while run < depth and place + run < len(foreseen) and foreseen[place + run]:
            run += 1
        place += run + 1
        rounds += 1
    return rounds
