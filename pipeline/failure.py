"""Losses: what ends a rank before its time, in words, threads whose death is one, and the heartbeat.

It knows nothing about messages. A broken connection is noticed at once by the neighbours; a peer that is silent, since
its machine hangs or its cable is out, only by its missing heartbeat. The first to notice writes it down where all
ranks read it, so that all name the same rank.
"""
from __future__ import annotations

import errno
import re
import resource
import threading
import time
from contextlib import suppress
from typing import Any, Callable, Dict, NamedTuple, Sequence, Tuple

from config.schema.untrusted import plain
from pipeline.trace import Meter

GB = 1e9
LOSS_KEY = "heartbeat/lost"  # in the store: the loss that was noted first, in words
BEAT = 0.5  # seconds
END = 1 << 40  # more beats than a rank can live
Heard = Dict[int, Tuple[int, float]]  # of each peer, the number of its beats, and when that last changed
Failure = Callable[[str, BaseException], None]  # is given a thread's name, and what it died of


class PeerLost(RuntimeError):
    """Another rank has died or fallen silent; the message names it."""


def guarded(name: str, run: Callable[[], None], on_failure: Failure) -> threading.Thread:
    """Start a thread. Whatever it dies of is reported, for nobody waits for its end."""
    def work() -> None:
        try:
            run()
        except BaseException as error:
            on_failure(name, error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class Shortage(NamedTuple):
    """Something of which a machine may have too little: how that shows in an error, and what a person can do."""

    numbers: Sequence[int]  # of system errors
    words: Sequence[str]
    message: str
    limit: int  # of the resource module
    limited: str  # the remedy where this limit is set
    remedy: str  # and where it is not


MEMORY = "ulimit -v allows a process {:.2f} GB: raise it, as in ulimit -v unlimited"
SPACE = Shortage([errno.ENOMEM], ["allocate memory", "out of memory", "bad_alloc", "failed to map segment"],
             "there is not enough memory", resource.RLIMIT_AS, MEMORY,
             "end other programs, or give a smaller max_length")
THREADS = Shortage([errno.EAGAIN], ["Resource temporarily unavailable", "can't start new thread"],
               "no more threads can be started", resource.RLIMIT_AS, MEMORY, "raise ulimit -u, or end other programs")
FILES = Shortage([errno.EMFILE, errno.ENFILE], ["Too many open files"],
             "no more files can be opened", resource.RLIMIT_NOFILE,
             "ulimit -n allows a process {:.0f}: raise it, as in ulimit -n 1024", "end other programs")


def shortage(error: BaseException) -> str:
    """A sentence about what the machine has too little of, by an error; empty if the error is none of that kind."""
    text = "bad_alloc" if isinstance(error, MemoryError) else str(error)
    for entry in (SPACE, THREADS, FILES):
        numbered = isinstance(error, OSError) and error.errno in entry.numbers
        if numbered or any(word in text for word in entry.words):
            return f"{entry.message} ({plain(text.splitlines()[0])}): {limited(entry) or entry.remedy}"
    return ""


def limited(entry: Shortage) -> str:
    """The remedy, if this process has a limit that may be the reason."""
    most = resource.getrlimit(entry.limit)[0]
    scale = GB if entry.limit == resource.RLIMIT_AS else 1
    return "" if most == resource.RLIM_INFINITY else entry.limited.format(most / scale)


def foreseen(error: BaseException) -> bool:
    """Whether a sentence says it all; else a person needs to see where it happened."""
    return isinstance(error, (PeerLost, ValueError, OSError, KeyboardInterrupt)) or bool(shortage(error))


def explain(error: BaseException) -> str:
    """An error as a sentence for a person, without a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped"
    shown = str(error)
    if not foreseen(error):
        shown = f"{type(error).__name__}: {shown}".splitlines()[0]
    return shortage(error) or plain(shown)


# --- the heartbeat ----------------------------------------------------------------------------------------------------

class Losses:
    """What is known of the losses of one epoch of the links, in words; `suffix` is that of its keys in the store."""

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix
        self.suspect = ""  # what this rank has noticed itself …
        self.noticed = ""  # … and that a beat ago
        self.first = ""  # what counts for all, once they know it
        self.announced = threading.Event()


class Heartbeat:
    """A peer that is silent for `timeout` seconds counts as lost.

    `store` has `add`, `set` and `get`, as torch's stores. Beats are counted by `add`, so a store that keeps every
    change would grow for as long as a pipeline lives. Where ranks have `names`, with their hosts, losses are named by
    these.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float, names: Sequence[str] = ()) -> None:
        self.store, self._rank, self._timeout = store, rank, timeout
        self._names = names or [f"rank {peer}" for peer in range(world)]
        self.others = [peer for peer in range(world) if peer != rank]
        self._ended = threading.Event()
        self._losses = Losses()
        self._fault = ""  # an error of this rank's own
        self._looks = False  # whether a loss is looked for
        self._saying = threading.Lock()  # of who announces a loss, or begins an epoch
        self._heard: Heard = {}
        self._answered = 0.0  # when the store did last
        self._listened = 0.0  # when this rank did last: who is stopped itself finds nobody silent
        self.meter = Meter()  # of this rank's work

    def start(self, on_loss: Callable[[str], None], looks: bool = True) -> None:
        """Begin to beat; `on_loss` hears once in each epoch, in words, which peer was lost.

        Without `looks` losses are looked for since `begin`.
        """
        self._on_loss, self._looks, self._answered = on_loss, looks, time.monotonic()
        self._listen_again()
        self._thread = guarded("heartbeat", self._beat, self._broken)
        guarded("watch", self._watch, self._broken)

    def begin(self, suffix: str) -> None:
        """Begin an epoch of the links, whose losses have keys with this suffix: earlier ones are forgotten."""
        with self._saying:
            self._listen_again()
            self._losses, self._looks = Losses(suffix), True
            self._losses.suspect = self._fault

    def rest(self, loss: str) -> None:
        """This rank leaves its epoch, for this reason: all others shall, and losses are looked for since `begin`."""
        with self._saying:
            self._looks = False
        first_loss(self.store, self._named(loss), self._losses.suffix)

    def report(self, loss: str) -> None:
        """This rank has noticed a loss by itself: all shall hear of it soon."""
        self._losses.suspect = self._losses.suspect or self._named(loss)

    def note(self, loss: str) -> None:
        """Let all hear of it at once, since this rank is about to end."""
        with suppress(RuntimeError, OSError):
            first_loss(self.store, self._named(loss))

    def failed(self, thread: str, error: BaseException) -> None:
        """A thread of this rank has died: of a connection, or of an error that is this rank's own in any epoch."""
        if not isinstance(error, PeerLost):
            self._fault = self._own(thread, error)
        self.report(self._fault or str(error))

    def loss(self) -> str:
        """Which peer was lost, in words, once all ranks know it; empty if none was missed in all the time it takes."""
        losses = self._losses
        if not self._ended.is_set():
            losses.announced.wait(self._timeout + 4 * BEAT)
        return losses.first

    @property
    def lost(self) -> str:
        """Which peer was lost, in words, as far as it is known."""
        return self._losses.first

    def silent(self, seconds: float = 0.0) -> list[int]:
        """The peers whose heartbeats had not changed for too long when this rank listened last.

        Too long is the timeout, or so many seconds if these are more.
        """
        latest = self._listened - max(seconds, self._timeout)
        return [peer for peer, (_, since) in self._heard.items() if since < latest]

    def gone(self, peer: int, seconds: float) -> str:
        """In words, that a peer has said good-bye, or is silent for so long; empty if it lives."""
        if self.store.add(f"heartbeat/{peer}", 0) >= END:
            return f"{self._names[peer]} has ended"
        return self._was_silent(peer, seconds) if peer in self.silent(seconds) else ""

    def _was_silent(self, peer: int, seconds: float = 0.0) -> str:
        return f"{self._names[peer]} was lost: it has been silent for {max(seconds, self._timeout):g} seconds"

    def busy(self) -> list[float]:
        """For what share of its last seconds each rank was at work, from 0 to 1, as its last beat said."""
        try:
            ranks = sorted([self._rank, *self.others])
            return [self.store.add(f"busy/{rank}", 0) / 1000 for rank in ranks]
        except (RuntimeError, OSError):  # the store is gone, and a loss is about to be reported
            return []

    def stop(self, outlive: bool = False) -> None:
        """Say good-bye, so that the silence from now on alarms nobody; `outlive`: return when all others have done so.

        For rank 0: it may keep the store, it reads what all have written, and the others are not waited for then.
        """
        self._ended.set()
        self._thread.join(self._timeout)
        with suppress(RuntimeError, OSError):
            self.store.add(f"heartbeat/{self._rank}", END)
            end = time.monotonic() + self._timeout
            while outlive and time.monotonic() < end and not self._all_ended():
                time.sleep(BEAT / 10)

    def _all_ended(self) -> bool:
        """Whether every other rank has said good-bye."""
        return all(self.store.add(f"heartbeat/{peer}", 0) >= END for peer in self.others)

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(BEAT):
            last, self._heard = self._awake(last, self._heard)
            losses = self._losses
            try:
                self.store.add(f"heartbeat/{self._rank}", 1)
                busy, known = f"busy/{self._rank}", self.store.add(f"busy/{self._rank}", 0)
                self.store.add(busy, round(1000 * self.meter.share()) - known)
                self._listen()
                # A broken connection is reported a beat late: a launcher that sees why the process ended is faster.
                loss, losses.noticed = losses.noticed or self._silent(), losses.suspect
                lost = first_loss(self.store, loss, losses.suffix) if self._looks else ""
                self._answered = time.monotonic()
            except RuntimeError as error:
                lost = self._store_is_gone(error)
            if lost:
                self._announce(lost, losses)
                if not losses.suffix:
                    return

    def _listen(self) -> None:
        """Note which peers have beaten since the last time."""
        now = time.monotonic()
        for peer in self.others:
            # Of what every torch has, only `add` reads at once: `get` waits for a first beat, 1.11 has no `check`, and
            # the `compare_set` of 2.3 crashes where an empty text stands.
            beats = self.store.add(f"heartbeat/{peer}", 0)
            if beats != self._heard[peer][0] or beats >= END:
                self._heard[peer] = (beats, now)
        self._listened = now

    def _listen_again(self) -> None:
        """Give every peer all its time once more."""
        now = time.monotonic()
        for peer in self.others:
            beats, _ = self._heard.get(peer, (0, now))
            self._heard[peer] = (beats, now)

    def _store_is_gone(self, error: RuntimeError) -> str:
        """In words, that rank 0 is lost, which keeps the store. Others that were lost since have only noticed it first.
        """
        suspect = self._losses.suspect
        if suspect.startswith(self._names[0]):
            return suspect
        gone = f"the rendezvous was lost: {self._names[0]}'s machine or its launcher is gone"
        return str(error) if isinstance(error, PeerLost) else gone

    def _awake(self, last: float, heard: Heard) -> tuple[float, Heard]:
        """The time, and when each peer was heard. A rank that was stopped, as by Ctrl-Z, has to listen again."""
        now = time.monotonic()
        if now - last > BEAT + self._timeout / 2:
            heard = {peer: (beats, now) for peer, (beats, _) in heard.items()}
        return now, heard

    def _watch(self) -> None:
        """Behind a broken wire the store neither answers nor fails."""
        last = time.monotonic()
        while not self._ended.wait(BEAT) and not (self.lost and not self._losses.suffix):
            now = time.monotonic()
            if now - last > BEAT + self._timeout / 2:  # this rank was stopped itself
                self._answered = now
            elif now - self._answered > self._timeout + 2 * BEAT:
                self._announce(f"{self._names[self._rank]} could not reach the machine of {self._names[0]} for "
                           f"{self._timeout:g} seconds: its program hangs, or the network between both is cut",
                               self._losses)
            last = now

    def _own(self, thread: str, error: BaseException) -> str:
        return f"{self._names[self._rank]} failed: {explain(error)} (in its thread {thread})"

    def _broken(self, thread: str, error: BaseException) -> None:
        """One of the heartbeat's own threads has died."""
        loss, losses = self._own(thread, error), self._losses
        with suppress(RuntimeError, OSError):
            loss = first_loss(self.store, loss, losses.suffix) or loss
        self._announce(loss, losses)

    def _announce(self, loss: str, losses: Losses) -> None:
        """Let this rank hear of a loss of an epoch, if it has not left it."""
        with self._saying:
            if losses is not self._losses or not self._looks or losses.announced.is_set():
                return
            losses.first = loss
            losses.announced.set()
            self._on_loss(loss)

    def _named(self, loss: str) -> str:
        return re.sub(r"^rank (\d+)\b", lambda found: self._names[int(found[1])], loss)

    def _silent(self) -> str:
        """In words, the first peer whose heartbeat has not changed for too long."""
        now, silent = time.monotonic(), self.silent()
        patience = self._timeout - 2 * BEAT
        lately = [peer for peer in self.others if now - self._heard[peer][1] < patience]
        if not silent:
            return ""
        if not lately and len(self.others) > 1:  # all at once: it is rather this one that they have lost
            return (f"{self._names[self._rank]} has heard nothing of all others for {self._timeout:g} seconds: they "
                    "hang, or its network is cut")
        return self._was_silent(silent[0])


def first_loss(store: Any, loss: str, suffix: str = "") -> str:
    """The loss that was noted first under keys with this suffix, this one or another; empty if there is none."""
    count = store.add(f"heartbeat/losses{suffix}", 1 if loss else 0)
    if loss and count == 1:
        store.set(f"{LOSS_KEY}{suffix}", loss)
    first: bytes = store.get(f"{LOSS_KEY}{suffix}") if count else b""
    return plain(first.decode(errors="replace"))


def noted(store: Any) -> str:
    """The loss that ends the run whose ranks meet in this store, in words; empty if there is none."""
    return plain((store.look(LOSS_KEY) or b"").decode(errors="replace"))
