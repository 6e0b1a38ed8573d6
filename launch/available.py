"""The memory that a new process could have here: what the kernel says is free, less what the container's limit forbids.

A limit is a control group's, of version 1 or 2; a group has the limits of those above it, too. Files that a group has
read count as its own, but give way.
"""
from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Iterator

MEMINFO, OWN, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
FILES = ("inactive_file", "active_file")
# Where the groups of a version are, their files of the limit and of what is used, and what begins the name of a count
# that has the groups below in it.
SECOND = "", "memory.max", "memory.current", ""
FIRST = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"


def available() -> int:
    """Bytes of main memory that a new process could have; on boards CPU and GPU share them."""
    return max(0, min([_free(), *_left()]))


def _free() -> int:
    if MEMINFO.is_file():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left() -> Iterator[int]:
    """The bytes below the limit of each group that this process is in, its own and those above it."""
    lines = OWN.read_text(encoding="utf-8").splitlines() if OWN.is_file() else []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        place, *files, prefix = FIRST if kinds else SECOND
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):  # a container may show only the last of them
            folder = GROUPS / place / group
            with suppress(OSError, ValueError):  # there is no such group here, or its limit is "max"
                limit, used = (int((folder / file).read_text(encoding="ascii")) for file in files)
                stat = (folder / "memory.stat").read_text(encoding="ascii")
                counts = dict(line.split() for line in stat.splitlines())
                held = (counts.get(prefix + name, 0) for name in FILES)
                yield limit - used + sum(map(int, held))
