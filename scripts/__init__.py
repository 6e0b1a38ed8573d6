"""The commands. Ctrl-C ends them with a sentence, even while their modules are still being imported.

What a terminal has no sign for is shown escaped, so no answer ends in the midst of a word.
"""
from __future__ import annotations

import io
import sys
from typing import Any


def _tell(kind: Any, error: Any, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("\nflowspec: stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _tell
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")
