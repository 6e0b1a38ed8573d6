"""What /metrics shows: the same counts under the project's names and under vLLM's, as load tools read them."""
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.pipeline import Generation
from pipeline.answers import Answer
from pipeline.trace import OFF
from serve.metrics import Metrics


def samples_of(metrics):
    """The numbers that /metrics shows, by name and labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(sample.name, tuple(sample.labels.values())): sample.value
            for family in families for sample in family.samples}


def generation_of(text, foreseen, plain_tokens=0):
    """An answer to a prompt of three tokens, with the positions at which a guess in flight was right."""
    answer = Answer(3, token_ids=list(text), prefill_seconds=0.5, decode_seconds=2.0, plain_tokens=plain_tokens)
    settled = SimpleNamespace(tree=SimpleNamespace(accepted_positions=foreseen))
    return Generation(answer, settled, None, OFF)


@pytest.mark.parametrize("num_tokens, foreseen, runs", [
    (0, [], []), (1, [], []),
    (2, [], [0]),  # the second token was verified beside a wrong guess
    (6, [4, 5, 7], [2, 1]), (6, [1, 4, 6, 7], [1, 2]),
    (6, [4, 5, 6], [3, 0]), (4, [3, 4, 6], [2, 1])])
def test_a_run_begins_after_each_token_that_no_guess_covered(num_tokens, foreseen, runs):
    generation = generation_of(range(num_tokens), foreseen)
    assert generation.accepted_runs == runs
    assert generation.accepted == sum(3 <= position < 3 + num_tokens for position in foreseen)


def test_vllm_s_names_have_the_same_counts():
    metrics = Metrics()
    metrics.requests_by_outcome.labels("answered").inc()
    metrics.requests_by_outcome.labels("refused").inc()
    metrics.num_running.set(2)
    generation = generation_of(range(6), [4, 5, 7])
    metrics.count(generation.answer, 3.0, generation.accepted_runs, 7)

    shown = samples_of(metrics)
    expected = {
        "num_requests_running": 2, "num_requests_waiting": 0,
        "request_success_total": 1, "prompt_tokens_total": 3, "generation_tokens_total": 6,
        "time_to_first_token_seconds_sum": 1.0, "time_to_first_token_seconds_count": 1,
        "request_time_per_output_token_seconds_sum": 0.4, "e2e_request_latency_seconds_sum": 3.0,
        "spec_decode_num_drafts_total": 2, "spec_decode_num_draft_tokens_total": 10,
        "spec_decode_num_accepted_tokens_total": 3}
    assert {name: shown[f"vllm:{name}", ()] for name in expected} == expected
    assert shown["vllm:time_to_first_token_seconds_bucket", ("1.0",)] == 1
    assert shown["vllm:time_to_first_token_seconds_bucket", ("0.5",)] == 0

    per_position = [shown["vllm:spec_decode_num_accepted_tokens_per_pos_total", (str(position),)]
                    for position in range(4)]
    assert per_position == [2, 1, 0, 0]
    assert (shown["flowspec_guesses_total", ("accepted",)], shown["flowspec_guesses_total", ("rejected",)]) == (3, 7)
    assert not any(name.startswith("vllm:") and name.endswith("_created") for name, _ in shown)


def test_plain_decoding_counts_no_draft():
    metrics = Metrics()
    generation = generation_of(range(6), [], plain_tokens=6)
    metrics.count(generation.answer, 3.0, generation.accepted_runs, 0)
    shown = samples_of(metrics)
    assert shown["vllm:spec_decode_num_drafts_total", ()] == shown["vllm:spec_decode_num_draft_tokens_total", ()] == 0
