"""The pulse: every rank says that it lives, and hears who does not.

It knows nothing about messages. A broken connection is noticed at once by the neighbours; a peer that is silent, since
its machine hangs or its cable is out, only by its missing pulse. Whoever notices first writes it down where all ranks
read it, so that all name the same rank.
"""
from __future__ import annotations

import threading
import time
from typing import Any, Callable

BEAT = 0.5  # seconds
END = 1 << 40  # more beats than a rank can live


class Pulse:
    """`store` is the rendezvous' key-value store; a peer that is silent for `timeout` seconds counts as lost."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._others = [peer for peer in range(world) if peer != rank]
        self._ended = threading.Event()
        self._suspect = ""  # what this rank has noticed itself
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self, on_loss: Callable[[str], None]) -> None:
        """Begin to beat; `on_loss` is told once, in words, which peer was lost."""
        self._on_loss = on_loss
        self._thread.start()

    def report(self, loss: str) -> None:
        """This rank has noticed a loss by itself: tell all with the next beat."""
        self._suspect = self._suspect or loss

    def stop(self) -> None:
        """Say good-bye, so that the silence from now on alarms nobody."""
        self._ended.set()
        self._thread.join()
        self._store.add(f"pulse/{self._rank}", END)

    def _beat(self) -> None:
        heard = {peer: (0, time.monotonic()) for peer in self._others}
        suspect = ""
        while not self._ended.wait(BEAT):
            try:
                self._store.add(f"pulse/{self._rank}", 1)
                # A broken connection is told a beat late: a launcher that sees why the process ended is faster.
                loss, suspect = suspect or self._silent(heard), self._suspect
                told = self._first(loss)
            except RuntimeError:
                told = "the rendezvous was lost: rank 0's machine or its launcher is gone"
            if told:
                self._on_loss(told)
                return

    def _first(self, loss: str) -> str:
        """The loss that was noted first, by this rank or another; empty if there is none."""
        noted = self._store.add("pulse/losses", 1 if loss else 0)
        if loss and noted == 1:
            self._store.set("pulse/lost", loss)
        first: bytes = self._store.get("pulse/lost") if noted else b""
        return first.decode()

    def _silent(self, heard: dict[int, tuple[int, float]]) -> str:
        """In words, the first peer whose pulse has not changed for too long."""
        now = time.monotonic()
        for peer in self._others:
            # Of what every torch has, only `add` reads at once: `get` waits for a first beat, 1.11 has no `check`, and
            # the `compare_set` of 2.3 crashes where an empty text stands.
            beats = self._store.add(f"pulse/{peer}", 0)
            if beats != heard[peer][0] or beats >= END:
                heard[peer] = (beats, now)
            elif now - heard[peer][1] > self._timeout:
                return f"rank {peer} was lost: it has been silent for {self._timeout:g} seconds"
        return ""
