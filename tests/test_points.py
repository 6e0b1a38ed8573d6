"""Points of a sweep over several workers: the same results, whatever the order, and a lost worker loses nothing."""
from __future__ import annotations

import re
import signal
from contextlib import suppress
from functools import partial
from threading import Barrier, Event

import pytest

from config.keys import raw_values
from eval import points, sweep
from eval.command import evaluate
from eval.points import LOG_NAME, evaluate_points, workers_of
from tests.checkpoints import refused
from tests.test_push import save_program

KEYS = ["toy", "profile=jetson-7b", "time=virtual", "methods=ar,serial", "draft=eagle", "baseline_draft=", "sets=qa",
        "temperatures=0", "questions=1", "max_new_tokens=8"]


@pytest.fixture(autouse=True)
def handlers():
    """Hands the handlers of Ctrl-C and SIGTERM back to pytest."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def points_in(folder):
    return {f"seed {seed}": [*KEYS, f"seed={seed}", f"results={folder / str(seed)}"] for seed in (1, 2)}


def figures(folder):
    """The answers of all points, without the moment and the name of their start."""
    lines = [path.read_text() for path in sorted(folder.glob("*/summary.csv"))]
    assert len(lines) == 2
    return lines


def test_several_points_at_once_have_their_own_logs_and_are_counted(tmp_path, monkeypatch, output_of):
    monkeypatch.setattr(points, "evaluate_point", lambda words, log_file: log_file.write(raw_values(words)["seed"]) * 0)
    assert "here: 2 of 2 points are done" in output_of(evaluate_points, "here", points_in(tmp_path), 2)
    assert [(tmp_path / seed / LOG_NAME).read_text() for seed in "12"] == ["1", "2"]


def test_a_point_whose_process_is_killed_is_evaluated_again(tmp_path, monkeypatch):
    exit_codes = iter([137, 0, 137, 137, 137])
    monkeypatch.setattr(points, "evaluate_point", lambda *_: next(exit_codes))
    [first, second] = points_in(tmp_path).items()
    assert evaluate_points("here", dict([first]), 2) == 0
    assert evaluate_points("here", dict([second]), 2) == 137, "not for ever"


def test_a_point_that_fails_ends_the_command_and_its_log_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(points, "evaluate_point", lambda *_: 2)
    assert evaluate_points("here", points_in(tmp_path), 2) == 2
    assert re.search(rf"seed [12] has failed: {tmp_path}/[12]/{LOG_NAME} says why", capsys.readouterr().err)


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
        assert evaluate_points("here", words, 2) == failure
    assert sorted(begun) == ["0", "1"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_sigterm_ends_the_evaluations_and_so_the_sweep(tmp_path, monkeypatch, num_workers):
    """An evaluation of this test sends it to the sweep, and then waits."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    monkeypatch.setattr(points, "is_stopping", Event())
    save_program(tmp_path / "python", "#!/bin/sh\nkill -TERM $PPID\nexec sleep 60\n")
    monkeypatch.setattr(points.sys, "executable", str(tmp_path / "python"))
    assert evaluate_points("here", points_in(tmp_path), num_workers) == 128 + signal.SIGTERM

    save_program(tmp_path / "python", "#!/bin/sh\nexec sleep 60\n")
    assert evaluate_points("here", points_in(tmp_path), num_workers) == 128 + signal.SIGTERM, "it came between points"
    assert not points.under_way


def test_both_forms_of_a_key_are_understood(monkeypatch, tmp_path):
    evaluated = []

    def evaluate(title, points, workers):
        evaluated.append((workers, points))
        return 1

    monkeypatch.setattr(sweep, "evaluate_points", evaluate)
    sweep.main(["depth", "toy", "--workers", "3", "--results", str(tmp_path)])
    [(workers, found)] = evaluated
    assert workers == 3
    assert all(raw_values(words)["results"].startswith(str(tmp_path)) for words in found.values())


def test_several_workers_have_the_results_of_one(tmp_path, monkeypatch):
    assert evaluate_points("two", points_in(tmp_path / "two"), 2) == 0
    monkeypatch.setattr(points, "evaluate_point", partial(evaluate, "emulated"))
    assert evaluate_points("one", points_in(tmp_path / "one"), 1) == 0
    assert figures(tmp_path / "one") == figures(tmp_path / "two")


@pytest.mark.parametrize("value", ["0", "x", "", "257", "1.5", "-1", "ray"])
def test_impossible_workers_are_refused(value):
    with refused("workers=", " is not possible: give a number from 1 to 256"):
        workers_of([f"workers={value}"])
    assert workers_of(["toy", "workers=2", "seed=1"]) == (2, ["toy", "seed=1"])
    with refused("workers is given twice: leave one of them out"):
        workers_of(["workers=2", "workers=8"])
