"""A store of keys in a private folder: the rendezvous of ranks on one machine, without a port that others could reach.

It has the methods of torch's stores that the heartbeat and the clocks use. Counters are overwritten in place, so that
the folder does not grow with the heartbeats of a pipeline that runs for months, and hardly ever reaches the disk.
"""
from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator
from urllib.parse import quote

from config.failure import PeerLost

RENDEZVOUS = "FLOWSPEC_FOLDER"  # in the environment of a rank that a launcher started: the folder where all meet
POLL_SECONDS = 0.01  # between two checks for a key
COUNTER_DIGITS = 20
FOLDER_PREFIX = "flowspec-"
LOCK_FILE = ".flowspec-private"  # in each private folder; every process that uses the folder holds a lock on it


@contextmanager
def private_folder() -> Iterator[str]:
    """Yield a new folder that no other user may enter, and remove it at the end; first remove those of dead processes.

    It is among temporary files, not in shared memory, which systemd clears when its owner logs out, even if in use.
    """
    for left_folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        _remove_unused(left_folder)

    folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
    new_file = Path(folder.name, f"{LOCK_FILE}.part")
    with new_file.open("w") as lock_file, folder:
        fcntl.flock(lock_file, fcntl.LOCK_SH)
        new_file.rename(new_file.with_name(LOCK_FILE))  # anyone who sees it finds it locked
        yield folder.name


def hold(folder: str) -> None:
    """Mark a private folder as used until this process ends; raises OSError if it is gone."""
    lock_file = os.open(os.path.join(folder, LOCK_FILE), os.O_RDONLY)
    fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove_unused(folder: Path) -> None:
    """Remove a private folder of this user that no process uses; leave any other folder, and links, untouched."""
    with suppress(OSError):
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return

        lock_file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock_file)


class Folder:
    """A store with `set`, `get` and `add` as torch's stores have them."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder)

    def set(self, key: str, value: str) -> None:
        path = self._path_of(key)
        new_file = path.with_name(f"{path.name}.{os.getpid()}.part")
        new_file.write_text(value, encoding="utf-8")
        os.replace(new_file, path)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        while (value := self.look(key)) is None:
            time.sleep(POLL_SECONDS)
        return value

    def look(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it is missing; raises PeerLost if the folder is gone.

        It takes no lock, since a stopped process could hold it.
        """
        try:
            return self._path_of(key).read_bytes()
        except FileNotFoundError:
            if not self.path.is_dir():
                raise PeerLost(f"the rendezvous was lost: the launcher and its folder {self.path} are gone") from None
            return None

    def add(self, key: str, amount: int) -> int:
        """Add an amount to a counter and return its new value; 0 only reads it."""
        if not amount:
            return int(self.look(key) or 0)

        counter_file = os.open(self._path_of(key), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(counter_file, fcntl.LOCK_EX)
            total = int(os.pread(counter_file, COUNTER_DIGITS, 0) or 0) + amount
            os.pwrite(counter_file, f"{total:0{COUNTER_DIGITS}}".encode(), 0)
            return total
        finally:
            os.close(counter_file)

    def _path_of(self, key: str) -> Path:
        return self.path / quote(key, safe="")
