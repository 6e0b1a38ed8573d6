"""The tables and plots of the pages, made again by their own commands: bash scripts/make_results.sh [WORD ...]

Without a word it runs the command of every table that is older than the code that makes it, short commands first, and
copies its files into docs/. docs/tables.csv has the commands, and records the commit, date and processor of each table.
Then the figures in README.md and docs/ are written from the tables.

list         every table: how many commits of its code are newer, about how many minutes its command takes
pages        only write the figures of the pages
FILE ...     make these tables, as docs/results/toy.csv, even if they are not older

After an interruption the same command continues: an evaluation at the same commit keeps its answers, in
results/published/COMMIT. The source `printed` is what a command prints. Tables that need boards, other programs or a
person's hand have no source in docs/tables.csv, and are only listed.
"""
from __future__ import annotations

import shlex
import subprocess
import sys
from datetime import date
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Iterable, Sequence

from config.console import EXIT_STOPPED, EXIT_WRONG, command, say
from config.files import replace
from config.keys import HELP_WORDS, check_name
from config.presets import ROOT
from eval.page_figures import write_figures
from eval.results import current_commit, processor_name
from eval.table_ages import RecordedTable, num_newer_commits, recorded_tables, write_index
from launch.progress import ProgressBar

RESULTS_FOLDER = "results/published"
LOG_NAME = "make.log"
PRINTED = "printed"  # the source of a table that its command prints, and which needs no folder
ANY_PROCESSOR = "any (virtual time)"


@command
def main(words: Sequence[str]) -> int:
    """Make tables, list them, or write the pages; return the exit code."""
    if any(word in HELP_WORDS for word in words):
        print(__doc__)
        return 0
    if list(words) == ["list"]:
        print_tables(recorded_tables())
        return 0

    exit_code = 0
    if list(words) != ["pages"]:
        exit_code = make_tables(_wanted_tables(words))
    for page in write_figures():
        print(f"written: {page}")
    return exit_code


def print_tables(tables: Iterable[RecordedTable]) -> None:
    """Print a line for each table: how many commits of its code are newer, and the minutes of its command."""
    print(f"{'table':<78}{'newer':>6}{'minutes':>9}  command")
    for table in tables:
        num_newer = num_newer_commits(table)
        age = "?" if num_newer is None else str(num_newer)
        made_by = table.command if table.source else f"by hand: {table.command}" if table.command else "by hand"
        print(f"{table.table:<78}{age:>6}{table.minutes:>9}  {made_by}")


def _wanted_tables(names: Sequence[str]) -> list[RecordedTable]:
    """Return the tables to make: those named, or all that are older than their code."""
    tables = [table for table in recorded_tables() if table.source]
    names_of_tables = [table.table for table in tables]
    for name in names:
        check_name(name, names_of_tables, "table")

    if names:
        return [table for table in tables if table.table in names]
    return [table for table in tables if num_newer_commits(table) != 0]


def make_tables(tables: Sequence[RecordedTable]) -> int:
    """Run the commands of these tables, and copy their files; return 0, or the exit code of the first that fails."""
    for table in tables:
        _check_committed(table)

    ordered = sorted(tables, key=lambda table: (float(table.minutes), table.command))
    groups = [(words, list(group)) for words, group in groupby(ordered, key=attrgetter("command"))]
    num_minutes = sum(float(group[0].minutes) for _, group in groups)
    say(f"{len(tables)} tables by {len(groups)} commands, in about {num_minutes / 60:.1f} hours")

    with ProgressBar(total=num_minutes, unit="min") as bar:
        for words, group in groups:
            bar.set_description(Path(group[0].table).stem)
            exit_code = _make_group(words, group)
            if exit_code:
                return exit_code
            bar.update(float(group[0].minutes))
    return 0


def _check_committed(table: RecordedTable) -> None:
    """Raise ValueError if the code that makes a table differs from the commit that the table would name."""
    query = ["git", "status", "--porcelain", "--", *table.code.split()]
    try:
        status = subprocess.run(query, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        raise ValueError("git is not installed, and each table names a commit: install git") from None

    if status.returncode:
        raise ValueError(f"{ROOT} is no clone of the repository, and each table names a commit: make one by git clone")
    if status.stdout:
        raise ValueError(f"{table.table} would not be that of a commit: commit the changes of {table.code} first, or "
                         "git stash them")


def _make_group(command_line: str, tables: Sequence[RecordedTable]) -> int:
    """Run a command, and copy the files of its tables into docs/; return its exit code."""
    commit = (current_commit() or "").rstrip("+")[:8]
    first_table = next(table for table in recorded_tables() if table.command == command_line)
    folder_name = Path(first_table.table).with_suffix("").as_posix().replace("/", "-")
    folder = ROOT / RESULTS_FOLDER / commit / folder_name
    folder.mkdir(parents=True, exist_ok=True)

    is_printed = first_table.source == PRINTED
    words = shlex.split(command_line)
    if not is_printed:
        words.append(f"results={folder}")
    if words[0] == "python3":
        words[0] = sys.executable

    with (folder / LOG_NAME).open("ab") as log_file, (folder / PRINTED).open("wb") as printed_file:
        out_file = printed_file if is_printed else log_file
        exit_code = subprocess.run(words, cwd=ROOT, stdout=out_file, stderr=log_file).returncode
    if exit_code:
        say(f"{command_line} has failed: {folder / LOG_NAME} says why")
        return exit_code if exit_code > 0 else EXIT_STOPPED - exit_code

    for table in tables:
        source_path = folder / table.source
        if not source_path.is_file():
            say(f"{command_line} has not written {source_path}: correct the source of {table.table} in docs/tables.csv")
            return EXIT_WRONG
        replace(ROOT / table.table, source_path.read_bytes())

    processor = ANY_PROCESSOR if tables[0].processor == ANY_PROCESSOR else processor_name()
    today = date.today().isoformat()
    remade = {table.table: table._replace(commit=commit, date=today, processor=processor) for table in tables}
    write_index([remade.get(table.table, table) for table in recorded_tables()])
    return 0
