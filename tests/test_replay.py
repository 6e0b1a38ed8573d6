"""The replay and the account of a run: what a person finds by following a few rows by hand."""
import pytest

from eval.observe.span_sums import RowFlight, Span, Tally, replay
from eval.observe.time_breakdown import Account, account, by_request
from sim.clock import VirtualClock
from tests.json_files import load_json_lines
from tests.test_metrics import answer, line


def sent(at, nodes, tokens, parents, text):
    return Span("send", at, at, {"nodes": nodes, "tokens": tokens, "parents": parents, "text": text})


def heard(at, nodes, answers):
    return Span("judge", at, at, {"nodes": nodes, "answers": answers})


PROMPT = sent(0.0, [0, 1, 2], [7, 8, 9], [0, 0, 1], 3)
FIRST = heard(2.0, [0, 1, 2], {2: 5})  # the prompt's last row; token 5 follows


def test_token_by_token_every_row_is_a_miss_and_nothing_is_in_flight_while_rank_0_works():
    records = [PROMPT, FIRST, sent(2.5, [3], [5], [2], 1),
               heard(4.5, [3], {3: 6}),
               sent(4.75, [4], [6], [3], 1),
               heard(6.75, [4], {4: 1})]
    assert replay(records, 2.0, 7.0) == RowFlight(rows=2,
                                                  stay=4.0, aloft=4.0, misses=2, lost=1.0)


def test_a_guess_that_was_right_is_a_row_and_one_that_was_wrong_is_none():
    records = [PROMPT, FIRST,
               sent(3.0, [3, 4, 5], [5, 6, 6], [2, 3, 4], 1),  # the text, a guess below it, and one below that
               sent(3.5, [6, 7], [9, 1], [3, 5], 0),  # a wrong guess, and a right one
               heard(5.0, [3, 4, 5], {3: 6, 4: 6, 5: 1}),
               heard(6.0, [7], {7: 2}),
               sent(6.5, [8], [2], [7], 1)]  # the text goes on as nobody guessed; it never comes back
    assert replay(records, 2.0, 8.0) == RowFlight(rows=4,
                                                  stay=3 * 2.0 + 2.5, aloft=8.5 + 1.5, misses=2, lost=1.0 + 0.5)


def test_a_row_that_left_during_the_prefill_counts_from_the_first_token_on():
    records = [PROMPT, sent(1.0, [3], [5], [2], 0),
               FIRST, heard(4.0, [3], {3: 6})]
    assert replay(records, 2.0, 5.0) == RowFlight(rows=1,
                                                  stay=3.0, aloft=2.0, misses=0, lost=1.0)


def test_what_happens_at_one_moment_of_a_modelled_clock_has_its_order():
    late = [PROMPT, FIRST, sent(2.0, [3], [5], [2], 1),
            heard(3.0, [3], {})]
    early = [PROMPT, sent(2.0, [3], [5], [2], 0),
             FIRST, heard(3.0, [3], {})]
    assert [replay(records, 2.0, 3.0).misses for records in (late, early)] == [1, 0]


def test_a_prompt_may_go_in_chunks_and_a_request_that_ends_with_it_has_no_rows():
    records = [PROMPT,
               sent(0.5, [3, 4], [1, 1], [2, 3], 2),
               heard(1.0, [0, 1, 2], {}),
               heard(2.0, [3, 4], {4: 8}),
               sent(2.0, [5], [8], [4], 1),
               heard(3.0, [5], {5: 0})]
    assert replay(records, 2.0, 3.0) == RowFlight(1, 1.0, 1.0, 1, 0.0)
    assert replay(records[:4], 2.0, 2.5) == RowFlight(0, 0, 0.0, 0, 0.5) == replay([], 2.0, 2.5)


class TimedTally:
    """A tally by a clock that goes on only while something is spent."""

    def __init__(self, folder):
        self.folder, self.clock = folder, VirtualClock()
        self.tally = Tally(folder, 0, clock=self.clock)

    def spend(self, seconds, name, **facts):
        with self.tally.span(name, **facts):
            self.clock.set(self.clock.now() + seconds)

    def accounts(self):
        self.tally.close()
        return load_json_lines(self.folder / "rank_0.jsonl")


@pytest.fixture
def timed(tmp_path):
    return TimedTally(tmp_path)


def settle_one_token(timed):
    """Send a prompt of one token and hear what follows it, a second each."""
    timed.spend(1.0, "send", nodes=[0], tokens=[4], parents=[0], text=1)
    timed.spend(1.0, "judge", nodes=[0], answers={0: 5})


def test_the_tally_splits_a_request_at_its_first_token_and_keeps_no_clock_of_its_own(timed):
    for _ in range(2):
        timed.spend(0.5, "send", nodes=[0, 1],
              tokens=[4, 4], parents=[0, 0], text=2)
        timed.spend(1.0, "grow")
        timed.spend(2.0, "wait")
        timed.spend(0.25, "judge", nodes=[0, 1], answers={1: 5})
        timed.spend(0.125, "prune")  # here the first token has settled: 3.75 seconds
        timed.spend(1.0, "grow")
        timed.spend(0.5, "send", nodes=[2],
              tokens=[5], parents=[1], text=1)
        timed.spend(3.0, "wait")
        timed.spend(0.25, "judge", nodes=[2], answers={2: 6})
        timed.spend(9.0, "reset")
    for entry in timed.accounts():
        assert entry["seconds"] == 8.625 and entry["first"] == 3.75
        assert entry["decoding"] == {"prune": 0.125, "grow": 1.0, "send": 0.5, "wait": 3.0, "judge": 0.25}
        assert entry["flight"] == {"rows": 1, "stay": 3.5,
                                   "aloft": 3.5, "misses": 1, "lost": 0.125 + 1.0 + 0.25}
        assert entry["spans"]["grow"] == 2.0


def test_a_token_has_settled_when_guesses_are_drafted_next_though_nothing_is_pruned(timed):
    settle_one_token(timed)
    timed.spend(0.5, "grow")
    timed.spend(1.0, "reset")
    [entry] = timed.accounts()
    assert entry["first"] == 2.0 and entry["decoding"]["grow"] == 0.5


def test_a_request_that_a_message_ends_within_its_reset_has_an_account_too(timed):
    settle_one_token(timed)
    with timed.tally.span("reset"):  # of a group that shares layers, whose rank 0 is a stage as well
        timed.spend(1.0, "send", kind="Reset", nodes=[])
    [entry] = timed.accounts()
    assert (entry["first"], entry["seconds"], entry["decoding"]["send"]) == (2.0, 3.0, 1.0)


def test_a_rank_that_hears_no_answers_has_no_account(timed):
    timed.spend(1.0, "forward", nodes=[1])
    timed.spend(1.0, "send", kind="Reset", nodes=[])
    [entry] = timed.accounts()
    assert "flight" not in entry and entry["seconds"] == 2.0


def flown(request, launch="0-ar", **decoding):
    return {**line(0, request, 10.0, launch=launch), "first": 2.0, "decoding": decoding,
            "flight": {"rows": 4, "stay": 6.0, "aloft": 12.0, "misses": 2, "lost": 1.0}}


def test_an_account_adds_up_to_the_time_of_a_token():
    lines = [flown(0, grow=1.0, judge=0.5, wait=4.0),
             flown(1, grow=3.0, judge=0.5, wait=2.0),
             flown(7, grow=99.0),
             flown(0, launch="1-tp", grow=99.0), line(1, 0, 8.0)]
    answers = [answer(tokens=(4, 4),
                      seconds=(9.0, 9.0), requests=[0, 1], scale=2.0),
               answer(tokens=(50,), requests=[3])]  # request 3 has no line
    seen = account(by_request(lines), answers)

    assert seen == Account(drafting=0.25, verdict=0.0625, waiting=0.375, prefill=0.25, other=0.3125,
                           aloft=1.5, stay=0.75, tokens_per_miss=2.0, lost=0.125)
    assert seen.whole == pytest.approx(20.0 / 2 / 8)
    assert account(by_request(lines[-1:]), answers) is None


def test_a_run_without_misses_has_no_tokens_by_them():
    entry = flown(0)
    entry["flight"].update(rows=0, stay=0.0, misses=0)
    seen = account(by_request([entry]), [answer()])
    assert seen.tokens_per_miss != seen.tokens_per_miss and seen.stay != seen.stay
