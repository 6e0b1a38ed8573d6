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
LOOK = 0.01  # seconds between two checks for a key
DIGITS = 20
PREFIX = "flowspec-"
MARK = ".flowspec-private"  # a file in each private folder, on which every process that uses the folder holds a lock


@contextmanager
def private_folder() -> Iterator[str]:
    """Yield a new folder that no other user may enter, and remove it at the end; first remove those of dead processes.

    It is among temporary files, not in shared memory, which systemd clears when its owner logs out, even if in use.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_unused(left)
    folder = tempfile.TemporaryDirectory(prefix=PREFIX)
    draft = Path(folder.name, f"{MARK}.part")
    with draft.open("w") as mark, folder:
        fcntl.flock(mark, fcntl.LOCK_SH)
        draft.rename(draft.with_name(MARK))  # anyone who sees it finds it locked
        yield folder.name


def hold(folder: str) -> None:
    """Mark a private folder as used until this process ends; raises OSError if it is gone."""
    mark = os.open(os.path.join(folder, MARK), os.O_RDONLY)
    fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove_unused(folder: Path) -> None:
    """Remove a private folder of this user that no process uses; leave any other folder, and links, untouched."""
    with suppress(OSError):
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        mark = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(mark)


class Folder:
    """A store with `set`, `get` and `add` as torch's stores have them."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder)

    def set(self, key: str, value: str) -> None:
        path = self._path(key)
        draft = path.with_name(f"{path.name}.{os.getpid()}.part")
        draft.write_text(value, encoding="utf-8")
        os.replace(draft, path)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        while (found := self.look(key)) is None:
            time.sleep(LOOK)
        return found

    def look(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it is missing; raises PeerLost if the folder is gone.

        It takes no lock, since a stopped process could hold it.
        """
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            if not self.path.is_dir():
                gone = f"the launcher and its folder {self.path} are gone"
                raise PeerLost(f"the rendezvous was lost: {gone}") from None
            return None

    def add(self, key: str, amount: int) -> int:
        """Add an amount to a counter and return its new value; 0 only reads it."""
        if not amount:
            return int(self.look(key) or 0)
        file = os.open(self._path(key), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            total = int(os.pread(file, DIGITS, 0) or 0) + amount
            os.pwrite(file, f"{total:0{DIGITS}}".encode(), 0)
            return total
        finally:
            os.close(file)

    def _path(self, key: str) -> Path:
        return self.path / quote(key, safe="")
