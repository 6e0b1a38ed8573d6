"""The memory that is available to a new process: what the kernel reports as free, within the container's limits.

Limits are those of control groups, version 1 or 2; those of a group's parents apply, too. Cached files count towards a
group's usage, but can be reclaimed.
"""
from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Iterator, NamedTuple

MEMINFO, OWN_GROUPS, ALL_GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CACHE_COUNTERS = ("inactive_file", "active_file")  # of a group's cached files


class GroupVersion(NamedTuple):
    """Where one version of control groups keeps what it knows of memory."""

    subfolder: str  # of the groups
    limit_file: str
    usage_file: str
    counter_prefix: str  # of the counters that include child groups


VERSION_1 = GroupVersion("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
VERSION_2 = GroupVersion("", "memory.max", "memory.current", "")


def available() -> int:
    """Return the bytes of main memory that are available to a new process; on boards CPU and GPU share them."""
    return max(0, min([_free_bytes(), *_bytes_below_limits()]))


def _free_bytes() -> int:
    if MEMINFO.is_file():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes_below_limits() -> Iterator[int]:
    """Yield the bytes left below the limit of each group of this process: its own and all parents."""
    lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines() if OWN_GROUPS.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue

        version = VERSION_1 if controllers else VERSION_2
        own_group = PurePosixPath(path.lstrip("/"))
        for group in (own_group, *own_group.parents):  # a container may show only the root
            with suppress(OSError, ValueError):  # the group is missing here, or its limit is "max"
                yield _bytes_left(ALL_GROUPS / version.subfolder / group, version)


def _bytes_left(group_dir: Path, version: GroupVersion) -> int:
    """Return the bytes left below a group's limit. Raises OSError without such a group, ValueError without a limit."""
    limit = int((group_dir / version.limit_file).read_text(encoding="ascii"))
    usage = int((group_dir / version.usage_file).read_text(encoding="ascii"))

    statistics = (group_dir / "memory.stat").read_text(encoding="ascii")
    counters = dict(line.split() for line in statistics.splitlines())
    cached_bytes = sum(int(counters.get(version.counter_prefix + name, 0)) for name in CACHE_COUNTERS)
    return limit - usage + cached_bytes
