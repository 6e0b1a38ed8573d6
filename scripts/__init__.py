"""The commands. Ctrl-C ends them with a sentence, even while their modules are still being imported."""
from __future__ import annotations

import sys
from typing import Any


def _tell(kind: Any, error: Any, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("\nflowspec: stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _tell
