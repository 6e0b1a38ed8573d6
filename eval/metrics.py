"""The metrics: from answers to speeds, ratios, their uncertainty, and whether texts are equal; pure functions.

They know nothing about files, tables or plots. An answer is one line of a results folder: what a method wrote in all
turns of a question. Its seconds are modelled ones where a cluster was emulated. Samples are arrays with a row for each
question: tokens and seconds of a method, and in two more columns those of the baseline that it is compared with.
"""
from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from config.files import fits

Answer = Mapping[str, Any]
Answers = Iterable[Answer]
TallyLine = Mapping[str, Any]
Amounts = tuple  # tokens, and the seconds that they took
Statistic = Callable[[np.ndarray], np.ndarray]
Request = tuple  # the start of the pipeline, and how many requests it had before
Trial = tuple  # set, temperature, repeat, seed and question: what two methods must share to be compared
DRAWS, SEED, LEVEL = 2000, 0, 0.95  # of the bootstrap
NAN = float("nan")  # where there is nothing to measure
COMPUTING = ("forward", "grow", "verify")  # the spans in which a rank computes


def _has_choice(value: Any) -> bool:
    """Whether an answer has its one choice, with tokens and seconds of each turn."""
    choice = {"new_tokens": [int], "wall_time": [float]}
    return fits(value, [choice]) and len(value) > 0


def _has_spans(value: Any) -> bool:
    """Whether a line of the tally has seconds for each kind of span."""
    return isinstance(value, dict) and fits(list(value.values()), [float])


# What is read of an answer (eval/evaluation.py), and of a line of eval/observe/span_sums.py; see `fits` in
# config/files.py.
ANSWER = {
    "method": str, "set": str, "temperature": float, "repeat": int, "seed": int,
    "question_id": lambda value: isinstance(value, (int, str)),
    "choices": _has_choice, "token_ids": [[int]], "target_passes": [int],
    "emulated": bool, "profile": str, "scale": float,
    "launch": str, "requests": [int],
    "ttft": [float], "settled": [[(float, int)]]}
TALLY_LINE = {
    "rank": int, "request": int, "seconds": float, "spans": _has_spans, "late": float,
    "bytes": float, "control": float, "rows": float}
FLIGHT_LINE = {  # what a line about flights has beside
    "first": float, "decoding": _has_spans,
    "flight": {"rows": int, "stay": float, "aloft": float, "misses": int, "lost": float}}


class Interval(NamedTuple):
    """A value and the bounds that it has with 95 % confidence."""

    value: float
    low: float
    high: float


def trial_of(answer: Answer) -> Trial:
    """The trial that an answer belongs to; methods are compared on the same trials only."""
    return tuple(answer[key] for key in ("set", "temperature", "repeat", "seed", "question_id"))


def tokens(answer: Answer) -> int:
    """The number of new tokens in all turns of an answer."""
    return sum(answer["choices"][0]["new_tokens"])


def seconds(answer: Answer) -> float:
    """The seconds that all turns of an answer took, prefill included."""
    return float(sum(answer["choices"][0]["wall_time"]))


def whole(answer: Answer) -> Amounts:
    """Tokens and seconds of an answer."""
    return tokens(answer), seconds(answer)


def decoding(answer: Answer) -> Amounts:
    """The tokens behind the first of each turn, and the seconds after it: what decoding alone did."""
    [choice] = answer["choices"]
    spent = [total - first for total, first in zip(choice["wall_time"], answer["ttft"])]
    return sum(choice["new_tokens"]) - len(choice["new_tokens"]), float(sum(spent))


def sample(answers: Answers, amounts: Callable[[Answer], Amounts] = whole) -> np.ndarray:
    """Tokens and seconds of each question, `[questions, 2]`; what was asked several times is one row.

    `amounts` gives both for an answer.
    """
    rows: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for answer in answers:
        rows[answer["question_id"]] += amounts(answer)
    questions = sorted(rows, key=str)
    return np.array([rows[question] for question in questions]).reshape(-1, 2)


def paired(answers: Answers, baseline: Answers) -> np.ndarray:
    """Tokens and seconds of both methods, `[questions, 4]`, over the trials that both have answered."""
    mine = {trial_of(answer): answer for answer in answers}
    theirs = {trial_of(answer): answer for answer in baseline}
    both = [trial for trial in mine if trial in theirs]
    return np.hstack([sample(found[trial] for trial in both) for found in (mine, theirs)])


def speed(samples: Sequence[np.ndarray]) -> Interval:
    """The speed xi in tokens/s: all new tokens by all seconds; of several sets, the mean of theirs."""
    return bootstrap(samples, lambda sums: _rate(sums[..., :2]))


def total_speed(answers: Answers) -> float:
    """Tokens per second of all answers together, where several were made at once; NaN where they do not say when.

    The seconds are those from the beginning of the first answer to the end of the last one, of each start and repeat.
    """
    batches: dict[Any, list[Answer]] = defaultdict(list)
    for answer in answers:
        if "span" in answer:
            batches[answer["launch"], answer["repeat"]].append(answer)
    spent = 0.0
    for batch in batches.values():
        begun, ended = zip(*(answer["span"] for answer in batch))
        spent += max(ended) - min(begun)
    made = sum(tokens(answer) for batch in batches.values() for answer in batch)
    return made / spent if spent else NAN


def decoding_speed(sets: Sequence[Answers]) -> Interval:
    """The speed of decoding alone in tokens/s, without prefill; of several sets, the mean of theirs.

    Answers of a single token have none, and count in no set.
    """
    samples = [sample(answers, decoding) for answers in sets]
    return speed([rows[rows[:, 1] > 0] for rows in samples])


def speed_up(samples: Sequence[np.ndarray]) -> Interval:
    """The speed-up SR: xi by the baseline's xi on the same questions; of several sets, the ratio of both means.

    This is how table 1 of the FlowSpec paper has it.
    """
    def ratio(sums: np.ndarray) -> np.ndarray:
        mine, theirs = sums[..., :2], sums[..., 2:]
        return _rate(mine) / _rate(theirs)

    return bootstrap(samples, ratio)


def _rate(sums: np.ndarray) -> np.ndarray:
    """Tokens per second, the mean over the sets, from sums `[..., sets, 2]` of tokens and seconds."""
    rates = sums[..., 0] / sums[..., 1]
    return np.asarray(np.mean(rates, -1))


def bootstrap(samples: Sequence[np.ndarray], statistic: Statistic) -> Interval:
    """A statistic of the samples of all sets, with the bounds of a bootstrap over questions.

    Questions are drawn again with replacement, within their set and together with their baseline; the bounds are
    percentiles of the statistic, which gets sums over the questions, `[..., sets, columns]`.
    """
    samples = [rows for rows in samples if len(rows)]
    if not samples:
        return Interval(NAN, NAN, NAN)
    value = float(statistic(np.stack([rows.sum(0) for rows in samples])))
    if max(map(len, samples)) < 2:
        return Interval(value, NAN, NAN)
    random = np.random.default_rng(SEED)
    draws = []
    for rows in samples:
        chosen = random.integers(len(rows), size=(DRAWS, len(rows)))
        draws.append(rows[chosen].sum(1))
    values, tail = statistic(np.stack(draws, 1)), 50 * (1 - LEVEL)
    low, high = np.percentile(values, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def acceptance_length(answers: Answers) -> float:
    """The mean acceptance length tau: tokens per pass of the target, its own (bonus) token included.

    The token that each prefill brings does not count. Without a pass it is NaN.
    """
    settled = passes = 0
    for answer in answers:
        new = answer["choices"][0]["new_tokens"]
        for count, own_passes in zip(new, answer["target_passes"]):
            settled += count - 1
            passes += own_passes
    return settled / passes if passes else NAN


def time_to_first_token(answers: Answers) -> float:
    """The mean seconds from the beginning of a request to its first token, over all turns."""
    times = [seconds for answer in answers for seconds in answer["ttft"]]
    return sum(times) / len(times) if times else NAN


def request_time(answers: Answers) -> float:
    """The mean seconds of a request, which is a turn, from its beginning to its last token."""
    times = _request_times(answers)
    return sum(times) / len(times) if times else NAN


def request_time_quantile(answers: Answers, quantile: float) -> float:
    """The least of the requests' seconds that this fraction of them, 0 to 1, does not exceed."""
    times = sorted(_request_times(answers))
    place = math.ceil(quantile * len(times) - 1e-9)
    return times[max(place, 1) - 1] if times else NAN


def _request_times(answers: Answers) -> list[float]:
    return [float(spent) for answer in answers for spent in answer["choices"][0]["wall_time"]]


def time_per_token(answers: Answers, quantile: float) -> float:
    """A quantile, 0 to 1, of the seconds per token.

    Tokens that settle together each get an equal fraction of the time since the tokens before them. Those that settle
    first in a turn are left out, since their time is that of reading the prompt. Without others it is NaN.
    """
    gaps = []  # seconds per token, and how many tokens took that
    for turn in (turn for answer in answers for turn in answer["settled"]):
        for (before, _), (now, count) in zip(turn, turn[1:]):
            gaps.append(((now - before) / count, count))
    left = quantile * sum(count for _, count in gaps)
    for gap, count in sorted(gaps):
        left -= count
        if left <= 1e-9:
            return float(gap)
    return NAN


class Difference(NamedTuple):
    """The place where an answer leaves the reference first, turns and positions counted from 0.

    `margin` is by how much the target prefers the reference's token, if that is known.
    """

    answer: Answer
    turn: int
    position: int
    margin: float | None


def divergence(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position at which two texts differ, which may be the end of the shorter one; None if they are equal."""
    shorter = min(len(ids), len(others))
    for position in range(shorter):
        if ids[position] != others[position]:
            return position
    return None if len(ids) == len(others) else shorter


def differences(answers: Answers, baseline: Answers) -> tuple[int, list[Difference]]:
    """How many answers have one of the baseline for the same trial, and where those leave it that do."""
    reference = {trial_of(answer): answer["token_ids"] for answer in baseline}
    compared, found = 0, []
    for answer in answers:
        expected = reference.get(trial_of(answer))
        if expected is None:
            continue
        compared += 1
        for turn, (ids, others) in enumerate(zip(answer["token_ids"], expected)):
            position = divergence(ids, others)
            if position is not None:
                first = answer.get("first_difference") or {}
                found.append(Difference(answer, turn, position, first.get("margin")))
                break
    return compared, found


def equality(answers: Answers, baseline: Answers) -> str:
    """Either `same`, or how many answers differ from the baseline's and where the first one does.

    The text is empty if no answer has a counterpart.
    """
    compared, found = differences(answers, baseline)
    if not found:
        return "same" if compared else ""
    first = found[0]
    margin = "" if first.margin is None else f", margin {first.margin:.2g}"
    place = f"question {first.answer['question_id']} turn {first.turn + 1} token {first.position + 1}"
    return f"{len(found)} of {compared} differ, first {place}{margin}"


class Utilization(NamedTuple):
    """How a rank spent the time of some requests, and what it sent; the first four add up to 1."""

    computed: float  # in layers; on rank 0 in drafting, LM head and verification
    waited: float  # for a message, between its first segment and its last
    idle: float  # before the first segment came and after the last one left
    other: float  # sending, pruning, bookkeeping
    late: float  # by how much emulated devices and wires were too late, in seconds per second of computing
    bytes: float  # sent to the next rank, per request
    control: float  # bytes of prunes, per request
    rows: float  # sent to the next rank, per request


def utilization(lines: Iterable[TallyLine], kept: set[Request]) -> dict[int, Utilization]:
    """The utilization of each rank over the requests (launch, number) in `kept`, from lines of the tally.

    A line is that of eval/observe/span_sums.py with its `launch`. Only requests count of which every rank wrote that
    wrote anything.
    """
    requests: dict[Request, dict[int, TallyLine]] = defaultdict(dict)
    for line in lines:
        request = (line["launch"], line["request"])
        if request in kept:
            requests[request][line["rank"]] = line
    ranks = sorted({rank for by_rank in requests.values() for rank in by_rank})
    complete = [by_rank for by_rank in requests.values() if len(by_rank) == len(ranks)]
    if not complete:
        return {}
    sums = {rank: np.zeros(len(Utilization._fields)) for rank in ranks}
    duration = 0.0
    for by_rank in complete:
        longest = max(line["seconds"] for line in by_rank.values())
        duration += longest
        for rank, line in by_rank.items():
            sums[rank] += _amounts(line, longest)
    count = len(complete)
    return {rank: _ratios(row, duration, count) for rank, row in sums.items()}


def _amounts(line: TallyLine, duration: float) -> np.ndarray:
    """What a rank did in one request, in seconds, bytes and rows, in the order of `Utilization`."""
    spans, own = line["spans"], line["seconds"]
    computed = sum(spans.get(name, 0.0) for name in COMPUTING)
    waited = spans.get("wait", 0.0)
    times = [computed, waited, duration - own, own - computed - waited, line["late"]]
    return np.array([*times, line["bytes"], line["control"], line["rows"]])


def _ratios(amounts: np.ndarray, duration: float, requests: int) -> Utilization:
    """The sums of `_amounts` over some requests, by their seconds or by their number."""
    times, sent = amounts[:4] / duration, amounts[5:] / requests
    computed, late = amounts[0], amounts[4]
    lateness = late / computed if computed else 0.0
    return Utilization(*map(float, (*times, lateness, *sent)))
