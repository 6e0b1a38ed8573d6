"""The tables of the pages that are older than the code that makes them.

`docs/tables.csv` has a row for each table: its file or its heading in a page, the commit, date and processor that made
it, the command that makes it again (empty: there is none any more), the file that the command writes, and the code that
the table's figures depend on.
"""
from __future__ import annotations

import csv
import io
import subprocess
from pathlib import Path
from typing import Iterable, NamedTuple

from config.files import SPACE_REMEDY, write
from config.presets import ROOT

INDEX_FILE = "docs/tables.csv"


class RecordedTable(NamedTuple):
    """A row of the index; `code` has paths of files and folders, with spaces between.

    `source` is the table's file in the results folder of its command; empty: `make_results` cannot make it.
    """

    table: str
    commit: str
    date: str
    processor: str
    command: str
    source: str
    minutes: str  # that the command takes on two cores
    code: str


def recorded_tables(root: Path = ROOT) -> list[RecordedTable]:
    """Read the index."""
    with (root / INDEX_FILE).open(encoding="utf-8", newline="") as file:
        return [RecordedTable(**row) for row in csv.DictReader(file)]


def write_index(tables: Iterable[RecordedTable], root: Path = ROOT) -> None:
    """Write the index."""
    csv_text = io.StringIO()
    writer = csv.writer(csv_text, lineterminator="\n")
    writer.writerow(RecordedTable._fields)
    writer.writerows(tables)
    write(root / INDEX_FILE, csv_text.getvalue(), SPACE_REMEDY)


def num_newer_commits(table: RecordedTable, root: Path = ROOT) -> int | None:
    """Return how many commits changed the code of a table after it was made; None if git does not have its commit."""
    if not table.commit:
        return None
    commit_range = f"{table.commit}..HEAD"
    count_query = ["git", "rev-list", "--count", commit_range, "--", *table.code.split()]
    try:
        counted = subprocess.run(count_query, cwd=root, capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return int(counted.stdout) if counted.returncode == 0 else None
