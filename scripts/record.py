"""Record a command on a terminal, as it runs, into an animated SVG: python3 -m scripts.record FILE.svg COMMAND ...

It needs the package pyte, which emulates the terminal: .venv/bin/python -m pip install pyte
"""
from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from html import escape
from itertools import groupby
from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple

from config.console import command
from config.files import write

COLUMNS, LINES = 88, 29
FRAME_SECONDS = 0.15
PAUSE = 0.02  # seconds without output, after which a picture is complete
LAST_SECONDS = 4.0  # of the last picture, before the recording begins again
STATIC_SHARE = 0.25  # of the time: the picture where nothing is animated
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.4, 18, 12  # pixels
COLOURS = {"default": "#d5d9e0", "green": "#7ee787", "cyan": "#79c0ff", "brightblack": "#6e7681", "brown": "#e3b341"}
PAPER = "#0d1117"
STYLE = ("text { font: 14px ui-monospace, Menlo, Consolas, monospace; white-space: pre; visibility: hidden } "
         ".static { visibility: visible } "
         "@media (prefers-reduced-motion: reduce) { text { animation: none !important } }")
ColouredText = Tuple[int, str, str]  # first cell, text, colour
ScreenRow = Tuple[ColouredText, ...]
Frame = Tuple[float, List[ScreenRow]]  # seconds, and all lines


class Shown(NamedTuple):
    """A line of the terminal that stays the same from one moment to another, in seconds."""

    number: int
    row: ScreenRow
    begin: float
    end: float


# --- the terminal -----------------------------------------------------------------------------------------------------

def frames_of(command_words: Sequence[str]) -> Iterator[Frame]:
    """Run a command and yield its screen, with the seconds since its first output, whenever that has changed."""
    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    file_number, command_end = pty.openpty()
    fcntl.ioctl(command_end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    streams: dict[str, Any] = {"stdin": command_end, "stdout": command_end, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command_words, env=environment, **streams)
    os.close(command_end)

    begin_time = 0.0
    shown_rows: list[ScreenRow] = []
    while new_output := _read(file_number):
        begin_time = begin_time or time.monotonic()
        stream.feed(new_output)
        new_rows = [row_of(screen, line) for line in range(LINES)]
        if new_rows != shown_rows:
            shown_rows = new_rows
            yield time.monotonic() - begin_time, new_rows
    process.wait()


def _read(file_number: int) -> bytes:
    """Return what a terminal prints during a frame; nothing once its command has ended."""
    new_output = b""
    deadline = time.monotonic() + FRAME_SECONDS
    while True:
        is_over = bool(new_output) and time.monotonic() > deadline  # then only the end of a picture is read
        if not select.select([file_number], [], [], PAUSE if is_over else FRAME_SECONDS)[0]:
            if is_over:
                break
            continue
        try:
            new_output += os.read(file_number, 65536)
        except OSError:  # the other end is closed
            break
    return new_output


def row_of(screen: Any, line: int) -> ScreenRow:
    """Return the runs of a line's cells that have the same colour, without spaces at its end."""
    line_cells = [screen.buffer[line][column] for column in range(COLUMNS)]
    line_runs: list[ColouredText] = []
    first_cell = 0
    for colour, group in groupby(line_cells, key=lambda cell: "bold" if cell.bold else cell.fg):
        text = "".join(cell.data for cell in group)
        if text.strip():
            line_runs.append((first_cell, text.rstrip(), colour))
        first_cell += len(text)
    return tuple(line_runs)


# --- the picture ------------------------------------------------------------------------------------------------------

def shown_lines(frames: Sequence[Frame], seconds: float) -> Iterator[Shown]:
    """Yield each line of the frames once for each time in which it stays the same."""
    for number in range(LINES):
        row_moments = [(moment, rows[number]) for moment, rows in frames]
        for row, group in groupby(row_moments, key=lambda pair: pair[1]):
            begin = next(group)[0]
            later_moments = [moment for moment, other in row_moments if moment > begin and other != row]
            if row:
                yield Shown(number, row, begin, min(later_moments, default=seconds))


def drawn(frames: Sequence[Frame]) -> str:
    """Return the SVG of the frames, which repeats itself."""
    seconds = frames[-1][0] + LAST_SECONDS
    line_times = list(shown_lines(frames, seconds))
    line_moments = dict.fromkeys((line.begin, line.end) for line in line_times)
    periods = {moment: f"p{number}" for number, moment in enumerate(line_moments)}
    static_moment = STATIC_SHARE * seconds

    svg_styles = [STYLE]
    for (begin, end), name in periods.items():
        svg_styles.append(
            f".{name} {{ animation: {name} {seconds:.2f}s step-end infinite }} @keyframes {name} {{ "
            f"0% {{ visibility: hidden }} {100 * begin / seconds:.2f}% {{ visibility: visible }} "
            f"{100 * end / seconds:.2f}% {{ visibility: hidden }} }}")

    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, LINES * CELL_HEIGHT + 2 * MARGIN
    svg_parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
        f"<style>{' '.join(svg_styles)}</style>", f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>']
    for line in line_times:
        class_names = periods[line.begin, line.end] + " static" * (line.begin <= static_moment < line.end)
        height_of_line = MARGIN + CELL_HEIGHT * line.number + 13
        run_parts = "".join(_run(*run) for run in line.row)
        svg_parts.append(f'<text class="{class_names}" y="{height_of_line}">{run_parts}</text>')
    return "\n".join([*svg_parts, "</svg>", ""])


def _run(first_cell: int, text: str, colour: str) -> str:
    is_bold = colour == "bold"
    fill = COLOURS.get(colour, COLOURS["default"] if is_bold else f"#{colour}")
    weight = ' font-weight="bold"' if is_bold else ""
    left, length = MARGIN + CELL_WIDTH * first_cell, CELL_WIDTH * len(text)
    return f'<tspan x="{left:.1f}" textLength="{length:.1f}" fill="{fill}"{weight}>{escape(text)}</tspan>'


@command
def main(argv: Sequence[str]) -> int:
    if len(argv) < 2 or argv[0].startswith("-"):
        print(__doc__)
        return 0
    svg_path, *command_words = argv
    frames = list(frames_of(command_words))
    write(svg_path, drawn(frames), "choose another file")
    print(f"{svg_path}: {len(frames)} frames, {os.path.getsize(svg_path) / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
