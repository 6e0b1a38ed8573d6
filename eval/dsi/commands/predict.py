"""Speeds predicted out of a profile and recorded acceptance, beside those of the same methods in real emulation."""
from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any, Dict, NamedTuple, Sequence

from tqdm import tqdm

from config.cli import parse
from config.files import write_json
from config.schema.untrusted import plain
from eval.dsi.commands.emulate import Measured, measured
from eval.dsi.predict_keys import COMMAND, PredictConfig, words
from eval.dsi.predict_virtual import Numbers, Spent, by_events, closed_form, foretold, numbers_of, speed
from eval.dsi.records import Book, book_of
from eval.metrics import NAN
from eval.summary import number
from launch.prepare import open_part, prepare
from launch.processes import LOST
from pipeline.failure import PeerLost

COLUMNS = ("predicted", "with own", "measured", "ratio", "ratio", "closed form", "ratio", "events", "ratio")
NOTE = """\
tokens/s, prefill included. predicted: simulated in virtual time by the methods' own code, out of the profile and the
record alone; with own: and with Python's own time, as the emulation shows it. measured: emulated in real time. closed
form: out of T, d, a and a hop, in the long run; events: out of these and the recorded matches. Ratios are to measured:
of predicted, of with own, of the closed form, of events."""


class Row(NamedTuple):
    """Tokens per second of a method; NaN: not measured, or not told."""

    predicted: float
    with_own: float
    measured: float
    closed: float
    events: float

    @property
    def cells(self) -> list[str]:
        """As the columns of the table show it."""
        speeds = [number(value) for value in self]
        ratios = [number(value / self.measured, 3) for value in self]
        formulas = [speeds[3], ratios[3], speeds[4], ratios[4]]
        return [*speeds[:3], *ratios[:2], *formulas]


Rows = Dict[str, Row]  # by method


def main(argv: Sequence[str]) -> int:
    given = words(argv)
    config = parse(given, COMMAND, PredictConfig)
    assert isinstance(config, PredictConfig), f"a prediction was read as {type(config).__name__}"
    book = book_of(config)
    numbers = numbers_of(config, book, _stages(config))
    try:
        found = measured(config, given, book) if config.measure else None
    except PeerLost as loss:
        print(f"flowspec: {plain(str(loss))}", file=sys.stderr)
        return LOST
    rows = rows_of(config, book, numbers, found)
    print("\n".join([heading(config, book, numbers), *emulation(config, found)]))
    print("\n".join(["", table(rows), "", NOTE, *worst(rows)]))
    if config.output:
        write_json(config.output, report(config, book, rows, found))
    return 0


def _stages(config: PredictConfig) -> int:
    """The devices that hold the model, beside rank 0."""
    folder, _ = prepare(config.run("ar", virtual=True))
    return len(open_part(folder, 0).stages) - 1


def rows_of(config: PredictConfig, book: Book, numbers: Numbers, found: Measured | None) -> Rows:
    """The figures of every method."""
    rows = {}
    methods = config.chosen_methods
    for name in tqdm(methods, unit="method", desc="predicted", leave=False, file=sys.stderr):
        predicted = speed(foretold(config, book, name))
        with_own = speed(foretold(config, book, name, found.own)) if found else NAN
        taken = speed(found.spent[name]) if found else NAN
        closed, events = closed_form(config, name, numbers), by_events(config, name, book, numbers)
        rows[name] = Row(predicted, with_own, taken, closed, events)
    return rows


# --- what is told -----------------------------------------------------------------------------------------------------

def heading(config: PredictConfig, book: Book, numbers: Numbers) -> str:
    """What was asked, and the numbers of the closed forms."""
    tokens = sum(len(one.text) for one in book.answers)
    return (f"{config.profile}, {numbers.stages} boards and rank 0; {len(book.answers)} texts of {tokens} tokens, "
            f"temperature {config.temperature:g}; lookahead {config.lookahead}\n"
            f"T {numbers.target:g} ms, d {numbers.drafter:g} ms, hop {numbers.hop:g} ms, a {numbers.acceptance:.3f}")


def emulation(config: PredictConfig, found: Measured | None) -> list[str]:
    """What separates the emulation from the clock that only counts."""
    if found is None:
        return []
    turn, message, segment = (1e3 * seconds for seconds in asdict(found.own).values())
    lines = [f"Python's own time, in modelled ms: {turn:.2f} a turn, {message:.2f} a message, {segment:.2f} a segment; "
             f"emulated devices and wires came {found.late:.1%} too late (slowdown {config.slowdown:g})"]
    different = [f"{count} of {name}" for name, count in found.other.items() if count]
    if different:
        lines.append(f"answers that are not the recorded text: {', '.join(different)}")
    return lines


def table(rows: Rows) -> str:
    """A line for each method."""
    lines = [f"{'':<12}" + "".join(f"{name:>13}" for name in COLUMNS)]
    for name, row in rows.items():
        lines.append(f"{name:<12}" + "".join(f"{cell:>13}" for cell in row.cells))
    return "\n".join(lines)


def worst(rows: Rows) -> list[str]:
    """The methods whose predictions are the furthest off; nothing if none was measured."""
    if any(row.measured != row.measured for row in rows.values()):
        return []
    parts = []
    for column, name in (("predicted", "predicted"), ("with_own", "with own time")):
        off = {method: _off(row, column) for method, row in rows.items()}
        method = max(off, key=lambda each: abs(off[each]))
        parts.append(f"{name} {off[method]:+.1%} ({method})")
    return [f"worst deviation: {', '.join(parts)}"]


def _off(row: Row, column: str) -> float:
    """By what share a prediction is above what was measured."""
    foreseen: float = getattr(row, column)
    return foreseen / row.measured - 1


def report(config: PredictConfig, book: Book, rows: Rows, found: Measured | None) -> dict[str, Any]:
    """What the output file says: the keys, and every figure; null is what was not measured or not told."""
    told: dict[str, Any] = {
        "predicted": "simulated",
        "measured": "emulated" if found else None,
        "keys": asdict(config),
        "tokens_per_second": {name: _figures(row) for name, row in rows.items()},
        "matches": [one.likeliest for one in book.answers]}
    if found:
        told["own_seconds"], told["late"] = asdict(found.own), found.late
        told["other_texts"] = dict(found.other)
        told["answers"] = {name: _each(taken) for name, taken in found.spent.items()}
    return told


def _figures(row: Row) -> dict[str, float | None]:
    figures = row._asdict()
    return {key: None if value != value else value for key, value in figures.items()}


def _each(taken: Sequence[Spent]) -> list[dict[str, float]]:
    return [one._asdict() for one in taken]
