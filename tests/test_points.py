"""Points of a sweep over several workers: the same results, whatever the order, and a lost worker loses nothing."""
from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from contextlib import suppress
from threading import Barrier
from types import SimpleNamespace

import pytest

from config.failure import PeerLost
from config.keys import raw_values
from config.presets import ROOT
from eval import points, sweep
from eval.points import LOG_NAME, evaluate_points, workers_of, write_files

KEYS = ["toy", "profile=jetson-7b", "time=virtual", "methods=ar,serial", "draft=eagle", "baseline_draft=", "sets=qa",
        "temperatures=0", "questions=1", "max_new_tokens=8"]


@pytest.fixture(autouse=True)
def handler():
    """Hands the handler of Ctrl-C back to pytest."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def points_in(folder):
    return {f"seed {seed}": [*KEYS, f"seed={seed}", f"results={folder / str(seed)}"] for seed in (1, 2)}


def figures(folder):
    """The answers of all points, without the moment and the name of their start."""
    lines = [path.read_text() for path in sorted(folder.glob("*/summary.csv"))]
    assert len(lines) == 2
    return lines


def test_several_points_at_once_have_their_own_logs_and_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(points, "evaluate_point", lambda words, log_file: log_file.write(raw_values(words)["seed"]) * 0)
    assert evaluate_points("here", points_in(tmp_path), "2") == 0
    assert "here: 2 of 2 points are done" in capsys.readouterr().out
    assert [(tmp_path / seed / LOG_NAME).read_text() for seed in "12"] == ["1", "2"]


def test_a_point_whose_process_is_killed_is_evaluated_again(tmp_path, monkeypatch):
    exit_codes = iter([137, 0, 137, 137, 137])
    monkeypatch.setattr(points, "evaluate_point", lambda *_: next(exit_codes))
    [first, second] = points_in(tmp_path).items()
    assert evaluate_points("here", dict([first]), "2") == 0
    assert evaluate_points("here", dict([second]), "2") == 137, "not for ever"


def test_a_point_that_fails_ends_the_command_and_its_log_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(points, "evaluate_point", lambda *_: 2)
    assert evaluate_points("here", points_in(tmp_path), "2") == 2
    assert re.search(rf"seed [12] has failed: {tmp_path}/[12]/{LOG_NAME} says why", capsys.readouterr().err)


class FakeRay:
    """As much of ray as is used, in this process."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def init(self, runtime_env, log_to_driver):
        assert runtime_env["working_dir"] == str(ROOT)

    def shutdown(self):
        pass

    def remote(self, max_retries):
        return lambda function: SimpleNamespace(remote=lambda *arguments: Task(function(*arguments)))

    def wait(self, tasks):
        return tasks[-1:], tasks[:-1]

    def get(self, task):
        return task.value


class Task:
    """A task that has ended."""

    def __init__(self, value):
        self.value = value


def test_results_of_a_ray_cluster_are_written_here(tmp_path, monkeypatch):
    def write_answers(words, log_file):
        folder, seed = (raw_values(words)[name] for name in ("results", "seed"))
        assert not folder.startswith(str(tmp_path)), "a worker has a folder of its own"
        os.makedirs(f"{folder}/answers")
        with open(f"{folder}/answers/{seed}.jsonl", "w") as file:
            file.write(" ".join(words[:2]))
        return 0

    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    monkeypatch.setattr(points, "evaluate_point", write_answers)
    assert evaluate_points("there", points_in(tmp_path), "ray") == 0
    assert (tmp_path / "2" / "answers" / "2.jsonl").read_text() == "toy profile=jetson-7b"


@pytest.mark.parametrize("exit_code", [0, 2])
def test_a_worker_of_a_ray_cluster_continues_after_the_results_that_exist(tmp_path, monkeypatch, exit_code):
    def add_answer(words, log_file):
        folder = raw_values(words)["results"]
        with open(f"{folder}/answers.jsonl", "a") as file:
            file.write("new\n")
        return exit_code

    for seed in "12":
        (tmp_path / seed).mkdir()
        (tmp_path / seed / "answers.jsonl").write_text("earlier\n")
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    monkeypatch.setattr(points, "evaluate_point", add_answer)
    assert evaluate_points("there", points_in(tmp_path), "ray") == exit_code
    assert "earlier\nnew\n" in [(tmp_path / seed / "answers.jsonl").read_text() for seed in "12"]


def test_a_worker_of_a_ray_cluster_that_is_lost_again_and_again_is_named(tmp_path, monkeypatch):
    class LosingRay(FakeRay):
        def get(self, task):
            raise RuntimeError("it was\nkilled")

    monkeypatch.setitem(sys.modules, "ray", LosingRay())
    monkeypatch.setattr(points, "evaluate_point", lambda *_: 0)
    with pytest.raises(PeerLost, match="the worker of point seed [12] was lost: it was.*killed"):
        evaluate_points("there", points_in(tmp_path), "ray")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "Ctrl-C ends the command"


@pytest.mark.parametrize("failure", [130, OSError("the disk is full")], ids=["exit code", "error"])
def test_no_point_begins_after_a_failure(tmp_path, monkeypatch, failure):
    both, begun = Barrier(2), []

    def fail(words, log_file):
        begun.append(raw_values(words)["seed"])
        both.wait(60)
        if isinstance(failure, OSError):
            raise failure
        return failure

    words = {f"seed {seed}": [f"seed={seed}", f"results={tmp_path / str(seed)}"] for seed in range(6)}
    monkeypatch.setattr(points, "evaluate_point", fail)
    with suppress(OSError):
        assert evaluate_points("here", words, "2") == failure
    assert sorted(begun) == ["0", "1"]


def test_both_forms_of_a_key_are_understood(monkeypatch, tmp_path):
    evaluated = []

    def evaluate(title, points, workers):
        evaluated.append((workers, points))
        return 1

    monkeypatch.setattr(sweep, "evaluate_points", evaluate)
    sweep.main(["depth", "toy", "--workers", "3", "--results", str(tmp_path)])
    [(workers, found)] = evaluated
    assert workers == "3"
    assert all(raw_values(words)["results"].startswith(str(tmp_path)) for words in found.values())


@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed")
def test_a_real_ray_cluster_has_the_results_of_this_machine(tmp_path):
    assert evaluate_points("here", points_in(tmp_path / "here"), "1") == 0
    assert evaluate_points("here", points_in(tmp_path / "at once"), "2") == 0
    assert figures(tmp_path / "here") == figures(tmp_path / "at once")
    assert evaluate_points("there", points_in(tmp_path / "there"), "ray") == 0
    assert figures(tmp_path / "here") == figures(tmp_path / "there")


def test_a_file_of_a_worker_stays_in_the_results_folder(tmp_path):
    for name in ("../x", "/etc/x", "a/../../x"):
        with pytest.raises(ValueError, match="does not belong into"):
            write_files(tmp_path / "results", {name: b""})
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("value", ["0", "x", "", "257", "1.5", "-1"])
def test_impossible_workers_are_refused(value):
    with pytest.raises(ValueError, match="workers=.* is not possible: give a number from 1 to 256, or ray"):
        workers_of([f"workers={value}"])
    assert workers_of(["toy", "workers=ray", "seed=1"]) == ("ray", ["toy", "seed=1"])
    with pytest.raises(ValueError, match="workers is given twice: leave one of them out"):
        workers_of(["workers=2", "workers=8"])


def test_without_ray_its_installation_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="workers=ray needs ray on all machines: install it"):
        evaluate_points("there", points_in(tmp_path), "ray")
