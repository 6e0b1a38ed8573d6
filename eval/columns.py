"""A table as a terminal shows it: one line a row, and columns as wide as they need be."""
from __future__ import annotations

from typing import Iterable, Sequence

LONGEST = 20  # characters of a name, of which the last ones say most
APART = "  "


def in_columns(heading: Sequence[str], rows: Iterable[Sequence[str]],
               names: int = 1) -> str:
    """A line for the heading and for each row; so many `names` begin a row, and figures follow, flush right."""
    columns = []
    for place, column in enumerate(zip(heading, *rows)):
        cells = list(map(short, column)) if place < names else column
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if place < names else cell.rjust(width) for cell in cells])
    return "\n".join(APART.join(row).rstrip() for row in zip(*columns))


def short(name: str) -> str:
    """The end of a name."""
    return name[-LONGEST:]
