"""How a rank ends before its time: it says why, lets the others hear of it, and keeps its trace.

It knows nothing about roles: the composition root says who informs whom.
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
from pipeline.failure import PeerLost, explain, foreseen
from pipeline.heartbeat import Heartbeat
from pipeline.trace import OFF, NoTrace


@dataclass
class Ending:
    """The end of one rank, with what there is to end so far: a heartbeat, a trace, wires."""

    rank: int
    debug: bool  # whether a traceback is shown with every sentence
    speaks: bool  # whether this rank prints losses
    launched: bool  # whether a launcher prints the errors of its ranks
    patience: float  # seconds for the main thread to find a loss by itself
    linger: float  # seconds for other ranks to hear why this one ends
    heartbeat: Heartbeat | None = None
    trace: NoTrace = OFF
    wires: Wires | None = None

    def lose(self, loss: str) -> None:
        """End the rank, since the heartbeat has heard of a loss; called on the heartbeat's thread."""
        try:
            if self.wires is not None:
                self.wires.fail(PeerLost(loss))
            time.sleep(self.patience)
            if self.speaks:  # its main thread waits for other ranks in the midst of a product
                print(f"\nflowspec: {loss}", file=sys.stderr)
        finally:
            self._end(LOST)

    def give_up(self, error: BaseException) -> NoReturn:
        """End the rank, since its main thread has failed or found a loss."""
        show(error, self.debug)
        lost = isinstance(error, PeerLost)
        reason = explain(error) if lost else f"rank {self.rank} failed: {explain(error)}"
        own_error_unheard = not lost and not self.launched
        if self.speaks or own_error_unheard:
            print(f"\nflowspec: {reason}", file=sys.stderr)
        self.speaks = False  # once is enough
        if self.heartbeat is not None:
            self.heartbeat.note(reason)
        elif self.launched:
            note(reason)
        time.sleep(self.linger)
        if isinstance(error, KeyboardInterrupt):
            self._end(INTERRUPTED)
        self._end(LOST if lost else WRONG)

    def _end(self, code: int) -> NoReturn:
        with suppress(OSError, ValueError):
            self.trace.close()
        die(code)


def show(error: BaseException, debug: bool) -> None:
    """Print the traceback, unless a sentence says it all."""
    if debug or not foreseen(error):
        traceback.print_exception(type(error), error, error.__traceback__)
