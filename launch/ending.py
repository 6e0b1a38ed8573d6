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

from launch.processes import INTERRUPTED, LOST, WRONG, die, note
from launch.wiring import Wires
from pipeline.heartbeat import Heartbeat
from pipeline.loss import PeerLost, explain, foreseen
from pipeline.trace import OFF, NoTrace


@dataclass
class Ending:
    """Of one rank, by what it has so far of a heartbeat, a trace and wires."""

    rank: int
    debug: bool
    tells: bool  # losses, to whom it may concern
    hushed: bool  # whether a launcher tells all
    patience: float  # seconds for its main thread to find a loss
    linger: float  # seconds for others to hear why
    heartbeat: Heartbeat | None = None
    trace: NoTrace = OFF
    wires: Wires | None = None

    def lose(self, loss: str) -> None:
        """The heartbeat has heard of a loss."""
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
        loss = why if lost else f"rank {self.rank} failed: {why}"
        if self.tells or not (lost or self.hushed):
            print(f"\nflowspec: {loss}", file=sys.stderr)
        self.tells = False  # once is enough
        if self.heartbeat is not None:
            self.heartbeat.note(loss)
        elif self.hushed:
            note(loss)
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
