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
from typing import Iterable, Iterator, NamedTuple, Sequence

from config.files import SPACE_REMEDY, write
from config.presets import ROOT

INDEX_FILE = "docs/tables.csv"
NOT_KNOWN = "commit not here"
NO_COMMAND = "no command any more"


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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(RecordedTable._fields)
    writer.writerows(tables)
    write(root / INDEX_FILE, text.getvalue(), SPACE_REMEDY)


def num_newer_commits(table: RecordedTable, root: Path = ROOT) -> int | None:
    """Return how many commits changed the code of a table after it was made; None if git does not have its commit."""
    if not table.commit:
        return None
    span = f"{table.commit}..HEAD"
    query = ["git", "rev-list", "--count", span, "--", *table.code.split()]
    try:
        counted = subprocess.run(query, cwd=root, capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return int(counted.stdout) if counted.returncode == 0 else None


def older_tables(root: Path = ROOT) -> Iterator[tuple[RecordedTable, str]]:
    """Yield each table that is older than its code, or whose age is not known, with the number of newer commits."""
    for table in recorded_tables(root):
        num_newer = num_newer_commits(table, root)
        if num_newer != 0:
            yield table, NOT_KNOWN if num_newer is None else str(num_newer)


def tables(argv: Sequence[str]) -> int:
    """Run the command `python3 -m scripts.bench tables`; it only reports."""
    if argv:
        raise ValueError(f"tables has no keys: leave {argv[0]} out")
    older = list(older_tables())
    print(f"{'table':<58}{'commit':<10}{'date':<12}newer  made again by")
    for table, newer in older:
        print(f"{table.table:<58}{table.commit:<10}{table.date:<12}{newer:>5}  {table.command or NO_COMMAND}")
    print(f"{len(older)} of {len(recorded_tables())} tables are older than the code that makes them")
    return 0
