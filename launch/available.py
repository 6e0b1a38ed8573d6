"""The memory that is available to a new process: what the kernel reports as free, within the container's limits.

Limits are those of control groups, version 1 or 2; those of a group's parents apply, too. Cached files count towards a
group's usage, but can be reclaimed.
"""
from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Iterator

MEMINFO, OWN, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
FILES = ("inactive_file", "active_file")
# Of each version: the folder of the groups, the files with their limit and usage, and the prefix of the counters that
# include child groups.
SECOND = "", "memory.max", "memory.current", ""
FIRST = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"


def available() -> int:
    """Return the bytes of main memory that are available to a new process; on boards CPU and GPU share them."""
    return max(0, min([_free(), *_left()]))


def _free() -> int:
    if MEMINFO.is_file():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left() -> Iterator[int]:
    """Yield the bytes left below the limit of each group of this process: its own and all parents."""
    lines = OWN.read_text(encoding="utf-8").splitlines() if OWN.is_file() else []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        place, *files, prefix = FIRST if kinds else SECOND
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):  # a container may show only the root
            folder = GROUPS / place / group
            with suppress(OSError, ValueError):  # the group is missing here, or its limit is "max"
                limit, used = (int((folder / file).read_text(encoding="ascii")) for file in files)
                stat = (folder / "memory.stat").read_text(encoding="ascii")
                counts = dict(line.split() for line in stat.splitlines())
                held = (counts.get(prefix + name, 0) for name in FILES)
                yield limit - used + sum(map(int, held))
