"""How much memory the control groups of this process still allow it to take.

Version 1 and version 2 (systemd's `MemoryMax=`, containers, Kubernetes) are supported. A limit counts on every level,
from the process's own group to the topmost visible group.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP_FILE = Path("/proc/self/cgroup")
V1, V2 = 1, 2
_LIMIT_FILE = {V1: "memory.limit_in_bytes", V2: "memory.max"}
_USAGE_FILE = {V1: "memory.usage_in_bytes", V2: "memory.current"}
# The counter of memory.stat for cached file pages, which the kernel reclaims first.
_CACHE_COUNTER = {V1: "total_inactive_file", V2: "inactive_file"}


def memory_groups(cgroups: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP_FILE) -> list[tuple[int, Path]]:
    """The version and folder of this process's memory group, and of every group that contains it.

    A container may see its own group as the topmost one, while `membership` has the group's path on the host. So
    leading parts of the path that do not exist are left out.
    """
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += [(V2, folder) for folder in _group_levels(cgroups, path)]
            elif "memory" in controllers.split(","):
                found += [(V1, folder) for folder in _group_levels(cgroups / "memory", path)]
    return found


def available_memory_bytes(cgroups: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP_FILE) -> int | None:
    """Bytes that this process may still take: the least over all levels of its groups. None: there is no limit."""
    left: list[int] = []
    for version, folder in memory_groups(cgroups, membership):
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file says "max", which is no limit
            limit = int((folder / _LIMIT_FILE[version]).read_text())
            used = int((folder / _USAGE_FILE[version]).read_text())
            left.append(max(0, limit - used + min(used, _reclaimable_bytes(folder, _CACHE_COUNTER[version]))))
    return min(left, default=None)


def _group_levels(top: Path, path: str) -> list[Path]:
    """The existing folder of the group `path` below `top`, and all folders above it up to `top`."""
    parts = [part for part in path.split("/") if part]
    # The group lies outside of the part of the tree that this process can see.
    if ".." in parts:
        parts = []
    while parts and not top.joinpath(*parts).is_dir():
        parts = parts[1:]
    return [top.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _reclaimable_bytes(folder: Path, name: str) -> int:
    """Bytes in use that the kernel reclaims as soon as other memory is needed (a counter of memory.stat)."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            kind, _, count = line.partition(" ")
            if kind == name:
                return int(count)
    return 0
