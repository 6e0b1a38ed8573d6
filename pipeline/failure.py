"""Lost ranks: sentences that explain errors, guarded threads, and the heartbeat.

It knows nothing about messages. Neighbours notice a broken connection at once. A hung machine or a cut cable is only
noticed by the missing heartbeat. The first loss is written into the store, so that all ranks name the same rank.
"""
from __future__ import annotations

import errno
import re
import resource
import threading
import time
from contextlib import suppress
from typing import Any, Callable, NamedTuple, Sequence

from config.schema.untrusted import one_line
from pipeline.trace import Meter

GB = 1e9
LOSS_KEY = "heartbeat/lost"  # key of the first loss in the store, a sentence
BEAT = 0.5  # seconds between two beats
END = 1 << 40  # added to the beats of a rank that ends in order
Failure = Callable[[str, BaseException], None]  # is called with a thread's name and the error that ended it


class PeerLost(RuntimeError):
    """Another rank was lost; the message names it."""


def broken(peer: int) -> PeerLost:
    """Return the error for a peer with a broken connection."""
    return PeerLost(f"rank {peer} was lost: its connection broke")


def guarded(name: str, run: Callable[[], None], on_failure: Failure) -> threading.Thread:
    """Start a thread that reports its error to `on_failure`."""
    def work() -> None:
        try:
            run()
        except BaseException as error:
            on_failure(name, error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class Shortage(NamedTuple):
    """A resource that may be exhausted, with the error numbers and texts that show it, and the remedies."""

    numbers: Sequence[int]  # values of errno
    words: Sequence[str]  # parts of error messages
    message: str
    limit: int  # constant of the resource module
    limited: str  # the remedy if that limit is set
    remedy: str  # the remedy otherwise


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
    """Return a sentence about the exhausted resource; empty for any other error."""
    text = "bad_alloc" if isinstance(error, MemoryError) else str(error)
    for entry in (SPACE, THREADS, FILES):
        numbered = isinstance(error, OSError) and error.errno in entry.numbers
        if numbered or any(word in text for word in entry.words):
            return f"{entry.message} ({one_line(text.splitlines()[0])}): {limited(entry) or entry.remedy}"
    return ""


def limited(entry: Shortage) -> str:
    """Return the remedy for a limit of this process that may be the cause; empty if there is no limit."""
    most = resource.getrlimit(entry.limit)[0]
    scale = GB if entry.limit == resource.RLIMIT_AS else 1
    return "" if most == resource.RLIM_INFINITY else entry.limited.format(most / scale)


def foreseen(error: BaseException) -> bool:
    """Return whether the error is explained by its message alone, without a traceback."""
    return isinstance(error, (PeerLost, ValueError, OSError, KeyboardInterrupt)) or bool(shortage(error))


def explain(error: BaseException) -> str:
    """Return the sentence that describes an error."""
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped"
    if foreseen(error):
        return shortage(error) or one_line(str(error))
    return one_line(f"{type(error).__name__}: {error}".splitlines()[0])


# --- the heartbeat ----------------------------------------------------------------------------------------------------

class Losses:
    """The losses in one epoch of the links, as sentences; `suffix` ends the keys of the epoch in the store."""

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix
        self.suspect = ""  # noticed by this rank
        self.noticed = ""  # `suspect` at the last beat
        self.first = ""  # known to all ranks
        self.announced = threading.Event()


class Heartbeat:
    """The heartbeat of a rank: a peer that is silent for `timeout` seconds counts as lost.

    The `store` holds a counter of beats per rank, so it does not grow. Losses use `names`, which may include hosts.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float, names: Sequence[str] = ()) -> None:
        self.store, self._rank, self._timeout = store, rank, timeout
        self._names = names or [f"rank {peer}" for peer in range(world)]
        self.others = [peer for peer in range(world) if peer != rank]
        self._ended = threading.Event()
        self._losses = Losses()
        self._fault = ""  # error of this rank
        self._watching = False  # whether to look for losses: not between two epochs
        self._changing = threading.Lock()  # for a change of the epoch, or of its first loss
        self._beats = dict.fromkeys(self.others, 0)
        self._changed: dict[int, float] = {}  # times at which these counts last changed
        self._answered = 0.0  # last time at which the store answered
        self._listened = 0.0  # last time at which this rank read the beats
        self.meter = Meter()  # measures the work of this rank

    def start(self, on_loss: Callable[[str], None]) -> None:
        """Start the threads; after `begin`, `on_loss` is called with the first loss of each epoch."""
        self._on_loss, self._answered = on_loss, time.monotonic()
        self._listen_again()
        self._thread = guarded("heartbeat", self._beat, self._broken)
        guarded("watch", self._watch, self._broken)

    def begin(self, suffix: str) -> None:
        """Begin an epoch of the links, with this suffix of its keys in the store; forget earlier losses."""
        with self._changing:
            self._listen_again()
            self._losses, self._watching = Losses(suffix), True
            self._losses.suspect = self._fault

    def end_epoch(self, loss: str) -> None:
        """End the epoch for all ranks because of this loss; look for further losses only after `begin`."""
        with self._changing:
            self._watching = False
        first_loss(self.store, self._named(loss), self._losses.suffix)

    def report(self, loss: str) -> None:
        """Write a loss into the store at one of the next beats."""
        self._losses.suspect = self._losses.suspect or self._named(loss)

    def note(self, loss: str) -> None:
        """Write a loss into the store at once, since this rank is about to end."""
        with suppress(RuntimeError, OSError):
            first_loss(self.store, self._named(loss))

    def failed(self, thread: str, error: BaseException) -> None:
        """Report the error that ended a thread. An error of this rank, unlike a lost peer, counts in all epochs."""
        if not isinstance(error, PeerLost):
            self._fault = self._own_failure(thread, error)
        self.report(self._fault or str(error))

    def loss(self) -> str:
        """Return the first loss, once all ranks know it; empty if there is none after the timeout."""
        losses = self._losses
        if not self._ended.is_set():
            losses.announced.wait(self._timeout + 4 * BEAT)
        return losses.first

    @property
    def lost(self) -> str:
        """The first loss of the epoch; empty if none is known."""
        return self._losses.first

    def silent(self, seconds: float = 0.0) -> list[int]:
        """Return the peers that were silent for the timeout or `seconds`, if longer, at the last reading of beats."""
        latest = self._listened - max(seconds, self._timeout)
        return [peer for peer, since in self._changed.items() if since < latest]

    def gone(self, peer: int, seconds: float) -> str:
        """Return a sentence if a peer has ended or is silent for this long; empty if it lives."""
        if self._count(peer) >= END:
            return f"{self._names[peer]} has ended"
        return self._silence(peer, seconds) if peer in self.silent(seconds) else ""

    def _silence(self, peer: int, seconds: float = 0.0) -> str:
        return f"{self._names[peer]} was lost: it has been silent for {max(seconds, self._timeout):g} seconds"

    def busy(self) -> list[float]:
        """Return for each rank the share, from 0 to 1, of the last seconds in which it worked."""
        try:
            ranks = sorted([self._rank, *self.others])
            return [self.store.add(f"busy/{rank}", 0) / 1000 for rank in ranks]
        except (RuntimeError, OSError):  # the store is lost, which is reported elsewhere
            return []

    def stop(self, outlive: bool = False) -> None:
        """End the heartbeat, so that the silence of this rank does not count as a loss.

        With `outlive`, wait until all other ranks have ended; it is for rank 0, which may hold the store.
        """
        self._ended.set()
        self._thread.join(self._timeout)
        with suppress(RuntimeError, OSError):
            self.store.add(f"heartbeat/{self._rank}", END)
            end = time.monotonic() + self._timeout
            left = self.others if outlive else []
            while left and time.monotonic() < end:
                left = [peer for peer in left if self._count(peer) < END]
                time.sleep(BEAT / 10 if left else 0)

    def _count(self, peer: int) -> int:
        """Return the number of a peer's beats so far."""
        return int(self.store.add(f"heartbeat/{peer}", 0))

    def _slept(self, last: float) -> bool:
        """Return whether this process was stopped, as by Ctrl-Z, since `last`, a time about one beat ago."""
        return time.monotonic() - last > BEAT + self._timeout / 2

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(BEAT):
            if self._slept(last):
                self._listen_again()
            last = time.monotonic()
            losses = self._losses
            try:
                self.store.add(f"heartbeat/{self._rank}", 1)
                busy, known = f"busy/{self._rank}", self.store.add(f"busy/{self._rank}", 0)
                self.store.add(busy, round(1000 * self.meter.share()) - known)
                self._listen()
                # A broken connection is reported a beat late, as the launcher knows the reason and should report first.
                loss, losses.noticed = losses.noticed or self._silent(), losses.suspect
                lost = first_loss(self.store, loss, losses.suffix) if self._watching else ""
                self._answered = time.monotonic()
            except RuntimeError as error:
                lost = self._store_lost(error)
            if lost:
                self._announce(lost, losses)
                if not losses.suffix:
                    return

    def _listen(self) -> None:
        """Read the beats of all peers."""
        now = time.monotonic()
        for peer in self.others:
            beats = self._count(peer)
            if beats != self._beats[peer] or beats >= END:
                self._beats[peer], self._changed[peer] = beats, now
        self._listened = now

    def _listen_again(self) -> None:
        """Restart the timeout of every peer."""
        self._changed = dict.fromkeys(self.others, time.monotonic())

    def _store_lost(self, error: RuntimeError) -> str:
        """Return the loss of rank 0, which holds the store; other ranks may have noticed it first and ended."""
        suspect = self._losses.suspect
        if suspect.startswith(self._names[0]):
            return suspect
        gone = f"the rendezvous was lost: {self._names[0]}'s machine or its launcher is gone"
        return str(error) if isinstance(error, PeerLost) else gone

    def _watch(self) -> None:
        """Announce a loss if the store does not answer, as after a network failure."""
        last = time.monotonic()
        while not self._ended.wait(BEAT) and not (self.lost and not self._losses.suffix):
            now = time.monotonic()
            if self._slept(last):
                self._answered = now
            elif now - self._answered > self._timeout + 2 * BEAT:
                self._announce(f"{self._names[self._rank]} could not reach the machine of {self._names[0]} for "
                               f"{self._timeout:g} seconds: its program hangs, or the network between them is cut",
                               self._losses)
            last = now

    def _own_failure(self, thread: str, error: BaseException) -> str:
        return f"{self._names[self._rank]} failed: {explain(error)} (in its thread {thread})"

    def _broken(self, thread: str, error: BaseException) -> None:
        """Announce the error that ended one of the heartbeat's own threads."""
        loss, losses = self._own_failure(thread, error), self._losses
        with suppress(RuntimeError, OSError):
            loss = first_loss(self.store, loss, losses.suffix) or loss
        self._announce(loss, losses)

    def _announce(self, loss: str, losses: Losses) -> None:
        """Report the first loss of an epoch to this rank, unless the rank has left the epoch."""
        with self._changing:
            if losses is not self._losses or not self._watching or losses.announced.is_set():
                return
            losses.first = loss
            losses.announced.set()
            self._on_loss(loss)

    def _named(self, loss: str) -> str:
        return re.sub(r"^rank (\d+)\b", lambda found: self._names[int(found[1])], loss)

    def _silent(self) -> str:
        """Return a sentence about the first silent peer; empty if there is none."""
        silent = self.silent()
        if not silent:
            return ""
        lately = time.monotonic() - self._timeout + 2 * BEAT
        if len(self.others) > 1 and max(self._changed.values()) <= lately:  # all at the same time: this rank is cut off
            return (f"{self._names[self._rank]} has received no heartbeat of any other rank for {self._timeout:g} "
                    "seconds: they hang, or its network is cut")
        return self._silence(silent[0])


def first_loss(store: Any, loss: str, suffix: str = "") -> str:
    """Write a loss, if any, into the store under this epoch's suffix; return the first one there, or ""."""
    count = store.add(f"heartbeat/losses{suffix}", 1 if loss else 0)
    if loss and count == 1:
        store.set(f"{LOSS_KEY}{suffix}", loss)
    first: bytes = store.get(f"{LOSS_KEY}{suffix}") if count else b""
    return one_line(first.decode(errors="replace"))


def noted(store: Any) -> str:
    """Return the loss that ended the run of this store, as a sentence; empty if there is none."""
    return one_line((store.look(LOSS_KEY) or b"").decode(errors="replace"))
