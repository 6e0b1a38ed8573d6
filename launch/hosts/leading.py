"""Rank 0 of a pipeline over several hosts, inside a program that stays: a person's own, or the server.

It knows nothing about what is asked. On the other boards somebody types `run_jetson.sh`, as for a single run.
"""
from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, closing, contextmanager
from typing import Iterator, Sequence

from config.run_config import RunConfig
from launch.hosts.board import Board
from launch.hosts.rendezvous import Coordinator
from launch.prepare import prepare
from launch.ranks import Rank, begin_groups, in_group, torch_as_it_was
from pipeline.heartbeat import Heartbeat

SAYS = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")  # what a rendezvous writes into the environment


@contextmanager
def as_boards(config: RunConfig, board: Board, words: Sequence[str]) -> Iterator[Rank]:
    """Rank 0 on this board, once the others have come, who are asked to read the same `words`.

    Raises ValueError, also on another board than rank 0's, and PeerLost if one does not come.
    """
    if board.rank:
        raise ValueError(f"this board is rank {board.rank}, and who asks is rank 0: start this on the board of "
                         f"{board.named(0)}, and bash run_jetson.sh here")
    begin_groups()
    print(f"flowspec: on each of the other boards: bash run_jetson.sh {shlex.join(words)}", file=sys.stderr)
    with torch_as_it_was(), ExitStack() as ends:
        with environment_as_it_was():
            coordinator = ends.enter_context(closing(Coordinator(board)))
            folder, placement = coordinator.attend(config, prepare)
            store = coordinator.connect()
            heartbeat = Heartbeat(store, 0, placement.world, config.timeout, coordinator.names)
            rank_0 = ends.enter_context(in_group(config, folder, placement, heartbeat))
        yield rank_0


@contextmanager
def environment_as_it_was() -> Iterator[None]:
    """While ranks meet, the environment says which rank this is; the program around it gets its own back."""
    before = {name: os.environ.get(name) for name in SAYS}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
