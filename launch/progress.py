"""Progress as a bar on a terminal, and as plain lines in a log."""
from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

NUM_LINES = 10  # in a log, at most, for the whole work


class ProgressBar(tqdm):
    """A bar of tqdm, with its arguments.

    In a stream that is no terminal it writes one line for each tenth of `total`, and nothing if a terminal would show
    it for a while only (`leave=False`).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        stream = options.get("file") or sys.stderr
        self._in_log = not stream.isatty()
        self._num_lines = 0

        if self._in_log and not options.get("leave", True):
            options["disable"] = True
        super().__init__(*args, gui=self._in_log, **options)  # as a GUI's, a bar writes no control characters

    def display(self, msg: Any = None, pos: Any = None) -> None:
        """Draw the bar, or write a line if another tenth is done."""
        if not self._in_log:
            super().display(msg, pos)
            return

        num_lines = int(NUM_LINES * self.n / self.total) if self.total else 0
        if num_lines > self._num_lines:
            self._num_lines = num_lines
            label = self.desc.rstrip(": ") or f"{self.unit}s"
            elapsed = self.format_interval(self.format_dict["elapsed"])
            self.fp.write(f"{100 * num_lines // NUM_LINES} % after {elapsed}, {label}\n")
            self.fp.flush()

    def clear(self, nolock: bool = False) -> None:
        """Remove the bar for a moment, as `write` does; lines stay."""
        if not self._in_log:
            super().clear(nolock)

    def close(self) -> None:
        """End the bar."""
        if self._in_log and not self.disable:
            self.display()
        super().close()
