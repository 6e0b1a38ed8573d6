"""The search: many candidates on few tokens, few candidates on many; what is much slower than the best is left out.

Plain decoding is always tried to the end.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Collection, Iterable, Iterator, NamedTuple, Sequence

from tqdm import tqdm

from eval.plan.candidates import Candidate
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


COUNT = 1 << 20  # all that there are
FEW = Rung(3, 12, 64, 8, 0.65)
MORE = Rung(6, 24, 64, 5, 0.8)
ALL = Rung(COUNT, COUNT, COUNT, 5, 0.0)


class Search:
    """A search over one cluster."""

    def __init__(self, bench: Bench, shown: bool = True) -> None:
        self._bench, self._shown = bench, shown
        self._trials: dict[tuple[Candidate, Rung], Trial] = {}

    @property
    def tried(self) -> int:
        """How many trials there were."""
        return len(self._trials)

    def run(self, families: Sequence[Sequence[Candidate]]) -> list[Trial]:
        """The finalists with all that was recorded, the fastest first; raises ValueError if nothing fits."""
        there = [list(filter(self._bench.fits, family)) for family in families]
        there = [family for family in there if family]
        if not there:
            raise ValueError(_too_large(self._bench, families))
        every = [one for family in there for one in family]
        spread = [one for family in there for one in _spread(family, FIRST)]
        first = self._try(spread, FEW, "methods")
        good = {one.kind for one in candidates(_best(first, FEW))}
        wider = self._try((one for one in every if one.kind in good), FEW, "splits")
        varied = self._varied(candidates(_best([*first, *wider], FEW)))
        finalists = self._refined(_best(varied, MORE), {one.kind for one in every})
        plain = self._try((one for one in every if one.plain), FEW, "plain")
        last = candidates([*finalists, *_best(plain, FEW)[:2]])
        return _ranked(self._try(last, ALL, "finalists"))

    def beside(self, trials: Sequence[Trial], chosen: Candidate,
               families: Sequence[Sequence[Candidate]]) -> list[Trial]:
        """These trials, and the best of what was chosen over the most boards on which it fits.

        If it is that itself, the best over fewer, unless another method is there that has fewer.
        """
        same = (replace(one, sizes=chosen.sizes) for family in families for one in family
                if one.kind == chosen.kind and one.members == chosen.members)
        fitting = list(filter(self._bench.fits, same))
        most = max((len(one.boards) for one in fitting), default=0)
        others = [one for one in fitting if len(one.boards) == most]
        if len(chosen.boards) == most:
            guess = (one for one in candidates(trials) if not one.plain)
            there = any(len(one.boards) < most for one in guess)
            others = [] if there else [one for one in fitting if len(one.boards) < most]
        best = _best(self._try(others, FEW, "boards"), FEW)[:1]
        return _ranked([*trials, *self._try(candidates(best), ALL, "boards")])

    def _varied(self, chosen: Sequence[Candidate]) -> list[Trial]:
        """These candidates and those that differ in a size, and the best of them with another size changed."""
        near = [one for each in chosen for one in each.varied()]
        found = _best(self._try(near, FEW, "sizes"), FEW)
        again = [near for one in candidates(found[:3]) for near in one.varied()]
        found = _best([*found, *self._try(again, FEW, "sizes")], FEW)
        return self._try([*chosen, *candidates(found)], MORE, "longer")

    def _refined(self, found: Sequence[Trial], kinds: Collection[tuple[str, str]]) -> list[Trial]:
        """Finalists, with a size or the draft of the fastest of each method changed, as long as that is faster.

        `kinds` are the methods with the drafts that they may have.
        """
        better, seen = list(found), set[Candidate]()
        while True:
            firsts = {one.method: one for one in reversed(candidates(better))}
            fresh = [one for one in firsts.values() if one not in seen]
            if not fresh:
                return better
            seen.update(fresh)
            others = [near for one in fresh for near in one.varied()]
            for one in fresh:
                drafts = (draft for method, draft in sorted(kinds) if method == one.method)
                others += [replace(one, draft=draft) for draft in drafts]
            better = _best([*better, *self._try(others, MORE, "refined")], MORE)

    def _try(self, chosen: Iterable[Candidate], rung: Rung, what: str) -> list[Trial]:
        """A trial of each."""
        answers = self._bench.book.answers[:rung.answers]
        once = dict.fromkeys(chosen)
        for one in tqdm(once, desc=what, unit="candidate", leave=False, disable=not self._shown):
            if (one, rung) not in self._trials:
                self._trials[one, rung] = self._bench.trial(one, answers, rung.tokens, rung.guesses)
        return [self._trials[one, rung] for one in once]


def candidates(trials: Iterable[Trial]) -> list[Candidate]:
    """What was tried."""
    return [trial.candidate for trial in trials]


def nearly_best(trials: Sequence[Trial]) -> list[Trial]:
    """Those that are hardly slower than the first, which is the fastest."""
    return [trial for trial in trials if trial.speed >= NEAR * trials[0].speed]


def plain_of(finalists: Sequence[Trial]) -> Trial:
    """The fastest plain decoding among finalists, the fastest of which come first."""
    return next(trial for trial in finalists if trial.candidate.plain)


def choice(finalists: Sequence[Trial]) -> Trial:
    """The fastest, or plain decoding if that is hardly slower."""
    best, plain = finalists[0], plain_of(finalists)
    return best if best.speed >= WORTH * plain.speed else plain


def _ranked(trials: Iterable[Trial]) -> list[Trial]:
    """Each candidate once, the fastest first; of equals the one on fewer boards."""
    once = {trial.candidate: trial for trial in trials}
    fewest = sorted(once.values(), key=lambda trial: len(trial.candidate.boards))
    return sorted(fewest, key=lambda trial: -trial.speed)


def _best(trials: Iterable[Trial], rung: Rung) -> list[Trial]:
    """Those that stay: the fastest ones, and the fastest of each method with each draft that is hardly slower.

    Else many sizes of one method would crowd out another one, which few tokens cannot separate from it.
    """
    ranked = _ranked(trials)
    top = ranked[0].speed if ranked else 0.0
    staying = [trial for trial in ranked[:rung.stay] if trial.speed >= rung.slower * top]
    there = {one.kind for one in candidates(staying)}
    for trial in ranked[rung.stay:]:
        kind = trial.candidate.kind
        if trial.speed >= NEAR * top and kind not in there:
            there.add(kind)
            staying.append(trial)
    return staying


def _spread(family: Sequence[Candidate], most: int) -> Iterator[Candidate]:
    """At most so many of a family, the first and the last one among them."""
    last, steps = len(family) - 1, most - 1
    if last < most:
        yield from family
    else:
        yield from (family[round(i * last / steps)] for i in range(most))


def _too_large(bench: Bench, families: Sequence[Sequence[Candidate]]) -> str:
    """That nothing fits, with the memory that would."""
    fullest = (max(bench.memory(one).values()) for family in families for one in family)
    return (f"no split fits: even the smallest part takes {min(fullest):.1f} GB on a board, and the boards have "
            f"{', '.join(f'{size:g}' for size in bench.site.memory)}: add boards, quantize the weights (layer_gb=), or "
            "give a smaller max_length")
