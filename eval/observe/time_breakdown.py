"""The account: where the time of a token went on rank 0, and how well the rows in flight served the text.

Pure functions over answers and lines of the tally; all seconds are modelled ones where a cluster was emulated.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Iterable, Iterator, NamedTuple

from eval.metrics import NAN, Answer, TallyLine

SHARES = ("drafting", "verdict", "waiting", "prefill", "other")  # of the time of a token; they add up to it
SPANS = {"drafting": "grow", "verdict": "verify", "waiting": "wait"}  # of rank 0, after the first token


class Account(NamedTuple):
    """What a token took, in seconds, and what true rows did: those that became text behind the prompt."""

    drafting: float
    verdict: float  # LM head, sampler and the noting of what they say
    waiting: float  # for a segment
    prefill: float  # until the first token had settled, whatever was done meanwhile
    other: float  # sending, pruning, bookkeeping, and the layers where rank 0 has some
    aloft: float  # true rows in flight, the mean over the time of decoding
    stay: float  # seconds from the sending of a true row until it was back
    tokens_per_miss: float  # a miss: a true row that was sent only after the answer of its parent had come
    lost: float  # seconds per token in which no true row was in flight

    @property
    def whole(self) -> float:
        """The seconds of a token."""
        return sum(self[:len(SHARES)])


def account(lines: Iterable[TallyLine], answers: Iterable[Answer]) -> Account | None:
    """The account of these answers, from the lines of rank 0 about flights; None if there are none.

    The sums over all requests are divided by all their tokens, or by what the field says.
    """
    flights = {(line["launch"], line["request"]): line for line in lines if "flight" in line}
    sums: dict[str, float] = defaultdict(float)
    for place, tokens, scale in _requests(answers):
        if place in flights:
            sums["tokens"] += tokens
            for name, value in _amounts(flights[place], scale):
                sums[name] += value
    if not sums["tokens"]:
        return None
    of_token = {name: sums[name] / sums["tokens"] for name in (*SHARES, "lost")}
    aloft, stay = _ratio(sums["aloft"], sums["decoding"]), _ratio(sums["stay"], sums["rows"])
    misses = _ratio(sums["tokens"], sums["misses"])
    return Account(aloft=aloft, stay=stay, tokens_per_miss=misses, **of_token)


def _requests(answers: Iterable[Answer]) -> Iterator[tuple[tuple[str, int], int, float]]:
    """Start and number of each request, its tokens, and how many seconds passed for a modelled one."""
    for answer in answers:
        for request, tokens in zip(answer["requests"], answer["choices"][0]["new_tokens"]):
            yield (answer["launch"], request), tokens, answer["scale"]


def _amounts(line: TallyLine, scale: float) -> Iterator[tuple[str, float]]:
    """What one request adds to the sums: seconds, modelled ones, and counts."""
    spans, flight = line["decoding"], line["flight"]
    left = line["seconds"] - line["first"]
    yield "decoding", left / scale
    for share, span in SPANS.items():
        spent = spans.get(span, 0.0)
        left -= spent
        yield share, spent / scale
    yield "prefill", line["first"] / scale
    yield "other", left / scale
    for name in ("stay", "aloft", "lost"):
        yield name, flight[name] / scale
    for name in ("rows", "misses"):
        yield name, flight[name]


def _ratio(sum_: float, count: float) -> float:
    return sum_ / count if count else NAN
