"""The FlowSpec paper's tables beside ours: the published cells, the comparison, and what is refused."""
from __future__ import annotations

import re
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

from config.presets import ROOT
from eval.flowspec import paper
from eval.flowspec.paper import (
    CellFigures,
    depth_points,
    evaluations,
    main,
    show_bandwidth,
    show_depths,
    show_table,
    table_points,
)
from eval.flowspec.published import PROFILES, bandwidth_table, depth_table, known_reasons, main_table
from eval.keys import SETS
from tests.sources import project_text
from tests.test_report import csv_rows

RECORDED_FILE = ROOT / "docs" / "results" / "paper.csv"


def test_the_published_tables_are_whole():
    cells = main_table()
    assert len(cells) == len(set(cells)) == 192
    assert {cell.data_set for cell in cells} == set(SETS.split(","))
    by_place = {(cell.model, cell.temperature, cell.method, cell.data_set): (cell.xi, cell.sr) for cell in cells}
    assert by_place["llama2-7b", 0, "continuous", "mt_bench"] == (9.65, 1.44)
    assert by_place["vicuna-13b", 1, "naive", "qa"] == (0.97, 1.00)
    assert all(cell.sr == 1 for cell in cells if cell.method == "naive")

    assert len(bandwidth_table()) == 20 and bandwidth_table()["continuous", "125"] == 8.76
    for model in ("llama2-7b", "vicuna-7b"):
        grid = depth_table(model)
        assert len(grid) == 36 and max(grid, key=grid.__getitem__) == (5, 5)


@pytest.fixture
def faster(monkeypatch):
    """Answers of ours that are a fifth faster than the paper's means, but for naive."""
    def figures_of(results, method, data_set, temperature):
        xi_by_place = {(cell.size, cell.temperature, cell.method, cell.data_set): cell.xi for cell in main_table()}
        xi = xi_by_place[results.size, temperature, method, data_set] * (1 if method == "naive" else 1.2)
        return CellFigures(xi, 1.0)

    monkeypatch.setattr(paper, "_figures_of", figures_of)
    monkeypatch.setattr(paper, "read", lambda folder: SimpleNamespace(size=folder.name, answers=ANSWERS))


ANSWERS = [{"simulated": True, "emulated": True, "profile": "jetson-7b"}]


def test_the_comparison_has_both_sides_and_a_reason_for_each_difference(faster, tmp_path):
    page = "\n".join(show_table(tmp_path))
    assert page.count("\n## ") + page.startswith("## ") == 8, "four models at two temperatures"
    assert "| continuous | paper | 9.65 | 10.14 | 8.92 | 8.84 | 6.78 | 7.85 | 8.70 | 1.43 |" in page
    assert page.count("; here: simulated, profile jetson-7b, one model for 7b)") == 4
    assert re.search(r"\n- pipedec: xi \+\d\d%, SR \+\d\d%: measured: in the original all ranks wait", page)
    assert "no reason known" not in page and "- naive" not in page

    rows = csv_rows(tmp_path / "paper.csv")
    assert len(rows) == 192 and rows[0]["xi_paper"] == "6.69"


def test_bandwidth_and_depths_are_shown_with_the_best_cell(monkeypatch, tmp_path):
    monkeypatch.setattr(paper, "read", lambda folder: SimpleNamespace(name=folder.name, answers=ANSWERS))
    monkeypatch.setattr(paper, "_figures_of", lambda own, *_: CellFigures(len(own.name) + own.name.count("7"), 1.0))
    page = "\n".join(show_bandwidth(tmp_path))
    assert "| continuous | paper | 8.76 | 9.13 | 9.35 | 9.44 |" in page and "|  | here | 13.00 |" in page
    page = "\n".join(show_depths(tmp_path))
    assert "best: init_depth=7, expand_depth=7" in page and "| 7 | 11.00 | 11.00 | 11.00 | 11.00 | **12.00** |" in page
    assert "llama2-7b; best: init_depth=5, expand_depth=5" in page and "**9.65**" in page


def test_a_reason_names_a_size_and_a_method_of_the_table():
    published = {(cell.size, cell.method) for cell in main_table()}
    assert known_reasons().keys() == published
    assert all(reason.startswith(("untested: ", "measured: ")) for reason in known_reasons().values())


def test_the_recorded_comparison_is_of_the_published_cells():
    rows = csv_rows(RECORDED_FILE)
    assert [(row["model"], row["method"], row["set"], float(row["xi_paper"])) for row in rows] == [
        (cell.model, cell.method, cell.data_set, cell.xi) for cell in main_table()]


def mean_and_ratio(rows, size, method, temperature, column):
    """A cell of results.md: the mean over the sets, and its ratio to that of naive."""
    means = {}
    for name in (method, "naive"):
        places = [row for row in rows if row["model"] == size and row["temperature"] == temperature]
        means[name] = mean(float(row[column]) for row in places if row["method"] == name)
    return f"{means[method]:.2f} ({means[method] / means['naive']:.2f})"


def test_the_figures_of_the_page_are_those_of_the_recorded_comparison():
    rows = csv_rows(RECORDED_FILE)
    page = project_text("docs/results.md")
    section = page.partition("## Compared with the paper")[2].partition("\n## ")[0]
    size, num_lines = "", 0
    for label, temperature, *cells in re.findall(r"^\| (.*`.*) \| ([01]) \| (.*) \| (.*) \| (.*) \|$", section, re.M):
        size = label.partition("B: ")[0].lower() + "b" if "B: " in label else size
        method = re.search("`(.*)`", label)[1]
        assert cells == [mean_and_ratio(rows, f"{model}-{size}", method, temperature, column) for model, column in
                         (("llama2", "xi_paper"), ("vicuna", "xi_paper"), ("llama2", "xi_here"))], label
        num_lines += 1
    assert num_lines == 10


def test_keys_replace_defaults_but_not_what_the_table_fixes(sentence_of, output_of):
    [words, _] = evaluations(table_points(), ["questions=1", "seed=4"], Path("/folder")).values()
    assert {"toy", "questions=1", "seed=4", "init_depth=5", "profile=jetson-7b", "results=/folder/7b"} <= set(words)
    assert len(evaluations(depth_points(), [], Path("/folder"))) == 36
    for words, sentence in ((["profile=wifi"], "profile is fixed by the paper's table"),
                            (["tabel"], "did you mean table?"),
                            (["depths", "init_depth=3"], "init_depth is fixed by the paper's table")):
        assert sentence in sentence_of(main, words)
    assert "simulated" in output_of(main, ["--help"])
    assert list(PROFILES) == ["7b", "13b"]
