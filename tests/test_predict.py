"""Predictions in virtual time beside emulation and closed forms: what is computed, written and refused."""
from __future__ import annotations

import json

import pytest

from config.cli import parse
from config.presets import TOY
from eval.dsi import command as simulate
from eval.dsi.keys import COMMAND
from eval.dsi.predict import CHAINS, NARROW, Pair, PredictConfig, closed_form, predicted, speed, staged, words
from pipeline.decode import Answer

SHORT = ("sets=gsm8k,qa", "max_new_tokens=12", "dtype=float64")


def config_of(*given):
    return parse(words(given), f"{COMMAND} predict", kind=PredictConfig)


@pytest.mark.parametrize("given", [("lookahead=2", "temperature=0.8", "seed=3", "top_k=40"),
                                   ("replicas=2x2", "lookahead=4")], ids=["drawn", "replicas of two stages"])
def test_every_method_predicts_the_text_of_ar_in_a_time_that_repeats(given):
    config = config_of(*SHORT, *given)
    requests = Pair(config).requests
    found = {method: predicted(config, method, requests) for method in CHAINS}
    assert len(requests) == 2
    for answers in found.values():
        assert [one.token_ids for one in answers] == [one.token_ids for one in found["ar"]]
    again = predicted(config, "dsi", requests)
    assert [one.seconds for one in again] == [one.seconds for one in found["dsi"]]
    assert speed(found["ar"]) < min(speed(found["continuous"]), speed(found["dsi"]))


def test_figures_by_hand():
    config = config_of("lookahead=2", "wires=,3", "slowdown=4")
    known = staged(config, 0.75)
    assert known == (240, 14, 0.75, 2, 4, 3)
    assert closed_form(config, "ar", known) == pytest.approx(1e3 / (240 + 3 * 3))
    assert closed_form(config, "serial", known) == pytest.approx(1e3 * (1 + .75 + .75 ** 2) / (240 + 9 + 28))
    assert closed_form(config, "pipedec", known) == pytest.approx(1e3 / (.25 * (240 + 9) + .75 * 60))
    answers = Answer(1, [1, 2, 3], 0.25, 0.75), Answer(1, [4], 0.5)
    assert speed(answers) == pytest.approx(4 / 1.5)


def test_the_acceptance_is_the_share_of_the_text_that_the_drafter_has_too():
    pair = Pair(config_of(*SHORT))
    prompt = pair.requests[0].prompt
    text = []
    for _ in range(6):  # what the drafter itself writes
        read = [*prompt, *text]
        logits = pair.drafter.whole.logits(read, pair.drafter.whole.cache(len(read)), 1)
        text.append(int(logits.argmax()))
    wrong = [text[0], text[1], text[2],
             text[3], (text[4] + 1) % 4096]
    assert pair.acceptance([Answer(len(prompt), text)]) == 1
    assert pair.acceptance([Answer(len(prompt), wrong)]) == 4 / 5


def test_the_command_predicts_without_measuring(tmp_path, capsys):
    output = tmp_path / "out.json"
    given = [*SHORT, "measure=false", "methods=serial,dsi", f"output={output}"]
    assert simulate.main(["predict", *given]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("ar ", "serial ", "dsi "))] == [
        "ar", "serial", "dsi"]
    assert "worst deviation" not in shown
    written = json.loads(output.read_text())
    assert written["predicted"] == "simulated" and written["measured"] is None
    config, figures = config_of(*given), written["tokens_per_second"]
    assert figures["dsi"]["predicted"] == speed(predicted(config, "dsi", Pair(config).requests))
    assert figures["dsi"]["measured"] is None


def test_the_command_measures_what_it_predicts(tmp_path, capsys):
    """With a cluster that is fast forward, since only the form is looked at."""
    output = tmp_path / "out.json"
    given = ["sets=gsm8k", "max_new_tokens=6", "methods=serial,dsi", "slowdown=0.1", f"output={output}"]
    assert simulate.main(["predict", *given]) == 0
    shown = capsys.readouterr().out
    written = json.loads(output.read_text())
    assert written["measured"] == "emulated"
    assert written["other_texts"] == {"ar": 0, "serial": 0, "dsi": 0}
    for figures in written["tokens_per_second"].values():
        assert 0 < figures["measured"] < figures["predicted"]
    assert "worst deviation: predicted +" in shown.splitlines()[-1]


@pytest.mark.parametrize(("word", "message"), [
    ("methods=ar,streaming", "streaming, which drafts no chain"), ("methods=dsi,dsi", "names something twice"),
    ("draft=eagle", "add draft=model"), ("draft_dir=", "the drafter is missing"),
    ("lookahead=auto", "set lookahead to a number"), ("lookahead=0", "lookahead=0 is not possible"),
    ("subseq_token=0", "set subseq_token to a number"), ("profile=none", "profile=jetson-7b"),
    ("time=virtual", "time is a key of single runs: leave it out"), ("pipeline_type=dsi", "write methods="),
    ("stop=x", "stop is a key of single runs"), ("tp=2", "tp is a key of single"), ("trace=x", "trace is a key"),
    ("ignore_eos=true", "ignore_eos is a key of single runs: leave it out"),
    ("sets=", "sets is empty"), ("sets=nothing", "there is no data set nothing"), ("width=2", "give width=1"),
    (f"output={TOY}", "choose another output="),
    ("draft_dir=/nowhere/at/all", "/nowhere/at/all"), ("max_length=9", "in a context of 9")])
def test_what_cannot_be_predicted_is_refused_with_the_fix(word, message, capsys):
    assert simulate.main(["predict", "measure=false", "max_new_tokens=2", word]) == 2
    assert message in capsys.readouterr().err


def test_every_method_drafts_a_chain_of_the_lookahead():
    config = config_of("lookahead=3")
    tree = config.run.tree
    assert (tree.init.width, tree.expand.width, tree.layer.width, tree.coupled.width) == (1, 1, 1, 1)
    assert tree.init.depth == tree.expand.depth == 2 and tree.lookahead == tree.run == 3
    assert tree.init.segment == tree.expand.segment == 3
    assert all(getattr(config.run, key) == float(value) for key, value in NARROW.items())
    assert config_of("lookahead=3", "expand_depth=8").run.tree.expand.depth == 8
