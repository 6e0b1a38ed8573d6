"""The metrics: from answers to speeds, ratios, their uncertainty, and whether texts are equal; pure functions.

They know nothing about files, tables or plots. An answer is one line of a results folder; its seconds are modelled ones
where a cluster was emulated. `Sample` arrays have a row per question: tokens, seconds, and the same of the base.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from config.files import fits

Answer = Mapping[str, Any]
Asked = tuple  # what an answer answers: set, temperature, repeat, seed, question
DRAWS, SEED, LEVEL = 2000, 0, 0.95  # of the bootstrap
NAN = float("nan")  # where there is nothing to measure

# What is read of an answer (eval/bench.py), and of a line of the tally (eval/tally.py); see `fits` in config/files.py.
ANSWER = {
    "method": str, "set": str, "temperature": float, "repeat": int, "seed": int,
    "question_id": lambda value: isinstance(value, (int, str)),
    "choices": lambda value: fits(value, [{"new_tokens": [int], "wall_time": [float]}]) and len(value) > 0,
    "emulated": bool, "profile": str, "scale": float, "launch": str, "requests": [int], "token_ids": [[int]],
    "ttft": [float], "settled": [[(float, int)]], "target_passes": [int]}
TOLD = {"rank": int, "request": int, "seconds": float,
        "spans": lambda value: isinstance(value, dict) and fits(list(value.values()), [float]),
        "late": float, "bytes": float, "control": float, "rows": float}


class Interval(NamedTuple):
    """A value and the bounds that it has with 95 % confidence."""

    value: float
    low: float
    high: float


def asked(answer: Answer) -> Asked:
    """What an answer answers; two methods are compared on the same of these only."""
    return tuple(answer[key] for key in ("set", "temperature", "repeat", "seed", "question_id"))


def tokens(answer: Answer) -> int:
    """New tokens of all turns."""
    return sum(answer["choices"][0]["new_tokens"])


def seconds(answer: Answer) -> float:
    """Of all turns, prefill included."""
    return float(sum(answer["choices"][0]["wall_time"]))


def sample(answers: Iterable[Answer]) -> np.ndarray:
    """Tokens and seconds `[questions, 2]`; what was asked several times is one row."""
    rows: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for answer in answers:
        rows[answer["question_id"]] += (tokens(answer), seconds(answer))
    return np.array([rows[question] for question in sorted(rows, key=str)]).reshape(-1, 2)


def paired(answers: Iterable[Answer], base: Iterable[Answer]) -> np.ndarray:
    """Tokens and seconds of both, `[questions, 4]`, where both have an answer."""
    mine, theirs = ({asked(answer): answer for answer in some} for some in (answers, base))
    both = [key for key in mine if key in theirs]
    return np.hstack([sample(some[key] for key in both) for some in (mine, theirs)])


def speed(samples: Sequence[np.ndarray]) -> Interval:
    """xi: all new tokens by all seconds, in tokens/s; of several sets, the mean of theirs."""
    return _bootstrap(samples, lambda sums: _rate(sums[..., :2]))


def speed_up(samples: Sequence[np.ndarray]) -> Interval:
    """SR: xi by the base's xi on the same questions; of several sets, the ratio of both means (FlowSpec, table 1)."""
    return _bootstrap(samples, lambda sums: _rate(sums[..., :2]) / _rate(sums[..., 2:]))


def _rate(sums: np.ndarray) -> np.ndarray:
    """Of sums `[..., sets, 2]`."""
    return np.asarray(np.mean(sums[..., 0] / sums[..., 1], -1))


def _bootstrap(samples: Sequence[np.ndarray], statistic: Callable[[np.ndarray], np.ndarray]) -> Interval:
    """Questions are drawn anew with replacement, within their set and together with their base; the bounds are
    percentiles of the statistic over the sums `[draws, sets, columns]`."""
    samples = [rows for rows in samples if len(rows)]
    if not samples:
        return Interval(NAN, NAN, NAN)
    value, random = float(statistic(np.stack([rows.sum(0) for rows in samples]))), np.random.default_rng(SEED)
    if max(map(len, samples)) < 2:
        return Interval(value, NAN, NAN)
    draws = np.stack([rows[random.integers(len(rows), size=(DRAWS, len(rows)))].sum(1) for rows in samples], 1)
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(statistic(draws), [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def accepted(answers: Iterable[Answer]) -> float:
    """tau: tokens per pass of the target, its own (bonus) token included; the token of the prefill does not count."""
    turns = [(new, passes) for answer in answers
             for new, passes in zip(answer["choices"][0]["new_tokens"], answer["target_passes"])]
    passes = sum(passes for _, passes in turns)
    return sum(new - 1 for new, _ in turns) / passes if passes else NAN


def first_token(answers: Iterable[Answer]) -> float:
    """Mean seconds until the first token of an answer."""
    times = [seconds for answer in answers for seconds in answer["ttft"]]
    return sum(times) / len(times) if times else NAN


def token_time(answers: Iterable[Answer], share: float) -> float:
    """The seconds that this share of the tokens took at most. Tokens that settle together share the time since the
    tokens before them alike; those that settle first are left out, since the prompt was read for them."""
    gaps = [((now - before) / count, count) for answer in answers for turn in answer["settled"]
            for (before, _), (now, count) in zip(turn, turn[1:])]
    left = share * sum(count for _, count in gaps)
    for gap, count in sorted(gaps):
        left -= count
        if left <= 1e-9:
            return float(gap)
    return NAN


class Difference(NamedTuple):
    """Where an answer leaves the reference first; `margin` is by how much the target prefers the reference's token."""

    answer: Answer
    turn: int
    position: int
    margin: float | None


def differences(answers: Iterable[Answer], base: Iterable[Answer]) -> tuple[int, list[Difference]]:
    """How many answers could be compared with the base's for the same question and seed, and those that differ."""
    reference = {asked(answer): answer["token_ids"] for answer in base}
    compared, found = 0, []
    for answer in answers:
        expected = reference.get(asked(answer))
        if expected is None:
            continue
        compared += 1
        turn = next((i for i, (a, b) in enumerate(zip(answer["token_ids"], expected)) if a != b), None)
        if turn is not None:
            mine, theirs = answer["token_ids"][turn], expected[turn]
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
            found.append(Difference(answer, turn, same, (answer.get("first_difference") or {}).get("margin")))
    return compared, found


def equality(answers: Iterable[Answer], base: Iterable[Answer]) -> str:
    """`same`, or how many answers differ and where the first does; empty if nothing can be compared."""
    compared, found = differences(answers, base)
    if not found:
        return "same" if compared else ""
    first = found[0]
    margin = "" if first.margin is None else f", margin {first.margin:.2g}"
    return (f"{len(found)} of {compared} differ, first question {first.answer['question_id']} turn {first.turn + 1} "
            f"token {first.position + 1}{margin}")


class Shares(NamedTuple):
    """How a rank spent the time of some requests; the first four add up to 1."""

    computed: float  # in layers; on rank 0 in drafting, LM head and verification
    waited: float  # for a message, between its first segment and its last
    idle: float  # before the first segment came and after the last one left
    other: float  # sending, pruning, bookkeeping
    late: float  # by how much emulated devices and wires were too late, in seconds per second of computing
    bytes: float  # sent to the next rank, per request
    control: float  # bytes of prunes, per request
    rows: float  # sent to the next rank, per request


COMPUTING = ("forward", "grow", "verify")


def shares(lines: Iterable[Mapping[str, Any]], kept: set[tuple[str, int]]) -> dict[int, Shares]:
    """By rank, from the tally lines (see eval/tally.py, with `launch`) of the requests (launch, number) in `kept`.

    Only requests count that every rank which wrote anything has told of.
    """
    requests: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for line in lines:
        if (line["launch"], line["request"]) in kept:
            requests[line["launch"], line["request"]][line["rank"]] = line
    ranks = {rank for told in requests.values() for rank in told}
    sums: dict[int, np.ndarray] = {rank: np.zeros(8) for rank in sorted(ranks)}
    count, whole = 0, 0.0
    for told in requests.values():
        if told.keys() == ranks:
            length = max(line["seconds"] for line in told.values())
            count, whole = count + 1, whole + length
            for rank, line in told.items():
                sums[rank] += _spent(line, length)
    return {rank: _shares(row, whole, count) for rank, row in sums.items() if count}


def _spent(line: Mapping[str, Any], length: float) -> np.ndarray:
    computed, waited = sum(line["spans"].get(name, 0.0) for name in COMPUTING), line["spans"].get("wait", 0.0)
    return np.array([computed, waited, length - line["seconds"], line["seconds"] - computed - waited, line["late"],
                     line["bytes"], line["control"], line["rows"]])


def _shares(row: np.ndarray, whole: float, count: int) -> Shares:
    late = row[4] / row[0] if row[0] else 0.0
    return Shares(*(float(x) for x in (*row[:4] / whole, late, *row[5:] / count)))
