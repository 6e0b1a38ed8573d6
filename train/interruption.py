"""How a training ends: with its work, in one sentence on what is wrong, or with how to go on.

A training that was killed may leave a half of a file, which the next one removes.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Callable


def sweep(folder: Path, *names: str) -> None:
    """Remove what a killed process left of files of these names, which `config.files.replace` was writing."""
    for name in names:
        for half in folder.glob(f"{name}.*.part"):
            half.unlink(missing_ok=True)


def ended(name: str, work: Callable[[], None]) -> int:
    """Do the work of the command of this name; its exit code."""
    try:
        work()
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped; type the same command again to go on from the last checkpoint", file=sys.stderr)
        return 130
    return 0
