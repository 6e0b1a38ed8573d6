"""Every table of the pages has its commit, date, processor and command, and those older than their code are listed."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from config.presets import ROOT
from eval.table_ages import INDEX_FILE, num_newer_commits, recorded_tables

IDENTITY = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, env=IDENTITY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with a table that `code/a.py` makes, and a function that commits a change of a file."""
    git(tmp_path, "init", "-q")

    def commit(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", text)
        return git(tmp_path, "rev-parse", "--short", "HEAD")

    return tmp_path, commit


def write_index(folder: Path, commit: str) -> None:
    (folder / "docs").mkdir(exist_ok=True)
    (folder / INDEX_FILE).write_text("table,commit,date,processor,command,source,minutes,code\n"
                                     f'docs/a.csv,{commit},2026-01-01,any,"make, it",a.csv,1,code/a.py code/b\n')


def test_a_table_is_older_once_its_code_has_changed(repository):
    folder, commit = repository
    write_index(folder, commit("code/a.py", "1"))
    table, = recorded_tables(folder)
    commit("code/other.py", "2")
    assert num_newer_commits(table, folder) == 0
    commit("code/a.py", "3")
    commit("code/a.py", "4")
    assert num_newer_commits(table, folder) == 2 and table.command == "make, it"


@pytest.mark.parametrize("commit_of_table", ["0123abc", ""])
def test_the_age_of_a_table_of_an_unknown_commit_is_not_known(repository, commit_of_table):
    folder, commit = repository
    commit("code/a.py", "1")
    write_index(folder, commit_of_table)
    assert num_newer_commits(recorded_tables(folder)[0], folder) is None


def test_every_table_is_in_the_index_with_all_of_its_facts():
    tables = recorded_tables()
    files = [path.relative_to(ROOT).as_posix() for folder in ("results", "requests")
             for kind in ("*.csv", "*.md") for path in sorted((ROOT / "docs" / folder).glob(kind))]
    names = [table.table for table in tables]
    assert len(set(names)) == len(names) and [name for name in files if name not in names] == []
    for table in tables:
        path, _, heading = table.table.partition("#")
        assert (ROOT / path).is_file(), table
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.M) if heading else []
        anchors = [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings]
        assert not heading or heading in anchors, table
        assert re.fullmatch("[0-9a-f]{7,40}", table.commit) and re.fullmatch(r"2\d{3}-\d\d-\d\d", table.date)
        assert table.processor and all((ROOT / code).exists() for code in table.code.split()), table
