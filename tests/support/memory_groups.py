"""Memory cgroups for tests: they limit what a process and its children may take, and know the most that they took."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

LIMITS = ("memory.max", "memory.limit_in_bytes")
PEAKS = ("memory.peak", "memory.max_usage_in_bytes")


class MemoryGroupError(Exception):
    """There can be no such group here; the text says why."""


class MemoryGroup:
    """A group that was made, in `folder`."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        """Make the group.

        Raises:
            MemoryGroupError: it cannot be made here, or would limit nothing.
        """
        self.limit_bytes = limit_bytes
        top = Path("/sys/fs/cgroup")
        self.folder = (top / "memory" if (top / "memory").is_dir() else top) / name
        try:
            self.folder.mkdir()
        except OSError as error:
            raise MemoryGroupError(f"no memory cgroup can be made here: {error.strerror}") from None
        limit = self._file(LIMITS)
        if limit is None:
            self.remove()
            raise MemoryGroupError("cgroups do not limit memory here")
        try:
            limit.write_text(str(limit_bytes))
        except OSError as error:
            self.remove()
            raise MemoryGroupError(f"memory cgroups take no limit here: {error.strerror}") from None

    def enter(self) -> None:
        """Move this process into the group; what it starts from now on is in the group, too."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def members(self) -> set[int]:
        return {int(line) for line in (self.folder / "cgroup.procs").read_text().split()}

    def peak_bytes(self) -> int | None:
        """The most that the group took at once, cached file pages included; None: this kernel does not know."""
        file = self._file(PEAKS)
        return None if file is None else int(file.read_text())

    def remove(self) -> None:
        """Remove the group if it has no members; the last ones may be ending just now."""
        for _ in range(40):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            if not self.folder.exists():
                return
            time.sleep(0.05)

    def _file(self, names: tuple[str, ...]) -> Path | None:
        return next((self.folder / name for name in names if (self.folder / name).exists()), None)
