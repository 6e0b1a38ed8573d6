"""The search: many candidates on few tokens, then few candidates on many, without those much slower than the best.

Plain decoding is always tried to the end.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Iterable, Iterator, NamedTuple, Sequence

from eval.plan.candidates import Candidate, Families
from eval.plan.trial import Bench, Trial
from launch.progress import ProgressBar

FIRST = 4  # splits of a family to try first
NEAR = 0.9  # share of the best speed at which the best of a method with a draft always stays
WORTH = 1.02  # least speed-up that justifies more boards, or guesses


class Rung(NamedTuple):
    """A step of the search: the amount of the record to answer, and the number of candidates that stay."""

    answers: int
    tokens: int
    guesses: int  # most guesses in a tree of streaming: a smaller tree is nearly as good, and faster to simulate
    stay: int
    slower: float  # share of the best speed that a candidate must reach


Candidates = Iterable[Candidate]
COUNT = 1 << 20  # no limit
FEW = Rung(3, 12, 64, 8, 0.65)
MORE = Rung(6, 24, 64, 5, 0.8)
ALL = Rung(COUNT, COUNT, COUNT, 5, 0.0)


class Search:
    """A search over one cluster, among families of candidates. Raises ValueError if none of them fits."""

    def __init__(self, bench: Bench, families: Families, shown: bool = True) -> None:
        self._bench, self._shown = bench, shown
        self._families = [list(filter(bench.fits, family)) for family in families]
        self._fitting = list(chain.from_iterable(self._families))
        self._trials: dict[tuple[Candidate, Rung], Trial] = {}
        if not self._fitting:
            raise ValueError(_too_large(bench, chain.from_iterable(families)))

    @property
    def tried(self) -> int:
        """The number of trials."""
        return len(self._trials)

    def run(self) -> list[Trial]:
        """Return the trials of the finalists over the whole record, the fastest first."""
        spread = [one for family in self._families for one in _spread(family)]
        good = {one.kind for one in self._best(spread, FEW, "methods")}
        wider = [one for one in self._fitting if one.kind in good]
        near = self._best([*spread, *wider], FEW, "splits")
        varied = self._best(_varied(near), FEW, "sizes")
        varied = self._best([*varied, *_varied(varied[:3])], FEW, "sizes")
        finalists = self._refined(self._best([*near, *varied], MORE, "longer"))
        plain = self._best([one for one in self._fitting if one.plain], FEW, "plain")
        return self._ranked([*finalists, *plain[:2]], ALL, "finalists")

    def with_other_sizes(self, finalists: Sequence[Trial]) -> list[Trial]:
        """Return these finalists, and the best candidate of the chosen method and draft over the most boards.

        If the choice itself uses the most boards, add the best over fewer, unless a finalist with guesses uses fewer.
        """
        tried = candidates(finalists)
        chosen = choice(finalists).candidate
        others = [replace(one, sizes=chosen.sizes) for one in self._fitting
                  if one.kind == chosen.kind and one.members == chosen.members]
        most = max(len(one.boards) for one in others)
        if len(chosen.boards) < most:
            others = [one for one in others if len(one.boards) == most]
        elif any(len(one.boards) < most for one in tried if not one.plain):
            others = []
        else:
            others = [one for one in others if len(one.boards) < most]
        best = self._best(others, FEW, "boards")[:1]
        return self._ranked([*tried, *best], ALL, "boards")

    def _refined(self, better: list[Candidate]) -> list[Candidate]:
        """Improve candidates: change a size or the draft of the fastest of each method as long as that is faster."""
        kinds = sorted({one.kind for one in self._fitting})
        seen = set[Candidate]()
        while True:
            firsts = {one.method: one for one in reversed(better)}
            fresh = [one for one in firsts.values() if one not in seen]
            if not fresh:
                return better
            seen.update(fresh)
            others = _varied(fresh)
            for one in fresh:
                others += [replace(one, draft=draft) for method, draft in kinds if method == one.method]
            better = self._best([*better, *others], MORE, "refined")

    def _best(self, chosen: Candidates, rung: Rung, what: str) -> list[Candidate]:
        """Return the candidates that stay: the fastest, and the best of each method and draft that is hardly slower.

        Otherwise many sizes of one method would displace another method that few tokens cannot distinguish from it.
        """
        ranked = self._ranked(chosen, rung, what)
        top = ranked[0].speed if ranked else 0.0
        fast = [trial for trial in ranked[:rung.stay] if trial.speed >= rung.slower * top]
        staying = candidates(fast)
        for trial in ranked[rung.stay:]:
            kinds = {one.kind for one in staying}
            if trial.speed >= NEAR * top and trial.candidate.kind not in kinds:
                staying.append(trial.candidate)
        return staying

    def _ranked(self, chosen: Candidates, rung: Rung, what: str) -> list[Trial]:
        """Return a trial of each candidate, the fastest first; in a tie the one on fewer boards first."""
        answers = self._bench.book.answers[:rung.answers]
        once = dict.fromkeys(chosen)
        for one in ProgressBar(once, what, unit="candidate", leave=False, disable=not self._shown):
            if (one, rung) not in self._trials:
                trial = self._bench.trial(one, answers, rung.tokens, rung.guesses)
                self._trials[one, rung] = trial
        found = [self._trials[one, rung] for one in once]
        found.sort(key=lambda trial: len(trial.candidate.boards))
        return sorted(found, key=lambda trial: -trial.speed)


def candidates(trials: Iterable[Trial]) -> list[Candidate]:
    """Return the candidates of trials."""
    return [trial.candidate for trial in trials]


def nearly_best(trials: Sequence[Trial]) -> list[Candidate]:
    """Return the candidates that are hardly slower than the first, which is the fastest."""
    return [trial.candidate for trial in trials if trial.speed >= NEAR * trials[0].speed]


def plain_of(finalists: Sequence[Trial]) -> Trial:
    """Return the fastest trial of plain decoding among finalists in order of speed."""
    return next(trial for trial in finalists if trial.candidate.plain)


def choice(finalists: Sequence[Trial]) -> Trial:
    """Return the fastest trial, or plain decoding if that is hardly slower."""
    best, plain = finalists[0], plain_of(finalists)
    return best if best.speed >= WORTH * plain.speed else plain


def _varied(chosen: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that differ from one of these in one size."""
    return [near for one in chosen for near in one.varied()]


def _spread(family: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield at most `FIRST` candidates of a family, evenly spaced, including the first and the last one."""
    last, steps = len(family) - 1, FIRST - 1
    if last < FIRST:
        yield from family
    else:
        yield from (family[round(i * last / steps)] for i in range(FIRST))


def _too_large(bench: Bench, tried: Candidates) -> str:
    """Return the error message for no plan that fits, with the memory that one would need."""
    fullest = (max(bench.memory(one).values()) for one in tried)
    sizes = ", ".join(f"{size:g}" for size in bench.site.memory)
    return (f"no split fits, since even the smallest part takes {min(fullest):.1f} GB on a board, and the boards have "
            f"{sizes}: add boards, quantize the weights (layer_gb=), or give a smaller max_length")
