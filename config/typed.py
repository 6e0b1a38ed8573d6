"""The words of a command, `[PRESET] key=value ...`, as layers: what was typed, over defaults that it leaves open.

It knows nothing about which keys there are: `cli.py` does, and says what is wrong with a word.
"""
from __future__ import annotations

import os
from typing import Mapping, Sequence

from config.files import fits, whole

ENDING = ".json"  # of a file that stands in place of a preset


def opened(argv: Sequence[str]) -> list[str]:
    """The words of a command that begins with a file of keys, as a plan writes it, with those of the file in its place.

    The file says {"preset": NAME, "keys": {KEY: VALUE}}; what was typed comes before it. Raises ValueError if it does
    not.
    """
    if not argv or "=" in argv[0] or not argv[0].endswith(ENDING):
        return list(argv)
    found = whole(os.path.expanduser(argv[0]), "name a preset, or a file that a plan has written")
    texts = {"preset": str, "keys": lambda keys: isinstance(keys, dict) and fits(list(keys.values()), [str])}
    if not fits(found, texts):
        raise ValueError(f"{argv[0]} is no preset: name a file that a plan has written with preset=FILE")
    return over([found["preset"], *argv[1:]], found["keys"])


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

    Every word that was typed stays, so that a wrong one is reported in the end as it was typed.
    """
    given = typed(argv)
    added = [f"{key}={value}" for key, value in defaults.items() if key not in given]
    first = [] if preset_of(argv) or not preset else [preset]
    return [*first, *argv, *added]
