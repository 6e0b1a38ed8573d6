"""What a measurement types for a person: keys that a measurement sets, unless the command gives them."""
from __future__ import annotations


def key_of(word: str) -> str:
    """The key of `key=value`."""
    return word.partition("=")[0]


def with_defaults(argv: list[str], *defaults: str) -> list[str]:
    """`argv`, followed by those defaults whose keys it does not give."""
    given = {key_of(word) for word in argv}
    return argv + [word for word in defaults if key_of(word) not in given]
