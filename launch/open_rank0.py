"""Where the other ranks are when a program is rank 0: on other boards, in processes, in threads, or simulated."""
from __future__ import annotations

import os
from typing import ContextManager, Sequence

from config.cli import parse
from launch.hosts.board import find_board
from launch.hosts.leading import as_boards
from launch.prepare import prepare
from launch.ranks import Rank, as_processes, as_threads
from launch.virtual import as_virtual


def rank_0(words: Sequence[str]) -> ContextManager[Rank]:
    """Rank 0 of the pipeline that these words ask for, to be entered and left; raises ValueError for what cannot work.
    """
    config = parse(words)
    board = find_board(config, os.environ)
    if board is not None:
        return as_boards(config, board, words)
    folder, placement = prepare(config)
    if config.virtual:
        return as_virtual(config, folder, placement)
    if config.processes:
        return as_processes(config, folder, placement, words)
    return as_threads(config, folder, placement)
