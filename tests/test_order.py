"""Figures in virtual time, which depend on the question and on who answers it, and on nothing that came before."""
from shutil import copytree

import pytest

from config.cli import parse
from config.profiles import PROFILES
from eval.command import evaluate
from eval.keys import EvalConfig
from eval.results import read_answers
from pipeline.trace import OFF
from sim.clock import EVEN_FROM, VirtualClock
from sim.cluster import Cluster
from sim.stages import StageShare, work_of
from tests.checkpoints import refused
from tests.json_files import save_json_lines
from tests.test_virtual import paths, segment

ASKED = ["what is it?", "where is it? where is it?"]
OTHERS = ("tstamp", "launch", "requests")  # what is another at every start


@pytest.fixture
def ask(saved, tmp_path, monkeypatch):
    """The answers to some questions by two methods over wires that jitter, in the order in which they were written."""
    monkeypatch.setattr("eval.evaluation.WARM_UP", 2)
    monkeypatch.setattr("eval.command.report", lambda folder, screen: f"{folder}/report.md")

    def ask(results, methods="continuous,streaming", questions=ASKED):
        numbered = ({"question_id": ASKED.index(words), "category": "", "turns": [words]} for words in questions)
        save_json_lines(tmp_path / "asked.jsonl", numbered)
        words = (f"results={tmp_path / results}", f"methods={methods}", f"data={tmp_path}", "sets=asked",
                 f"model_dir={saved / '0+2+2'}", "time=virtual", "profile=wifi", "temperatures=0", "draft=eagle+suffix",
                 "max_new_tokens=8", "template=none", "dtype=float64", "ignore_eos=true")
        assert evaluate("emulated", words) == 0
        found = (line for path in tmp_path.glob(f"{results}/answers/*/*.jsonl") for line in read_answers(path))
        return sorted(found, key=lambda line: line["tstamp"])

    return ask


def figures(answers):
    """All that is said of each answer, by method and question, but when it was made."""
    return {(line["method"], line["question_id"]): {name: line[name]
                                                    for name in line if name not in OTHERS}
            for line in answers}


def test_an_evaluation_that_is_resumed_after_any_answer_has_the_figures_of_one_that_was_not(ask, tmp_path):
    whole = ask("whole")
    assert len(whole) == 4
    for count in (1, 2, 3):  # in a method, between two and before the last
        folder = copytree(tmp_path / "whole", tmp_path / f"cut{count}")
        for path in folder.glob("answers/*/*.jsonl"):
            save_json_lines(path, (line for line in whole[:count] if line["method"] == path.parent.name))
        assert figures(ask(folder.name)) == figures(whole), count


def test_the_order_of_questions_and_methods_changes_no_figure(ask):
    whole = figures(ask("whole"))
    assert figures(ask("back", "streaming,continuous", ASKED[::-1])) == whole
    assert figures(ask("alone", "streaming", ASKED[1:])).items() <= whole.items()


def test_a_cluster_that_restarts_draws_the_same_jitter_and_has_forgotten_what_the_target_said():
    clock, known = VirtualClock(EVEN_FROM), paths()
    wifi = PROFILES["wifi"]
    work = work_of(wifi, StageShare([1], 1.0))
    cluster = Cluster(wifi, clock, [[work]], known, [OFF] * 2)
    [link] = cluster.links

    def spent(request):
        begin = clock.now()
        for first in (0, 3):
            link.send(segment(first, 3, request))
            link.recv()
        return clock.now() - begin

    first = spent(0)
    assert spent(1) != first
    cluster.restart(True)
    assert known.after(known.root, 30) == 0, "rows were computed together"
    assert spent(2) == first
    link.defer()
    cluster.restart(True)
    assert known.after(known.root, 31) == 7, "each row is computed by itself"
    cluster.restart(False)
    assert known.after(known.root, 31) == 0


def test_what_begins_at_a_whole_second_takes_the_same_time_to_the_last_bit():
    clock, took = VirtualClock(EVEN_FROM), []
    for _ in range(3):
        clock.even()
        begin = clock.now()
        clock.sleep_until(begin + 3 * 2.0 ** -35)  # between two doubles
        took.append(clock.now() - begin)
        clock.sleep_until(clock.now() + 0.1)
    assert took[0] == took[1] == took[2] and begin == EVEN_FROM + 3


@pytest.mark.parametrize("key", [["reuse=true"], ["answers=FILE", "draft=eagle+suffix"]])
def test_what_carries_from_answer_to_answer_is_refused(key):
    with refused("is a key of single runs: leave it out"):
        parse(key, keys_class=EvalConfig)
