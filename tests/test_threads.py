"""Whatever a thread of a rank dies of is told as a loss, by name; nothing waits for it for ever."""
from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

import pytest

from pipeline import heartbeat, transport
from pipeline.loss import guarded
from sim import devices
from tests.forked import ranks
from tests.saved import models

ENDLESS = ("prompt_ids=5,17,40", "ignore_eos=true", "max_length=30000", "max_new_tokens=30000", "timeout=5",
           "threads_per_rank=1", "device=cpu", "profile=server")
THREADS = {0: ["data sender", "control sender", "data listener", "emulated wire", "pulse", "watch"],
           1: ["data sender", "control sender", "data listener", "control listener", "emulated wire", "pulse", "watch"],
           2: ["data sender", "control sender", "data listener", "control listener", "emulated wire", "pulse", "watch"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models(tmp_path_factory.getbasetemp() / "saved")


def poison(sick: int, thread: str, rank: int) -> None:
    """One kind of thread of one rank shall die of something that nobody foresaw."""
    def die():
        time.sleep(1)
        raise KeyError("unforeseen")

    def start(name, run, failed):
        return guarded(name, die if (rank, name) == (sick, thread) else run, failed)

    for module in (transport, devices, heartbeat):
        module.guarded = start


@pytest.mark.parametrize("sick", THREADS)
def test_whatever_a_thread_dies_of_ends_all_ranks_with_its_name(saved, tmp_path, sick):
    words = [f"model_dir={saved / '0+2+2'}", *ENDLESS]
    with ExitStack() as stack:
        runs = {thread: stack.enter_context(ranks(tmp_path / thread, words, 3, partial(poison, sick, thread)))
                for thread in THREADS[sick]}
        for thread, run in runs.items():
            assert run.codes() == [75, 75, 75], thread
            assert run.noted == f"rank {sick} failed: KeyError: 'unforeseen' (in its thread {thread})"
