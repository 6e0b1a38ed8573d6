"""Breakdowns of time: the time of each rank for some requests, and the time of a token on rank 0.

Pure functions over answers and lines of the tally (eval/observe/span_sums.py), each with its `launch`. The seconds of
an account are modelled if a cluster was emulated.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple

from eval.metrics import NAN, AnswerRecord

TallyLine = Mapping[str, Any]
RequestId = Tuple[str, int]  # the start of the pipeline, and the number of earlier requests in it
TallyLines = Mapping[RequestId, Mapping[int, TallyLine]]  # by request and rank
COMPUTING = ("forward", "grow", "judge")  # the spans in which a rank computes
SHARES = ("drafting", "verdict", "waiting", "prefill", "other")  # of the time of a token; they add up to it
SPANS = {"drafting": "grow", "verdict": "judge", "waiting": "wait"}  # of rank 0, after the first token
TALLY_LINE = {  # the fields that are read from a line; see `fits` in config/files.py
    "rank": int, "request": int, "seconds": float, "spans": {float}, "late": float,
    "bytes": float, "control": float, "rows": float}
FLIGHT_LINE = {  # further fields of a line about flights
    "first": float, "decoding": {float},
    "flight": {"rows": int, "stay": float, "aloft": float, "misses": int, "lost": float}}


class Utilization(NamedTuple):
    """The parts of a rank's time during some requests, and what it sent; the first four add up to 1."""

    computed: float  # in layers; on rank 0 in drafting, LM head and verification
    waited: float  # for a message, between its first segment and its last
    idle: float  # before the first segment came and after the last one left
    other: float  # sending, pruning, bookkeeping
    late: float  # delay of emulated devices and wires, in seconds per second of computing
    bytes: float  # sent to the next rank, per request
    control: float  # bytes of prunes, per request
    rows: float  # sent to the next rank, per request


def by_request(lines: Iterable[TallyLine]) -> TallyLines:
    """Return the lines of each request by rank."""
    lines_by_request: dict[RequestId, dict[int, TallyLine]] = defaultdict(dict)
    for line in lines:
        lines_by_request[line["launch"], line["request"]][line["rank"]] = line
    return lines_by_request


def utilization(tally: TallyLines, answers: Iterable[AnswerRecord]) -> dict[int, Utilization]:
    """Return the utilization of each rank during these answers.

    A request counts only if it has a line of every rank that wrote any line.
    """
    request_ids = dict.fromkeys(request_id for request_id, _, _ in _requests(answers))
    lines_by_request = [tally[request_id] for request_id in request_ids if request_id in tally]
    all_ranks = sorted({rank for by_rank in lines_by_request for rank in by_rank})
    complete_requests = [by_rank for by_rank in lines_by_request if len(by_rank) == len(all_ranks)]

    durations = [max(line["seconds"] for line in by_rank.values()) for by_rank in complete_requests]
    return {rank: _utilization([by_rank[rank] for by_rank in complete_requests], durations)
            for rank in all_ranks if complete_requests}


def _utilization(lines: Sequence[TallyLine], durations: Sequence[float]) -> Utilization:
    """Return the utilization of one rank, from its lines about requests of these durations."""
    def total(name: str) -> float:
        return sum(line[name] for line in lines)

    span_seconds: Counter[str] = Counter()
    for line in lines:
        span_seconds.update(line["spans"])

    total_seconds, own_seconds, wait_seconds = sum(durations), total("seconds"), span_seconds["wait"]
    computing_seconds = sum(span_seconds[name] for name in COMPUTING)
    other_seconds = own_seconds - computing_seconds - wait_seconds
    part_seconds = (computing_seconds, wait_seconds, total_seconds - own_seconds, other_seconds)

    late_share = total("late") / computing_seconds if computing_seconds else 0.0
    sent_amounts = (total(name) / len(lines) for name in ("bytes", "control", "rows"))
    return Utilization._make([*(seconds / total_seconds for seconds in part_seconds), late_share, *sent_amounts])


class Account(NamedTuple):
    """The parts of a token's seconds, and the flight of true rows: those that became text after the prompt."""

    drafting: float
    verdict: float  # LM head, sampler, and recording their results
    waiting: float  # for a segment
    prefill: float  # all time until the first token had settled
    other: float  # sending, pruning, bookkeeping, and layers if rank 0 has some
    aloft: float  # true rows in flight, the mean over the time of decoding
    stay: float  # seconds from sending a true row until its return
    tokens_per_miss: float  # a miss: a true row that was sent only after the answer of its parent had come
    lost: float  # seconds per token in which no true row was in flight

    @property
    def whole(self) -> float:
        """The seconds of a token."""
        return sum(self[:len(SHARES)])


def account(tally: TallyLines, answers: Iterable[AnswerRecord]) -> Account | None:
    """Return the account of these answers, from the lines about flights, which are rank 0's; None without such lines.

    The sums over all requests are divided by all their tokens, unless the field has another unit.
    """
    sums: Counter[str] = Counter()
    for request_id, num_tokens, scale in _requests(answers):
        for line in tally.get(request_id, {}).values():
            if "flight" in line:
                sums.update(_of_request(line, scale), tokens=num_tokens)
    if not sums["tokens"]:
        return None

    def ratio(amount: str, unit: str) -> float:
        return sums[amount] / sums[unit] if sums[unit] else NAN

    seconds_per_token = {name: ratio(name, "tokens") for name in (*SHARES, "lost")}
    return Account(aloft=ratio("aloft", "decoding"), stay=ratio("stay", "rows"),
                   tokens_per_miss=ratio("tokens", "misses"), **seconds_per_token)


def _of_request(line: TallyLine, scale: float) -> dict[str, float]:
    """Return one request's part of the sums: modelled seconds, and counts."""
    flight, decoding_seconds = line["flight"], line["seconds"] - line["first"]
    span_seconds = {share: line["decoding"].get(span, 0.0) for share, span in SPANS.items()}
    other_seconds = decoding_seconds - sum(span_seconds.values())
    seconds = {**span_seconds, "decoding": decoding_seconds, "prefill": line["first"], "other": other_seconds,
               **{name: flight[name] for name in ("stay", "aloft", "lost")}}
    modelled_seconds = {name: value / scale for name, value in seconds.items()}
    return {**modelled_seconds, "rows": flight["rows"], "misses": flight["misses"]}


def _requests(answers: Iterable[AnswerRecord]) -> Iterator[tuple[RequestId, int, float]]:
    """Yield start and number of each request, its tokens, and the elapsed seconds per modelled one."""
    for answer in answers:
        for request, tokens in zip(answer["requests"], answer["choices"][0]["new_tokens"]):
            yield (answer["launch"], request), tokens, answer["scale"]
