"""Ctrl-C: the first one counts, also if it is pressed several times at once.

It imports nothing that takes long, so that a command can obey from its first moment on.
"""
from __future__ import annotations

import time
from typing import Any

AT_ONCE = 1  # second in which to press Ctrl-C several times means no more than once
_pressed = -AT_ONCE * 1.0


def interrupt(number: int, frame: Any) -> None:
    """Ctrl-C, of which the first one counts: another one would break the good order in which the command ends."""
    global _pressed
    before, _pressed = _pressed, time.monotonic()
    if _pressed - before >= AT_ONCE:
        raise KeyboardInterrupt
