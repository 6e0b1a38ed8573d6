"""Ablations change the time that a text takes, never the text; and a sweep is its points, a table and a plot."""
from __future__ import annotations

import io
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest

from config.cli import parse
from config.presets import ROOT
from config.run_config import RunConfig
from eval import sweep as command
from eval.command import SWEEP_POINT
from eval.keys import EvalConfig, words
from eval.sweep import SWEEPS, commands
from eval.sweep import write as write_sweep
from model.drafts.network import at_once
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.requests import RequestTarget
from tests.checkpoints import refused
from tests.sources import project_text
from tests.test_report import csv_rows, put
from tests.tiny import TINY, TREE, Oracle, pipeline, write

PROMPT = [5, 17, 40, 3, 28, 11, 9, 50, 2]
NEW = 12
SAMPLER = Sampler(1.0, seed=4)
WITHOUT_EXPAND = replace(TREE, expand=replace(TREE.init, nodes=0, depth=0))
NO_IDLE_GROWTH = replace(TREE.idle, nodes=0, depth=0)
OFF = {
    "score_order": replace(TREE, best_first=False),
    "expand": WITHOUT_EXPAND,
    "none_expand": replace(TREE, idle=NO_IDLE_GROWTH),
    "both": replace(WITHOUT_EXPAND, idle=NO_IDLE_GROWTH),
}


@pytest.mark.parametrize("oracle", [False, True])
@pytest.mark.parametrize("name", OFF)
def test_without_score_order_or_expansion_the_text_stays(name, oracle):
    for strategy in ("pruned", "continuous"):
        draft = Oracle(PROMPT + TINY.text(PROMPT, NEW, SAMPLER)) if oracle else TINY.twin(noise=0.02)
        with pipeline(TINY, 3, strategy, draft, OFF[name]) as decoder:
            assert write(decoder, PROMPT, NEW, SAMPLER) == TINY.text(PROMPT, NEW, SAMPLER)


@pytest.mark.parametrize("strategy", ["serial", "naive", "pruned", "continuous", "pipedec"])
def test_without_pruning_the_text_stays_and_all_that_was_sent_comes_back(strategy, monkeypatch):
    with pipeline(TINY, 3, strategy, TINY.twin(noise=0.05),
                  replace(TREE, prunes=False)) as decoder:
        sent, back = [], []
        send, record = RequestTarget.send, RequestTarget._record_features
        monkeypatch.setattr(RequestTarget, "send",
                            lambda own, nodes: (sent.append(list(nodes)), send(own, nodes)))
        monkeypatch.setattr(
            RequestTarget, "_record_features",
            lambda own, returned: (back.append(returned.segment.nodes), record(own, returned)))
        for sampler in (SAMPLER, Sampler()):
            assert write(decoder, PROMPT, NEW, sampler) == TINY.text(PROMPT, NEW, sampler)
            assert back == sent[:len(back)]
            sent.clear(), back.clear()
        assert not any(stage.caches for stage in decoder.stages)


def test_guesses_are_cut_best_first_or_as_they_were_drafted():
    for best_first in (True, False):
        tree = TokenTree([1], max_tokens=9, best_first=best_first)
        poor = tree.add(tree.tip, 2, -3.0)
        good = tree.add(tree.tip, 3, -1.0)
        below = tree.add(good, 4, -2.0)
        assert tree.cut()[1:] == ([good, below, poor]
                                  if best_first else [poor, good, below])


def test_a_growth_of_no_guesses_drafts_nothing():
    tree = TokenTree(PROMPT, max_tokens=60)
    draft = TINY.twin()
    tree.cut()
    assert not at_once(draft.grow(tree, RunConfig(ablate="expand").tree.expand))
    assert not tree.live
    assert at_once(draft.grow(tree, TREE.expand))


def test_the_switches_reach_what_strategies_know():
    assert RunConfig().tree.best_first and not RunConfig(ablate="score_order").tree.best_first
    off = RunConfig(ablate="expand", init_total_token=33, subseq_token=7, expand_total_token=55).tree
    assert off.expand.nodes == off.expand.depth == 0
    assert off.expand.segment == 7 and off.init.nodes == 33
    assert RunConfig(expand_total_token=55).tree.expand.nodes == 55


@pytest.mark.parametrize("name", SWEEPS)
def test_every_point_of_a_sweep_is_a_different_evaluation_that_can_be_asked_for(name):
    folder, points = commands(name, SWEEPS[name], [])
    configs = [parse(words("emulated", argv), keys_class=EvalConfig) for argv in points.values()]
    assert folder == ROOT / "results" / "sweeps" / name
    assert len({config.results for config in configs}) == len(configs)
    assert len({replace(config, results="any") for config in configs}) == len(configs)
    assert all(config.run.cluster and config.run.max_new_tokens == 64 for config in configs)


def test_what_a_person_says_counts_but_for_what_is_varied(tmp_path):
    argv = ["toy", "methods=continuous", "questions=1", f"results={tmp_path}"]
    folder, points = commands("bandwidth", SWEEPS["bandwidth"], argv)
    assert folder == tmp_path and list(points) == ["125", "250", "500", "1000"]
    config = parse(words("emulated", points["250"]), keys_class=EvalConfig)
    assert (config.methods, config.run.questions, config.run.wires) == ("continuous", "1", "250")
    assert config.results == str(tmp_path / "250") and config.sets == "mt_bench,gsm8k"
    with refused("wires is what bandwidth varies: leave wires=5 out"):
        commands("bandwidth", SWEEPS["bandwidth"], ["wires=5"])


def test_every_sweep_stands_in_the_table_of_figures():
    rows = [line.split("|")[2] for line in project_text("docs/figures.md").splitlines()
            if line.startswith("|") and "-m scripts.sweep" in line]
    listed = {word.strip("`,") for row in rows for word in row.split()}
    assert SWEEPS.keys() <= listed


def test_a_sweep_that_is_not_complete_is_a_table_and_a_plot_of_what_is_there(tmp_path):
    for point, seconds in (("125", 4.0), ("500", 2.0)):
        for method, times in (("naive", 2), ("continuous", 1)):
            put(tmp_path / point, method=method, tokens=(16,),
                seconds=(seconds * times,), token_ids=[[1, 2]])
    put(tmp_path / "500", method="continuous", question=2, tokens=(16,),
        seconds=(2.0,), token_ids=[[3]])
    put(tmp_path / "500", method="naive", question=2, tokens=(16,),
        seconds=(4.0,), token_ids=[[4]])
    screen = io.StringIO()
    text = write_sweep(tmp_path, "bandwidth", SWEEPS["bandwidth"], screen).read_text(encoding="utf-8")
    shown_rows = [line.split() for line in screen.getvalue().splitlines()]
    assert [row for row in shown_rows if row[:1] in (["method"], ["naive"], ["continuous"])] == [
        ["method", "125", "250", "500", "1000"],
        ["naive", "2.00", "–", "4.00", "–"],
        ["continuous", "4.00", "–", "8.00", "–"]]
    assert "(emulated, profile jetson-7b)" in screen.getvalue() and "png" not in screen.getvalue()
    assert "(emulated, profile jetson-7b)" in text and "Missing: 250, 1000." in text
    assert "| naive | 2.00 | – | 4.00 | – |" in text and "| continuous | 4.00 | – | 8.00 | – |" in text
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    rows = {(row["point"], row["method"]): row for row in csv_rows(tmp_path / "sweep.csv")}
    assert len(rows) == 4 and rows["500", "continuous"]["sr_naive"] == "2"
    assert rows["125", "naive"]["equal"] == "same"
    assert sorted(row["equal"][:13] for row in rows.values()) == ["1 of 2 differ", "same", "same", "same"]


def test_an_ablation_is_bars_and_one_without_answers_a_sentence(tmp_path):
    with refused("has no answers at any point"):
        write_sweep(tmp_path, "ablation", SWEEPS["ablation"])
    put(tmp_path / "score_order", method="continuous")
    put(tmp_path / "nothing", method="continuous", seconds=(1.0,))
    put(tmp_path / "nothing", method="continuous", set="edits", seconds=(0.1,))  # in no mean
    text = write_sweep(tmp_path, "ablation", SWEEPS["ablation"]).read_text(encoding="utf-8")
    assert "| continuous | 10.00 | 5.00 | – | – | – |" in text and (tmp_path / "sweep.png").is_file()


@pytest.mark.parametrize("words, message", [
    (["results="], "results is empty: name a folder"), (["ablate=thrift"], "ablate is what prune varies")])
def test_a_sweep_that_cannot_be_is_reported_before_its_first_point(monkeypatch, sentence_of, words, message):
    monkeypatch.setattr("eval.points.subprocess.Popen", lambda *_: pytest.fail("a point was begun"))
    assert message in sentence_of(command.main, ["prune", *words])


def test_the_help_of_a_sweep_is_that_of_the_evaluation_once(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("eval.sweep.evaluate_point", lambda words: asked.append(words) or 0)
    assert command.main(["prune", "toy", "--help"]) == 0
    assert asked == [["toy", "--help"]] and capsys.readouterr().out.startswith("prune: pruning of rows that died")


def test_the_evaluations_of_a_sweep_know_that_they_are_its_points(tmp_path, monkeypatch):
    marks = []
    monkeypatch.setattr("eval.points.signal.signal", lambda *_: None)
    monkeypatch.setattr("eval.points.subprocess.Popen", lambda *_, env: (
        marks.append(env[SWEEP_POINT]) or nullcontext(Mock(returncode=0))))
    assert command.main(["prune", f"results={tmp_path}"]) == 2, "no point has answers"
    assert marks == ["true", "true"]


@pytest.mark.parametrize("ended, code", [(2, 2), (-9, 137)])
def test_a_point_that_fails_ends_the_sweep_and_alone_says_why(tmp_path, monkeypatch, capsys, ended, code):
    monkeypatch.setattr("eval.points.signal.signal", lambda *_: None)
    monkeypatch.setattr("eval.points.subprocess.Popen", lambda *_, **__: nullcontext(Mock(returncode=ended)))
    assert command.main(["prune", f"results={tmp_path}"]) == code
    assert capsys.readouterr().err == ""
