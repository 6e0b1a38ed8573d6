"""The rendezvous of ranks on several hosts: they come in any order, compare what they are, and try to connect.

It knows nothing about what a rank does afterwards. Rank 0 keeps the store that all write to, and judges; so whatever is
wrong on one board ends all of them with one sentence, which names the board.
"""
from __future__ import annotations

import atexit
import errno
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import torch.distributed as dist

from config.run_config import RunConfig
from launch.hosts.agreement import Verdict, code_version, judge_facts, judge_ways, open_door, reaches, settings
from launch.hosts.board import Board
from launch.hosts.entries import Facts
from launch.hosts.store import Keeper, Shelf, Store, Wire, hang_up
from launch.spec import RankSpec
from model.weights import Part
from pipeline.transport import PeerLost
from tp.links import Placement

PATIENCE = 15  # seconds: for a board to answer that is there, and for those that come late to hear why all ended
LOOK = 0.2  # seconds between two looks into the store
SOONER = 0.8  # of the heartbeat's patience
LATE = ("{} did not come within {:g} seconds: start run_jetson.sh there too, see what it says there, or give more time "
        "with wait=")


class Rendezvous:
    """One rank's side of it. After `attend`, `names` has each rank as messages shall name it."""

    apart = True  # each rank has a terminal of its own

    def __init__(self, board: Board) -> None:
        self.board = board
        self.names: list[str] = []
        os.environ.update(board.environment)
        print(f"flowspec: this is {board.named(board.rank, socket.gethostname())}; all ranks meet at {board.master}:"
              f"{board.port} (MASTER_ADDR, MASTER_PORT), over {board.interface or 'the interface that leads there'} "
              f"(GLOO_SOCKET_IFNAME), within {board.wait:g} seconds (wait=)", file=sys.stderr)
        self._until = time.monotonic() + board.wait
        self._store = self._open()

    def attend(self, config: RunConfig, prepare: Callable[[RunConfig], tuple[Path, Placement]]
               ) -> tuple[Path, Placement]:
        """What `prepare` gives, once all ranks are here and belong together; raises ValueError or PeerLost."""
        with socket.socket() as door:
            facts: Facts = {"host": socket.gethostname(), "code": code_version(), "settings": settings(config)}
            try:
                folder, placement = prepare(config)
                world = placement.world
                interface, own = self.board.ground()
                door.bind((own, 0))
                door.listen()
                threading.Thread(target=open_door, args=(door, self.board.rank), name="door", daemon=True).start()
                part = Part(folder / f"stage_{self.board.rank}")
                dtype = str(RankSpec(config, part).dtype).rpartition(".")[2]
                facts.update(split=part.split_id, world=world, address=own, interface=interface,
                             port=door.getsockname()[1], settings=settings(config, dtype=dtype))
            except (ValueError, OSError) as error:
                self._put("facts", {**facts, "error": str(error)})
                self._agree("facts", len(self.board.lines), lambda told: judge_facts(told, self.board))
                raise
            self._put("facts", facts)
            told = self._agree("facts", world, lambda told: judge_facts(told, self.board))
            self.names = [self.board.named(rank, told[rank]["host"], told[rank]["address"]) for rank in range(world)]
            self._until = time.monotonic() + PATIENCE
            with ThreadPoolExecutor(world) as pool:
                reached = list(pool.map(reaches, told.values(), told))
            self._put("ways", [rank for rank in told if not reached[rank]])
            self._agree("ways", world, lambda ways: judge_ways(told, ways, self.names))
            hang_up(door)  # closing it alone would leave it open for as long as its thread waits
        self._settle(config.timeout)
        os.environ.update(GLOO_SOCKET_IFNAME=interface, WORLD_SIZE=str(world))
        print(f"flowspec: all {world} ranks are here", file=sys.stderr)
        return folder, placement

    def connect(self) -> Any:
        """Join the process group of all ranks; the store in which they tell each other that they live."""
        try:
            dist.init_process_group("gloo", store=self._store, rank=self.board.rank, world_size=len(self.names),
                                    timeout=timedelta(seconds=PATIENCE))
        except PeerLost:
            raise
        except RuntimeError as error:
            raise PeerLost(f"{self.names[self.board.rank]} could not connect to the others: a board was lost just now, "
                           f"or a firewall is between them ({str(error).splitlines()[0]}); start all again") from error
        return dist.distributed_c10d._get_default_store()

    def _open(self) -> Store:
        raise NotImplementedError

    def _settle(self, timeout: float) -> None:
        """The ranks have met: from now on a store that is silent for `timeout` seconds is lost."""

    def _agree(self, topic: str, world: int, judge: Callable[[dict[int, Any]], str]) -> dict[int, Any]:
        raise NotImplementedError

    def _put(self, key: str, value: Any) -> None:
        """Write down under this rank's name."""
        self._store.set(f"{key}/{self.board.rank}", json.dumps(value))

    def _get(self, key: str) -> Any:
        """What somebody wrote down; None if it is not there yet."""
        found = self._store.look(key)
        return None if found is None else json.loads(found)

    def _missing(self, topic: str, world: int) -> str:
        """In words, the ranks that have not written yet."""
        ranks = [rank for rank in range(world) if self._store.look(f"{topic}/{rank}") is None]
        return ", ".join(self.board.named(rank) for rank in ranks)

    def _say(self, missing: str, said: str) -> str:
        if missing != said and missing:
            print(f"flowspec: waiting for {missing}, up to {max(0, self._until - time.monotonic()):.0f} seconds",
                  file=sys.stderr)
        return missing


class Leader(Rendezvous):
    """Rank 0's side."""

    def _open(self) -> Store:
        board, shelf, place = self.board, Shelf(), self.board.place()
        try:
            Keeper((place, board.port), shelf)
        except OSError as error:
            raise ValueError(f"port {board.port} of {place} cannot be used ({error.strerror}): choose another "
                             "master_port, the same on all boards") from error
        return Store(shelf.own)

    def _agree(self, topic: str, world: int, judge: Callable[[dict[int, Any]], str]) -> dict[int, Any]:
        """What all have written, and that it is well; tells the others."""
        told: dict[int, Any] = {}
        said, verdict, world = "", Verdict(), max(world, 1)  # 0: rank 0's own folder could not tell
        while not verdict.told and len(told) < world:
            for rank in (rank for rank in range(world) if rank not in told):
                found = self._get(f"{topic}/{rank}")
                if found is not None:
                    told[rank] = found
            if topic == "facts" and any(fact.get("error") for fact in told.values()):
                break
            if time.monotonic() > self._until:
                verdict = Verdict(self._absent(topic, world), lost=True)
            said = self._say(self._missing("facts", world), said)
            time.sleep(LOOK)
        told = dict(sorted(told.items()))
        verdict = verdict if verdict.told else Verdict(judge(told))
        self._store.set(f"{topic}/all", json.dumps(list(told.items())))
        self._store.set(f"{topic}/verdict", json.dumps(verdict))
        if verdict.told:
            atexit.register(self._linger, topic, [rank for rank in range(1, world) if not verdict.lost or rank in told])
        verdict.enforce()
        return told

    def _absent(self, topic: str, world: int) -> str:
        missing = self._missing(topic, world)
        if topic == "ways":
            return f"{missing} fell silent while the ranks met: look at its board and network, then start all again"
        return LATE.format(missing, self.board.wait)

    def _linger(self, topic: str, ranks: list[int]) -> None:
        """The store ends with this process: first let the others hear, also those that come only now."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(not self._store.add(f"{topic}/heard/{rank}", 0) for rank in ranks):
            time.sleep(LOOK)


class Follower(Rendezvous):
    """The side of all other ranks."""

    def _open(self) -> Store:
        self._wire = self._reach()
        return Store(self._wire.ask)

    def _settle(self, timeout: float) -> None:
        # A little less than the heartbeat has: this end can tell a cut wire from a program that stands still.
        self._wire.names, self._wire.patience = (self.names[0], self.names[self.board.rank]), SOONER * timeout

    def _reach(self) -> Wire:
        """Wait for rank 0's program. Its board must answer sooner, if only to refuse."""
        board, silent, said = self.board, time.monotonic(), False
        names = board.named(0), board.named(board.rank, socket.gethostname())
        while True:
            try:
                wire = Wire((board.master, board.port), names, PATIENCE)
                holder = wire.greet(board.rank)
                break
            except OSError as error:
                refused, why = error.errno == errno.ECONNREFUSED, error.strerror or str(error)
            now = time.monotonic()
            silent = now if refused else silent
            if now - silent > PATIENCE:
                raise PeerLost(f"{names[0]} cannot be reached at {board.master}:{board.port} from {names[1]} ({why}): "
                               "check MASTER_ADDR or the hosts file, the cable and the firewall") from None
            if now > self._until:
                raise PeerLost(LATE.format(names[0], board.wait)) from None
            said = said or bool(self._say(board.named(0), ""))
            time.sleep(LOOK)
        if holder:
            raise ValueError(f"rank {board.rank} is there already, from {holder}: end the run of which it is, or give "
                             "this board a NODE_RANK of its own")
        return wire

    def _agree(self, topic: str, world: int, judge: Callable[[dict[int, Any]], str]) -> dict[int, Any]:
        """What all have written; raises what rank 0 says of it."""
        said, verdict = "", None
        while verdict is None:
            verdict = self._get(f"{topic}/verdict")
            said = self._say(self._missing("facts", world), said)
            time.sleep(LOOK)
        told = dict(self._get(f"{topic}/all"))
        self._store.add(f"{topic}/heard/{self.board.rank}", 1)
        Verdict(*verdict).enforce()
        if set(told) != set(range(world)):
            raise PeerLost(f"{self._wire.names[0]} speaks of other ranks than the {world} of this split: look whether "
                           "all boards were given one address and port")
        return told
