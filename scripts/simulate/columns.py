"""A table as a terminal shows it: one line a row, and columns as wide as they need be."""
from __future__ import annotations

from typing import Sequence

LONGEST = 20  # characters of a name, of which the last ones tell most
APART = "  "


def in_columns(heading: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A line for the heading and for each row; so many `names` begin a row, and figures follow, flush right."""
    cells = [list(heading), *([short(cell) for cell in row[:names]] + list(row[names:]) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) if place < names else cell.rjust(width)
                  for place, (cell, width) in enumerate(zip(row, widths))]
        lines.append(APART.join(padded).rstrip())
    return "\n".join(lines)


def short(name: str) -> str:
    """The end of a name."""
    return name[-LONGEST:]
