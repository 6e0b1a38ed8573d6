"""The search: many candidates on few tokens, few candidates on many; what is much slower than the best is left out.

Plain decoding is always tried to the end.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Iterable, Iterator, NamedTuple, Sequence

from tqdm import tqdm

from eval.plan.candidates import Candidate, Families
from eval.plan.trial import Bench, Trial

FIRST = 4  # splits of a family that are tried first
NEAR = 0.9  # of the best one's speed: a method that reaches it with a draft stays, whatever is faster
WORTH = 1.02  # times as fast as another one, from which on a candidate is worth its boards, or its guesses


class Rung(NamedTuple):
    """How much of the record is answered, and who stays: the best ones, as far as they are not much slower."""

    answers: int
    tokens: int
    guesses: int  # in a tree of streaming, at most: a smaller one is nearly as good, and sooner simulated
    stay: int
    slower: float  # of the best one's speed, what must be reached


Candidates = Iterable[Candidate]
COUNT = 1 << 20  # all that there are
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
        """How many trials there were."""
        return len(self._trials)

    def run(self) -> list[Trial]:
        """The finalists with all that was recorded, the fastest first."""
        spread = [one for family in self._families for one in _spread(family)]
        good = {one.kind for one in self._best(spread, FEW, "methods")}
        wider = [one for one in self._fitting if one.kind in good]
        near = self._best([*spread, *wider], FEW, "splits")
        varied = self._best(_varied(near), FEW, "sizes")
        varied = self._best([*varied, *_varied(varied[:3])], FEW, "sizes")
        finalists = self._refined(self._best([*near, *varied], MORE, "longer"))
        plain = self._best([one for one in self._fitting if one.plain], FEW, "plain")
        return self._ranked([*finalists, *plain[:2]], ALL, "finalists")

    def beside(self, finalists: Sequence[Trial]) -> list[Trial]:
        """These finalists, and the best of what is chosen over the most boards on which it fits.

        If it is that itself, the best over fewer, unless another method is there that has fewer.
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
        """These, with a size or the draft of the fastest of each method changed, as long as that is faster."""
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
        """Those that stay: the fastest ones, and the fastest of each method with each draft that is hardly slower.

        Else many sizes of one method would crowd out another one, which few tokens cannot separate from it.
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
        """A trial of each, the fastest first; of equals the one on fewer boards."""
        answers = self._bench.book.answers[:rung.answers]
        once = dict.fromkeys(chosen)
        for one in tqdm(once, what, unit="candidate", leave=False, disable=not self._shown):
            if (one, rung) not in self._trials:
                trial = self._bench.trial(one, answers, rung.tokens, rung.guesses)
                self._trials[one, rung] = trial
        found = [self._trials[one, rung] for one in once]
        found.sort(key=lambda trial: len(trial.candidate.boards))
        return sorted(found, key=lambda trial: -trial.speed)


def candidates(trials: Iterable[Trial]) -> list[Candidate]:
    """What was tried."""
    return [trial.candidate for trial in trials]


def nearly_best(trials: Sequence[Trial]) -> list[Candidate]:
    """Those that are hardly slower than the first, which is the fastest."""
    return [trial.candidate for trial in trials if trial.speed >= NEAR * trials[0].speed]


def plain_of(finalists: Sequence[Trial]) -> Trial:
    """The fastest plain decoding among finalists, the fastest of which come first."""
    return next(trial for trial in finalists if trial.candidate.plain)


def choice(finalists: Sequence[Trial]) -> Trial:
    """The fastest, or plain decoding if that is hardly slower."""
    best, plain = finalists[0], plain_of(finalists)
    return best if best.speed >= WORTH * plain.speed else plain


def _varied(chosen: Iterable[Candidate]) -> list[Candidate]:
    """Those that differ from one of these in a size."""
    return [near for one in chosen for near in one.varied()]


def _spread(family: Sequence[Candidate]) -> Iterator[Candidate]:
    """At most `FIRST` of a family, the first and the last one among them."""
    last, steps = len(family) - 1, FIRST - 1
    if last < FIRST:
        yield from family
    else:
        yield from (family[round(i * last / steps)] for i in range(FIRST))


def _too_large(bench: Bench, tried: Candidates) -> str:
    """That nothing fits, with the memory that would."""
    fullest = (max(bench.memory(one).values()) for one in tried)
    sizes = ", ".join(f"{size:g}" for size in bench.site.memory)
    return (f"no split fits: even the smallest part takes {min(fullest):.1f} GB on a board, and the boards have "
            f"{sizes}: add boards, quantize the weights (layer_gb=), or give a smaller max_length")
