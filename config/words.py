"""The words of a command, `[PRESET] key=value ...`, as layers: what was typed, over defaults that it leaves open.

It knows nothing about which keys there are: `cli.py` does, and says what is wrong with a word.
"""
from __future__ import annotations

from typing import Mapping, Sequence


def preset_of(argv: Sequence[str]) -> str:
    """The preset that a command begins with; empty if it names none."""
    named = bool(argv) and "=" not in argv[0] and not argv[0].startswith("-")
    return argv[0] if named else ""


def typed(argv: Sequence[str]) -> dict[str, str]:
    """What stands behind each key of a command; nothing, if a word has no `=`."""
    pairs = (word.partition("=") for word in argv)
    return {key: value for key, _, value in pairs}


def over(argv: Sequence[str], defaults: Mapping[str, str], preset: str = "") -> list[str]:
    """The words of a command, and those that its defaults add: a preset where none is named, keys that are not given.

    Every word that was typed stays, so that a wrong one is told in the end as it was typed.
    """
    given = typed(argv)
    added = [f"{key}={value}" for key, value in defaults.items() if key not in given]
    first = [] if preset_of(argv) or not preset else [preset]
    return [*first, *argv, *added]
