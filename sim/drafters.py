"""Small models on ranks of their own in virtual time: each has a clock of its own, so that all of them draft at once.

They guess really, here and now. What is modelled is when a question reaches a rank, how long it drafts, and when its
answer is back.
"""
from __future__ import annotations

from collections import deque

from config.profiles import Profile
from pipeline.drafters import Drafter
from pipeline.interfaces import Clock
from pipeline.messages import Message
from pipeline.trace import OFF, NoTrace
from sim.wires import Wire, size


class DrafterWay:
    """Rank 0's link to a rank with a small model.

    `clock` is rank 0's, `own` that of the small model, which passes on to `own` what a level takes; both begin at 0.
    `trace` is rank 0's.
    """

    def __init__(self, profile: Profile, drafter: Drafter, clock: Clock, own: Clock, trace: NoTrace = OFF) -> None:
        self._profile, self._drafter = profile, drafter
        self._clock, self._own = clock, own
        self._trace = trace
        self._there, self._back = Wire(profile), Wire(profile)
        self._answers: deque[tuple[float, Message]] = deque()  # with the moments at which they come

    def restart(self) -> None:
        """Let the wires draw their jitter from its beginning on."""
        self._there.restart()
        self._back.restart()

    def send(self, msg: Message) -> None:
        """Hand over a message; the rank obeys it once it has come and those before it are done."""
        self._own.sleep_until(self._carry(self._there, msg, self._clock.now(), self._trace))
        answer = self._drafter.apply(msg)
        arrival = self._carry(self._back, answer, self._own.now(), self._drafter.trace)
        self._answers.append((arrival, answer))

    def recv(self) -> Message:
        """The next answer, once its moment has come."""
        arrival, answer = self._answers.popleft()
        self._clock.sleep_until(arrival)
        self._trace.note("recv", arrival, arrival, kind=type(answer).__name__, nodes=[])
        return answer

    def _carry(self, wire: Wire, msg: Message, now: float, trace: NoTrace) -> float:
        """The moment at which a message comes that leaves now."""
        arrival = wire.arrival(msg, now)
        trace.note("wire", now, arrival, kind=type(msg).__name__, bytes=size(msg, self._profile))
        return arrival
