"""The server's metrics, in the format of Prometheus: under its own names, and under those of vLLM that tools read."""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from pipeline.answers import Answer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5,
           10, 30, 60, 120, 300)
NUM_POSITIONS = 32  # of a run of accepted guesses, those that are counted one by one


@dataclass(eq=False)  # a registry keeps it as a key
class VllmName(Collector):
    """The numbers of `metric` once more, under the name by which load tools read a server of vLLM's.

    With a `label_value` they are those of this label alone, unlabelled.
    """

    name: str
    metric: MetricWrapperBase
    label_value: str = ""

    def collect(self) -> Iterator[Metric]:
        for family in self.metric.collect():
            renamed = Metric(self.name, family.documentation, family.type)
            for sample in family.samples:
                is_chosen = not self.label_value or self.label_value in sample.labels.values()
                # such a time would be added to the count by tools that sum up all lines of a name
                if is_chosen and not sample.name.endswith("_created"):
                    labels = {} if self.label_value else sample.labels
                    renamed.add_sample(sample.name.replace(family.name, self.name), labels, sample.value)
            yield renamed


class Metrics:
    """Counts since the start of the server; times are in seconds of its clock."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)

        self.requests_by_outcome = counter("flowspec_requests", "Requested answers, by outcome.", ["outcome"])
        self.tokens_by_kind = counter("flowspec_tokens", "Tokens of prompts and of answers.", ["kind"])
        self.guesses_by_fate = counter("flowspec_guesses", "Guesses that were sent, by outcome.", ["fate"])
        self.num_guesses = counter("flowspec_guesses_sent", "Guesses that were sent.")
        self.num_runs = counter("flowspec_runs", "Runs of accepted guesses, each after a token that no guess covered.")
        self.accepted_by_position = counter(
            "flowspec_guesses_accepted_at", "Accepted guesses by their position in a run, from 0.", ["position"])
        self.num_restarts = counter("flowspec_restarts", "How often the pipeline was restarted.")

        self.first_token_seconds = histogram(
            "flowspec_time_to_first_token_seconds", "Time from the request to its first token.")
        self.token_seconds = histogram(
            "flowspec_time_per_token_seconds", "Time per token after the first, averaged over an answer.")
        self.request_seconds = histogram("flowspec_request_seconds", "Time from the request to its last token.")
        self.accepted_length = histogram(
            "flowspec_mean_accepted_length", "Tokens per verification of an answer.", buckets=range(1, 17))

        self.num_running = gauge("flowspec_requests_running", "Answers under way.")
        self.num_waiting = gauge("flowspec_requests_waiting", "Answers that wait for a place.")
        self.plain_seconds = gauge(
            "flowspec_plain_seconds_per_token",
            "Estimate for plain decoding: one row once round the ring, measured at the start.")
        self.busy_shares = gauge(
            "flowspec_rank_busy_share", "Share of the last two seconds in which a rank was busy.", ["rank"])
        self.busy_of_ranks: list[float] = []
        for vllm_name in self._vllm_names():
            self.registry.register(vllm_name)

    def _vllm_names(self) -> list[VllmName]:
        return [
            VllmName("vllm:num_requests_running", self.num_running),
            VllmName("vllm:num_requests_waiting", self.num_waiting),
            VllmName("vllm:prompt_tokens", self.tokens_by_kind, "prompt"),
            VllmName("vllm:generation_tokens", self.tokens_by_kind, "answer"),
            VllmName("vllm:request_success", self.requests_by_outcome, "answered"),
            VllmName("vllm:time_to_first_token_seconds", self.first_token_seconds),
            VllmName("vllm:request_time_per_output_token_seconds", self.token_seconds),
            VllmName("vllm:e2e_request_latency_seconds", self.request_seconds),
            VllmName("vllm:spec_decode_num_drafts", self.num_runs),
            VllmName("vllm:spec_decode_num_draft_tokens", self.num_guesses),
            VllmName("vllm:spec_decode_num_accepted_tokens", self.guesses_by_fate, "accepted"),
            VllmName("vllm:spec_decode_num_accepted_tokens_per_pos", self.accepted_by_position)]

    def count(self, answer: Answer, seconds: float, accepted_runs: Sequence[int], num_rejected: int) -> None:
        """Count a complete answer, this many `seconds` after its request came, and its guesses."""
        self.first_token_seconds.observe(seconds - answer.decode_seconds)
        if answer.new_tokens > 1:
            self.token_seconds.observe(answer.decode_seconds / (answer.new_tokens - 1))
        self.request_seconds.observe(seconds)
        self.accepted_length.observe(answer.mean_accepted_length)
        self.tokens_by_kind.labels("prompt").inc(answer.prompt_tokens)
        self.tokens_by_kind.labels("answer").inc(answer.new_tokens)

        num_accepted = sum(accepted_runs)
        self.guesses_by_fate.labels("accepted").inc(num_accepted)
        self.guesses_by_fate.labels("rejected").inc(num_rejected)
        self.num_guesses.inc(num_accepted + num_rejected)
        self.num_runs.inc(max(0, len(accepted_runs) - answer.plain_tokens))  # before plain tokens nothing was guessed
        for position in range(NUM_POSITIONS):  # all of them, so that each is shown from the first answer on
            self.accepted_by_position.labels(str(position)).inc(sum(length > position for length in accepted_runs))

    def occupy(self, shares: list[float]) -> None:
        """Set each rank's share of the last seconds in which it was busy; no shares if there are no ranks."""
        self.busy_of_ranks = [round(share, 3) for share in shares]
        self.busy_shares.clear()
        for rank, share in enumerate(shares):
            self.busy_shares.labels(str(rank)).set(share)

    def text(self) -> bytes:
        """Return all metrics, as /metrics shows them."""
        return generate_latest(self.registry)
