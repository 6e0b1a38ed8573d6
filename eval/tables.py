"""Tables as a terminal shows them, in Markdown and as CSV."""
from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence

from config.console import aligned
from config.files import SPACE_REMEDY, write

NAME_WIDTH = 20  # characters of a name in a terminal: its last ones, which say most
LABEL_WIDTH = 50  # of a method with its draft
NOT_MEASURED = "–"  # the cell of a figure that was not measured


def number(value: float, digits: int = 2) -> str:
    """Return a figure as a cell; NaN means not measured."""
    return NOT_MEASURED if value != value else f"{value:.{digits}f}"


def short(name: str, name_width: int = NAME_WIDTH) -> str:
    """Return the end of a name."""
    return name[-name_width:]


def in_columns(heading: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1,
               name_width: int = NAME_WIDTH) -> str:
    """Return a line for the heading and for each row; a row is this many `names`, then right-aligned figures."""
    shown_rows = []
    for row in (heading, *rows):
        short_names = [short(name, name_width) for name in row[:names]]
        shown_rows.append([*short_names, *row[names:]])
    return "\n".join(aligned(shown_rows, names))


def markdown(heading: Sequence[str],
             rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(heading)} |"
    yield f"|{'---|' * len(heading)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def save(path: Path, columns: Sequence[str],
         rows: Iterable[Mapping[str, Any]]) -> None:
    """Write these columns into a CSV file; figures that were not measured are empty cells."""
    csv_text = io.StringIO()
    csv_writer = csv.writer(csv_text, lineterminator="\n")
    csv_writer.writerow(columns)
    for row in rows:
        csv_writer.writerow([_cell(row[column]) for column in columns])
    write(path, csv_text.getvalue(), SPACE_REMEDY)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return str(value)
