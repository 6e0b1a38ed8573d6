"""The tables of the pages: made by their commands from one commit, and shown as they are recorded."""
from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
from collections import defaultdict

import numpy as np
import pytest

from config.presets import ROOT
from eval import page_tables
from eval.page_tables import RecordedRun, main, recorded_runs, with_tables
from eval.tables import save
from tests.sources import project_text
from tests.test_docs import DOCS, anchor
from tests.test_report import csv_rows

MADE = "bash make.sh {} DIR"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_marked_table_of_a_page_is_that_of_its_file(path):
    page_text = project_text(path)
    assert with_tables(page_text) == page_text
    assert page_text.count("<!-- table: ") == page_text.count("<!-- end -->") == len(
        page_tables.MARKED_TABLE.findall(page_text))


def mean_rows(table):
    """The means over the sets at temperature 0 by method, with the draft of the README."""
    return {row["method"]: row for row in csv_rows(ROOT / "docs" / "results" / f"{table}.csv")
            if (row["set"], row["temperature"]) == ("mean", "0") and row["draft"] in ("none", "eagle+suffix")}


def test_the_raw_answers_of_the_readmes_table_give_its_speeds_and_its_hash():
    raw = gzip.decompress((ROOT / "docs" / "results" / "smollm2-head-answers.jsonl.gz").read_bytes())
    answers = [json.loads(text) for text in raw.splitlines()]
    for method, row in mean_rows("smollm2-head").items():
        by_method = [each for each in answers if each["method"] == method]
        trials = sorted([*(str(each[name]) for name in ("set", "temperature", "repeat", "seed", "question_id")),
                         each["token_ids"]] for each in by_method)
        assert hashlib.sha256(json.dumps(trials).encode()).hexdigest()[:12] == row["texts"]

        sums = defaultdict(lambda: np.zeros(2))  # tokens and seconds of each set
        for each in by_method:
            for token_ids, settled in zip(each["token_ids"], each["settled"]):
                sums[each["set"]] += len(token_ids), settled[-1][0]
        speeds = [tokens / seconds for tokens, seconds in sums.values()]
        assert len(speeds) == 6 and np.mean(speeds) == pytest.approx(float(row["xi"]), rel=1e-4)


def test_the_figures_of_the_readme_are_those_of_the_recorded_tables():
    readme = project_text("README.md")
    tables = mean_rows("smollm2-head"), mean_rows("toy")

    ratios = re.findall(r"\*\*(\S+) times(?: as fast as plain pipelined\s+decoding)?\*\*", readme)
    assert ratios == [f"{float(rows['streaming']['sr_ar']):.1f}" for rows in tables]

    figures = re.findall(r"^\| `(\w+)` \|.*\| \**(\S+ \(\S+\))\** \| \**(\S+ \(\S+\))\** \|$", readme, re.M)
    assert len(figures) == 5
    for method, *cells in figures:
        for cell, rows in zip(cells, tables, strict=True):
            speed, naive_speed = (float(rows[name]["xi"]) for name in (method, "naive"))
            assert cell == f"{speed:.2f} ({speed / naive_speed:.2f})", method


def test_the_speeds_of_smollm2_beside_dsi_are_those_of_their_file():
    speeds = {row["method"]: float(row["sr_ar"]) for row in csv_rows(ROOT / "docs" / "results" / "smollm2-dsi.csv")
              if row["set"] == "mean"}
    text = " ".join(project_text("docs/dsi.md").split())
    assert (f"SmolLM2 reaches {speeds['continuous']:.2f} times `ar` by `continuous`, {speeds['serial']:.2f} by "
            f"`serial`, and with chains {speeds['dsi']:.2f} by `dsi`") in text


def test_a_table_has_the_rows_and_columns_that_its_comment_names(tmp_path, monkeypatch):
    monkeypatch.setattr(page_tables, "ROOT", tmp_path)
    (tmp_path / "a.csv").write_text("name,set,xi,xi_low,xi_high,ratio\n"
                                    "a,mean,1.23456,1,2,\nb,mean,99.999,99.999,99.999,1\nc,x,1,1,1,1\nd,y,1,1,1,1\n")
    opening = "<!-- table: a.csv set=mean,x name=a,b,c | name xi ratio -->\n"
    table = "| name | xi | ratio |\n|---|---|---|\n| a | 1.235, 1–2 |  |\n| b | 100 | 1 |\n| c | 1 | 1 |\n"
    for former_table in ("", "| old |\n", table):
        page_text = f"before\n{opening}{former_table}<!-- end -->\nafter"
        assert with_tables(page_text) == f"before\n{opening}{table}<!-- end -->\nafter"


def test_a_table_of_several_files_has_their_rows_in_the_order_of_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(page_tables, "ROOT", tmp_path)
    for name in ("b", "a", "c"):
        (tmp_path / f"ring-{name}.csv").write_text(f"name,xi\n{name},1\n")
    opening, end = "<!-- table: ring-*.csv name=a,b | name -->\n", "<!-- end -->"
    assert with_tables(opening + end) == f"{opening}| name |\n|---|\n| a |\n| b |\n{end}"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a command that makes two tables, one that fails, one that prints, and a table made by hand."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.csv").write_text("name\n")
    (tmp_path / "docs" / "page.md").write_text("<!-- table: docs/one.csv | name -->\n<!-- end -->\n")
    (tmp_path / "make.sh").write_text('echo name >"$2/made.csv"; echo "$1" >>"$2/made.csv"; [ "$1" != wrong ]\n')
    (tmp_path / "print.sh").write_text('echo "$*"; echo progress >&2\n')
    runs = [RecordedRun("docs/one.csv=made.csv docs/two.csv=made.csv", MADE.format("first"), "", "", ""),
            RecordedRun("docs/printed.md=printed", "bash print.sh 'a  page'", "", "", ""),
            RecordedRun("docs/three.csv=made.csv", MADE.format("wrong"), "", "", ""),
            RecordedRun("docs/by_hand.csv", "by hand: an oven", "0123abc", "2026-01-01", "a toaster")]
    save(tmp_path / page_tables.INDEX_FILE, RecordedRun._fields, map(RecordedRun._asdict, runs))
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)

    monkeypatch.setattr(page_tables, "ROOT", tmp_path)
    monkeypatch.setattr(page_tables, "current_commit", lambda: "0123456789abcdef")
    monkeypatch.setattr(page_tables, "processor_name", lambda: "an abacus")
    return tmp_path


def text_in(project, name):
    """What a page or a table of the repository holds."""
    return (project / "docs" / name).read_text()


def test_a_command_makes_all_its_tables_and_the_index_says_from_which_commit(project):
    assert main(["docs/two.csv"]) == 0
    assert text_in(project, "one.csv") == text_in(project, "two.csv") == "name\nfirst\n"
    assert "|---|\n| first |\n" in text_in(project, "page.md")

    one, *others = recorded_runs()
    assert (one.commit, one.processor) == ("01234567", "an abacus") and one.date >= "2026-11-27"
    assert [run.commit for run in others] == ["", "", "0123abc"]
    assert main(["docs/one.csv"]) == 0, "tables that differ from the commit stop no other"
    [folder] = project.glob("results/published/*/*")
    assert folder.name == "docs-one.csv", "the same command continues in its folder"


def test_a_table_may_be_what_its_command_prints(project):
    assert main(["docs/printed.md"]) == 0
    assert text_in(project, "printed.md") == "a  page\n"


def test_a_command_that_fails_is_named_and_what_was_made_before_is_kept(project, capfd):
    assert main([]) == 1
    assert "make.sh wrong DIR has failed" in capfd.readouterr().err
    assert not (project / "docs" / "three.csv").exists()
    assert [run.commit for run in recorded_runs()] == ["01234567", "01234567", "", "0123abc"]
    assert "| first |" in text_in(project, "page.md")


def test_only_the_pages_are_written_on_request(project):
    (project / "docs" / "one.csv").write_text("name\nother\n")
    assert main(["pages"]) == 0
    assert "| other |" in text_in(project, "page.md")
    assert not (project / "results").exists()


@pytest.mark.parametrize("commit, sentence", [("0123", "commit them first"), (None, "run this in a clone")])
def test_tables_of_code_that_is_in_no_commit_are_refused(project, monkeypatch, sentence_of, commit, sentence):
    (project / "make.sh").write_text("# changed")
    monkeypatch.setattr(page_tables, "current_commit", lambda: commit)
    assert sentence in sentence_of(main, ["docs/one.csv"])


@pytest.mark.parametrize("words, exit_code, sentence", [
    (["list"], 0, "docs/by_hand.csv\n    by hand: an oven (0123abc, 2026-01-01, a toaster)"),
    (["--help"], 0, "bash scripts/make_results.sh"),
    (["docs/on.csv"], 2, "did you mean docs/one.csv?"), (["docs/by_hand.csv"], 2, "unknown table docs/by_hand.csv")])
def test_tables_are_listed_and_named(project, capsys, words, exit_code, sentence):
    assert main(words) == exit_code
    assert sentence in "".join(capsys.readouterr())


def test_every_recorded_table_is_in_the_index_with_commit_date_and_processor():
    runs = recorded_runs()
    names = [output.partition("=")[0] for run in runs for output in run.outputs.split()]
    files = [path.relative_to(ROOT).as_posix() for folder in ("results", "requests")
             for path in (ROOT / "docs" / folder).glob("*")]
    assert len(set(names)) == len(names) and set(files) <= set(names)

    for name in names:
        path, _, heading = name.partition("#")
        assert (ROOT / path).is_file(), name
        if heading:
            headings = re.findall(r"^#+ (.+)$", project_text(path), re.M)
            assert heading in map(anchor, headings), name

    for run in runs:
        assert re.fullmatch("[0-9a-f]{7,40}", run.commit) and re.fullmatch(r"2\d{3}-\d\d-\d\d", run.date), run
        assert run.processor and run.command, run
