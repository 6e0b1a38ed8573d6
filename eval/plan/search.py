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

MAX_FIRST_SPLITS = 4  # of a family
NEARLY_BEST = 0.9  # share of the best speed at which the best of a method with a draft always stays
WORTH = 1.02  # least speed-up that justifies more boards, or guesses


class Rung(NamedTuple):
    """A step of the search: the amount of the record to answer, and the number of candidates that stay."""

    max_answers: int
    max_tokens: int
    max_guesses: int  # in a tree of streaming: a smaller tree is nearly as good, and faster to simulate
    max_staying: int
    least_share: float  # of the best speed, that a candidate must reach


Candidates = Iterable[Candidate]
NO_LIMIT = 1 << 20
FEW_TOKENS = Rung(3, 12, 64, 8, 0.65)
MORE_TOKENS = Rung(6, 24, 64, 5, 0.8)
ALL_TOKENS = Rung(NO_LIMIT, NO_LIMIT, NO_LIMIT, 5, 0.0)


class Search:
    """A search over one cluster, among families of candidates. Raises ValueError if none of them fits."""

    def __init__(self, bench: Bench, families: Families, shows_progress: bool = True) -> None:
        self._bench, self._shows_progress = bench, shows_progress
        self._families = [list(filter(bench.fits, family)) for family in families]
        self._fitting = list(chain.from_iterable(self._families))
        self._trials: dict[tuple[Candidate, Rung], Trial] = {}
        if not self._fitting:
            raise ValueError(_too_large_message(bench, chain.from_iterable(families)))

    @property
    def tried(self) -> int:
        """The number of trials."""
        return len(self._trials)

    def run(self) -> list[Trial]:
        """Return the trials of the finalists over the whole record, the fastest first."""
        # methods and drafts
        spread = list(chain.from_iterable(map(_spread, self._families)))
        good_kinds = {candidate.kind for candidate in self._best(spread, FEW_TOKENS, "methods")}

        # splits and sizes
        of_good_kinds = [candidate for candidate in self._fitting if candidate.kind in good_kinds]
        best_splits = self._best([*spread, *of_good_kinds], FEW_TOKENS, "splits")
        best_sizes = self._best(_varied(best_splits), FEW_TOKENS, "sizes")
        best_sizes = self._best([*best_sizes, *_varied(best_sizes[:3])], FEW_TOKENS, "sizes")

        # finalists
        finalists = self._refined(self._best([*best_splits, *best_sizes], MORE_TOKENS, "longer"))
        all_plain = [candidate for candidate in self._fitting if candidate.plain]
        best_plain = self._best(all_plain, FEW_TOKENS, "plain")[:2]
        return self._ranked([*finalists, *best_plain], ALL_TOKENS, "finalists")

    def with_other_sizes(self, finalists: Sequence[Trial]) -> list[Trial]:
        """Return these finalists, and the best candidate of the chosen method and draft over the most boards.

        If the choice itself uses the most boards, add the best over fewer, unless a finalist with guesses uses fewer.
        """
        tried = candidates(finalists)
        chosen = choice(finalists).candidate
        others = [replace(candidate, sizes=chosen.sizes) for candidate in self._fitting
                  if candidate.kind == chosen.kind and candidate.members == chosen.members]
        max_boards = max(len(other.boards) for other in others)

        if len(chosen.boards) < max_boards:
            others = [other for other in others if len(other.boards) == max_boards]
        elif any(len(candidate.boards) < max_boards for candidate in tried if not candidate.plain):
            others = []
        else:
            others = [other for other in others if len(other.boards) < max_boards]

        best_other = self._best(others, FEW_TOKENS, "boards")[:1]
        return self._ranked([*tried, *best_other], ALL_TOKENS, "boards")

    def _refined(self, best: list[Candidate]) -> list[Candidate]:
        """Improve candidates: change a size or the draft of the fastest of each method as long as that is faster."""
        kinds = sorted({candidate.kind for candidate in self._fitting})
        refined = set[Candidate]()
        while True:
            fastest_by_method = {candidate.method: candidate for candidate in reversed(best)}
            to_refine = [candidate for candidate in fastest_by_method.values() if candidate not in refined]
            if not to_refine:
                return best
            refined.update(to_refine)

            others = _varied(to_refine)
            for candidate in to_refine:
                others += [replace(candidate, draft=draft) for method, draft in kinds if method == candidate.method]
            best = self._best([*best, *others], MORE_TOKENS, "refined")

    def _best(self, chosen: Candidates, rung: Rung, label: str) -> list[Candidate]:
        """Return the candidates that stay: the fastest, and the best of each method and draft that is hardly slower.

        Otherwise many sizes of one method would displace another method that few tokens cannot distinguish from it.
        """
        ranked = self._ranked(chosen, rung, label)
        best_speed = ranked[0].speed if ranked else 0.0
        least_speed = rung.least_share * best_speed
        staying = candidates(trial for trial in ranked[:rung.max_staying] if trial.speed >= least_speed)

        staying_kinds = {candidate.kind for candidate in staying}
        for trial in ranked[rung.max_staying:]:
            candidate = trial.candidate
            if trial.speed >= NEARLY_BEST * best_speed and candidate.kind not in staying_kinds:
                staying.append(candidate)
                staying_kinds.add(candidate.kind)
        return staying

    def _ranked(self, chosen: Candidates, rung: Rung, label: str) -> list[Trial]:
        """Return a trial of each candidate, the fastest first; in a tie the one on fewer boards first."""
        answers = self._bench.record.answers[:rung.max_answers]
        distinct = dict.fromkeys(chosen)
        progress = ProgressBar(distinct, label, unit="candidate", leave=False, disable=not self._shows_progress)
        for candidate in progress:
            if (candidate, rung) not in self._trials:
                trial = self._bench.trial(candidate, answers, rung.max_tokens, rung.max_guesses)
                self._trials[candidate, rung] = trial

        trials = [self._trials[candidate, rung] for candidate in distinct]
        return sorted(trials, key=lambda trial: (-trial.speed, len(trial.candidate.boards)))


def candidates(trials: Iterable[Trial]) -> list[Candidate]:
    """Return the candidates of trials."""
    return [trial.candidate for trial in trials]


def nearly_best(trials: Sequence[Trial]) -> list[Candidate]:
    """Return the candidates that are hardly slower than the first, which is the fastest."""
    return [trial.candidate for trial in trials if trial.speed >= NEARLY_BEST * trials[0].speed]


def plain_of(finalists: Sequence[Trial]) -> Trial:
    """Return the fastest trial of plain decoding among finalists in order of speed."""
    return next(trial for trial in finalists if trial.candidate.plain)


def choice(finalists: Sequence[Trial]) -> Trial:
    """Return the fastest trial, or plain decoding if that is hardly slower."""
    best, plain = finalists[0], plain_of(finalists)
    return best if best.speed >= WORTH * plain.speed else plain


def _varied(chosen: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that differ from one of these in one size."""
    return list(chain.from_iterable(candidate.varied() for candidate in chosen))


def _spread(family: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield at most `MAX_FIRST_SPLITS` candidates of a family, evenly spaced, with the first and the last one."""
    last_index, num_steps = len(family) - 1, MAX_FIRST_SPLITS - 1
    if last_index < MAX_FIRST_SPLITS:
        yield from family
    else:
        yield from (family[round(step * last_index / num_steps)] for step in range(MAX_FIRST_SPLITS))


def _too_large_message(bench: Bench, tried: Candidates) -> str:
    """Return the error message for no plan that fits, with the memory that one would need."""
    largest_parts = (max(bench.memory(candidate).values()) for candidate in tried)
    memory_sizes = ", ".join(f"{size:g}" for size in bench.site.memory)
    return (f"no split fits, since even the smallest part takes {min(largest_parts):.1f} GB on a board, and the "
            f"boards have {memory_sizes}: add boards, quantize the weights (layer_gb=), or give a smaller max_length")
