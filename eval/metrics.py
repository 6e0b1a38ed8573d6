"""The metrics of answers: speeds, ratios and their uncertainty, and the equality of texts, as pure functions.

An answer is one line of a results folder: the output of a method in all turns of a question. Its seconds are modelled
if a cluster was emulated. Samples are arrays with a row for each question: tokens and seconds of a method, and in two
more columns those of its baseline.
"""
from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from pipeline.answers import by_position

AnswerRecord = Mapping[str, Any]
AnswerRecords = Iterable[AnswerRecord]
Amounts = tuple  # tokens and their seconds
Statistic = Callable[[np.ndarray], np.ndarray]
TrialKey = tuple  # set, temperature, repeat, seed and question: equal for two answers that are compared
NUM_DRAWS, SEED, CONFIDENCE = 2000, 0, 0.95  # of the bootstrap
NAN = float("nan")  # nothing was measured
ANSWER_FIELDS = {  # the fields that are read from an answer; see `fits` in config/files.py
    "method": str, "draft": str, "set": str, "temperature": float, "repeat": int, "seed": int,
    "question_id": lambda value: isinstance(value, (int, str)),
    "choices": ({"new_tokens": [int], "wall_time": [float], "accept_lengths": [int]},),
    "token_ids": [[int]], "misses": [int],
    "emulated": bool, "profile": str, "scale": float,
    "launch": str, "requests": [int],
    "ttft": [float], "settled": [[(float, int)]]}


class Interval(NamedTuple):
    """A value with its bounds at 95 % confidence."""

    value: float
    low: float
    high: float


NO_INTERVAL = Interval(NAN, NAN, NAN)


def trial_of(answer: AnswerRecord) -> TrialKey:
    """Return the trial of an answer."""
    return tuple(answer[key] for key in ("set", "temperature", "repeat", "seed", "question_id"))


# --- speeds -----------------------------------------------------------------------------------------------------------

def whole_amounts(answer: AnswerRecord) -> Amounts:
    """Return the tokens and seconds of all turns of an answer, including the prefill."""
    [choice] = answer["choices"]
    return sum(choice["new_tokens"]), float(sum(choice["wall_time"]))


def decoding_amounts(answer: AnswerRecord) -> Amounts:
    """Return the tokens after the first of each turn, and the seconds after it, which are those of decoding alone."""
    [choice] = answer["choices"]
    decoding_seconds = [whole - to_first_token for whole, to_first_token in zip(choice["wall_time"], answer["ttft"])]
    return sum(choice["new_tokens"]) - len(choice["new_tokens"]), float(sum(decoding_seconds))


def sample(answers: AnswerRecords, amounts_of: Callable[[AnswerRecord], Amounts] = whole_amounts) -> np.ndarray:
    """Return tokens and seconds of each question, `[questions, 2]`; several answers to a question are summed up."""
    amounts_by_question: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for answer in answers:
        amounts_by_question[answer["question_id"]] += amounts_of(answer)
    question_ids = sorted(amounts_by_question, key=str)
    return np.array([amounts_by_question[question_id] for question_id in question_ids]).reshape(-1, 2)


def paired(answers: AnswerRecords, baseline: AnswerRecords) -> np.ndarray:
    """Return tokens and seconds of both methods, `[questions, 4]`, over the trials that both have answered."""
    own_answers = {trial_of(answer): answer for answer in answers}
    baseline_answers = {trial_of(answer): answer for answer in baseline}
    common_trials = [trial for trial in own_answers if trial in baseline_answers]
    return np.hstack([sample(own_answers[trial] for trial in common_trials),
                      sample(baseline_answers[trial] for trial in common_trials)])


def speed(samples: Sequence[np.ndarray]) -> Interval:
    """Return the speed xi in tokens/s: all new tokens divided by all seconds; for several sets, the mean of theirs."""
    return bootstrap(samples, lambda sums: _rate(sums[..., :2]))


def decoding_speed(sets: Sequence[AnswerRecords]) -> Interval:
    """Return the speed of decoding without prefill; questions with answers of a single token do not count."""
    samples = [sample(answers, decoding_amounts) for answers in sets]
    return speed([rows[rows[:, 1] > 0] for rows in samples])


def speed_up(samples: Sequence[np.ndarray]) -> Interval:
    """Return the speed-up SR: xi divided by the baseline's xi on the same questions.

    For several sets it is the ratio of the two means, as in table 1 of the FlowSpec paper.
    """
    return bootstrap(samples,
                     lambda sums: _rate(sums[..., :2]) / _rate(sums[..., 2:]))


def _rate(sums: np.ndarray) -> np.ndarray:
    """Return tokens per second, the mean over the sets, from sums `[..., sets, 2]` of tokens and seconds."""
    rates = sums[..., 0] / sums[..., 1]
    return np.asarray(np.mean(rates, -1))


def total_speed(answers: AnswerRecords) -> float:
    """Return tokens per second of all answers together if several were generated at once; NaN if none has a `span`.

    The seconds are those from the beginning of the first answer to the end of the last one, for each start and repeat.
    """
    spans_by_batch: dict[Any, list[Sequence[float]]] = defaultdict(list)
    num_tokens = 0
    for answer in answers:
        if "span" in answer:
            spans_by_batch[answer["launch"], answer["repeat"]].append(answer["span"])
            num_tokens += whole_amounts(answer)[0]

    batch_times = (zip(*batch_spans) for batch_spans in spans_by_batch.values())
    total_seconds = sum(max(end_times) - min(start_times) for start_times, end_times in batch_times)
    return num_tokens / total_seconds if total_seconds else NAN


def bootstrap(samples: Sequence[np.ndarray], statistic: Statistic) -> Interval:
    """Return a statistic of the samples of all sets, with the bounds of a bootstrap over questions.

    Questions are drawn with replacement, within their set and together with their baseline. The bounds are percentiles
    of the statistic, which takes sums over the questions, `[..., sets, columns]`.
    """
    samples = [rows for rows in samples if len(rows)]
    if not samples:
        return NO_INTERVAL

    value = float(statistic(np.stack([rows.sum(0) for rows in samples])))
    if max(map(len, samples)) < 2:
        return Interval(value, NAN, NAN)

    generator = np.random.default_rng(SEED)
    drawn_sums = []
    for rows in samples:
        drawn_questions = generator.integers(len(rows), size=(NUM_DRAWS, len(rows)))
        drawn_sums.append(rows[drawn_questions].sum(1))

    drawn_values = statistic(np.stack(drawn_sums, 1))
    tail_percent = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(drawn_values, [tail_percent, 100 - tail_percent])
    return Interval(value, float(low), float(high))


# --- tokens of a pass, times of requests and tokens -------------------------------------------------------------------

def accepted_length(answers: AnswerRecords) -> float:
    """Return the mean accepted length: tokens per verification, the target's own included; NaN without any.

    The prefills' tokens do not count.
    """
    lengths = _accepted_lengths(answers)
    return sum(lengths) / len(lengths) if lengths else NAN


def tokens_per_miss(answers: AnswerRecords) -> float:
    """Return the mean run of correct guesses with the token that begins it, without the prefills'; NaN without any."""
    num_tokens, num_misses = _tokens_and_misses(answers)
    return num_tokens / num_misses if num_misses else NAN


def acceptance(answers: AnswerRecords) -> float:
    """Return the share of tokens, without the prefills', that a guess under way covered; NaN without any tokens."""
    num_tokens, num_misses = _tokens_and_misses(answers)
    return 1 - num_misses / num_tokens if num_tokens else NAN


def _tokens_and_misses(answers: AnswerRecords) -> tuple[int, int]:
    """Return the numbers of tokens, without the prefills', and of misses."""
    choices_and_misses = [(answer["choices"][0], answer["misses"]) for answer in answers]
    num_tokens = sum(sum(choice["new_tokens"]) - len(choice["new_tokens"]) for choice, _ in choices_and_misses)
    return num_tokens, sum(sum(misses) for _, misses in choices_and_misses)


def lossy_divergence(answers: AnswerRecords) -> float:
    """Return the nats per token by which lossy verification diverges from the target (KL); NaN if none was used."""
    lossy_answers = [answer for answer in answers if answer.get("lossy_rule")]
    num_tokens = sum(sum(answer["choices"][0]["new_tokens"]) for answer in lossy_answers)
    return sum(sum(answer["divergence"]) for answer in lossy_answers) / num_tokens if num_tokens else NAN


def acceptance_by_position(answers: AnswerRecords) -> list[float]:
    """Return the share of verifications, over all answers, that settled a second token, a third one, and so on."""
    return by_position(_accepted_lengths(answers))


def _accepted_lengths(answers: AnswerRecords) -> list[int]:
    return [length for answer in answers for length in answer["choices"][0]["accept_lengths"]]


def first_token_times(answers: AnswerRecords) -> list[float]:
    """Return the seconds from the beginning of each request (a turn) to its first token."""
    return [seconds for answer in answers for seconds in answer["ttft"]]


def request_times(answers: AnswerRecords) -> list[float]:
    """Return the seconds of each request up to its last token."""
    return [seconds for answer in answers for seconds in answer["choices"][0]["wall_time"]]


def token_times(answers: AnswerRecords) -> list[float]:
    """Return the seconds of each token.

    Tokens that settle together each get an equal fraction of the time since the previous tokens. The tokens that settle
    first in a turn are left out, since their time is that of reading the prompt.
    """
    token_seconds = []
    for turn in (turn for answer in answers for turn in answer["settled"]):
        for (settled_before, _), (settled_at, num_tokens) in zip(turn, turn[1:]):
            token_seconds += [(settled_at - settled_before) / num_tokens] * num_tokens
    return token_seconds


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else NAN


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least of the values that this share of them (0 to 1) does not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else NAN


# --- texts ------------------------------------------------------------------------------------------------------------

def divergence(token_ids: Sequence[int], other_ids: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ, possibly the end of the shorter one; None if equal."""
    pairs = enumerate(zip_longest(token_ids, other_ids))
    return next((position for position, (token, other_token) in pairs if token != other_token), None)


def equality(answers: AnswerRecords, baseline: AnswerRecords) -> str:
    """Return `same`, or how many answers differ from the baseline's and where the first one does.

    The result is empty if no answer has a counterpart.
    """
    reference_texts = {trial_of(answer): answer["token_ids"] for answer in baseline}
    compared_answers = [answer for answer in answers if trial_of(answer) in reference_texts]
    differences = [_difference(answer, reference_texts[trial_of(answer)]) for answer in compared_answers]
    differences = [difference for difference in differences if difference]
    if not differences:
        return "same" if compared_answers else ""
    return f"{len(differences)} of {len(compared_answers)} differ, first {differences[0]}"


def _difference(answer: AnswerRecord, reference: Sequence[Sequence[int]]) -> str:
    """Return where an answer first differs from the reference, with the margin of the reference's token if known."""
    margin = (answer.get("first_difference") or {}).get("margin")
    margin_text = "" if margin is None else f", margin {margin:.2g}"
    for turn_number, texts in enumerate(zip(answer["token_ids"], reference), 1):
        position = divergence(*texts)
        if position is not None:
            return f"question {answer['question_id']} turn {turn_number} token {position + 1}{margin_text}"
    return ""
