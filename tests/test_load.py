"""Concurrent coroutines write what each writes alone, and a load takes what a person counts by hand."""
from __future__ import annotations

import csv

import pytest

from eval.command import evaluate
from eval.load.arrivals import Served, figures, poisson, serve, unequal
from eval.load.keys import moments
from eval.metrics import total_speed
from eval.report import report
from model.drafts.draft import NoDraft
from model.sample import Sampler
from pipeline.answers import Request
from pipeline.concurrent import concurrent
from pipeline.decode import Decoder, PipelineLimits
from pipeline.requests import Ring
from pipeline.strategies import STRATEGIES
from scripts import bench
from tests.checkpoints import refused
from tests.json_files import load_json, load_json_lines, save_json_lines
from tests.saved import here
from tests.test_virtual import cluster
from tests.tiny import TINY, TREE, pipeline

PROMPTS = [[5, 17, 40], [8, 1, 33, 2], [2, 31], [7, 7, 19, 44], [30, 21]]
NEW = 6
TEXTS = [TINY.text(prompt, NEW, Sampler()) for prompt in PROMPTS]
QUESTIONS = [{"question_id": 3, "turns": ["who are you?", "why?"]}, {"question_id": 5, "turns": ["hello"]},
             {"question_id": 4, "turns": ["where is it?", "and now?"]}]


def coroutine(decoder, prompt, under_way):
    answer, stream = decoder.submit(Request(prompt, Sampler(), NEW), waits=False)
    under_way.append(prompt)
    try:
        for _ in stream:
            yield None
        yield answer.token_ids
    finally:
        under_way.remove(prompt)


@pytest.mark.parametrize("places", [1, 2, 5])
def test_concurrent_coroutines_write_what_each_writes_alone_and_no_more_are_under_way_than_places(places):
    under_way, most = [], []
    with pipeline(TINY, 2, "streaming", TINY.eagle()) as decoder:
        texts = []
        for text in concurrent((coroutine(decoder, prompt, under_way) for prompt in PROMPTS), decoder, places):
            most.append(len(under_way))
            texts.append(text)
        assert sorted(texts) == sorted(TEXTS) and max(most) == places and not under_way
        assert not any(stage.caches for stage in decoder.stages)


def test_coroutines_that_are_given_up_or_fail_leave_nothing_under_way():
    def failing(decoder):
        yield from coroutine(decoder, PROMPTS[1], under_way)
        raise ValueError("a coroutine of its own")

    under_way: list[list[int]] = []
    with pipeline(TINY, 2, "continuous", TINY.eagle()) as decoder:
        works = concurrent((coroutine(decoder, prompt, under_way) for prompt in PROMPTS), decoder, 4)
        assert next(works) in TEXTS and under_way
        works.close()
        assert not under_way and not decoder.running
        with refused("of its own"):
            list(concurrent([coroutine(decoder, PROMPTS[0], under_way), failing(decoder)], decoder, 2))
        assert not under_way and not decoder.running
        assert decoder.complete(Request(PROMPTS[2], Sampler(), NEW)).token_ids == TEXTS[2]


def virtual(places: int = 4) -> Decoder:
    """Plain decoding over two stages of 4 ms on a virtual clock, with wires of 1 ms: 11 ms a token."""
    link, clock = cluster()
    ring = Ring(link, TINY.lm_head, 3, clock=clock)
    return Decoder(ring, NoDraft(), STRATEGIES["autoregressive"], TREE, PipelineLimits(200, places))


def requests(prompts=PROMPTS):
    return [Request(prompt, Sampler(), NEW) for prompt in prompts]


def test_requests_that_arrive_far_apart_begin_when_they_arrive_and_take_what_one_alone_takes():
    served = serve(virtual(), requests(), 4, [0.5 * number for number in range(5)])
    assert [each.text for each in served] == [tuple(text) for text in TEXTS]
    assert [each.arrived for each in served] == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert [each.ended - each.arrived for each in served] == pytest.approx([0.011 * NEW] * 5)
    assert [each.first - each.arrived for each in served] == pytest.approx([0.011] * 5)


def test_requests_that_find_no_place_wait_in_their_order_and_their_wait_counts():
    served = serve(virtual(), requests(), 1, [0.0, 0.001, 0.002, 0.003, 0.004])
    ends = [each.ended for each in served]
    assert ends == sorted(ends)
    assert [each.text for each in served] == [tuple(text) for text in TEXTS]
    least = [0.011 * NEW * (number + 1) - each.arrived for number, each in enumerate(served)]
    assert all(each.ended - each.arrived >= alone - 1e-9 for each, alone in zip(served, least))


def test_plain_decoding_of_several_at_once_shares_the_passes_of_stages():
    alone, together = (figures(serve(virtual(), requests(), places)) for places in (1, 5))
    assert together.tokens_per_second > 2 * alone.tokens_per_second and together.latency < 2 * alone.latency


def test_the_figures_of_a_load_are_those_of_a_person():
    served = [Served(number, float(number), number + 0.5,
                     number + 2.0 + number % 2, 3, (1, 2, 3))
              for number in range(4)]
    found = figures(served)
    assert found.latency == 2.5 and found.latency_p95 == 3.0 and found.ttft == found.ttft_p95 == 0.5
    assert found.tokens_per_second == 12 / 6
    texts = {}
    assert unequal(served, texts) == 0
    assert unequal([served[0]._replace(text=(1,)), served[1]], texts) == 1


def test_arrivals_at_random_have_their_rate_and_their_seed():
    drawn = poisson(4.0, 4000, 7)
    assert drawn == sorted(drawn) == poisson(4.0, 4000, 7) != poisson(4.0, 4000, 8)
    assert drawn[-1] == pytest.approx(1000, rel=0.05)
    within = sum(later - earlier < 0.25 for earlier, later in zip([0.0, *drawn], drawn)) / 4000
    assert within == pytest.approx(0.632, abs=0.03)


@pytest.mark.parametrize("text, message", [("", "has no times"), ("1\nx", "line 2"), ("2\n1", "line 2"),
                                        ("-1", "line 1"), ("1e99", "line 1")])
def test_a_file_of_moments_that_is_none_is_refused_by_its_line(tmp_path, text, message):
    (tmp_path / "moments").write_text(text)
    with refused(message):
        moments(str(tmp_path / "moments"))
    (tmp_path / "moments").write_text("0\n\n0.5\n 0.5\n")
    assert moments(str(tmp_path / "moments")) == [0, 0.5, 0.5]


@pytest.fixture
def small(saved, tmp_path):
    """Words for a measurement with a small model."""
    (tmp_path / "hello.json").write_text('["hello", "where is it?", "who are you?"]')
    return [f"model_dir={saved / '0+2+2'}", f"data={tmp_path}", "sets=hello", "template=none", "dtype=float64",
            "ignore_eos=true", "max_new_tokens=6", "draft=eagle", "init_total_token=8", "width=3", "requests=3"]


def test_a_load_is_shown_as_a_table_and_written_as_csv_and_plots(small, tmp_path, capsys):
    words = ["rates=1,50", "at_once=1,3", "methods=ar,streaming", "alone=ar", f"results={tmp_path / 'out'}"]
    assert bench.main(["load", *small, *words]) == 0
    said = capsys.readouterr().out
    assert "requests that arrive (simulated, profile jetson-7b)" in said and "of the first method: 0 of 24" in said
    with (tmp_path / "out" / "load.csv").open() as file:
        loaded = list(csv.DictReader(file))
    assert [(row["method"], row["places"], row["rate"]) for row in loaded] == [
        ("ar", "1", "1"), ("ar", "1", "50"),
        ("streaming", "16", "1"), ("streaming", "16", "50")]
    assert float(loaded[1]["latency_p95"]) > float(loaded[0]["latency_p95"]) > 0
    with (tmp_path / "out" / "at_once.csv").open() as file:
        counted = {(row["method"], row["at_once"]): row for row in csv.DictReader(file)}
    assert float(counted["ar", "1"]["over_one"]) == 1 < float(counted["ar", "3"]["over_one"]) <= 3
    assert (tmp_path / "out" / "load-latency-t0.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words, message", [
    ("rates=0", "rates=0: 0 is not possible"), ("at_once=1.5", "1.5 is not possible"),
    ("methods=ar,dsi", "dsi is unknown, or needs a pipeline of its own"), ("rates=", "there is no load to measure"),
    ("profile=none time=real", "name a cluster"), ("temperature=1", "write temperatures=")])
def test_a_load_that_cannot_be_measured_is_refused_with_the_fix(small, words, message, error_of):
    assert message in error_of(bench.main, ["load", *small, *words.split()])


def test_a_file_of_questions_is_answered_several_at_once_as_one_by_one(saved, tmp_path, capsys):
    save_json_lines(tmp_path / "asked", QUESTIONS)
    kept = []
    for requests_ in (1, 3):
        out = tmp_path / f"out{requests_}"
        words = (f"model_dir={saved / '0+2+2'}", "template=none", "max_new_tokens=8", f"output={out}")
        assert here(*words, f"max_requests={requests_}", f"question_file={tmp_path / 'asked'}") == 0
        kept.append(load_json(out))
    alone, together = kept
    assert [(entry["question_id"], entry["turn"]) for entry in together] == [(3, 0),
                                                                             (3, 1), (5, 0), (4, 0), (4, 1)]
    for one, other in zip(alone, together):
        same = ("prompt", "text", "token_ids", "prompt_tokens", "new_tokens", "finish_reason")
        assert {key: one.get(key) for key in same} == {key: other.get(key) for key in same}
    said = capsys.readouterr()
    assert said.out.count("tokens/s of all") == 1 and "100 % after" in said.err


def test_an_evaluation_of_several_questions_at_once_writes_the_texts_of_one_by_one(saved, tmp_path, monkeypatch):
    save_json_lines(tmp_path / "talk.jsonl", ({**each, "category": ""} for each in QUESTIONS))
    monkeypatch.setattr("eval.evaluation.WARM_UP", 2)
    fixed = (f"model_dir={saved / '0+2+2'}", f"data={tmp_path}", "template=none", "link=threads", "dtype=float64",
             "ignore_eos=true", "init_total_token=8", "width=3", "methods=naive,ar", "sets=talk", "temperatures=1",
             "seed=5", "max_new_tokens=6", "profile=jetson-7b", "time=virtual")
    texts = []
    for places in (1, 2):
        folder = tmp_path / f"at_once_{places}"
        assert evaluate("emulated", [f"results={folder}", f"concurrency={places}", *fixed]) == 0
        lines = [line for path in sorted(folder.glob("answers/*/*.jsonl")) for line in load_json_lines(path)]
        texts.append({(line["method"], line["question_id"]): line["token_ids"] for line in lines})
        assert {line["same_as_ar"] for line in lines if line["method"] == "naive"} == {True}
        assert all(("span" in line) == (places > 1) for line in lines)
        assert any(folder.glob("tally/*/rank_0.jsonl")) == (places == 1)
    assert texts[0] == texts[1] and len(texts[0]) == 6
    found = (folder / "report.md").read_text()
    assert "answers 2 questions at once" in found and "of all answers of a set together" in found
    own = [line for line in lines if line["method"] == "ar"]
    seconds = max(line["span"][1] for line in own) - min(line["span"][0] for line in own)
    assert total_speed(own) == pytest.approx(5 * 6 / seconds) and report(folder)


def test_an_evaluation_whose_keys_disagree_is_refused(tmp_path, error_of):
    assert "write concurrency=3" in error_of(evaluate, "emulated", ["max_requests=3", f"results={tmp_path / 'x'}"])
