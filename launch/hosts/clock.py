"""One clock for the traces of several machines: a rank learns by how much rank 0's clock is ahead of its own.

It knows nothing about what is traced. Ranks of one machine share its monotonic clock; on another machine a rank asks
rank 0 for the time, over the store of the rendezvous, and believes the answer that came quickest (Cristian, 1989).
"""
from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Sequence

from pipeline.trace import CLOCK, NoTrace

PINGS = 8
BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for all that shares a monotonic clock, containers included
Clock = Callable[[], float]


def machine() -> str:
    """What identifies this machine since its last start."""
    return BOOT.read_text().strip()


def send_time(store: Any, peers: Sequence[int], here: str, clock: Clock = time.monotonic) -> None:
    """On rank 0, send the time to those peers that are on another machine than `here`, as often as they ask."""
    store.set("clock/0", here)
    for peer in peers:
        if store.get(f"clock/{peer}").decode() != here:
            for i in range(PINGS):
                store.get(f"clock/{peer}/ask/{i}")
                store.set(f"clock/{peer}/time/{i}", repr(clock()))


def learn_time(store: Any, rank: int, here: str, trace: NoTrace) -> None:
    """On any other rank, note in the trace by how many seconds rank 0's clock is ahead, if that is another machine's.
    """
    store.set(f"clock/{rank}", here)
    if store.get("clock/0").decode() == here:
        return
    measured = []  # seconds that a ping took, and by how many rank 0's clock is ahead
    for i in range(PINGS):
        asked = time.monotonic()
        store.set(f"clock/{rank}/ask/{i}", "")
        theirs = float(store.get(f"clock/{rank}/time/{i}"))
        back = time.monotonic()
        halfway = (asked + back) / 2
        measured.append((back - asked, theirs - halfway))
    _, ahead = min(measured)
    trace.note(CLOCK, time.monotonic(), ahead=ahead)
