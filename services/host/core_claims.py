"""Gives the workers of a machine different CPU cores, even if several deployments run on it: by locked files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


class CoreClaim:
    """The cores that one worker holds until `release`, or until this process ends."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` has a file per core; by default it is the same one for all processes of this user."""
        self._folder = folder or Path(tempfile.gettempdir()) / f"diptych-cores-{os.geteuid()}"
        self._held: list[int] = []

    def take_cores(self, count: int, cores: Sequence[int]) -> int | None:
        """Hold `count` cores in a row of `cores` that nobody holds, and return the first; None if there are none."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            return None
        for first in range(len(cores) - count + 1):
            wanted = cores[first : first + count]
            if all(self._lock(core) for core in wanted):
                return wanted[0]
            self.release()
        return None

    def release(self) -> None:
        """Let others have the cores. Idempotent."""
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    def _lock(self, core: int) -> bool:
        """Lock the file of a core; False if another process holds it."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._folder / str(core), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._held.append(descriptor)
            return True
        return False
