"""The heartbeat: how ranks notice that another one is lost, and agree which loss was the first.

A peer is *lost* if its connection broke or its heartbeat is silent; a rank *fails* if an error of its own ends it; both
are *reported* in the store. Neighbours notice a broken connection at once, a hung machine by the missing heartbeat, a
cut cable by that or by a connection that is not acknowledged. The first loss in the store stays there, so all ranks
name the same one. Messages are unknown here.
"""
from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Callable, NamedTuple, Sequence

from config.failure import PeerLost, explain, guarded
from config.schema.untrusted import one_line
from pipeline.trace import Meter

LOSS_KEY = "heartbeat/lost"  # key of the first loss in the store, a sentence
BEAT_SECONDS = 0.5  # between two beats
END_COUNT = 1 << 40  # added to the beats of a rank that ends in order
NUM_EXCHANGES = 8  # with the store, of which the shortest counts


def report_loss(store: Any, loss: str, suffix: str = "") -> str:
    """Write a loss, if any, into the store under this membership's suffix; return the first one there, or ""."""
    num_losses = store.add(f"heartbeat/losses{suffix}", 1 if loss else 0)
    if loss and num_losses == 1:
        store.set(f"{LOSS_KEY}{suffix}", loss)

    first_loss: bytes = store.get(f"{LOSS_KEY}{suffix}") if num_losses else b""
    return one_line(first_loss.decode(errors="replace"))


def reported_loss(store: Any) -> str:
    """Return the loss that ended the run of this store, as a sentence; empty if there is none."""
    return one_line((store.look(LOSS_KEY) or b"").decode(errors="replace"))


class RankState(NamedTuple):
    """What a rank says of itself with each beat."""

    busy: float  # share, from 0 to 1, of the last seconds in which it worked
    away: float = 0.0  # ms of an exchange with rank 0, the shortest of the last ones; 0: unknown
    free: float = 0.0  # GB of its machine's memory; 0: unknown
    layer: float = 0.0  # GB of one of its layers, with keys and values; 0: it has none


class LossRecord:
    """What a rank knows of the losses in one membership; `suffix` ends the keys of the membership in the store."""

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix
        self.observed = ""  # by this rank
        self.observed_before = ""  # `observed` at the last beat
        self.first_loss = ""  # of all ranks, as the store has it; without the store, this rank's own
        self.is_announced = threading.Event()


class Heartbeat:
    """The heartbeat of a rank: a peer that is silent for `timeout` seconds counts as lost.

    The `store` holds a counter of beats per rank, so beats do not let it grow; losses do. They use `names`, which may
    include hosts.
    """

    def __init__(self, store: Any, rank: int, world: int,
                 timeout: float, names: Sequence[str] = ()) -> None:
        self.store, self._rank, self._timeout = store, rank, timeout
        self._names = names or [f"rank {peer}" for peer in range(world)]
        self.others = [peer for peer in range(world) if peer != rank]
        self.meter = Meter()  # measures the work of this rank

        # losses
        self._record = LossRecord()
        self._own_failure = ""  # the error that ended a thread of this rank
        self._is_watching = False  # for losses: not between two memberships
        self._record_lock = threading.Lock()  # for a change of the membership, or of its first loss

        # beats
        self._is_stopped = threading.Event()
        self._beat_counts = dict.fromkeys(self.others, 0)
        self._last_beat_at: dict[int, float] = {}  # times at which these counts last changed
        self._store_answered_at = 0.0
        self._beats_read_at = 0.0
        self._exchange_times: deque[float] = deque(maxlen=NUM_EXCHANGES)  # ms
        self.memory: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)  # returns `free` and `layer` of a state

    def start(self, on_loss: Callable[[str], None]) -> None:
        """Start the threads; after `begin`, `on_loss` is called with the first loss of each membership."""
        self._on_loss, self._store_answered_at = on_loss, time.monotonic()
        self._restart_timeouts()
        self._thread = guarded("heartbeat", self._beat, self._report_own_thread)
        guarded("watch", self._watch_store, self._report_own_thread)

    def begin(self, suffix: str) -> None:
        """Begin a membership, with this suffix of its keys in the store, as `/3`; forget earlier losses.

        The empty suffix stands for the whole run: a loss that is reported under it ends all ranks.
        """
        with self._record_lock:
            self._restart_timeouts()
            self._record, self._is_watching = LossRecord(suffix), True
            self._record.observed = self._own_failure

    def end_membership(self, loss: str) -> None:
        """End the membership for all ranks because of this loss; look for further losses only after `begin`."""
        with self._record_lock:
            self._is_watching = False
        report_loss(self.store, self._with_name(loss), self._record.suffix)

    def stop(self, outlive: bool = False) -> None:
        """End the heartbeat, so that the silence of this rank does not count as a loss.

        With `outlive`, wait until all other ranks have ended; it is for rank 0, which may hold the store.
        """
        self._is_stopped.set()
        self._thread.join(self._timeout)

        with suppress(RuntimeError, OSError):
            self.store.add(f"heartbeat/{self._rank}", END_COUNT)
            waits_until = time.monotonic() + self._timeout
            running = self.others if outlive else []
            while running and time.monotonic() < waits_until:
                running = [peer for peer in running if self._beats_of(peer) < END_COUNT]
                time.sleep(BEAT_SECONDS / 10 if running else 0)

    # --- reports ------------------------------------------------------------------------------------------------------

    def report(self, loss: str) -> None:
        """Report a loss at one of the next beats."""
        self._record.observed = self._record.observed or self._with_name(loss)

    def report_at_once(self, loss: str) -> None:
        """Report a loss of the whole run now, since this rank is about to end: no membership follows it."""
        with suppress(RuntimeError, OSError):
            report_loss(self.store, self._with_name(loss))

    def report_failure(self, thread: str, error: BaseException) -> None:
        """Report the error that ended a thread. Unlike a lost peer, it counts in all memberships."""
        if not isinstance(error, PeerLost):
            self._own_failure = self._failure_of(thread, error)
        self.report(self._own_failure or str(error))

    def _report_own_thread(self, thread: str, error: BaseException) -> None:
        """Announce the error that ended one of the heartbeat's own threads."""
        loss, record = self._failure_of(thread, error), self._record
        with suppress(RuntimeError, OSError):
            loss = report_loss(self.store, loss, record.suffix) or loss
        self._announce(loss, record)

    def _failure_of(self, thread: str, error: BaseException) -> str:
        return f"{self._names[self._rank]} failed: {explain(error)} (in its thread {thread})"

    def _with_name(self, loss: str) -> str:
        return re.sub(r"^rank (\d+)\b(?! \()", lambda match: self._names[int(match[1])], loss)

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def first_loss(self) -> str:
        """The first loss of the membership; empty if none is known."""
        return self._record.first_loss

    def wait_for_loss(self) -> str:
        """Return the first loss, once it is announced; empty if there is none after the timeout."""
        record = self._record
        if not self._is_stopped.is_set():
            record.is_announced.wait(self._timeout + 4 * BEAT_SECONDS)
        return record.first_loss

    def silent_peers(self, seconds: float = 0.0) -> list[int]:
        """Return the peers that were silent for the timeout or `seconds`, if longer, at the last reading of beats."""
        latest = self._beats_read_at - max(seconds, self._timeout)
        return [peer for peer, beat_at in self._last_beat_at.items() if beat_at < latest]

    def loss_of(self, peer: int, seconds: float) -> str:
        """Return a sentence if a peer has ended or is silent for this long; empty if it lives."""
        if self._beats_of(peer) >= END_COUNT:
            return f"{self._names[peer]} has ended"
        return self._silence_of(peer, seconds) if peer in self.silent_peers(seconds) else ""

    def states(self) -> dict[str, RankState]:
        """Return the state of each rank by its name, in the order of the ranks; none if the store is lost."""
        states_by_name = {}
        with suppress(RuntimeError, OSError):  # which is reported elsewhere
            for rank, name in enumerate(self._names):
                entry = self.store.look(f"state/{rank}")
                states_by_name[name] = RankState(**json.loads(entry)) if entry else RankState(0.0)
        return states_by_name

    # --- the threads --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Beat, read the beats of the others, and announce the first loss of each membership, until `stop`.

        Without recovery there is one membership, and the loss ends the thread.
        """
        last_beat_at = time.monotonic()
        while not self._is_stopped.wait(BEAT_SECONDS):
            if self._was_suspended(last_beat_at):
                self._restart_timeouts()
            last_beat_at = time.monotonic()

            record = self._record
            try:
                self._write_beat()
                self._read_beats()
                first_loss = self._exchange_losses(record)
                self._store_answered_at = time.monotonic()
            except RuntimeError as error:
                first_loss = self._loss_of_store(error)

            if first_loss:
                self._announce(first_loss, record)
                if not record.suffix:
                    return

    def _write_beat(self) -> None:
        """Count a beat of this rank, and write its state."""
        sent_at = time.monotonic()
        self.store.add(f"heartbeat/{self._rank}", 1)
        self._exchange_times.append(1e3 * (time.monotonic() - sent_at))

        state = RankState(self.meter.share(), min(self._exchange_times), *self.memory())
        self.store.set(f"state/{self._rank}", json.dumps(state._asdict()))

    def _read_beats(self) -> None:
        """Read the beats of all peers."""
        now = time.monotonic()
        for peer in self.others:
            count = self._beats_of(peer)
            if count != self._beat_counts[peer] or count >= END_COUNT:
                self._beat_counts[peer], self._last_beat_at[peer] = count, now
        self._beats_read_at = now

    def _exchange_losses(self, record: LossRecord) -> str:
        """Report what this rank has observed, and return the first loss of all ranks.

        A broken connection is reported a beat late: the launcher knows the reason, and should report first.
        """
        loss = record.observed_before or self._loss_by_silence()
        record.observed_before = record.observed
        return report_loss(self.store, loss, record.suffix) if self._is_watching else ""

    def _watch_store(self) -> None:
        """Announce a loss if the store does not answer, as after a network failure."""
        last_look_at = time.monotonic()
        while not self._is_stopped.wait(BEAT_SECONDS) and not (self.first_loss and not self._record.suffix):
            now = time.monotonic()
            if self._was_suspended(last_look_at):
                self._store_answered_at = now
            elif now - self._store_answered_at > self._timeout + 2 * BEAT_SECONDS:
                self._announce(f"{self._names[self._rank]} could not reach the machine of {self._names[0]} for "
                               f"{self._timeout:g} seconds: its program hangs, or the network between them is cut",
                               self._record)
            last_look_at = now

    def _announce(self, loss: str, record: LossRecord) -> None:
        """Call `on_loss` with the first loss of a membership, unless this rank has left the membership."""
        with self._record_lock:
            if record is not self._record or not self._is_watching or record.is_announced.is_set():
                return
            record.first_loss = loss
            record.is_announced.set()
            self._on_loss(loss)

    # --- silence ------------------------------------------------------------------------------------------------------

    def _beats_of(self, peer: int) -> int:
        """Return the number of a peer's beats so far."""
        return int(self.store.add(f"heartbeat/{peer}", 0))

    def _was_suspended(self, last_beat_at: float) -> bool:
        """Return whether this process was suspended, as by Ctrl-Z, since a time about one beat ago."""
        return time.monotonic() - last_beat_at > BEAT_SECONDS + self._timeout / 2

    def _restart_timeouts(self) -> None:
        """Restart the timeout of every peer."""
        self._last_beat_at = dict.fromkeys(self.others, time.monotonic())

    def _silence_of(self, peer: int, seconds: float = 0.0) -> str:
        return f"{self._names[peer]} was lost: it has been silent for {max(seconds, self._timeout):g} seconds"

    def _loss_by_silence(self) -> str:
        """Return a sentence about the first silent peer; empty if there is none."""
        silent_peers = self.silent_peers()
        if not silent_peers:
            return ""

        recently = time.monotonic() - self._timeout + 2 * BEAT_SECONDS
        are_all_silent = max(self._last_beat_at.values()) <= recently
        if len(self.others) > 1 and are_all_silent:  # since the same time: this rank is cut off
            return (f"{self._names[self._rank]} has received no heartbeat of any other rank for {self._timeout:g} "
                    "seconds: they hang, or its network is cut")
        return self._silence_of(silent_peers[0])

    def _loss_of_store(self, error: RuntimeError) -> str:
        """Return the loss of rank 0, which holds the store; other ranks may have observed it first and ended."""
        observed = self._record.observed
        if observed.startswith(self._names[0]):
            return observed
        if isinstance(error, PeerLost):
            return str(error)
        return f"the rendezvous was lost: {self._names[0]}'s machine or its launcher is gone"
