"""Where the other ranks are when a program is rank 0: on other boards, in processes, in threads, or simulated."""
from __future__ import annotations

import os
import shlex
from contextlib import ExitStack, closing, contextmanager
from typing import ContextManager, Iterator, Sequence

import torch.distributed as dist

from config.run_config import RunConfig
from launch.console import say
from launch.folder import Folder, private_folder
from launch.fork_server import LOOK, Ranks
from launch.hosts.board import Board, find_board
from launch.hosts.rendezvous import Coordinator
from launch.prepare import Prepared, prepare
from launch.processes import await_ends, environment_kept, keep_on_loopback, noted_in, reason_of, start_ranks
from launch.ranks import Member, Rank, as_threads, in_group, join
from launch.virtual import as_virtual
from launch.words import Asked
from pipeline.failure import PeerLost, explain, guarded

SAYS = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")  # what a rendezvous writes into the environment


def rank_0(asked: Asked) -> ContextManager[Rank]:
    """Rank 0 of the pipeline that is asked for, to be entered and left; raises ValueError for what cannot work."""
    config, words = asked.keys, asked.words
    board = find_board(config, os.environ)
    if board is not None:
        return _beside_boards(config, board, words)
    prepared = prepare(config)
    if config.processes and not config.virtual:
        return _beside_processes(prepared, words)
    return alone(prepared)


def alone(prepared: Prepared) -> ContextManager[Rank]:
    """Rank 0, with all others in this process."""
    return as_virtual(prepared) if prepared.config.virtual else as_threads(prepared)


@contextmanager
def _beside_processes(prepared: Prepared, words: Sequence[str]) -> Iterator[Rank]:
    """Rank 0, beside the others as processes that read the same `words`; this process joins their process group."""
    _begin_groups()
    world = prepared.placement.world
    with private_folder() as place:
        others = start_ranks(["launch.run", *words], place, world, range(1, world))
        try:
            store = join_beside(others, place, world)
            with in_group(Member(prepared, 0, store)) as rank:
                yield rank
            await_ends(others)
        finally:
            others.kill()


def join_beside(others: Ranks, folder: str, world: int) -> Folder:
    """Join the process group of ranks that this one has started; raises PeerLost, with the reason, if one ends instead.
    """
    joined: list[Folder] = []
    failed: list[BaseException] = []

    def join_as_0() -> None:
        joined.append(join(folder, 0, world))

    with environment_kept("GLOO_SOCKET_IFNAME"):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the way to other machines
        keep_on_loopback(os.environ)
        joining = guarded("join", join_as_0, lambda thread, error: failed.append(error))
        while joining.is_alive() and not others.ended():
            joining.join(LOOK)
    if joined:
        return joined[0]
    noted, ended = noted_in(folder), others.ended()
    if ended:
        raise PeerLost(reason_of(ended, noted))
    raise PeerLost(noted or f"rank 0 could not connect to the others: {explain(failed[0])}")


@contextmanager
def _beside_boards(config: RunConfig, board: Board, words: Sequence[str]) -> Iterator[Rank]:
    """Rank 0 on this board, once the others have come, where somebody types `run_jetson.sh` with the same `words`.

    Raises ValueError, also on another board than rank 0's, and PeerLost if one does not come.
    """
    if board.rank:
        raise ValueError(f"this board is rank {board.rank}, and who asks is rank 0: start this on the board of "
                         f"{board.named(0)}, and bash run_jetson.sh here")
    _begin_groups()
    say(f"on each of the other boards: bash run_jetson.sh {shlex.join(words)}")
    with ExitStack() as ends:
        with environment_kept(*SAYS):
            coordinator = ends.enter_context(closing(Coordinator(board)))
            prepared = coordinator.attend(config)
            member = Member(prepared, 0, coordinator.connect(), coordinator.names)
            rank = ends.enter_context(in_group(member))
        yield rank


def _begin_groups() -> None:
    """Make ready to join a process group; raises ValueError if this program is in one already."""
    if dist.is_initialized():
        raise ValueError("this program is in a process group of torch.distributed already: end it first, or open the "
                         "pipeline with processes=False")
    # Groups are named by a number, which a group that could not be joined has raised. All others begin with 0.
    dist.distributed_c10d._group_count = 0
