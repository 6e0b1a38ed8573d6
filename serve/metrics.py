"""What the server counts, in the form that Prometheus reads."""
from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipeline.decode import Answer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Figures:
    """Counts since the start of the server; times are in seconds of its clock."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("flowspec_requests", "Answers that were asked for, by how they ended.", ["outcome"],
                                registry=self.registry)
        self.tokens = Counter("flowspec_tokens", "Tokens that were read as prompts or written as answers.", ["kind"],
                              registry=self.registry)
        self.guesses = Counter("flowspec_guesses", "Guesses that were sent, by what became of them.", ["fate"],
                               registry=self.registry)
        self.first = Histogram("flowspec_time_to_first_token_seconds", "From the request to its first token.",
                               buckets=SECONDS, registry=self.registry)
        self.each = Histogram("flowspec_time_per_token_seconds", "Of a token behind the first, on average of an "
                              "answer.", buckets=SECONDS, registry=self.registry)
        self.accepted = Histogram("flowspec_mean_accepted_length", "Tokens per target pass of an answer.",
                                  buckets=tuple(range(1, 17)), registry=self.registry)
        self.restarts = Counter("flowspec_restarts", "How often the pipeline was brought up again.",
                                registry=self.registry)
        self.running = Gauge("flowspec_requests_running", "Answers under way.", registry=self.registry)
        self.waiting = Gauge("flowspec_requests_waiting", "Answers that wait for a place.", registry=self.registry)

        self.plain = Gauge("flowspec_plain_seconds_per_token", "Of plain decoding, estimated: one row once round the "
                           "ring, measured at the start.", registry=self.registry)
        self.busy = Gauge("flowspec_rank_busy_share", "For what share of its last two seconds a rank was at work.",
                          ["rank"], registry=self.registry)
        self.busy_of_ranks: list[float] = []

    def count(self, answer: Answer, seconds: float) -> None:
        """Take in an answer that is whole, so many seconds after it was asked for."""
        self.first.observe(seconds - answer.decode_seconds)
        if answer.new_tokens > 1:
            self.each.observe(answer.decode_seconds / (answer.new_tokens - 1))
        self.accepted.observe(answer.mean_accepted_length)
        self.tokens.labels("prompt").inc(answer.prompt_tokens)
        self.tokens.labels("answer").inc(answer.new_tokens)

    def occupy(self, shares: list[float]) -> None:
        """Take in for what share of the last seconds each rank was at work; nothing, where there are no ranks."""
        self.busy_of_ranks = [round(share, 3) for share in shares]
        self.busy.clear()
        for rank, share in enumerate(shares):
            self.busy.labels(str(rank)).set(share)

    def text(self) -> bytes:
        """All of it, as /metrics shows it."""
        return generate_latest(self.registry)
