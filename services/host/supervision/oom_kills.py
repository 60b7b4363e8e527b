"""Counts how many processes the kernel has killed because memory ran out, as far as this process can see."""

from __future__ import annotations

import contextlib
from pathlib import Path

from diptych.cgroups import CGROUP_ROOT, MEMBERSHIP_FILE, V1, V2, memory_groups

# In all three files, the line with the count has this name.
OOM_KILL_LINE = "oom_kill"


def count_oom_kills(
    cgroups: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP_FILE, vmstat: Path = Path("/proc/vmstat")
) -> int:
    """Number of out-of-memory kills so far in the innermost cgroup of this process that counts them.

    Without such a cgroup the kills of the whole machine are counted.

    The kernel counts before it kills, so a caller that has seen a child end finds the kill counted. A kill in this
    cgroup is counted whether the cgroup or the machine ran out of memory. Returns 0 if no counter can be read, so that
    callers never see a difference.
    """
    for file in (*_cgroup_files(cgroups, membership), vmstat):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text(encoding="utf-8").splitlines():
                name, _, count = line.partition(" ")
                if name == OOM_KILL_LINE:
                    return int(count)
    return 0


def _cgroup_files(cgroups: Path, membership: Path) -> list[Path]:
    """The files with memory events of this process's cgroup and of all cgroups around it, innermost first."""
    names = {V1: "memory.oom_control", V2: "memory.events"}
    return [folder / names[version] for version, folder in memory_groups(cgroups, membership)]
