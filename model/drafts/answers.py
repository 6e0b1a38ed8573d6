"""Earlier answers as token ids, in a file that only its user may read.

A line of JSON names the size of the vocabulary, each other line is the list of a text's token ids, the oldest first. It
knows nothing about what is made of them.
"""
from __future__ import annotations

import fcntl
import json
import os
from typing import Iterable

from config.files import ROOM, fits, lines, make_private, open_lock, replace
from config.schema.untrusted import Name, shown

AFRESH = "delete the file, which begins a new one, or name another"


def load_texts(path: Name, vocabulary: int, limit: int) -> list[list[int]]:
    """The newest texts of a file, the oldest first, `limit` tokens in all; none if there is no file or an empty one.

    Raises ValueError if the file cannot be read, is of another vocabulary, or has a line that is no text of it.
    """
    found = lines(path, AFRESH) if os.path.exists(path) else iter(())
    head: object
    number, head = next(found, (0, None))
    if not number:
        return []
    if not fits(head, {"vocabulary": int}):
        raise ValueError(f"line {number} of {path} does not name the size of a vocabulary: {AFRESH}")
    if head != {"vocabulary": vocabulary}:
        raise ValueError(f"{path} holds answers of another vocabulary ({shown(head)}) than the model's, which has "
                         f"{vocabulary} tokens: {AFRESH}")

    def is_token(value: object) -> bool:
        return fits(value, int) and value in range(vocabulary)

    texts = []
    for number, text in found:
        if not fits(text, [is_token]):
            raise ValueError(f"line {number} of {path} is no list of token ids from 0 to {vocabulary - 1}: {AFRESH}")
        texts.append(text)
    return _newest(texts, limit)


def add_texts(path: Name, texts: Iterable[list[int]], vocabulary: int, limit: int) -> None:
    """Add texts to a file, which keeps the newest `limit` tokens; makes the file and its folder if need be.

    The file is replaced whole, one process at a time, so it is not spoiled by one that ends half-way; a lock stands
    beside it. The time grows with `limit`. Raises ValueError as `load_texts` does, or if the file cannot be written.
    """
    try:
        with open_lock(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = _newest([*load_texts(path, vocabulary, limit), *texts], limit)
            make_private(path)
            content = [{"vocabulary": vocabulary}, *kept]
            replace(path, "".join(f"{json.dumps(line)}\n" for line in content).encode())
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): {ROOM}") from error


def _newest(texts: list[list[int]], limit: int) -> list[list[int]]:
    """The last texts that have at most `limit` tokens together; of the first of them its end."""
    kept: list[list[int]] = []
    for text in reversed(texts):
        if limit < 1:
            break
        if text:
            kept.append(text[-limit:])
            limit -= len(text)
    return kept[::-1]
