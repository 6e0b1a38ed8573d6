"""Figures are what a person computes by hand from the same answers, and the tally sums what a rank did."""
from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch

from cluster.transport import Inbox
from config.profiles import PROFILES
from eval import metrics
from eval.observe.span_sums import Tally
from eval.observe.time_breakdown import by_request, utilization
from pipeline.messages import Prune, Reset, Segment
from pipeline.stage import Stage
from pipeline.trace import NoTrace
from sim.clock import Pace
from sim.devices import Lane
from sim.wires import size
from tests.json_files import load_json_lines
from tests.tiny import CONFIG, TINY


def answer(method="continuous", question=1, tokens=(10,), seconds=(2.0,), **more):
    """One line of a results folder."""
    turns = len(tokens)
    return {"question_id": question, "method": method, "draft": "none" if method == "ar" else "eagle",
            "set": "qa", "temperature": 0.0, "repeat": 0, "seed": 0,
            "profile": "jetson-7b", "emulated": True, "scale": 1.0, "launch": "0-ar", "requests": list(range(turns)),
            "choices": [{"index": 0, "new_tokens": list(tokens), "wall_time": list(seconds),
                         "accept_lengths": [4, 3, 2]}],
            "misses": [3] * turns, "ttft": [0.5] * turns,
            "settled": [[[0.5, 1]]] * turns,
            "token_ids": [list(range(n)) for n in tokens], "first_difference": None, **more}


def test_speed_is_all_tokens_by_all_seconds():
    answers = [answer(question=1, tokens=(10, 20), seconds=(2.0, 3.0)),
               answer(question=2, tokens=(6,), seconds=(4.0,))]
    assert metrics.sample(answers).tolist() == [[30, 5], [6, 4]]
    assert metrics.speed([metrics.sample(answers)]).value == 36 / 9
    assert metrics.speed([metrics.sample(answers[:1]), metrics.sample(answers[1:])]).value == (30 / 5 + 6 / 4) / 2


def test_decoding_alone_is_the_tokens_behind_the_first_by_the_seconds_after_it():
    answers = [answer(question=1, tokens=(10, 20),
                      seconds=(2.0, 3.0), ttft=[0.5, 1.0]),
               answer(question=2, tokens=(6,), seconds=(4.0,), ttft=[1.5]),
               answer(question=3, tokens=(1,), seconds=(0.5,), ttft=[0.5])]
    assert metrics.sample(answers, metrics.decoding_amounts).tolist() == [[28, 3.5],
                                                                          [5, 2.5], [0, 0]]
    assert metrics.decoding_speed([answers]).value == 33 / 6
    assert metrics.decoding_speed([answers[:1], answers[1:2], answers[2:]]).value == (28 / 3.5 + 5 / 2.5) / 2
    assert math.isnan(metrics.decoding_speed([answers[2:]]).value)


def test_the_time_of_a_request_is_that_of_a_turn():
    answers = [answer(question=1, tokens=(9, 9), seconds=(1.0, 2.0)),
               answer(question=2, seconds=(6.0,))]
    assert metrics.request_times(answers) == [1.0, 2.0, 6.0]


def test_a_quantile_is_a_value_that_was_measured():
    assert metrics.mean([1.0, 2.0, 6.0]) == 3
    assert metrics.quantile([2.0, 6.0, 1.0], 0.95) == 6
    twenty = [float(number) for number in range(1, 21)]
    assert [metrics.quantile(twenty, share) for share in (0, 0.05, 0.5, 0.951, 0.95)] == [1, 1, 10, 20, 19]
    assert math.isnan(metrics.mean([]))
    assert math.isnan(metrics.quantile([], 0.95))


def test_a_ratio_is_of_the_same_questions_only():
    mine = [answer(question=1, tokens=(10,), seconds=(1.0,)),
            answer(question=2, tokens=(99,), seconds=(1.0,)),
            answer(question=3, tokens=(20,), seconds=(2.0,))]
    base = [answer("naive", question=3, tokens=(20,), seconds=(8.0,)),
            answer("naive", question=1, tokens=(10,), seconds=(4.0,)),
            answer("naive", question=1, tokens=(10,), seconds=(1.0,), temperature=1.0)]
    assert metrics.paired(mine, base).tolist() == [[10, 1, 10, 4],
                                                   [20, 2, 20, 8]]
    assert metrics.speed_up([metrics.paired(mine, base)]) == (4.0, 4.0, 4.0)


def test_the_mean_ratio_is_the_ratio_of_the_means():
    one = np.array([[10, 1, 10, 2.0]])
    two = np.array([[10, 2, 10, 10.0]])
    assert metrics.speed_up([one, two]).value == ((10 + 5) / 2) / ((5 + 1) / 2)


def test_bounds_enclose_the_value_are_the_same_each_time_and_absent_for_one_question():
    random = np.random.default_rng(3)
    rows = np.column_stack([random.integers(20, 60, 40),
                            random.uniform(4, 8, 40)])
    value, low, high = metrics.speed([rows])
    assert low < value < high and metrics.speed([rows]) == (value, low, high)
    wide = metrics.speed([rows[:10]])
    assert wide.high - wide.low > high - low
    one = metrics.speed([rows[:1]])
    assert one.value == rows[0, 0] / rows[0, 1]
    assert math.isnan(one.low) and math.isnan(one.high)
    assert all(math.isnan(x) for x in metrics.speed([]))
    assert math.isnan(metrics.speed_up([rows[:0]]).value)


def test_the_tokens_of_a_miss_are_those_behind_the_prefill():
    assert metrics.tokens_per_miss([answer(tokens=(10, 7), seconds=(1.0, 1.0), misses=[3, 2])]) == (9 + 6) / 5
    assert metrics.tokens_per_miss([answer(tokens=(10,), misses=[9])]) == 1
    assert math.isnan(metrics.tokens_per_miss([answer(tokens=(1,), misses=[0])]))


def test_acceptance_is_the_share_of_tokens_behind_the_prefills_that_were_no_misses():
    assert metrics.acceptance([answer(tokens=(10, 8), seconds=(1.0, 1.0), misses=[3, 1])]) == 0.75
    assert metrics.acceptance([answer(tokens=(10,), misses=[0])]) == 1
    assert math.isnan(metrics.acceptance([answer(tokens=(1,), misses=[0])]))


def test_acceptance_by_position_is_what_vllm_prints():
    """Of four drafts of three tokens the first guess is accepted by three, the second by two and the third by one."""
    choices = [{"index": 0, "new_tokens": [11], "wall_time": [1.0], "accept_lengths": lengths}
               for lengths in ([4, 1], [3, 2])]
    rates = metrics.acceptance_by_position([answer(choices=[choice]) for choice in choices])
    assert rates == [0.75, 0.5, 0.25]
    mean = metrics.accepted_length([answer(choices=[choice]) for choice in choices])
    assert 1 + sum(rates) == mean == (4 + 1 + 3 + 2) / 4
    assert math.isnan(metrics.accepted_length([answer(choices=[{**choices[0], "accept_lengths": []}])]))
    assert metrics.acceptance_by_position([answer(choices=[{**choices[0], "accept_lengths": []}])]) == []


def test_times_of_tokens():
    turns = [[[1.0, 1], [1.5, 5], [2.5, 2], [2.75, 1]],
             [[2.0, 2], [4.0, 2]]]  # 5 of 0.1, 2 of 0.5, 1 of 0.25, 2 of 1
    answers = [answer(tokens=(9, 4),
                      seconds=(2.75, 4.0), settled=turns, ttft=[1.0, 2.0])]
    assert metrics.first_token_times(answers) == [1.0, 2.0]
    assert [metrics.quantile(metrics.token_times(answers), share) for share in (0.5, 0.6, 0.7, 0.99)] == [
        0.1, 0.25, 0.5, 1.0]
    assert metrics.token_times([answer()]) == []


def test_equality_names_the_first_difference_and_its_margin():
    base = [answer("ar", question=q, token_ids=[[1, 2, 3], [4, 5]])
            for q in (1, 2, 3)]
    same = [answer(question=q, token_ids=[[1, 2, 3], [4, 5]])
            for q in (2, 1)]
    assert metrics.equality(same, base) == "same" and metrics.equality(base, base) == "same"
    other = [*same, answer(question=3,
                           token_ids=[[1, 2, 3], [4, 6]], first_difference={"margin": 0.01234}),
             answer(question=7, token_ids=[[9]])]
    assert metrics.equality(other, base) == "1 of 3 differ, first question 3 turn 2 token 2, margin 0.012"
    short = [answer(question=1, token_ids=[[1, 2], [4, 5]])]
    assert metrics.equality(short, base) == "1 of 1 differ, first question 1 turn 1 token 3"
    assert metrics.equality(same, []) == ""
    assert metrics.equality([answer(question=1, seed=5)], base) == ""


def line(rank, request, seconds, launch="0-ar", late=0.0, **spans):
    return {"launch": launch, "rank": rank, "request": request, "seconds": seconds, "spans": spans, "late": late,
            "segments": 3, "rows": 30 + rank, "bytes": 1000, "control": 0 if rank else 80}


def test_shares_of_time_add_up():
    lines = [line(0, 0, 10.0, grow=2.0, judge=1.0, wait=6.0),
             line(1, 0, 8.0, forward=5.0, wait=2.5, late=0.1),
             line(0, 1, 10.0, grow=1.0, wait=9.0),
             line(1, 1, 10.0, forward=3.0, wait=6.0),
             line(0, 2, 99.0),
             line(1, 0, 99.0, launch="1-tp"), line(0, 3, 5.0)]
    found = utilization(by_request(lines), [answer(requests=[0, 1, 3],
                                                   tokens=(1, 1, 1), seconds=(1.0, 1.0, 1.0))])
    assert found[0][:4] == (0.2, 0.75, 0.0, 0.05)
    assert found[0].control == 80 and found[0].bytes == 1000
    assert found[1][:4] == pytest.approx((0.4, 0.425, 0.1, 0.075))
    assert found[1].rows == 31
    assert found[1].late == pytest.approx(0.1 / 8)
    assert all(sum(share[:4]) == pytest.approx(1) for share in found.values())
    assert utilization(by_request(lines), []) == {}


def written_lines(folder, rank):
    """The lines of a rank's tally."""
    return load_json_lines(folder / f"rank_{rank}.jsonl")


def spend(seconds, tally, name, **facts):
    """Let a span of this name take time."""
    with tally.span(name, **facts):
        time.sleep(seconds)


class Spans(NoTrace):
    """Another trace behind the tally."""

    def __init__(self):
        self.names = []

    def note(self, name, since, until=None, **facts):
        self.names.append(name)

    def close(self):
        self.names.append("closed")


def test_a_tally_has_a_line_for_each_request_and_nothing_between(tmp_path):
    behind = Spans()
    tally = Tally(tmp_path, 1, behind)
    spend(0, tally, "wait")
    spend(0, tally, "send", kind="Reset", nodes=[])  # that of the start
    for rows in (3, 2):
        spend(0.01, tally, "wait")
        spend(0.02, tally, "forward", nodes=[1] * rows)
        spend(0, tally, "send", kind="Segment", nodes=[1] * rows)
        spend(0.005, tally, "wait")
        spend(0, tally, "send", kind="Segment", nodes=[])
        spend(0, tally, "send", kind="Reset", nodes=[])
        sender = threading.Thread(target=tally.note, args=("sent", 0.0),
                                  kwargs={"kind": "Segment", "bytes": 64 * rows})
        sender.start()
        sender.join()
        tally.note("sent", 0.0, kind="Prune", bytes=8)
        tally.note("late", time.monotonic() - 0.25)
    tally.close()
    lines = written_lines(tmp_path, 1)
    assert [(x["rank"], x["request"], x["segments"], x["rows"], x["bytes"], x["control"]) for x in lines] == [
        (1, 0, 1, 3, 192, 8), (1, 1, 1, 2, 128, 8)]
    for message in lines:
        assert 0.02 <= message["spans"]["forward"] <= message["seconds"] and 0.25 <= message["late"]
        assert 0.005 <= message["spans"]["wait"] < message["seconds"] - message["spans"]["forward"]
    assert behind.names.count("sent") == 4 and behind.names[-1] == "closed"


def test_an_emulated_wire_tells_the_tally_what_it_carried(tmp_path):
    tally, inbox = Tally(tmp_path, 0), Inbox()
    lane = Lane(inbox.put, Pace(PROFILES["server"], trace=tally), 0.0, print)
    messages = [Segment(0, [1, 2], [0, 1],
                        [1, 2], 2, torch.tensor([5, 6])),
                Prune(0, 2, 1, 9, [3, 4]), Reset(0)]
    with tally.span("send", kind="Segment", nodes=[1, 2]):
        for msg in messages:
            lane.put(msg)
    with tally.span("reset"):
        lane.close()
    tally.close()
    [found] = written_lines(tmp_path, 0)
    server = PROFILES["server"]
    assert (found["bytes"], found["control"]) == (size(messages[0], server), size(messages[1], server)) == (64, 16)
    assert found["late"] > 0


def test_what_is_late_while_a_stage_computes_belongs_to_the_request_of_its_first_segment(tmp_path):
    tally = Tally(tmp_path, 1)

    def late_slice(x, pos_T, cache, inputs, alive):
        tally.note("late", 1.0, 1.25)
        return x[:, None].float()

    stage = Stage(late_slice, lambda: CONFIG.cache(1, 64, TINY.lm_head.weight), tally)
    for request in range(2):
        nodes = [2 * request, 2 * request + 1]
        stage.apply(Segment(request, nodes, nodes[:1] * 2, [0, 1], 2, torch.tensor([5, 6])))
        stage.apply(Reset(request))
        spend(0, tally, "send", kind="Reset", nodes=[])
    tally.close()
    assert [found["late"] for found in written_lines(tmp_path, 1)] == [0.25, 0.25]


def test_a_request_that_did_not_end_has_no_line(tmp_path):
    tally = Tally(tmp_path, 2)
    spend(0, tally, "forward", nodes=[1])
    tally.close()
    tally.note("late", 0.0)
    assert written_lines(tmp_path, 2) == []
