"""SI and DSI by events: exact times, published figures, and what no order of events may break."""
from __future__ import annotations

import random
from dataclasses import replace
from math import ceil

import pytest

from eval.dsi.events import DSI, EventPlan, Forward, decode
from eval.dsi.online import spread


def even(ticks: int) -> Forward:
    return Forward(ticks, ticks)


def plan(target: int, drafter: int, lookahead: int, tokens: int, more: int = 0) -> EventPlan:
    """With the servers that Eq. 1 asks for, and some `more`.

    Only the last drafts, fewer than k, follow sooner than that equation has it: for them it takes one more.
    """
    servers = ceil(target / (lookahead * drafter)) + more
    return EventPlan(tokens, lookahead, servers, even(target), even(drafter))


def chances(acceptance: float, tokens: int, seed: int) -> list:
    chance = random.Random(seed)
    return [chance.random() < acceptance for _ in range(tokens)]


def summed(asked: EventPlan, right: list, least: int) -> int:
    """What DSI takes if nothing ever waits: run after run, by hand. The rejected draft is among its first `least`."""
    target, drafter, total, left = asked.target.first, asked.drafter.first, 0, asked.num_tokens
    while left:
        start = asked.num_tokens - left
        accepted = next((n for n, hit in enumerate(right[start:asked.num_tokens - 1])
                         if not hit), left - 1)
        drafts = min(ceil(accepted / least) * least, left - 1)
        total += drafts * drafter + target
        left -= accepted + 1
    return total


SIZES = [(7, 1, 1), (10, 1, 2), (10, 1, 5), (20, 3, 4), (9, 5, 1), (8, 8, 1), (16, 3, 5)]


@pytest.mark.parametrize("target, drafter, lookahead", SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 50])
def test_perfect_drafts_take_a_draft_each_and_one_target_and_useless_ones_a_target_each(
        target, drafter, lookahead, tokens):
    asked = plan(target, drafter, lookahead, tokens, more=lookahead > 1)
    always, never = [True] * tokens, [False] * tokens
    assert decode("DSI", asked, always).ticks == (tokens - 1) * drafter + target
    for stops, more in ((True, 0), (True, 1), (False, 1)):
        plain = decode("DSI", replace(plan(target, drafter, lookahead, tokens, more), stops=stops), never)
        assert [plain.settled_by(moment * target) for moment in range(tokens + 1)] == list(range(tokens + 1))
        assert plain.ticks == tokens * target
    assert decode("non-SI", asked, always) == decode("non-SI", asked, never)
    assert decode("non-SI", asked, never).commits == [(i * target, 1) for i in range(1, tokens + 1)]
    assert decode("SI", asked, never).ticks == tokens * target + drafter * sum(
        min(lookahead, left) for left in range(tokens))


def test_each_round_of_si_takes_its_drafts_and_one_target():
    right = spread([2, 0, 3, 1, 5], 12)  # 1 1 0 0 1 1 1 0 1 0 1 1
    assert decode("SI", plan(10, 1, 2, 12), right).commits == [
        (12, 3), (24, 1), (36, 3), (48, 1), (60, 2), (71, 2)]


@pytest.mark.parametrize("target, drafter, lookahead", SIZES)
def test_dsi_takes_run_after_run_what_a_person_sums_if_there_are_servers_enough(
        target, drafter, lookahead):
    for seed in range(60):
        tokens = 1 + seed
        right = chances((0.3, 0.7, 0.95)[seed % 3], tokens, seed)
        for more, stops in ((0, True), (1, True), (1, False)):
            enough = plan(target, drafter, lookahead, tokens, more + (lookahead > 1))
            asked = replace(enough, stops=stops, seed=seed)
            assert decode("DSI", asked, right).ticks == summed(asked, right, lookahead)


class Watched(DSI):
    """DSI that notices an answer of an epoch that is over, and more servers at work than there are."""

    epoch = 0

    def begin(self) -> None:
        self.epoch += 1
        super().begin()

    def ask(self, done) -> None:
        epoch, free = self.epoch, len(self.free)

        def answer() -> None:
            assert epoch == self.epoch
            done()
        super().ask(answer)
        assert len(self.free) == free - 1


@pytest.mark.parametrize("seed", range(150))
def test_whatever_the_order_of_events_all_is_settled_once_by_no_stale_answer_and_no_sooner_than_can_be(seed):
    chance = random.Random(seed)
    target, tokens = chance.randint(4, 30), chance.randint(1, 40)
    asked = EventPlan(tokens, chance.randint(1, 6), chance.randint(1, 5),
                      Forward(target + chance.randint(0, 20), target), even(chance.randint(1, target)),
                      stops=chance.random() < 0.5, seed=seed)
    right = chances(chance.choice([0.0, 0.5, 0.9, 1.0]), tokens, seed)
    outcome = Watched(asked, right).run()
    assert sum(count for _, count in outcome.commits) == tokens
    moments_of_commits = [when for when, _ in outcome.commits]
    assert moments_of_commits == sorted(moments_of_commits)
    assert outcome.ticks >= summed(replace(asked, target=even(target)), right, 1)


def test_a_server_that_takes_long_for_its_first_forward_does_so_once():
    asked = EventPlan(20, 2, 3, Forward(100, 10), Forward(5, 1))
    assert decode("non-SI", asked, [True] * 20).ticks == 100 + 19 * 10
    assert decode("SI", asked, [False] * 20).commits[:2] == [(100 + 5 + 1, 1), (100 + 6 + 12, 1)]
    never = decode("DSI", asked, [False] * 20)
    assert never.commits[0] == (100, 1) and never.ticks == 100 + 19 * 10


def test_slow_drafts_do_not_keep_the_target_waiting():
    """With k d > T no block is full in time: what was drafted so far is verified whenever the target is free."""
    asked = EventPlan(30, 5, 1, even(10), even(9))
    assert decode("DSI", asked, [True] * 30).ticks <= decode("non-SI", asked, [True] * 30).ticks
    for seed in range(20):
        right = chances(0.7, 30, seed)
        assert decode("DSI", asked, right).ticks <= decode("non-SI", asked, right).ticks
