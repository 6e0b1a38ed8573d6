"""The pulse: every rank says that it lives, and hears who does not.

It knows nothing about messages. A broken connection is noticed at once by the neighbours; a peer that is silent, since
its machine hangs or its cable is out, only by its missing pulse. Whoever notices first writes it down where all ranks
read it, so that all name the same rank.
"""
from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from typing import Any, Callable, Sequence

BEAT = 0.5  # seconds
END = 1 << 40  # more beats than a rank can live


class Pulse:
    """`store` is the rendezvous' key-value store; a peer that is silent for `timeout` seconds counts as lost.

    Where ranks have `names`, with their hosts, losses are told with these.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float, names: Sequence[str] = ()) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._names = names or [f"rank {peer}" for peer in range(world)]
        self._others = [peer for peer in range(world) if peer != rank]
        self._ended = threading.Event()
        self._suspect = ""  # what this rank has noticed itself
        self._told, self._lost = threading.Event(), ""
        self._answered = 0.0  # when the store did last
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self, on_loss: Callable[[str], None]) -> None:
        """Begin to beat; `on_loss` is told once, in words, which peer was lost."""
        self._on_loss, self._answered = on_loss, time.monotonic()
        self._thread.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def report(self, loss: str) -> None:
        """This rank has noticed a loss by itself: tell all with the next beat."""
        self._suspect = self._suspect or re.sub(r"^rank (\d+)\b", lambda found: self._names[int(found[1])], loss)

    def verdict(self) -> str:
        """Which peer was lost, in words, once all ranks know it; empty if none was missed in all the time it takes."""
        self._told.wait(self._timeout + 4 * BEAT)
        return self._lost

    def stop(self, outlive: bool = False) -> None:
        """Say good-bye, so that the silence from now on alarms nobody; `outlive`: when all others have done so.

        For the process that keeps the store, with which it ends.
        """
        self._ended.set()
        self._thread.join(self._timeout)
        with suppress(RuntimeError):
            self._store.add(f"pulse/{self._rank}", END)
            end = time.monotonic() + self._timeout
            while outlive and time.monotonic() < end and any(
                    self._store.add(f"pulse/{peer}", 0) < END for peer in self._others):
                time.sleep(BEAT / 10)

    def _beat(self) -> None:
        heard = {peer: (0, time.monotonic()) for peer in self._others}
        suspect = ""
        while not self._ended.wait(BEAT):
            try:
                self._store.add(f"pulse/{self._rank}", 1)
                # A broken connection is told a beat late: a launcher that sees why the process ended is faster.
                loss, suspect = suspect or self._silent(heard), self._suspect
                told = self._first(loss)
                self._answered = time.monotonic()
            except RuntimeError as error:
                gone = f"the rendezvous was lost: {self._names[0]}'s machine or its launcher is gone"
                told = self._suspect or str(getattr(error, "told", gone))
            if told:
                self._tell(told)
                return

    def _watch(self) -> None:
        """Behind a broken wire the store neither answers nor fails."""
        while not self._ended.wait(BEAT) and not self._lost:
            if time.monotonic() - self._answered > self._timeout + 2 * BEAT:
                self._tell(f"{self._names[self._rank]} could not reach the machine of {self._names[0]} for "
                           f"{self._timeout:g} seconds: look at the network of both")

    def _tell(self, loss: str) -> None:
        self._lost = loss
        self._told.set()
        self._on_loss(loss)

    def _first(self, loss: str) -> str:
        """The loss that was noted first, by this rank or another; empty if there is none."""
        noted = self._store.add("pulse/losses", 1 if loss else 0)
        if loss and noted == 1:
            self._store.set("pulse/lost", loss)
        first: bytes = self._store.get("pulse/lost") if noted else b""
        return first.decode()

    def _silent(self, heard: dict[int, tuple[int, float]]) -> str:
        """In words, the first peer whose pulse has not changed for too long."""
        now, silent = time.monotonic(), []
        for peer in self._others:
            # Of what every torch has, only `add` reads at once: `get` waits for a first beat, 1.11 has no `check`, and
            # the `compare_set` of 2.3 crashes where an empty text stands.
            beats = self._store.add(f"pulse/{peer}", 0)
            if beats != heard[peer][0] or beats >= END:
                heard[peer] = (beats, now)
            elif now - heard[peer][1] > self._timeout:
                silent.append(peer)
        lately = [peer for peer in self._others if now - heard[peer][1] < self._timeout - 2 * BEAT]
        if silent and not lately and len(self._others) > 1:  # all at once: it is rather this one that they have lost
            return (f"{self._names[self._rank]} has heard nothing of all others for {self._timeout:g} seconds: look at "
                    "its network")
        return f"{self._names[silent[0]]} was lost: it has been silent for {self._timeout:g} seconds" if silent else ""
