"""A server whose pipeline is on several hosts: its texts, boards that are lost or hang, and boards that come back.

The other boards are processes that meet the server over loopback, each of them what run_jetson.sh starts.
"""
import os
import signal
import socket
import threading
from contextlib import contextmanager

import pytest

from launch.pipeline import Pipeline
from scripts.serve import build, main
from tests.saved import answer_of, boards_of, wait_until
from tests.serving import live
from tests.test_hosts import ends, meet_here, said, starting

SAMPLED = {"temperature": 0.8, "seed": 5, "max_tokens": 24}
UNENDED = ("template=none", "ignore_eos=true")
RUN = ("recover=false", *UNENDED, "dtype=float64", "timeout=2")
AGREED = ("max_requests=1", "reuse=true")  # what the server says of itself, and boards are sent
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def place(tmp_path_factory, saved):
    return boards_of(saved, tmp_path_factory.mktemp("boards"))


@pytest.fixture(scope="module")
def keys(place):
    return (*meet_here(place), *RUN)


@pytest.fixture(scope="module")
def boards(place, keys):
    """Starts both other boards, and returns their processes."""
    with contextmanager(starting)(place, place) as start:
        yield lambda: [start(rank, *keys, *AGREED) for rank in (1, 2)]


@pytest.fixture(scope="module")
def text(saved, tmp_path_factory):
    """What run_pipe.sh answers with the options of SAMPLED."""
    return answer_of(tmp_path_factory.mktemp("pipe"), f"model_dir={saved / '0+2+2'}", *UNENDED, "prompt=tell me more",
                     "temperature=0.8", "seed=5", "max_new_tokens=24", "dtype=float64")["text"]


@pytest.fixture
def rank_0(monkeypatch):
    monkeypatch.setenv("NODE_RANK", "0")  # all lines of the hosts file are this machine


def health(server):
    got = server.client.get("/health")
    return got.status_code, got.json()["reason"]


def answered(server):
    """The text of an answer, or the error in its place."""
    got = server.chat("tell me more", **SAMPLED).json()
    return got["choices"][0]["message"]["content"] if "choices" in got else got["error"]


def test_a_server_over_three_hosts_writes_the_texts_of_run_pipe_whatever_becomes_of_its_boards(
        rank_0, boards, keys, place, text):
    running = boards()
    environment = dict(os.environ)
    with live(f"model_dir={place / 'board0'}", *keys, "max_requests=1", "queue=7") as server:
        assert health(server) == (200, "") and answered(server) == text
        assert dict(os.environ, TORCHINDUCTOR_CACHE_DIR="") == dict(environment, TORCHINDUCTOR_CACHE_DIR="")

        got = {}  # a board is killed with one request under way and one that waits

        def ask(name, **options):
            got[name] = server.chat("tell me more", **options).json()

        threads = [threading.Thread(target=ask, args=["under way"], kwargs={"max_tokens": 1900}),
                   threading.Thread(target=ask, args=["waiting"], kwargs=SAMPLED)]
        threads[0].start()
        assert wait_until(lambda: any(job.generation is not None for job in list(server.engine.jobs)), 60)
        threads[1].start()
        assert wait_until(lambda: len(server.engine.jobs) == 2, 60)
        running[1].kill()
        lost = f"rank 2 ({HOST}, 127.0.0.1) was lost: its connection broke"
        assert wait_until(lambda: health(server) == (503, lost), 60)
        threads[0].join()
        assert got["under way"]["error"]["message"] == f"the answer is lost: {lost}; try again"
        assert ends(running) == [75, -signal.SIGKILL] and said(place, 1) == f"flowspec: {lost}"
        assert "waiting" not in got
        running = boards()
        threads[1].join()
        assert got["waiting"]["choices"][0]["message"]["content"] == text
        assert health(server) == (200, "")

        os.kill(running[0].pid, signal.SIGSTOP)  # while nobody asks anything
        hung = f"rank 1 ({HOST}, 127.0.0.1) was lost: it has been silent for 2 seconds"
        assert wait_until(lambda: health(server) == (503, hung), 60)
        assert ends(running[1:]) == [75]
        running[0].kill()
        running = boards()
        assert wait_until(lambda: health(server) == (200, ""), 60) and answered(server) == text
    assert ends(running) == [0, 0]


def test_a_server_on_another_board_than_rank_0s_is_announced_with_where_to_start_it(monkeypatch, keys, place, capfd):
    monkeypatch.setenv("NODE_RANK", "1")
    assert main([f"model_dir={place / 'board1'}", "port=0", *keys]) == 2
    assert "this board is rank 1, but requests come from rank 0: start this on the board of rank 0 (127.0.0.1)" in (
        capfd.readouterr().err)


def test_the_words_for_other_boards_have_no_preset_that_nobody_typed(keys, place, monkeypatch):
    opened = []
    monkeypatch.setattr(Pipeline, "open", lambda preset, **options: opened.append(preset))
    for typed in ((), ("toy",)):
        engine, _ = build([*typed, f"model_dir={place / 'board0'}", *keys])
        engine._open_pipeline()
    assert opened == ["", "toy"]
