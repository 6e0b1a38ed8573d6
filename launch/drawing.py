"""The picture of an answer under way: the guesses as a tree, and the rows in each stage. From a state to lines.

It knows nothing about terminals. A line is a list of parts: texts, each with the name of its style.
"""
from __future__ import annotations

import unicodedata
from collections import defaultdict
from itertools import groupby
from operator import itemgetter
from typing import List, Mapping, NamedTuple, Sequence, Tuple

StyledText = Tuple[str, str]  # a text and the name of its style
StyledLine = List[StyledText]
GuessViews = Sequence["GuessView"]
Spots = Mapping[int, "Spot"]  # by node
MARKS = {"text": "█", "guess": "▒", "wrong": "░"}  # of a row in a stage, by its fate
LEGEND = {"text": "became text", "guess": "may become text", "wrong": "proved wrong"}
MAX_LETTERS = 14  # of a guess
MIN_BRANCH = 3  # cells between the end of a text and the next column: a space, a line, a space
LABEL_WIDTH = 9  # cells before the rows of a stage
SPACE: StyledText = (" ", "")
ROOT_NODE = None  # parent of a guess that follows the text


class GuessView(NamedTuple):
    """A guess as it is drawn; `score` is the log-probability of its path."""

    node: int
    parent: int | None
    text: str
    score: float
    is_sent: bool


class Scene(NamedTuple):
    """A state: the end of the text, the guesses, and the fates of the rows in each stage, by the names in `MARKS`."""

    text_end: str
    guesses: GuessViews
    stages: Sequence[Sequence[str]]


class Spot(NamedTuple):
    """Where a guess is drawn: in a column and on a line, both from 0."""

    depth: int
    line: int


def picture(scene: Scene, width: int, num_tree_lines: int) -> list[StyledLine]:
    """Return the lines of a scene, at most `width` cells wide; the number of lines is always the same."""
    tree = tree_lines(scene.text_end, scene.guesses, width, num_tree_lines)
    padding: list[StyledLine] = [[] for _ in range(num_tree_lines - len(tree))]
    if not scene.stages:
        return [*tree, *padding]

    numbered_stages = enumerate(scene.stages, 1)
    stage_lines = [line_of_stage(number, rows, width) for number, rows in numbered_stages]
    return [*tree, *padding, [], *stage_lines, legend()]


# --- stages -----------------------------------------------------------------------------------------------------------

def line_of_stage(number: int, rows: Sequence[str], width: int) -> StyledLine:
    """Return the line of a stage: a mark for each row, those of one fate next to each other."""
    stage_line: StyledLine = [(f"stage {number}".ljust(LABEL_WIDTH), "label")]
    for fate, run in groupby(rows[:width - LABEL_WIDTH]):
        num_rows = len(list(run))
        stage_line.append((MARKS[fate] * num_rows, fate))
    return stage_line


def legend() -> StyledLine:
    parts: StyledLine = [(" " * LABEL_WIDTH, "label")]
    for fate, about in LEGEND.items():
        parts += [(MARKS[fate], fate), (f" {about}   ", "label")]
    return parts


# --- the tree ---------------------------------------------------------------------------------------------------------

def tree_lines(text_end: str, guesses: GuessViews, width: int, num_lines: int) -> list[StyledLine]:
    """Return the lines of a tree that begins at the end of the text; its likeliest path is the first line."""
    chosen = fitting(guesses, num_lines)
    spots = layout(chosen)
    begins = column_begins(text_end, chosen, spots)
    num_fitting = sum(end - MIN_BRANCH <= width for end in begins[1:])
    chosen = [guess for guess in chosen if spots[guess.node].depth < num_fitting]

    spots = layout(chosen)
    grid = Grid()
    grid.write(0, 0, text_end, "text")
    for guess in chosen:
        spot = spots[guess.node]
        style = "guess" if guess.is_sent else "unsent"
        grid.write(spot.line, begins[spot.depth], shown(guess), style)
    draw_branches(grid, chosen, spots, begins)
    return grid.lines()


def fitting(guesses: GuessViews, num_lines: int) -> list[GuessView]:
    """Return the likeliest guesses that fit into this many lines: each further child of a guess takes a line."""
    children_of: dict[int | None, int] = {ROOT_NODE: 0}
    chosen = []
    for guess in sorted(guesses, key=rank_of):
        num_children = children_of.get(guess.parent)
        if num_children is None or (num_children and num_lines < 2):
            continue
        num_lines -= bool(num_children)
        children_of[guess.parent] = num_children + 1
        children_of[guess.node] = 0
        chosen.append(guess)
    return chosen


def rank_of(guess: GuessView) -> tuple[float, int]:
    """Return the key that sorts guesses: the likeliest first, and the oldest of equal ones."""
    return -guess.score, guess.node


def layout(guesses: GuessViews) -> dict[int, Spot]:
    """Return the spots of guesses: the likeliest child is on its parent's line, and the others are below."""
    children_of = by_parent(guesses)
    spots: dict[int, Spot] = {}
    next_line = 0

    to_place = [(child, 0) for child in reversed(children_of[ROOT_NODE])]
    while to_place:
        guess, depth = to_place.pop()
        spots[guess.node] = Spot(depth, next_line)

        children = children_of[guess.node]
        if not children:
            next_line += 1
        to_place += [(child, depth + 1) for child in reversed(children)]
    return spots


def by_parent(guesses: GuessViews) -> Mapping[int | None, list[GuessView]]:
    """Return the children of each guess, the likeliest first."""
    children_of: dict[int | None, list[GuessView]] = defaultdict(list)
    for guess in sorted(guesses, key=rank_of):
        children_of[guess.parent].append(guess)
    return children_of


def column_begins(text_end: str, guesses: GuessViews, spots: Spots) -> list[int]:
    """Return the first cell of each column, and of the one after the last."""
    column_widths: dict[int, int] = defaultdict(int)
    for guess in guesses:
        depth = spots[guess.node].depth
        column_widths[depth] = max(column_widths[depth], num_cells(shown(guess)))

    begins = [num_cells(text_end) + MIN_BRANCH]
    for depth in range(len(column_widths)):
        begins.append(begins[-1] + column_widths[depth] + MIN_BRANCH)
    return begins


def draw_branches(grid: Grid, guesses: GuessViews, spots: Spots, begins: Sequence[int]) -> None:
    """Draw the lines between parents and children."""
    ends: dict[int | None, int] = {ROOT_NODE: begins[0] - MIN_BRANCH}  # the cell after each text
    for guess in guesses:
        ends[guess.node] = begins[spots[guess.node].depth] + num_cells(shown(guess))

    for parent, children in by_parent(guesses).items():
        child_lines = [spots[child.node].line for child in children]
        column_begin = begins[spots[children[0].node].depth]
        grid.write(child_lines[0], ends[parent] + 1, "─" * (column_begin - ends[parent] - 2), "branch")
        if len(children) > 1:
            draw_fork(grid, column_begin - 2, child_lines)


def draw_fork(grid: Grid, cell: int, child_lines: Sequence[int]) -> None:
    """Draw the vertical line from the first to the last child of a guess, which has several."""
    top_line, *other_lines = child_lines
    grid.write(top_line, cell, "┬", "branch")
    for line in range(top_line + 1, child_lines[-1]):
        grid.write(line, cell, "├" if line in other_lines else "│", "branch")
    grid.write(child_lines[-1], cell, "└", "branch")


def shown(guess: GuessView) -> str:
    """Return the text of a guess as it is drawn."""
    text = guess.text.replace("\n", "⏎").strip() or "␣"
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:MAX_LETTERS]


# --- cells ------------------------------------------------------------------------------------------------------------

def num_cells(text: str) -> int:
    """Return the cells that a terminal needs for a text."""
    return sum(_width(sign) for sign in text)


def _width(sign: str) -> int:
    if unicodedata.combining(sign):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


class Grid:
    """Cells of a picture, each with a character and a style."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[int, StyledText]] = defaultdict(dict)

    def write(self, line: int, cell: int, text: str, style: str) -> None:
        cells = self._lines[line]
        for sign in text:
            if not _width(sign) and cell - 1 in cells:  # an accent belongs to the character before
                before, _ = cells[cell - 1]
                cells[cell - 1] = before + sign, style
                continue
            cells[cell] = sign, style
            if _width(sign) == 2:
                cells[cell + 1] = "", style
            cell += _width(sign)

    def lines(self) -> list[StyledLine]:
        """Return all lines up to the last one that was written, without spaces at their ends."""
        last_line = max(self._lines, default=-1)
        return [self._line(self._lines[number]) for number in range(last_line + 1)]

    def _line(self, cells: Mapping[int, StyledText]) -> StyledLine:
        num_written = max(cells, default=-1) + 1
        signs = [cells.get(cell, SPACE) for cell in range(num_written)]
        parts: StyledLine = []
        for style, run in groupby(signs, key=itemgetter(1)):
            parts.append(("".join(sign for sign, _ in run), style))
        return parts
