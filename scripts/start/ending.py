"""How a rank ends before its time: what it tells, that the others hear of it, and that its trace is kept.

It knows nothing about roles: who tells whom is told by the composition root.
"""
from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from pipeline.loss import PeerLost, explain, foreseen
from pipeline.pulse import Pulse
from pipeline.trace import OFF, NoTrace
from scripts.start.processes import INTERRUPTED, LOST, WRONG, die
from scripts.start.wiring import Wires


@dataclass
class Ending:
    """Of one rank, by what it has so far of a pulse, a trace and wires."""

    rank: int
    debug: bool
    tells: bool  # losses, to whom it may concern; its own failure is always told
    root: bool  # whether its words need no name
    patience: float  # seconds for its main thread to find a loss
    linger: float  # seconds for others to hear why
    pulse: Pulse | None = None
    trace: NoTrace = OFF
    wires: Wires | None = None

    def lose(self, loss: str) -> None:
        """The pulse has heard of a loss."""
        try:
            if self.wires is not None:
                self.wires.fail(PeerLost(loss))
            time.sleep(self.patience)
            if self.tells:  # its main thread waits for other ranks in the midst of a product
                print(f"\nflowspec: {loss}", file=sys.stderr)
        finally:
            self._end(LOST)

    def give_up(self, error: BaseException) -> NoReturn:
        """The main thread has failed, or found a loss."""
        show(error, self.debug)
        lost, why = isinstance(error, PeerLost), explain(error)
        if self.tells or not lost:
            print(f"\nflowspec: {why}" if lost or self.root else f"\nflowspec: rank {self.rank}: {why}",
                  file=sys.stderr)
        if self.pulse is not None:
            self.pulse.report(why if lost else f"rank {self.rank} failed: {why}")
            self.pulse.verdict()  # which all have heard then
        time.sleep(self.linger)
        self._end(INTERRUPTED if isinstance(error, KeyboardInterrupt) else LOST if lost else WRONG)

    def _end(self, code: int) -> NoReturn:
        with suppress(OSError, ValueError):
            self.trace.close()
        die(code)


def show(error: BaseException, debug: bool) -> None:
    """The traceback, unless a sentence says it all."""
    if debug or not foreseen(error):
        traceback.print_exception(type(error), error, error.__traceback__)
