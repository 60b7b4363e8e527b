"""Tells when files that a running process uses were replaced: keys, and certificates."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Seconds between two looks at files. A look costs a system call each; events of the kernel would miss network drives.
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one state of a file from another: which file it is, and when and how long it was written."""

    device: int
    inode: int
    modified_ns: int
    num_bytes: int
    # Its mode and owner may be the problem.
    changed_ns: int


class WatchedFiles:
    """The state of `paths`, behind all links. Create it before the files are read."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._used = self._seen = [_stamp_file(path) for path in paths]

    def have_changed(self) -> bool:
        """Whether the files are to be read again: others than those that were used, or than were refused, are there.

        A single file that was put in place of another one counts at once. One that is written over, and several files,
        count once they are the same at two looks: so nothing is read that is half written.
        """
        now = [_stamp_file(path) for path in self.paths]
        before, self._seen = self._seen, now
        if now == self._used or (now != before and not _is_exchanged(before, now)):
            return False
        self._used = now
        return True


def _stamp_file(path: Path) -> FileStamp | None:
    """The state of a file now; None if it is not there."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return FileStamp(state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size, state.st_ctime_ns)


def _is_exchanged(before: Sequence[FileStamp | None], now: Sequence[FileStamp | None]) -> bool:
    """Whether a single file is another one than before, or is gone."""
    if len(now) != 1:
        return False
    [first], [second] = before, now
    if first is None or second is None:
        return second is None
    return (first.device, first.inode) != (second.device, second.inode)
