"""The accounting of the online simulator that was published with the paper on DSI, by events.

There, a run of n accepted drafts settles n tokens: the target's own token after them goes to nobody. Each run begins
with a verification of no drafts, which SI waits for, too. Every k drafts the target is called with all drafts of the
run, and the run ends when a call returns that has more than n of them. Servers that are busy find the newest call
first. A run that would settle more tokens than are wanted ends with its first call. The first draft is a first forward
of the drafter until something is settled.
"""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Sequence

from eval.dsi.events import Driver, Virtual
from eval.dsi.forwards import Worker
from eval.dsi.speculation import Method, Outcome, Plan


class Original(Method):
    """One run after the other; `waits` is whether the drafter waits for each call, as in SI."""

    def __init__(self, plan: Plan, runs: Sequence[int], waits: bool,
                 driver: Driver) -> None:
        super().__init__(replace(plan, servers=1) if waits else plan, (), driver)
        self._runs, self._waits = iter(runs), waits

    def begin(self) -> None:
        """Begin the next run."""
        if not self.settled:
            self.drafter = Worker(self.events, 0, self.plan.drafter, 0)
        self.length = next(self._runs)
        self.drafts = 0
        self.calls: list[int] = []  # those without a server, by their drafts
        self._call()

    def _call(self) -> None:
        self.calls.append(self.drafts)
        self._go_on()

    def _go_on(self) -> None:
        """Give work to whoever is free."""
        while self.calls and self.free:
            count = self.calls.pop()
            self.ask(0, partial(self._verified, count))
        busy = len(self.free) < len(self.servers)
        if self.drafter.free and not (self._waits and busy):
            self.drafter.compute(0, self._drafted)

    def _drafted(self) -> None:
        self.drafts += 1
        if self.drafts % self.plan.lookahead:
            self._go_on()
        else:
            self._call()

    def _verified(self, count: int) -> None:
        ends = self.settled + self.length > self.plan.tokens
        if not ends and self.length >= count:
            self._go_on()
            return
        self.rejections += self.length < count
        self.commit(self.length)
        if ends:
            self.events.stop()
            return
        for worker in [self.drafter, *self.servers]:
            worker.give_up(self._go_on)
        self.begin()


def replay(method: str, plan: Plan, runs: Sequence[int],
           driver: Driver | None = None) -> Outcome:
    """What comes of a plan with SI or DSI and runs of these lengths, whose sum is more than the plan's tokens.

    Nobody waits if no driver is given.
    """
    return Original(plan, runs, method == "SI", driver or Virtual()).run()
