"""Clients of a server: what is compared, counted and held, and what cannot be measured."""
from __future__ import annotations

import os
import signal
import subprocess

import pytest

from eval.bench import process_tree
from eval.load.arrivals import Served
from eval.load.keys import ServeLoadConfig, of_the_server
from eval.load.server import Held, LoadResult, holds, server
from tests.saved import wait_until


def test_texts_are_compared_with_what_their_question_gets_alone_and_errors_are_counted_apart():
    served = [Served(0, 1.0, 1.5, 3.0, 4, "yes"),
              Served(1, 2.0, 3.5, 6.0, 6, "no"),
              Served(0, 8.0, 9.0, 11.0, 10, "no"),
              Served(1, 0.0, 9.0, 99.0, 0, "", "queue_full")]
    samples = [Held(100.0 + i, 50.0, 9, 3) for i in range(20)]
    measured = LoadResult(4, served, samples, {0: "yes", 1: "no"})
    assert measured.wrong == (1, 1)
    assert measured.row(2.0) == ["4", "4", "1", "1", "4.0", "0.50", "0.75", "1.50", "2.00",
                                 "102 to 119", "50 to 50", "9 to 9", "3 to 3"]
    assert LoadResult(4, served[3:], samples, {}).row(2.0)[:5] == ["4", "1", "1", "0", "–"]


def test_what_a_process_holds_is_its_memory_its_files_and_its_threads():
    before = holds(os.getpid())
    with open(os.devnull) as one, open(os.devnull) as other:
        after = holds(os.getpid())
        assert after.files == before.files + 2 and after.server > 1 and after.threads >= 1, (one, other)


def test_ranks_that_a_server_of_theirs_has_forked_are_held_too():
    shells = "sh -c 'sleep 60; true' & wait"
    with subprocess.Popen(["sh", "-c", shells], start_new_session=True) as process:
        try:
            assert wait_until(lambda: len(process_tree(process.pid)) == 3, 10)
            assert holds(process.pid).threads == 3
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_server_gets_its_own_keys_and_what_is_wrong_is_reported():
    assert of_the_server(["toy", "clients=3", "minutes=1", "port=7", "questions=1", "queue=9"]) == ["toy", "queue=9"]
    for keys, message in (({"clients": "0"}, "clients=0: 0 is not possible"), ({"clients": ","}, "clients is empty"),
                          ({"minutes": 0.0}, "minutes=0.0 is not possible"), ({"sets": ""}, "sets is empty")):
        with pytest.raises(ValueError, match=message):
            ServeLoadConfig.of(**keys)


def test_clients_of_a_live_server_get_the_texts_that_each_question_gets_alone(saved, capfd):
    words = [f"model_dir={saved / '0+4'}", "template=none", "dtype=float64", "processes=false", "threads_per_rank=1"]
    assert server([*words, "max_new_tokens=6", "questions=2", "sets=mt_bench", "clients=1,3", "minutes=0.03"]) == 0
    table = capfd.readouterr().out.splitlines()
    rows = [line.split()[:4]
            for line in table[table.index(next(line for line in table if "unequal" in line)) + 1:]]
    assert [(clients, errors, unequal) for clients, _, errors, unequal in rows] == [("1", "0", "0"), ("3", "0", "0")]
    assert all(int(answers) >= 1 for _, answers, _, _ in rows)
