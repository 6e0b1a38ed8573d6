"""Files that a person named: text and JSON out of them, and output into them that is there whole or not at all.

It knows nothing about what they hold. What is wrong with a file is a `ValueError` whose sentence names it, the line
too, and says what to do.
"""
from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Iterator

from config.schema.untrusted import Name, decoded, parse_json, read_bytes

HALF = re.compile("[\\ud800-\\udfff]")  # half of a character; Python makes it of a byte that is no UTF-8, too
ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON may write it; a whole character takes two of these
INHERITED = re.compile(r"/dev/fd/|/proc/")  # names of what one process has open
OWN = re.compile(r"/dev/std(out|err)$")  # names of what all ranks have open
MEND = "mend it"
ANOTHER = "name a file that you may read"
SAVE = "save it as UTF-8"
PRIVATE = 0o600
ROOM = "make room there, or let this user write there, and give the same command again"
LARGE = 1e300  # a number beyond is none that anybody measured


def absolute(path: str) -> str:
    """The place of a path that a person wrote, whatever folder is worked in later."""
    return os.path.abspath(os.path.expanduser(path))


# --- reading ----------------------------------------------------------------------------------------------------------

def whole(path: Name, remedy: str = MEND) -> Any:
    """What a file of JSON says."""
    text = decoded(read_bytes(path, ANOTHER), path, SAVE)
    return _parse(text, str(path), remedy)


def lines(path: Name, remedy: str = MEND, growing: bool = False) -> Iterator[tuple[int, Any]]:
    """Number and content of each line of JSON that is not blank; of a `growing` file no unfinished last line."""
    found = read_bytes(path, ANOTHER).split(b"\n")
    for number, line in enumerate(found[:-1] if growing else found, 1):
        where = f"line {number} of {path}"
        text = decoded(line, where, SAVE)
        if text.strip():
            yield number, _parse(text, where, remedy)


def _parse(text: str, where: str, remedy: str) -> Any:
    """What JSON says that becomes text for a tokenizer or a file, neither of which takes half a character."""
    found = parse_json(text, where, remedy)
    if ESCAPED.search(text) and HALF.search(json.dumps(found, ensure_ascii=False)):
        raise ValueError(f"{where} has half a character, which is no text: write its \\u escapes in pairs")
    return found


def fits(value: Any, form: Any) -> bool:
    """Whether a piece of JSON has this form.

    A form is a type (`float`: every finite number), a dict of keys that must be there with their forms, a set with the
    form of all values of an object, a list with that of all elements, a tuple with one for each, or a function.
    """
    if isinstance(form, set):
        return isinstance(value, dict) and fits([*value.values()], [*form])
    if isinstance(form, dict):
        held = isinstance(value, dict) and form.keys() <= value.keys()
        return held and all(fits(value[key], form[key]) for key in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(element, form[0]) for element in value)
    if isinstance(form, tuple):
        as_many = isinstance(value, list) and len(value) == len(form)
        return as_many and all(map(fits, value, form))
    if not isinstance(form, type):
        return bool(form(value))
    if isinstance(value, bool):  # which is no number to its author
        return form is bool
    if form is float:
        return isinstance(value, (int, float)) and -LARGE < value < LARGE
    return isinstance(value, form)


# --- writing ----------------------------------------------------------------------------------------------------------

def streams(path: Name) -> bool:
    """Whether a path leads to what is written through and cannot be replaced: a device, a pipe, the terminal."""
    if OWN.match(str(path)):
        return True
    with suppress(OSError):
        mode = os.stat(path).st_mode
        return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)
    return False


def check_output(path: Name, remedy: str) -> None:
    """Refuse a file that cannot be written, before there is anything to write. Makes its folder."""
    with explained(path, remedy):
        place = _place(path)
        if not streams(path):
            with _beside(place) as (_, file):
                os.close(file)


def open_lock(path: Name) -> BinaryIO:
    """A file to be locked, made with its folder. A link is not followed, and a pipe is not waited for: OSError."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = open(os.open(path, how, 0o666), "rb")
    if not stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
        lock.close()
        raise OSError(0, "it is no file", str(path))
    return lock


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let only one process at a time write into a folder, which is made; the others wait, and then find it done."""
    with open_lock(folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_private(path: Name) -> None:
    """A file that only its user may read, made if it is not there; what then takes its place keeps that."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, PRIVATE))
    os.chmod(path, PRIVATE)


def check_folder(path: Name, remedy: str) -> None:
    """Refuse a folder that nothing can be written into. Makes it."""
    with explained(path, remedy):
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def write(path: Name, data: str | bytes, remedy: str) -> None:
    """Write a file whole or not at all; links are followed, and devices and pipes are written through."""
    with explained(path, remedy):
        replace(path, data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


def write_json(path: Name, content: Any, indent: int | None = 1) -> None:
    """Write a file of JSON whole or not at all. Raises ValueError if that cannot be."""
    write(path, json.dumps(content, indent=indent) + "\n", ROOM)


def replace(path: Name, data: bytes) -> None:
    """Write a file whole or not at all, as `write` does; raises OSError where `write` raises ValueError."""
    place = _place(path)
    if streams(path):
        # without O_NONBLOCK this waited for as long as nobody reads from a pipe
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
        os.set_blocking(file, True)
        _put(file, data)
        return
    with _beside(place) as (draft, file):
        if place.exists():
            os.chmod(draft, stat.S_IMODE(place.stat().st_mode))
        _put(file, data)
        os.replace(draft, place)


def append(path: Name, text: str, remedy: str) -> None:
    """Add a text at the end of a file, which is made if it is not there; devices and pipes are written through."""
    data = text.encode("utf-8", "backslashreplace")
    with explained(path, remedy):
        if streams(path):
            replace(path, data)
        else:
            _put(os.open(_place(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), data)


def _put(file: int, data: bytes) -> None:
    with open(file, "wb") as out:
        out.write(data)
        out.flush()
        if stat.S_ISREG(os.fstat(file).st_mode):  # a pipe has no disk
            os.fsync(file)


def _place(path: Name) -> Path:
    """Where a path leads, links followed, in a folder that is made. Raises OSError if that is nothing to write to."""
    if INHERITED.match(str(path)):
        raise OSError(0, "it is open in one process alone, and a rank is another")
    place = Path(os.path.realpath(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        place.parent.mkdir(parents=True, exist_ok=True)
        return place
    for refused, what in ((stat.S_ISDIR, "it is a folder"), (stat.S_ISSOCK, "it is a socket"),
                          (stat.S_ISBLK, "it is a disk")):
        if refused(mode):
            raise OSError(0, what)
    if not os.access(path, os.W_OK):
        raise OSError(0, "it may not be written")
    return place


@contextmanager
def _beside(place: Path) -> Iterator[tuple[Path, int]]:
    """A new file that may take this place, which is no link that somebody put there; else it is gone in the end."""
    draft = place.with_name(f"{place.name}.{os.getpid()}.part")
    with suppress(OSError):
        draft.unlink()
    try:
        yield draft, os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    finally:
        with suppress(OSError):
            draft.unlink()


@contextmanager
def explained(path: Name, remedy: str) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the file, and says what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): {remedy}") from error
