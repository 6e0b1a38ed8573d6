"""The server's metrics, in the format of Prometheus."""
from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipeline.decode import Answer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5,
           10, 30, 60, 120, 300)


class Metrics:
    """Counts since the start of the server; times are in seconds of its clock."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("flowspec_requests", "Requested answers, by outcome.", ["outcome"])
        self.tokens = counter("flowspec_tokens", "Tokens of prompts and of answers.", ["kind"])
        self.guesses = counter("flowspec_guesses", "Guesses that were sent, by outcome.", ["fate"])
        self.first = histogram("flowspec_time_to_first_token_seconds", "Time from the request to its first token.",
                               buckets=SECONDS)
        self.each = histogram("flowspec_time_per_token_seconds", "Time per token after the first, averaged "
                              "over an answer.", buckets=SECONDS)
        self.accepted = histogram("flowspec_mean_accepted_length", "Tokens per verification of an answer.",
                                  buckets=range(1, 17))
        self.restarts = counter("flowspec_restarts", "How often the pipeline was restarted.")
        self.running = gauge("flowspec_requests_running", "Answers under way.")
        self.waiting = gauge("flowspec_requests_waiting", "Answers that wait for a place.")
        self.plain = gauge("flowspec_plain_seconds_per_token", "Estimate for plain decoding: one row once round the "
                           "ring, measured at the start.")
        self.busy = gauge("flowspec_rank_busy_share", "Share of the last two seconds in which a rank was busy.",
                          ["rank"])
        self.busy_of_ranks: list[float] = []

    def count(self, answer: Answer, seconds: float, accepted: int, rejected: int) -> None:
        """Count a complete answer, this many `seconds` after its request came, and its guesses."""
        self.first.observe(seconds - answer.decode_seconds)
        if answer.new_tokens > 1:
            self.each.observe(answer.decode_seconds / (answer.new_tokens - 1))
        self.accepted.observe(answer.mean_accepted_length)
        self.tokens.labels("prompt").inc(answer.prompt_tokens)
        self.tokens.labels("answer").inc(answer.new_tokens)
        self.guesses.labels("accepted").inc(accepted)
        self.guesses.labels("rejected").inc(rejected)

    def occupy(self, shares: list[float]) -> None:
        """Set each rank's share of the last seconds in which it was busy; no shares if there are no ranks."""
        self.busy_of_ranks = [round(share, 3) for share in shares]
        self.busy.clear()
        for rank, share in enumerate(shares):
            self.busy.labels(str(rank)).set(share)

    def text(self) -> bytes:
        """Return all metrics, as /metrics shows them."""
        return generate_latest(self.registry)
