"""Workers: boards that take part in every run of rank 0 with the keys that only rank 0 was given."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.agreement import adopted, settings
from cluster.board import WORKER_VARIABLE
from config.cli import parse
from config.presets import ROOT
from eval.bench.places import make_keys
from tests.checkpoints import refused
from tests.saved import answer_of, token_ids, wait_until
from tests.test_hosts import ASK, ends, errors_of, meet_here, own, reference, start

__all__ = ["own", "start"]  # fixtures
OTHER_ASK = ("prompt_ids=9,2", "max_new_tokens=7", "temperature=0", "ignore_eos=true", "dtype=float32",
             "pipeline_type=naive", "draft=suffix")


@pytest.fixture
def workers(own, tmp_path):
    """Ranks 1 and 2, as bash run_worker.sh starts them; the words of rank 0's rendezvous."""
    rendezvous_words = meet_here(tmp_path / "meeting")
    started = []
    for rank in (1, 2):
        log = (tmp_path / f"worker{rank}").open("w")
        environment = {**os.environ, "NODE_RANK": str(rank), "PYTHON": sys.executable}
        words = ["bash", str(ROOT / "run_worker.sh"), *rendezvous_words[:rank + 1], f"model_dir={own / f'board{rank}'}"]
        started.append(subprocess.Popen(words, env=environment, cwd=ROOT, stdout=log, stderr=log))
    yield started, rendezvous_words
    for worker in started:
        worker.kill()
        worker.wait()


def test_workers_take_part_in_one_run_after_the_other(workers, start, saved, tmp_path):
    started, rendezvous_words = workers
    for number, words in enumerate((ASK, OTHER_ASK)):
        output = tmp_path / f"answer{number}.json"
        root = start(0, rendezvous_words[0], rendezvous_words[1], "wait=60", *words, f"output={output}")
        assert ends([root]) == [0], errors_of(tmp_path, 0)
        assert token_ids(output) == answer_of(tmp_path, f"model_dir={saved / '0+2+2'}", *words)["token_ids"]

    for rank, worker in enumerate(started, 1):
        log = tmp_path / f"worker{rank}"
        assert wait_until(lambda log=log: log.read_text().count("waits for the next run of rank 0") >= 2, 60)
        worker.terminate()
        assert worker.wait(60) == 130
        assert log.read_text().strip().endswith("flowspec: this worker is stopped")
        assert "Traceback" not in log.read_text()


def test_workers_without_a_folder_receive_their_parts_from_rank_0(start, saved, tmp_path):
    meeting, output = tmp_path / "meeting", tmp_path / "out.json"
    rendezvous_words = meet_here(meeting)
    if not make_keys(meeting):
        pytest.skip("openssl is missing, which makes keys")
    words = [[*rendezvous_words, f"keys={meeting / 'keys' / str(rank)}"] for rank in range(3)]
    environment = {WORKER_VARIABLE: "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    boards = [start(rank, *words[rank], "model_dir=", **environment) for rank in (1, 2)]
    root = start(0, *words[0], f"model_dir={saved / '0+2+2'}", *ASK, f"output={output}")

    assert ends([root, *boards]) == [0, 0, 0], errors_of(tmp_path, 0)
    assert token_ids(output) == reference()
    for rank in (1, 2):
        assert "100 %" in errors_of(tmp_path, rank)


def test_a_worker_adopts_keys_of_a_run_and_keeps_its_machine():
    own = parse(["model_dir=mine", "device=cpu", "threads_per_rank=3", "temperature=1"])
    root = parse(["model_dir=theirs", "temperature=0.5", "max_requests=4", "draft=none", "threads_per_rank=1",
                  "profile=wifi", "slowdown=2"])
    taken = adopted(own, {**settings(root), "unknown": "x"})
    assert (taken.profile, taken.slowdown) == ("wifi", 2)
    assert adopted(own, {**settings(parse(["toy"])), "profile": "their.json"}).profile == "none"
    assert (taken.temperature, taken.max_requests, taken.draft) == (0.5, 4, "none")
    assert (Path(taken.model_dir).name, taken.device, taken.threads_per_rank) == ("mine", "cpu", 3)


@pytest.mark.parametrize("name, value", [("profile", "x.json"), ("answers", "/etc/passwd"), ("trace", "/tmp/x")])
def test_a_worker_opens_no_file_that_rank_0_names(name, value):
    own = parse([])
    assert getattr(adopted(own, {name: value}), name) == getattr(own, name)


def test_a_key_that_is_not_possible_is_named():
    with refused("temperature=-1.0 is not possible"):
        adopted(parse([]), {"temperature": "-1"})
    with refused("profile=/etc/passwd is unknown"):
        adopted(parse([]), {"profile": "/etc/passwd"})
    assert WORKER_VARIABLE == "FLOWSPEC_WORKER"
