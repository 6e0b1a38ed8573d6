"""The tables of the pages: made by their commands from one commit, and each figure of a page is that of its table."""
from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from config.presets import ROOT
from eval import make_results, page_figures
from eval.page_figures import Claim, claims, rewritten, write_figures
from eval.table_ages import RecordedTable, recorded_tables, write_index

CLAIMS = list(claims())
ANY = make_results.ANY_PROCESSOR


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page} {claim.pattern[:40]}")
def test_each_figure_of_a_page_is_that_of_its_table(claim):
    text = (ROOT / claim.page).read_text(encoding="utf-8")
    [match] = re.finditer(claim.pattern, text)
    assert list(match.groups()) == list(claim.figures())


def test_figures_are_written_where_they_stand_and_nowhere_else():
    claim = Claim("a.md", r"`x` is (\S+) of (\S+)\.", lambda: ["2.00", "3"])
    assert rewritten("So `x` is 1 of 99. `y` is 1 of 99.", claim) == "So `x` is 2.00 of 3. `y` is 1 of 99."
    for text in ("nothing", "`x` is 1 of 2. `x` is 3 of 4."):
        with pytest.raises(ValueError, match="a.md has . places that read as"):
            rewritten(text, claim)


def test_pages_whose_figures_have_changed_are_written(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text("speed 1\n")
    (tmp_path / "b.md").write_text("speed 2\n")
    changed = [Claim(page, r"speed (\d)", lambda: ["2"]) for page in ("a.md", "b.md")]
    monkeypatch.setattr(page_figures, "claims", lambda: changed)
    assert write_figures(tmp_path) == ["a.md"] and (tmp_path / "a.md").read_text() == "speed 2\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a command that makes two tables, and one that fails."""
    def table(name, words, source):
        return RecordedTable(f"docs/{name}.csv", "", "", ANY, shlex.join(words), source, "1", "make.sh")

    (tmp_path / "docs").mkdir()
    (tmp_path / "make.sh").write_text('folder="${2#results=}"; echo "$1" >"$folder/made.csv"; [ "$1" != wrong ]\n')
    tables = [table("one", ["bash", "make.sh", "first"], "made.csv"),
              table("two", ["bash", "make.sh", "first"], "made.csv"),
              table("three", ["bash", "make.sh", "wrong"], "made.csv"),
              table("by_hand", ["an", "oven"], ""),
              table("page", ["bash", "print.sh", "a", "page"], "printed")]
    (tmp_path / "print.sh").write_text('echo "$*"; echo progress >&2\n')
    write_index(tables, tmp_path)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)

    monkeypatch.setattr(make_results, "ROOT", tmp_path)
    monkeypatch.setattr(make_results, "current_commit", lambda: "0123456789abcdef")
    monkeypatch.setattr(make_results, "recorded_tables", lambda: recorded_tables(tmp_path))
    monkeypatch.setattr(make_results, "write_index", lambda tables: write_index(tables, tmp_path))
    monkeypatch.setattr(make_results, "write_figures", list)
    return tmp_path


def test_a_command_makes_all_its_tables_and_the_index_says_from_which_commit(project):
    assert make_results.main(["docs/one.csv", "docs/two.csv"]) == 0
    assert (project / "docs" / "one.csv").read_text() == (project / "docs" / "two.csv").read_text() == "first\n"
    [log] = project.rglob("make.log")
    assert log.parent.name == "docs-one"
    assert make_results.main(["docs/two.csv"]) == 0 and [*project.rglob("make.log")] == [log], "it continues there"
    one, two, three, by_hand, _ = recorded_tables(project)
    assert one.commit == two.commit == "01234567" and one.date == two.date >= "2026-11-27"
    assert three.commit == by_hand.commit == ""


def test_a_table_may_be_what_its_command_prints(project):
    assert make_results.main(["docs/page.csv"]) == 0
    assert (project / "docs" / "page.csv").read_text() == "a page\n", "the command gets no folder"
    assert next(project.rglob("make.log")).read_text() == "progress\n"


def test_a_command_that_fails_is_named_with_its_log(project, capsys):
    assert make_results.main([]) == 1
    assert "bash make.sh wrong has failed" in capsys.readouterr().err
    assert not (project / "docs" / "three.csv").exists()
    assert recorded_tables(project)[2].commit == ""


@pytest.mark.parametrize(("spoil", "sentence"), [
    (lambda folder: (folder / "make.sh").write_text("# changed"), "commit the changes of make.sh first"),
    (lambda folder: (folder / ".git").rename(folder / "no_git"), "is no clone of the repository")])
def test_tables_of_code_that_is_in_no_commit_are_refused(project, capsys, spoil, sentence):
    spoil(project)
    assert make_results.main(["docs/one.csv"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("words", "exit_code", "sentence"), [
    (["list"], 0, "by hand: an oven"), (["--help"], 0, "bash scripts/make_results.sh"),
    (["docs/on.csv"], 2, "did you mean docs/one.csv?"), (["docs/by_hand.csv"], 2, "unknown table docs/by_hand.csv")])
def test_tables_are_listed_and_named(project, capsys, words, exit_code, sentence):
    assert make_results.main(words) == exit_code
    assert sentence in "".join(capsys.readouterr())
