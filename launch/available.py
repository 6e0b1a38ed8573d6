"""The memory that a new process could have here: what the kernel says is free, less what the container's limit forbids.

A limit is a control group's, of version 1 or 2; a group has the limits of those above it, too. Files that a group has
read count as its own, but give way.
"""
from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Iterator, NamedTuple

MEMINFO, OWN, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
FILES = ("inactive_file", "active_file")


class Version(NamedTuple):
    """Where the groups of a version stand, and how their files and counts are called."""

    place: str
    limit: str
    used: str
    prefix: str  # of a count that has the groups below in it


SECOND = Version("", "memory.max", "memory.current", "")
FIRST = Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


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
        version = FIRST if kinds else SECOND
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):  # a container may show only the last of them
            yield from _below(GROUPS / version.place / group, version)


def _below(group: Path, version: Version) -> Iterator[int]:
    try:
        limit, used = _number(group / version.limit), _number(group / version.used)
        stat = (group / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):  # there is no such group here, or its limit is "max"
        return
    counts = dict(line.split() for line in stat.splitlines())
    held = (counts.get(version.prefix + name, 0) for name in FILES)
    yield limit - used + sum(map(int, held))


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
