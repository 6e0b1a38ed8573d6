"""Emulated groups take the time of collectives and shares that the formulas say, and compute what others compute."""
from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from config.profiles import PROFILES
from sim.clock import Pace
from sim.groups import Paced, Times, all_reduce, hop
from tests.tiny import in_threads
from tp.comm import Comm, Galaxy
from tp.group import Table, ThreadGroup

# 8 Mbit/s are 1 byte in a microsecond; no work but what is stated
PROFILE = replace(PROFILES["jetson-7b"], layers=4, row_bytes=1000, model=80,
                  row=1, free=0, token=0.1, mbps=8, step=2)


def test_a_ring_all_reduce_is_two_rounds_of_hops_with_a_piece_each():
    assert hop(PROFILE, 500) == pytest.approx(0.0025)
    for members in (1, 2, 4):
        size, rate, latency = 12_000, 1e6, 0.002
        exact = 2 * (members - 1) / members * size / rate + 2 * (members - 1) * latency
        assert all_reduce(PROFILE, size, members) == pytest.approx(exact)


def spent(make, rows: int, text: int) -> tuple[float, Tensor]:
    """Seconds that both members need for two blocks of one layer, which stands for two; and what the first has then."""
    table, answers = Table(2), {}

    def compute(member: int) -> None:
        comm = Paced(make(ThreadGroup(table, member)), Pace(PROFILE),
                     layers=2, times=Times(PROFILE, 0.75, 2))
        comm.open(rows, text)
        x = comm.scatter(torch.ones(rows, 4))
        for block in range(2):
            if block:
                comm.enter_block(x, [])
            x = comm.leave_block(torch.ones(rows, 4), torch.clone)
        answers[member] = comm.gather(x)

    start = time.monotonic()
    with in_threads(compute, [(0,), (1,)]):
        pass
    return time.monotonic() - start, answers[0]


def test_a_block_takes_its_share_of_the_model_and_its_all_reduce():
    seconds, sums = spent(lambda group: Comm(group, 4), rows=4, text=100)
    layer = 0.75 * (80 + 4 + 10) / 4e3  # the largest share of one layer
    wanted = 2 * (layer + 2 * all_reduce(PROFILE, 4000, 2))
    assert wanted <= seconds and torch.equal(sums, torch.full((4, 4), 2.0))
    assert 2 * Times(PROFILE, 0.75, 2).layer(False, 4, 100) == pytest.approx(wanted)


def test_tiles_travel_while_others_are_multiplied():
    seconds, sums = spent(lambda group: Galaxy(group, 4, tile=1), rows=4, text=100)
    product = 0.75 * (80 + 2 + 10) / 4e3 / 4  # of a tile, half a block: longer than its way to the next member
    assert product > hop(PROFILE, 2000)
    wanted = 2 * 4 * (2 * product)  # of two layers twice in and out, with two tiles each
    assert wanted <= seconds and torch.equal(sums, torch.full((4, 4), 2.0))
    assert 2 * Times(PROFILE, 0.75, 2).layer(True, 4, 100) == pytest.approx(wanted)
