"""The rendezvous of ranks on several hosts: they come in any order, compare their facts, and test connections.

It knows nothing about what a rank does afterwards. Rank 0 coordinates: it keeps the store to which all write, and
judges. So an error on one board ends all boards with the same sentence, which names that board.
"""
from __future__ import annotations

import atexit
import errno
import json
import math
import os
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Callable, Generic, Protocol, Sequence, TypeVar

import torch.distributed as dist

from cluster.agreement import (
    OTHER_CODE,
    PartFacts,
    RankFacts,
    Written,
    adopted,
    code_version,
    judge_facts,
    judge_ways,
    settings,
)
from cluster.board import Board
from cluster.heartbeat import reported_loss
from cluster.memberships import COMPLETE, NEWEST, Meeting, door_of
from cluster.processes import GRACE_SECONDS
from cluster.sockets import BoardDoor
from cluster.store import Entries, Store, StoreClient, StoreServer
from config.cli import CommandKeys
from config.console import say
from config.failure import PeerLost
from config.run_config import RunConfig
from config.schema.untrusted import one_line
from model.native.compiler import reason_against_library

REPLY_SECONDS = 15  # for a present board to reply, and for late boards to receive the reason of an end
SEAT_SECONDS = 30  # for an earlier run to end that has not yet noticed the loss of this board
POLL_SECONDS = 0.2  # between two checks of the store
PATIENCE_SHARE = 0.8  # of the heartbeat's patience
WIRE_SECONDS_MORE = 10.0  # by which a dead wire breaks after a silent board was named, since that breaks all its wires
RETURN_SECONDS = 5.0  # for a lost board to return, before the first spare stands in; then for each further spare
LATE_MESSAGE = ("{} did not come within {:g} seconds: start run_jetson.sh or run_worker.sh there too, see its output "
                "there, or give more time with wait=")
SILENT_MESSAGE = "{} fell silent during the rendezvous: check its board and network, then start all again"

MAKE_KEYS = "bash scripts/make_keys.sh hosts=FILE makes them for all boards"
ReceivePart = Callable[[Callable[[str, int], bytes], str], Path]
Judge = Callable[[Written], str]  # returns the first problem as a message, or an empty string


def no_objection(written: Written) -> str:
    """Accept what all ranks have written: a spare leaves the judgement to rank 0."""
    return ""


class PreparedRun(Protocol):
    """What the rendezvous has to know of a run that can start."""

    @property
    def config(self) -> RunConfig:
        """The keys with which it starts."""

    @property
    def world(self) -> int:
        """The number of ranks."""

    @property
    def needs_process_group(self) -> bool:
        """Whether the ranks meet in a process group of torch.distributed."""

    @property
    def shares_stages(self) -> bool:
        """Whether several ranks share a stage."""

    @property
    def recovers(self) -> bool:
        """Whether a lost rank may come back."""

    @property
    def patience(self) -> float:
        """Seconds for a silent rank to come back; 0 without recovery."""

    def facts(self, rank: int) -> PartFacts:
        """Return the facts of a rank's own part; raises ValueError if that is missing."""

    def piece(self, rank: int, file_name: str, offset: int) -> bytes:
        """Return the next bytes of a file of a rank's part; none at its end, or if it is not here."""


Run = TypeVar("Run", bound=PreparedRun)


class Rendezvous(Generic[Run]):
    """One rank's side of the rendezvous. After `attend`, `names` has each rank as messages name it.

    `prepare` checks a run on this board; it raises ValueError or OSError for what cannot work here.
    """

    _store: Store
    _client: StoreClient | None = None  # of every rank but 0
    _is_worker = False  # whether its board takes part in one run after the other by itself

    def __init__(self, board: Board, prepare: Callable[[RunConfig], Run]) -> None:
        self.board, self._prepare = board, prepare
        self.names: list[str] = []
        self._host = socket.gethostname()
        self._reported_missing = ""  # the boards that were printed last
        os.environ["RANK"] = str(board.rank)
        if board.lines:
            os.environ["WORLD_SIZE"] = str(board.world)
        interface = one_line(board.interface) or "the interface that leads there"
        say(f"this is {board.named(board.rank, self._host)}; the rendezvous of all ranks is "
            f"{board.master}:{board.port} (MASTER_ADDR, MASTER_PORT), over {interface} (GLOO_SOCKET_IFNAME), within "
            f"{board.wait:g} seconds (wait=)")
        self._deadline = time.monotonic() + board.wait

    def attend(self, keys: RunConfig | CommandKeys) -> Run:
        """Return the run, once all ranks are here and agree; raises ValueError or PeerLost."""
        judge = partial(judge_facts, board=self.board)
        facts: RankFacts = {"host": self._host, "code": code_version(), "settings": self._settings(keys),
                            "worker": self._is_worker}
        is_returning = self._read("facts/verdict") is not None

        with ExitStack() as closing_door:
            # this board's facts
            try:
                run = self._prepared(keys.run)
                interface, address = self.board.network()
                door = NumberDoor(address, self.board.rank)
                closing_door.enter_context(door)
                facts.update(self._facts_of(keys, run.facts(self.board.rank)))
                facts.update(address=address, interface=interface, port=door.port)
            except (ValueError, OSError) as error:
                self._write("facts", {**facts, "error": str(error)})
                self._agree("facts", self.board.world, judge)
                raise

            # all boards' facts
            self._write("facts", facts)
            facts_by_rank = self._agree("facts", run.world, judge)
            for rank, each in facts_by_rank.items():
                self.names.append(self.board.named(rank, each["host"], each["address"]))

            # connections between all, unless this board was in the run before
            if not is_returning:
                self._try_ways(facts_by_rank)
            elif change := judge({0: facts_by_rank[0], self.board.rank: facts}):
                raise ValueError(change)

        self._apply(run, facts)
        return run

    def _apply(self, run: Run, facts: RankFacts) -> None:
        """Set what follows from the agreement: patience, environment and addresses; print how safe the wires are."""
        timeout = run.config.timeout
        if self._client:
            own_name = self.board.named(self.board.rank, self._host, facts["address"])
            self._client.names = self.names[0], own_name
            # A little less than the heartbeat has: this end can tell a cut wire from a program that hangs. With
            # recovery such a program may continue.
            self._client.patience = max(PATIENCE_SHARE * timeout, run.patience)

        os.environ.update(GLOO_SOCKET_IFNAME=facts["interface"], WORLD_SIZE=str(run.world))
        self._address, self._needs_process_group = facts["address"], run.needs_process_group
        self._wire_patience = timeout + WIRE_SECONDS_MORE

        safety = ", encrypted"
        if run.shares_stages:
            safety = ", and all is encrypted but the sums of ranks that share a stage"
        if self.board.keys is None:
            safety = ", unencrypted: use only networks that you trust, or make keys (bash scripts/make_keys.sh --help)"
        say(f"all {run.world} ranks are here{safety}")

    def _prepared(self, config: RunConfig) -> Run:
        """Return the run that starts here; raises ValueError or OSError for what cannot work."""
        return self._prepare(config)

    def _facts_of(self, keys: RunConfig | CommandKeys, part: PartFacts) -> RankFacts:
        """Return the facts that must agree with rank 0's: the code, the part of the model and the settings."""
        resolved_settings = self._settings(keys, dtype=part.number_type)
        return {"code": code_version(), "split": part.split_id, "world": part.world, "settings": resolved_settings}

    def _settings(self, keys: RunConfig | CommandKeys, **resolved_values: str) -> dict[str, str]:
        """Return the keys that must agree with rank 0's, with the values to which some were resolved here."""
        return settings(keys, **resolved_values)

    def connect(self) -> Meeting:
        """Return the meeting of all ranks; join a process group if some of them share a stage."""
        if self._needs_process_group:
            self._begin_groups()
        door = partial(BoardDoor, self._address, self.board.keys, patience=self._wire_patience)
        return Meeting(self._store, door, self.names, self._rename, self._look_after, REPLY_SECONDS)

    def _rename(self) -> None:
        """Update the names of the boards, some of which may now stand in for others."""
        all_facts = [self._read(f"facts/{rank}") for rank in range(len(self.names))]
        addresses = [facts.get("address", "") for facts in all_facts]
        for rank, old_name in enumerate(list(self.names)):
            new_name = self.board.named(rank, all_facts[rank]["host"], addresses[rank])
            self.names[rank] = new_name
            if new_name != old_name:
                say(f"{new_name} stands in for {old_name}: {len(all_facts)} ranks on {len({*addresses})} boards", "\n")

    def _begin_groups(self) -> None:
        rank, world = self.board.rank, len(self.names)
        try:
            dist.init_process_group("gloo", store=self._store, rank=rank, world_size=world,
                                    timeout=timedelta(seconds=REPLY_SECONDS))
        except PeerLost:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLost(f"{self.names[rank]} could not connect to the others: a board was lost just now, or a "
                           f"firewall is between them ({reason}); start all again") from error

    def _look_after(self) -> str:
        """Return why a rank will not come to the next membership, or an empty string; only rank 0 knows."""
        return ""

    def _try_ways(self, facts_by_rank: Written) -> None:
        """Connect to all ranks, and agree that all ranks reach each other."""
        self._deadline = time.monotonic() + REPLY_SECONDS
        with ThreadPoolExecutor(len(facts_by_rank)) as pool:
            is_reached = list(pool.map(reaches, facts_by_rank.values(), facts_by_rank))
        self._write("ways", [rank for rank in facts_by_rank if not is_reached[rank]])
        self._agree("ways", len(facts_by_rank), lambda ways: judge_ways(facts_by_rank, ways, self.names))

    def _agree(self, topic: str, world: int, judge: Judge) -> Written:
        """Return what all ranks have written about a topic, in the order of their numbers.

        Raises rank 0's verdict: ValueError if anything does not fit, PeerLost if a rank is missing.
        """
        self._judge(topic, world, judge)
        while (verdict := self._read(f"{topic}/verdict")) is None:
            self._wait_for(self._missing_boards("facts", world))

        reason, is_lost, entries = verdict
        if reason:
            raise PeerLost(reason) if is_lost else ValueError(reason)

        written = dict(sorted(entries))
        if set(written) != set(range(world)):
            raise PeerLost(f"{self.board.named(0)} names other ranks than the {world} of this split: check that "
                           "all boards were given the same address and port")
        return written

    def _judge(self, topic: str, world: int, judge: Judge) -> None:
        """Write the verdict, on rank 0: the problem, whether it is a missing board, and all entries."""

    # --- the store ----------------------------------------------------------------------------------------------------

    def _write(self, topic: str, value: Any) -> None:
        self._store.set(f"{topic}/{self.board.rank}", json.dumps(value))

    def _read(self, key: str) -> Any:
        """Return the value of a key; None if it is missing."""
        entry = self._store.look(key)
        return None if entry is None else json.loads(entry)

    def _entries_about(self, topic: str, world: int) -> Written:
        """Return what has been written about a topic so far, in the order of the ranks."""
        entries = ((rank, self._read(f"{topic}/{rank}")) for rank in range(world))
        return {rank: entry for rank, entry in entries if entry is not None}

    def _missing_boards(self, topic: str, world: int) -> str:
        missing_ranks = set(range(world)) - self._entries_about(topic, world).keys()
        return ", ".join(map(self.board.named, sorted(missing_ranks)))

    def _wait_for(self, missing: str) -> None:
        """Wait briefly; print which boards are missing, if that has changed."""
        if missing not in ("", self._reported_missing):
            seconds_left = max(0, self._deadline - time.monotonic())
            say(f"waiting for {missing}, up to {seconds_left:.0f} seconds")
        self._reported_missing = missing
        time.sleep(POLL_SECONDS)


class NumberDoor(BoardDoor):
    """A door that sends this rank's number to everybody who connects."""

    def __init__(self, address: str, rank: int) -> None:
        self._rank = rank
        super().__init__(address, None, 0)

    def _read_greeting(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:  # the other end may have gone already
            connection.sendall(b"flowspec %d\n" % self._rank)


def reaches(facts: RankFacts, rank: int) -> bool:
    """Whether a rank replies with its number at the address of its facts."""
    try:
        with socket.create_connection((facts["address"], facts["port"]), timeout=5) as connection:
            return connection.recv(64) == b"flowspec %d\n" % rank
    except OSError:
        return False


class Coordinator(Rendezvous[Run]):
    """Rank 0's side: it keeps the store and judges what the others write.

    Once all are here, a lost board may come again, or another one in its place.
    """

    def __init__(self, board: Board, prepare: Callable[[RunConfig], Run]) -> None:
        super().__init__(board, prepare)
        address, entries = board.listen_address(), Entries()
        self._sent_offsets: dict[tuple[int, str], int] = {}  # of the last piece, by receiver and file
        self._awaited: Sequence[int] = ()  # ranks that must receive the verdict that ends the rendezvous

        try:
            self._server = StoreServer((address, board.port), entries, board.keys)
            self._server.rank_of_name = {line.name: rank for rank, line in enumerate(board.lines) if line.name}
            self._server.patience = SEAT_SECONDS  # a worker may be killed while it receives its part
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ValueError(f"port {board.port} of {address} cannot be used ({reason}): choose another with "
                             "master=:PORT, the same on all boards") from error
        self._store = Store(entries.reply_to_root)

    def _prepared(self, config: RunConfig) -> Run:
        """Return the run, of which boards with keys may now request their parts."""
        prepared = super()._prepared(config)
        if self.board.keys:
            self._server.read_piece = partial(self._read_piece, prepared)
        return prepared

    def _read_piece(self, prepared: Run, receiver: int, file_name: str, offset: int) -> bytes:
        """Return a piece of a rank's part, and wait longer for the ranks, as long as one receives its part."""
        piece = prepared.piece(receiver, file_name, offset)
        has_progress = bool(piece) and offset > self._sent_offsets.get((receiver, file_name), 0)
        if has_progress:
            if all(receiver != other for other, _ in self._sent_offsets):
                say(f"{self.board.named(receiver)} receives its part of the model from here")
            self._sent_offsets[receiver, file_name] = offset
            self._deadline = max(self._deadline, time.monotonic() + self.board.wait)
        return piece

    def attend(self, keys: RunConfig | CommandKeys) -> Run:
        prepared = super().attend(keys)
        if prepared.recovers:
            self._server.patience = keys.run.timeout
        if self.board.keys is None:  # only its address identifies a board
            seated_addresses = {self._server.seats[rank].address for rank in range(1, len(self.names))}
            self._server.board_addresses = seated_addresses | self.board.listed_addresses()
        return prepared

    def _look_after(self) -> str:
        if loss := reported_loss(self._store):
            return loss

        is_first_membership = self._store.add(NEWEST, 0) == 1
        patience = math.inf if is_first_membership else self._server.patience or math.inf
        ranks = range(len(self.names))
        gone_ranks = [rank for rank in self._server.gone_ranks(patience) if rank in ranks]
        if gone_ranks and is_first_membership:
            return f"{self.names[gone_ranks[0]]} was lost: its program has ended"

        missing = ", ".join(self.names[rank] for rank in gone_ranks)
        if missing not in ("", self._reported_missing):
            come_again = all(self._read(f"facts/{rank}")["worker"] for rank in gone_ranks)
            advice = "its worker comes again by itself" if come_again else "start run_jetson.sh there again"
            say(f"waiting for {missing}: {advice}{self._spares(gone_ranks)}", "\n")
        self._reported_missing = missing
        return ""

    def _spares(self, gone_ranks: Sequence[int]) -> str:
        """Return which present spares can stand in for these ranks, and why others cannot, as a part of a sentence."""
        present = self._server.seats.keys() - self._server.gone_ranks()
        clauses = ""
        for number in range(len(self.names), len(self.board.lines)):
            facts: Any = self._read(f"spare/{number}") if number in present else None
            for rank in gone_ranks if facts else ():
                reason = facts["lacks"].get(str(rank), "its line is for other ranks")
                outlook = f"cannot stand in: {reason}" if reason else f"stands in soon for rank {rank}"
                clauses += f"; {self.board.named(number, facts['host'], facts['address'])} {outlook}"
        return clauses

    def _judge(self, topic: str, world: int, judge: Judge) -> None:
        world = max(world, 1)  # 0: unknown, since rank 0's own folder is invalid
        written, late_reason = self._collect(topic, world)
        reason = late_reason or judge(written)
        # the entries of another version may have another form, and a reason ends all ranks anyway
        verdict = reason, bool(late_reason), [] if reason else list(written.items())
        self._store.set(f"{topic}/verdict", json.dumps(verdict))
        self._server.patience = None
        if reason:
            self._awaited = [rank for rank in range(1, world) if rank in written or not late_reason]
            atexit.register(self.close)

    def _collect(self, topic: str, world: int) -> tuple[Written, str]:
        """Return what the ranks have written, once all have or one has an error; and a message if it is too late."""
        while True:
            missing = self._missing_boards(topic, world)
            written = self._entries_about(topic, world)
            has_error = topic == "facts" and any(facts.get("error") for facts in written.values())
            if has_error or not missing:
                return written, ""
            if time.monotonic() > self._deadline:
                message = LATE_MESSAGE if topic == "facts" else SILENT_MESSAGE
                return written, message.format(missing, self.board.wait)
            self._wait_for(self._missing_boards("facts", world))

    def close(self) -> None:
        """End the store, after the other ranks, even late ones, have received the reason and ended."""
        atexit.unregister(self.close)
        self._server.close(REPLY_SECONDS if self._awaited else 2 * GRACE_SECONDS, self._awaited)


class Participant(Rendezvous[Run]):
    """The side of every other rank."""

    _client: StoreClient

    def __init__(self, board: Board, prepare: Callable[[RunConfig], Run]) -> None:
        super().__init__(board, prepare)
        self._client = self._reach()
        self._store = Store(self._client.ask)

    def _reach(self) -> StoreClient:
        """Connect to rank 0's store, once its program is running.

        Its board must respond sooner than its program, if only to refuse the connection.
        """
        board = self.board
        names = board.named(0), board.named(board.rank, self._host)
        master = board.meeting_point(names[0])
        last_refused = time.monotonic()  # its board responds, and refuses as long as the program is not running
        late_error: Exception = PeerLost(LATE_MESSAGE.format(names[0], board.wait))

        while True:
            missing, patience = names[0], REPLY_SECONDS
            error: Exception
            try:
                client = StoreClient((board.master, board.port), names, REPLY_SECONDS, board.keys)
                holder = client.greet(board.rank)
                if not holder:
                    return client
                missing, patience = f"the end of a run in which {holder} is rank {board.rank}", SEAT_SECONDS
                error = ValueError(f"rank {board.rank} is there already, from {holder}: end the run of that board, or "
                                   "give this board a NODE_RANK of its own")
                late_error = error  # still the reason if that run ends before this board gives up
            except ssl.SSLError:
                error = PeerLost(f"{names[0]} at {master} has no keys, or not those of the cluster "
                                 f"of {names[1]}: {MAKE_KEYS}")
            except OSError as refusal:
                if refusal.errno == errno.ECONNREFUSED:
                    last_refused = time.monotonic()
                error = PeerLost(f"{names[0]} cannot be reached at {master} from {names[1]} "
                                 f"({refusal.strerror or refusal}): check MASTER_ADDR or the hosts file, the cable and "
                                 "the firewall")

            now = time.monotonic()
            if now > self._deadline and missing == names[0]:
                raise late_error
            if now > min(last_refused + patience, self._deadline):
                raise error
            self._wait_for(missing)


class WorkerBoard(Participant[Run]):
    """A board that takes the keys of each run from rank 0, but for those of its own machine.

    Without a folder of its own it also takes its part of the model: `receive` returns its folder, and gets a function
    that requests a piece, and the number of the split.
    """

    _root_facts: RankFacts
    _is_worker = True

    def __init__(self, board: Board, prepare: Callable[[RunConfig], Run], receive: ReceivePart) -> None:
        self._receive = receive
        super().__init__(board, prepare)

    def attend(self, keys: RunConfig | CommandKeys) -> Run:
        while (facts := self._read("facts/0")) is None:
            self._wait_for(self.board.named(0))
        self._root_facts = facts
        return super().attend(keys)

    def _prepared(self, config: RunConfig) -> Run:
        root_facts = self._root_facts
        if root_facts["code"] != code_version():  # it may have other keys
            raise ValueError(OTHER_CODE)
        config = adopted(config, root_facts["settings"])

        if config.kernel == "native" and (reason := reason_against_library()):
            say(f"this board computes by torch, since {reason}")
            config = replace(config, kernel="torch")

        if not config.model_dir and "error" not in root_facts:  # else rank 0 judges
            if not self.board.keys:
                raise ValueError(f"this worker takes its part of the model from rank 0 with keys only: {MAKE_KEYS}, or "
                                 "copy the part with bash scripts/push.sh, and give model_dir= there")
            config = replace(config, model_dir=str(self._receive(self._client.piece, root_facts["split"])))
        return super()._prepared(config)

    def _settings(self, keys: RunConfig | CommandKeys, **resolved_values: str) -> dict[str, str]:
        return {**self._root_facts["settings"], **resolved_values}


class Spare(Participant[Run]):
    """A board that waits until another one is lost and does not return at once, and then becomes that rank."""

    def attend(self, keys: RunConfig | CommandKeys) -> Run:
        facts_by_rank = self._agree("facts", self.board.world, no_objection)
        reasons = self._reasons_against(keys, facts_by_rank[0])
        _, address = self.board.network()
        reasons_by_text = {str(rank): reason for rank, reason in reasons.items()}
        self._write("spare", {"host": self._host, "address": address, "lacks": reasons_by_text})

        for rank, reason in reasons.items():
            if reason:
                say(f"this spare cannot stand in for rank {rank}: {reason}")
        possible_ranks = [rank for rank, reason in reasons.items() if not reason]
        if not possible_ranks:
            raise ValueError("this spare can stand in for no rank, for the reasons above")

        names = " and ".join(self.board.named(rank) for rank in possible_ranks)
        say(f"waiting until {names} is lost; then this spare stands in")
        self._client.patience = max(REPLY_SECONDS, keys.run.recovery)
        try:
            self._stand_by(possible_ranks)
        except PeerLost:
            if self._client.ended:
                say(f"{self._client.names[0]} has ended, and this spare was not needed")
                raise SystemExit(0) from None
            raise
        return super().attend(keys)

    def _reasons_against(self, keys: RunConfig | CommandKeys, root_facts: RankFacts) -> dict[int, str]:
        """Return why this board cannot stand in, with the fix, for each rank of its line; empty if it can."""
        reasons = {}
        for rank in self.board.lines[self.board.rank].stands_in(self.board.world):
            os.environ["RANK"] = str(rank)
            try:
                facts = {"host": "", **self._facts_of(keys, self._prepare(keys.run).facts(rank))}
                reasons[rank] = judge_facts({0: root_facts, self.board.rank: facts}, self.board)
            except (ValueError, OSError) as error:
                reasons[rank] = f"{error}; bash scripts/push.sh brings a spare the folders of a split"
        return reasons

    def _stand_by(self, possible_ranks: Sequence[int]) -> None:
        """Wait, and take the seat of one of these ranks; spares act in the order of the hosts file."""
        last_complete = time.monotonic()
        patience = RETURN_SECONDS * (1 + self.board.rank - self.board.world)
        while self.board.is_spare:
            time.sleep(POLL_SECONDS)
            if loss := reported_loss(self._store):
                raise PeerLost(loss)

            newest_membership, now = self._store.add(NEWEST, 0), time.monotonic()
            if newest_membership < 2 or self._store.add(COMPLETE, 0) == newest_membership:
                last_complete = now
            lost_ranks = [rank for rank in possible_ranks if door_of(self._store, rank)[0] < newest_membership]
            if now > last_complete + patience:
                any(map(self._take_seat, lost_ranks))

    def _take_seat(self, rank: int) -> bool:
        """Become this rank, if its seat is free; return whether it was."""
        board, old_client = self.board._replace(rank=rank), self._client
        try:
            client = StoreClient((board.master, board.port), old_client.names, REPLY_SECONDS, board.keys)
            if client.greet(rank):
                return False
        except OSError:
            return False

        old_client.close()
        self.board, self._client, self._store = board, client, Store(client.ask)
        self._host += ", a spare"
        os.environ["RANK"] = str(rank)
        return True
