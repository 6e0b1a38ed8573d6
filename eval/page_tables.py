"""The tables of the pages: the commands that make their files, and the files as the pages show them.

Usage: bash scripts/make_results.sh [WORD ...]

docs/tables.csv has a row for each command: the files that it makes, and the commit, date and processor of its last run.
Without a word every command runs, which takes about an hour and a half on two cores. After an interruption the same
command continues: an evaluation at the same commit keeps its answers, in results/published/COMMIT.

list         print the rows; those without a command were made by hand, or by a command that does not exist any more
pages        only write the tables into the pages
FILE ...     run the commands that make these files, as docs/results/toy.csv

In a page a table stands between two comments, of which the first names its file (or several, as docs/results/*.csv),
conditions for its rows, and columns:
<!-- table: docs/results/toy.csv set=mean temperature=0 | method xi sr_ar --> and <!-- end -->
"""
from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import date
from typing import Mapping, NamedTuple, Sequence

from config.console import command, say, shell_code
from config.files import SPACE_REMEDY, replace, write
from config.keys import HELP_WORDS, check_name
from config.presets import ROOT
from eval.results import current_commit, processor_name
from eval.tables import markdown, save

INDEX_FILE = "docs/tables.csv"
RUNS_FOLDER = "results/published"
RUN_FOLDER = "DIR"  # stands for the folder of a run in a command
ANY_PROCESSOR = "any ("  # begins the processor of a table that is the same on each
PRINTED = "printed"  # the file in this folder that has what the command prints
PAIR = re.compile(r"(\S+?)=(\S+)")
MARKED_TABLE = re.compile(r"(<!-- table: (\S+)([^|\n]*)\|([^|\n]*)-->\n).*?(?=<!-- end -->)", re.S)


class RecordedRun(NamedTuple):
    """A row of the index; `outputs` are FILE=SOURCE with spaces between, and SOURCE is a file in the run's folder.

    Tables that no command makes have no SOURCE, and `command` says how they were made.
    """

    outputs: str
    command: str
    commit: str
    date: str
    processor: str

    @property
    def source_by_file(self) -> dict[str, str]:
        """The file of the run's folder from which each file is copied."""
        return dict(PAIR.findall(self.outputs))


@command
def main(words: Sequence[str]) -> int:
    """Make tables, list them, or write the pages; return the exit code."""
    if any(word in HELP_WORDS for word in words):
        print(__doc__)
        return 0
    if list(words) == ["list"]:
        for run in recorded_runs():
            print(f"{run.outputs}\n    {run.command} ({run.commit}, {run.date}, {run.processor})")
        return 0

    exit_code = 0 if list(words) == ["pages"] else make_tables(words)
    for page_path in sorted((ROOT / "docs").glob("*.md")):
        write(page_path, with_tables(page_path.read_text(encoding="utf-8")), SPACE_REMEDY)
    return exit_code


# --- files ------------------------------------------------------------------------------------------------------------

def recorded_runs() -> list[RecordedRun]:
    """Read the index."""
    with (ROOT / INDEX_FILE).open(encoding="utf-8", newline="") as file:
        return [RecordedRun(**row) for row in csv.DictReader(file)]


def make_tables(files: Sequence[str]) -> int:
    """Run the commands of these files, or all commands; return 0, or the exit code of the first that fails.

    Raise ValueError for an unknown file, or if the code of this project is not that of a commit.
    """
    runs = recorded_runs()
    known_files = [name for run in runs for name in run.source_by_file]
    for name in files:
        check_name(name, known_files, "table")
    commit = _clean_commit()

    for run in runs:
        if run.source_by_file.keys().isdisjoint(files or known_files):
            continue
        exit_code = _make_files(run, commit)
        if exit_code:
            return exit_code

        today = date.today().isoformat()
        processor = run.processor if run.processor.startswith(ANY_PROCESSOR) else processor_name()
        runs[runs.index(run)] = run._replace(commit=commit, date=today, processor=processor)
        save(ROOT / INDEX_FILE, RecordedRun._fields, map(RecordedRun._asdict, runs))
    return 0


def _clean_commit() -> str:
    """Return the first digits of the current commit. Raise ValueError if files outside docs/ differ from it."""
    commit = current_commit()
    if not commit:
        raise ValueError("each table names a commit, and there is none here: run this in a clone, with git installed")

    difference = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!docs"]
    if subprocess.run(difference, cwd=ROOT).returncode:
        raise ValueError("each table names a commit, and files differ from it: commit them first, or git stash them")
    return commit[:8]


def _make_files(run: RecordedRun, commit: str) -> int:
    """Run a command, and copy the files that it has made from its folder into docs/; return its exit code."""
    say(run.command)
    first_file = next(iter(run.source_by_file))
    folder = ROOT / RUNS_FOLDER / commit / first_file.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)

    words = [word.replace(RUN_FOLDER, str(folder)) for word in shlex.split(run.command)]
    if words[0] == "python3":
        words[0] = sys.executable

    with (folder / PRINTED).open("wb") as printed_file:
        exit_code = subprocess.run(words, cwd=ROOT, stdout=printed_file).returncode
    if exit_code:
        say(f"{run.command} has failed")
        return shell_code(exit_code)

    for file_name, source in run.source_by_file.items():
        replace(ROOT / file_name, (folder / source).read_bytes())
    return 0


# --- pages ------------------------------------------------------------------------------------------------------------

def with_tables(page_text: str) -> str:
    """Return a page in which the marked tables are those of their files."""
    return MARKED_TABLE.sub(_marked_table, page_text)


def _marked_table(match: re.Match[str]) -> str:
    """Return the first comment of a table, and below it the columns of the rows that meet its conditions."""
    opening, file_name, conditions, column_names = match.groups()
    columns = column_names.split()
    allowed = {column: values.split(",") for column, values in PAIR.findall(conditions)}

    cells: list[list[str]] = []
    for path in sorted(ROOT.glob(file_name)):
        with path.open(encoding="utf-8", newline="") as file:
            cells += [[_cell(row, column) for column in columns] for row in csv.DictReader(file)
                      if all(row[column] in allowed[column] for column in allowed)]
    return opening + "\n".join([*markdown(columns, cells), ""])


def _cell(row: Mapping[str, str], column: str) -> str:
    """Return a figure with four digits, and with its bounds if the row has any."""
    figure, low, high = (_rounded(row.get(f"{column}{ending}", "")) for ending in ("", "_low", "_high"))
    return f"{figure}, {low}–{high}" if low != high else figure


def _rounded(cell: str) -> str:
    with suppress(ValueError):
        return f"{float(cell):.4g}"
    return cell
