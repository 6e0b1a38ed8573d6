"""Files that a user names: read text and JSON, and write output atomically.

It knows nothing about the meaning of their content. Every problem of a file raises a `ValueError`, which names the
file, the line where there is one, and the remedy.
"""
from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Iterable, Iterator

from config.schema.untrusted import Name, decoded, parse_json, read_bytes

SURROGATE = re.compile("[\\ud800-\\udfff]")  # a surrogate; Python also decodes a byte that is not UTF-8 into one
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # a surrogate as JSON escapes it; a character takes two of them
PROCESS_FILES = re.compile(r"/dev/fd/|/proc/")  # names of files that one process has open
STANDARD_STREAMS = re.compile(r"/dev/std(out|err)$")  # names of files that all ranks have open
MEND_REMEDY = "mend it"
READABLE_REMEDY = "name a file that you may read"
UTF8_REMEDY = "save it as UTF-8"
PRIVATE_MODE = 0o600
SPACE_REMEDY = "make room there, or let this user write there, and give the same command again"
MAX_NUMBER = 1e300  # no measured number exceeds this


def absolute(path: str) -> str:
    """Return the absolute form of a path that a user wrote, so that a later change of directory does not matter."""
    return os.path.abspath(os.path.expanduser(path))


# --- reading ----------------------------------------------------------------------------------------------------------

def read_json_file(path: Name, remedy: str = MEND_REMEDY) -> Any:
    """Return the content of a JSON file."""
    text = decoded(read_bytes(path, READABLE_REMEDY), path, UTF8_REMEDY)
    return _parse(text, str(path), remedy)


def lines(path: Name, remedy: str = MEND_REMEDY, growing: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield number and content of each line of JSON but blank ones; a `growing` file's unfinished line is ignored."""
    all_lines = read_bytes(path, READABLE_REMEDY).split(b"\n")
    for line_number, line in enumerate(all_lines[:-1] if growing else all_lines, 1):
        line_name = f"line {line_number} of {path}"
        text = decoded(line, line_name, UTF8_REMEDY)
        if text.strip():
            yield line_number, _parse(text, line_name, remedy)


def _parse(text: str, source_name: str, remedy: str) -> Any:
    """Parse JSON for a tokenizer or a file, and refuse surrogates, which neither of them accepts."""
    content = parse_json(text, source_name, remedy)
    if has_half_character(text, content):
        raise ValueError(f"{source_name} has half a character (a surrogate): write \\u escapes of surrogates in pairs")
    return content


def has_half_character(text: str, content: Any) -> bool:
    """Return whether a JSON text has a surrogate without its other half; `content` is what it was parsed to."""
    if not ESCAPED_SURROGATE.search(text):
        return False
    return bool(SURROGATE.search(json.dumps(content, ensure_ascii=False)))


def fits(value: Any, form: Any) -> bool:
    """Return whether a JSON value has this form.

    A form is a type (`float`: every finite number), a dict of required keys and their forms, a set with the form of all
    values of an object, a list with the form of all elements, a tuple with one form per element, or a function.
    """
    if isinstance(form, set):
        return isinstance(value, dict) and fits([*value.values()], [*form])
    if isinstance(form, dict):
        has_keys = isinstance(value, dict) and form.keys() <= value.keys()
        return has_keys and all(fits(value[key], form[key]) for key in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(element, form[0]) for element in value)
    if isinstance(form, tuple):
        has_length = isinstance(value, list) and len(value) == len(form)
        return has_length and all(map(fits, value, form))

    if not isinstance(form, type):
        return bool(form(value))
    if isinstance(value, bool):  # an int in Python, but not in JSON
        return form is bool
    if form is float:
        return isinstance(value, (int, float)) and -MAX_NUMBER < value < MAX_NUMBER
    return isinstance(value, form)


# --- writing ----------------------------------------------------------------------------------------------------------

def streams(path: Name) -> bool:
    """Return whether a path leads to a device, a pipe or the terminal, which is written to and never replaced."""
    if STANDARD_STREAMS.match(str(path)):
        return True
    with suppress(OSError):
        mode = os.stat(path).st_mode
        return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)
    return False


def check_output(path: Name, remedy: str) -> None:
    """Raise ValueError if a file cannot be written, before there is anything to write. Creates its folder."""
    if os.path.basename(path) == "-":
        raise ValueError(f"{path} would be a file of this name: give /dev/stdout for standard output, or {remedy}")
    with as_value_error(path, remedy):
        target = _resolved_target(path)
        if not streams(path):
            with _temporary_for(target) as (_, file):
                os.close(file)


def open_lock(path: Name) -> BinaryIO:
    """Open a file for locking, and create it and its folder. Raises OSError for a link or a pipe, without waiting."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    open_flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = open(os.open(path, open_flags, 0o666), "rb")
    if not stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
        lock.close()
        raise OSError(0, "it is not a regular file", str(path))
    return lock


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock a folder, and create it, so that one process at a time writes there; others wait, then find the result."""
    with open_lock(folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_private(path: Name) -> None:
    """Let only the user read a file, which is created if missing; `write` keeps these permissions."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, PRIVATE_MODE))
    os.chmod(path, PRIVATE_MODE)


def cache_folder() -> Path:
    """Return the project's folder in the user's cache."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(user_cache) / "flowspec"


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user may enter; raises OSError if it exists and others may, or own it."""
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    folder_state = os.lstat(folder)
    open_to_others = folder_state.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    is_own = stat.S_ISDIR(folder_state.st_mode) and folder_state.st_uid == os.getuid()

    if open_to_others or not is_own:
        raise OSError(f"{folder} is not a folder that only this user may enter (mode 0700): remove it")


class NoSpace(ValueError):
    """A disk that is too small."""


def check_space(folder: Path, num_bytes: int, needs: str, remedy: str, reused: Iterable[Path] = ()) -> None:
    """Raise NoSpace if a folder's disk lacks room for these bytes; those of `reused` files count as free.

    The sentence begins with `needs`, such as "the split needs".
    """
    free_bytes = shutil.disk_usage(folder).free + sum(path.stat().st_size for path in reused if path.is_file())
    if num_bytes > free_bytes:
        raise NoSpace(f"{needs} {num_bytes / 1e9:.2f} GB, but the disk of {folder} has {free_bytes / 1e9:.2f} GB: "
                      f"{remedy}")


def check_folder(path: Name, remedy: str) -> None:
    """Raise ValueError if no file can be written into a folder. Creates the folder."""
    with as_value_error(path, remedy):
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def write(path: Name, data: str | bytes, remedy: str) -> None:
    """Write a file atomically. Links are followed; devices and pipes are written to directly."""
    with as_value_error(path, remedy):
        replace(path, data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


def write_json(path: Name, content: Any, indent: int | None = 1) -> None:
    """Write a JSON file atomically. Raises ValueError if it cannot be written."""
    write(path, json.dumps(content, indent=indent) + "\n", SPACE_REMEDY)


def replace(path: Name, data: bytes) -> None:
    """Write a file atomically, as `write` does, but raise OSError where `write` raises ValueError."""
    target = _resolved_target(path)
    if streams(path):
        # without O_NONBLOCK, opening a pipe would wait for a reader
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
        os.set_blocking(file, True)
        _write_and_sync(file, data)
        return

    with _temporary_for(target) as (temporary_path, file):
        if target.exists():
            os.chmod(temporary_path, stat.S_IMODE(target.stat().st_mode))
        _write_and_sync(file, data)
        os.replace(temporary_path, target)


def append(path: Name, text: str, remedy: str) -> None:
    """Append a text to a file, which is created if missing; devices and pipes are written to directly."""
    data = text.encode("utf-8", "backslashreplace")
    with as_value_error(path, remedy):
        if streams(path):
            replace(path, data)
        else:
            _write_and_sync(os.open(_resolved_target(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), data)


def _write_and_sync(file: int, data: bytes) -> None:
    with open(file, "wb") as out:
        out.write(data)
        out.flush()
        if stat.S_ISREG(os.fstat(file).st_mode):  # fsync fails for a pipe
            os.fsync(file)


def _resolved_target(path: Name) -> Path:
    """Resolve a path's links, and create the folder. Raises OSError for a target that cannot be written."""
    if PROCESS_FILES.match(str(path)):
        raise OSError(0, "it is open in one process only, and each rank is another process")

    target = Path(os.path.realpath(path))
    try:
        file_mode = os.stat(path).st_mode
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    for is_refused, reason in ((stat.S_ISDIR, "it is a folder"), (stat.S_ISSOCK, "it is a socket"),
                               (stat.S_ISBLK, "it is a disk")):
        if is_refused(file_mode):
            raise OSError(0, reason)
    if not os.access(path, os.W_OK):
        raise OSError(0, "it is write-protected")
    return target


@contextmanager
def _temporary_for(target: Path) -> Iterator[tuple[Path, int]]:
    """Create a temporary file next to `target`, never through an existing link; delete it unless it was renamed."""
    temporary_path = target.with_name(f"{target.name}.{os.getpid()}.part")
    with suppress(OSError):
        temporary_path.unlink()
    try:
        yield temporary_path, os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    finally:
        with suppress(OSError):
            temporary_path.unlink()


@contextmanager
def as_value_error(path: Name, remedy: str) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the file and the remedy, unless it is a sentence that does."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise ValueError(str(error)) from error
        raise ValueError(f"{path} cannot be written ({error.strerror}): {remedy}") from error
