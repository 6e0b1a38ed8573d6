"""The command scripts.simulate offline: a text by every algorithm, exactly and drawn."""
from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from eval.dsi import cost_model as rounds
from eval.dsi.command import main
from eval.dsi.cost_model import moments
from eval.dsi.counting import recorded, resampled, simulate

NAMES = ["non-SI", "SI", "DSI", "ar", "naive", "pruned", "pipedec", "continuous"]


def rows(shown: str) -> dict[str, list[str]]:
    """The cells of each algorithm, intervals left out."""
    lines = [line for line in shown.splitlines() if line.split(" ")[0] in NAMES]
    return {line.split()[0]: re.sub(r"\[.*\]", "", line).split()[1:] for line in lines}


def test_the_table_has_the_exact_moments_of_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["offline", "c=0.2", "a=0.8", "k=3", "S=60", "num_repeats=400", "stages=4", "hop=0.05"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    found = rows(shown)
    assert list(found) == NAMES and shown.startswith("Simulated: ")
    setting = (1.0, 0.2, 3)
    wanted = {"SI": rounds.si(*setting), "DSI": rounds.dsi(*setting),
              "pruned": rounds.pipeline("pruned", *setting, 4, 0.05)}
    for name, decoding in wanted.items():
        exact = moments(decoding, 0.8, 60)
        assert found[name][:2] == [f"{exact.mean[0]:.6g}", f"{exact.deviation[0]:.4g}"]
        assert abs(float(found[name][6])) < 4, "drawn texts are off by so many standard errors"
    assert found["non-SI"] == ["60", "0", "1", "1.000", "60", "0", "-", "60"]
    assert float(found["ar"][0]) == pytest.approx(60 * 1.15)
    assert main([*words, "accounting=original"]) == 0
    original = rows(capsys.readouterr().out)
    assert original["SI"][:4] == found["SI"][:4] and float(original["DSI"][0]) > float(found["DSI"][0])
    assert main(words) == 0 and rows(capsys.readouterr().out) == found, "the same seed draws the same"


def test_the_original_accounting_draws_what_the_published_simulator_draws(capsys: pytest.CaptureFixture[str]) -> None:
    """Its sanity run, of 5 texts of 1000 tokens with seed 42, gives about 322 for SI and 219 for DSI."""
    assert main(["offline", "accounting=original", "num_repeats=5"]) == 0
    found = rows(capsys.readouterr().out)
    assert (found["SI"][4], found["SI"][-1]) == ("322.24", "215")
    assert (found["DSI"][4], found["DSI"][-1]) == ("219.18", "247.2")
    for acceptance, cost in (("0", "40"), ("1", "4.9")):
        assert main(["offline", "accounting=original", "num_repeats=2", "S=40", f"a={acceptance}"]) == 0
        assert rows(capsys.readouterr().out)["DSI"][4] == cost


def test_traces_take_the_place_of_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = tmp_path / "matches.json"
    matches = [[1] * 9 + [0]] * 3 + [[True, False]]
    traces.write_text(json.dumps([*matches, []]))
    assert main(["offline", f"traces={traces}", "block=10", "S=100", "num_repeats=300", "random_seed=3"]) == 0
    shown = capsys.readouterr().out
    assert "a=0.875" in shown and "in blocks of 10 out of 4 traces" in shown
    found = rows(shown)
    texts = resampled([np.array(text, dtype=bool) for text in matches], 10, 100, 300, seed=3)
    for name, decoding in (("SI", rounds.si(1.0, 0.1, 5)), ("DSI", rounds.dsi(1.0, 0.1, 5))):
        costs = simulate(decoding, recorded(texts), 100, 300).costs
        assert found[name][0] == f"{moments(decoding, 0.875, 100).mean[0]:.6g}"
        assert found[name][4:6] == [f"{costs.mean():.6g}", f"{costs.std():.4g}"]
        low, high = np.percentile(costs, [2.5, 97.5])
        assert f"[{low:.6g}, {high:.6g}]" in shown


@pytest.mark.parametrize("form", ["png", "svg"])
def test_a_picture_is_drawn(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / f"costs.{form}"
    assert main(["offline", "S=30", "num_repeats=20", f"picture={picture}"]) == 0
    assert picture.stat().st_size > 5000 and f"drawn: {picture}" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    ("accounting=exact", "choose one of corrected, original"), ("hop=-1", "give 0 for no time or a number from"),
    ("stages=-1", "give 0 for as many as DSI has servers"), ("block=0", "give a number from 1"),
    ("k=1", "are too few for k=1"), ("picture=costs.txt", "name a file that ends in .png or .svg"),
    ("traces=nowhere.json", "there is no file"),
    ("traces=x num_repeats=1000000", "give num_repeats=200000 or less"), ("S=20001", "give S=20000 or less"),
])
def test_a_mistake_is_one_sentence(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offline", *words.split()]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.parametrize("text", ["[]", "[[]]", "[1, 0]", '{"a": [1]}', "[[2]]", '["MX"]'])
def test_a_file_without_matches_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = tmp_path / "matches.json"
    traces.write_text(text)
    assert main(["offline", f"traces={traces}"]) == 2
    assert "holds no matches: write a JSON list" in capsys.readouterr().err
