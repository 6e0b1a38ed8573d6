"""The guesses of several sources as one list: a mixture whose weights, and whose worth, are learnt on line.

It knows nothing about trees, models or automatons. A source is a name with tokens and the probabilities that it gives
them, of which it may leave out the least; what it leaves out counts as 0. Plain floats, and no chance.
"""
from __future__ import annotations

import math
from typing import Mapping, Sequence, Tuple

Guesses = Sequence[Tuple[int, float]]  # token and probability
Given = Mapping[str, Guesses]  # by source
Bucket = Tuple[Tuple[str, ...], int]  # the sources that have guesses, and how long a match is

SUFFIX = "suffix"  # the source of which it is known how long the match is that its guesses come from
WEIGHTS = (.03, .15, .25, .35, .4, .5, .6, .8)  # of a suffix beside others at the beginning, by length of match
DEPTHS = (1, 4, 10)  # where a range of depths begins, whose claims have a worth of their own
WINDOW = 256  # settled tokens; one that lies as far back counts 1 / e
KEEP = 1 - 1 / WINDOW  # of what was observed, at one observation more
PRIOR = 16  # settled tokens that the weights of the beginning count for, for ever
TRUST = 4.0  # the precision of the prior by which a claim is worth what it says
STRIDE = 0.25  # the most by which one guess changes a slope or a shift: far out the curvature says little
LEAST = 0.1  # the least slope, so that the order of guesses is kept
SURE = 1e-6  # what is claimed nearer to 0 or 1 counts as this near


class Blend:
    """One distribution out of those of several sources: p = sum of w_s p_s, then what such a p turned out to be worth.

    The weights w depend on which sources have guesses and, where a suffix does, on the length of its match. Each
    settled token is a step of online expectation maximisation (Cappe and Moulines, 2009): its responsibilities
    r_s = w_s p_s / sum of w_t p_t are added to sums that forget, and w_s is proportional to the sum of r_s plus PRIOR
    times the weight of the beginning. Where the weights come to rest, they are the mean of their responsibilities, and
    so a fixed point of expectation maximisation. The log-likelihood is concave in the weights, so that is its maximum,
    with the prior as a Dirichlet's. As the sums forget, the weights stray around it, the less the longer the window is.
    The prior never ends, so a source that was always wrong keeps a little weight, with which it can come back.

    The worth of the mixture is learnt, not that of each source: a mixture of sources that are right as often as they
    claim is right more often than it claims (Ranjan and Gneiting, 2010), and weights for sources that change their
    claims would not come to rest. It is learnt by ranges of depth, since guesses that stand on guesses may drift.
    """

    def __init__(self) -> None:
        self.unlearn()

    def unlearn(self) -> None:
        """Begin again with the weights of the beginning."""
        self._sums: dict[Bucket, dict[str, float]] = {}  # responsibilities by source
        self._worth: dict[tuple[Bucket, int], PlattScaling] = {}

    def weights(self, sources: Sequence[str], length: int) -> dict[str, float]:
        """The weight of each of these sources, with a match of `length` tokens if a suffix is among them."""
        found = starting_weights(sources, length)
        rung = _rung(length) if SUFFIX in sources else 0
        sums = self._sums.get((tuple(sorted(sources)), rung), {})
        total = PRIOR + sum(sums.values())
        return {source: (PRIOR * weight + sums.get(source, 0.0)) / total for source, weight in found.items()}

    def mix(self, given: Given, length: int, depth: int = 0) -> list[tuple[int, float]]:
        """The tokens of all sources with the probability of each, the likeliest first, then by token.

        `length` is that of the suffix's match, and without one not looked at; `depth` is how many guesses the guesses
        stand on.
        """
        mixed = self._mixed(given, length)
        worth = self._worth.get((_bucket(given, length), _range(depth)))
        if worth:
            mixed = {token: worth.of(claimed) for token, claimed in mixed.items()}
        total = max(1.0, sum(mixed.values()))
        return sorted(((token, probability / total) for token, probability in mixed.items()), key=_rank)

    def learn(self, given: Given, length: int, token: int, depth: int = 0) -> None:
        """The token that settled where these guesses stood; arguments as of `mix`.

        Where no source had guessed it, nothing is learnt of their weights.
        """
        bucket = _bucket(given, length)
        mixed = self._mixed(given, length)
        worth = self._worth.setdefault((bucket, _range(depth)), PlattScaling())
        worth.learn(list(mixed.items()), token)
        shares = {source: weight * dict(given[source]).get(token, 0.0)
                  for source, weight in self.weights(bucket[0], length).items()}
        total = sum(shares.values())
        if total > 0:
            sums = self._sums.setdefault(bucket, dict.fromkeys(shares, 0.0))
            for source, share in shares.items():
                sums[source] = KEEP * sums[source] + share / total

    def _mixed(self, given: Given, length: int) -> dict[int, float]:
        mixed: dict[int, float] = {}
        for source, weight in self.weights(_bucket(given, length)[0], length).items():
            for token, probability in given[source]:
                mixed[token] = mixed.get(token, 0.0) + weight * probability
        return mixed


class PlattScaling:
    """How often guesses are right that claim a probability: their log-odds are linear in those that are claimed.

    That is Platt's scaling (1999), which keeps the order of guesses; it is fitted by online Newton steps over a window
    that forgets. A claim is worth what it says at the beginning and, as far as the prior counts, for ever.
    """

    def __init__(self) -> None:
        self._slope, self._shift = 1.0, 0.0
        self._aa, self._ab, self._bb = TRUST, 0.0, TRUST  # the curvature of the log-likelihood, prior included

    def of(self, claimed: float) -> float:
        """The probability of being right, for a claimed probability; 0 stays 0."""
        return _sigmoid(self._slope * _log_odds(claimed) + self._shift) if claimed > 0 else 0.0

    def learn(self, guesses: Guesses, token: int) -> None:
        """This token was right, of these guesses or of none."""
        fading = (1 - KEEP) * TRUST
        self._aa, self._ab, self._bb = KEEP * self._aa + fading, KEEP * self._ab, KEEP * self._bb + fading
        self._step(fading * (1 - self._slope), -fading * self._shift)
        for guess, claimed in guesses:
            if claimed > 0:
                odds = _log_odds(claimed)
                worth = self.of(claimed)
                curvature, wrong = worth * (1 - worth), (guess == token) - worth
                self._aa += curvature * odds * odds
                self._ab += curvature * odds
                self._bb += curvature
                self._step(wrong * odds, wrong)

    def _step(self, along: float, across: float) -> None:
        """Newton's step for a gradient: the slope as far as it may go, then the shift that is best with it."""
        determinant = self._aa * self._bb - self._ab * self._ab
        slope = _bounded((self._bb * along - self._ab * across) / determinant)
        slope = max(slope, LEAST - self._slope)
        self._slope += slope
        self._shift += _bounded((across - self._ab * slope) / self._bb)


def _bounded(step: float) -> float:
    return min(max(step, -STRIDE), STRIDE)


def starting_weights(sources: Sequence[str], length: int) -> dict[str, float]:
    """The weights before anything was learnt: a suffix has its share of WEIGHTS, and all others have equal parts."""
    others = [source for source in sources if source != SUFFIX]
    if not others:
        return dict.fromkeys(sources, 1.0)
    share = WEIGHTS[_rung(length)] if SUFFIX in sources else 0.0
    found = dict.fromkeys(others, (1 - share) / len(others))
    return {**found, SUFFIX: share} if SUFFIX in sources else found


def _rung(length: int) -> int:
    return min(max(length, 1), len(WEIGHTS)) - 1


def _bucket(given: Given, length: int) -> Bucket:
    """The sources that have guesses, by name, and the length of a match if a suffix is among them."""
    sources = tuple(source for source in sorted(given) if given[source])
    return sources, _rung(length) if SUFFIX in sources else 0


def _range(depth: int) -> int:
    return sum(depth >= begin for begin in DEPTHS)


def _rank(guess: tuple[int, float]) -> tuple[float, int]:
    token, probability = guess
    return -probability, token


def _log_odds(probability: float) -> float:
    p = min(max(probability, SURE), 1 - SURE)
    return math.log(p / (1 - p))


FAR = _log_odds(1.0)


def _sigmoid(odds: float) -> float:
    return 1 / (1 + math.exp(-min(max(odds, -FAR), FAR)))
