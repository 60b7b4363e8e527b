"""Log files of bounded size: each is one file, with the older part beside it (`NAME.old`).

The standard error of a process that the supervisor starts is such a file. The process, its children and the libraries
in them write to it through one descriptor, so the file cannot be replaced. Instead the supervisor checks its size from
time to time, copies its end, and truncates it. That works because the file is opened for appending. Record files, which
programs read, are renamed by their only writer instead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import IO

# Suffix of the file with the older lines. It is not ".1", which logrotate uses.
OLD_SUFFIX = ".old"
# The largest size of one process's log, in bytes.
MAX_LOG_BYTES = 16 << 20
# Limit of a record file: `--request-log`, `--step-log`, `--replan-journal`.
MAX_RECORD_BYTES = 1 << 30
# Most bytes of a partial line that is skipped at the beginning of the copied part.
MAX_CUT_BYTES = 4 << 10


def open_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> IO[bytes]:
    """Open a log for appending, for the standard error of a process. A log that is too large is truncated first.

    Raises:
        OSError: the log cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab")
    truncate_log(path, log.fileno(), max_bytes)
    return log


def truncate_log(path: Path, descriptor: int, max_bytes: int = MAX_LOG_BYTES) -> None:
    """If a log is larger than `max_bytes`, copy its last `max_bytes` to `NAME.old` and empty it.

    `descriptor` is open for appending to it. Lines written during the copy, and lines that cannot be copied, are lost.
    A log that cannot be truncated is left unchanged.
    """
    with contextlib.suppress(OSError):
        if not _is_large(descriptor, max_bytes):
            return
        # Read through the descriptor, since the log may have been renamed. If the copy fails, the old lines are lost.
        with contextlib.suppress(OSError), open(f"/proc/self/fd/{descriptor}", "rb") as newer:
            newer.seek(-max_bytes, os.SEEK_END)
            # Skips the rest of the line that the seek landed in.
            newer.readline(MAX_CUT_BYTES)
            with open(f"{path}{OLD_SUFFIX}", "wb", opener=_open_private) as older:
                shutil.copyfileobj(newer, older)
        os.ftruncate(descriptor, 0)


def rotate_record(path: str, descriptor: int, max_bytes: int = MAX_RECORD_BYTES) -> bool:
    """Rename a file to `NAME.old` if it is larger than `max_bytes`. Returns True if so: its writer then opens a new
    file.

    Raises:
        OSError: the file cannot be renamed.
    """
    if not _is_large(descriptor, max_bytes):
        return False
    os.replace(path, f"{path}{OLD_SUFFIX}")
    return True


def _is_large(descriptor: int, max_bytes: int) -> bool:
    state = os.fstat(descriptor)
    return stat.S_ISREG(state.st_mode) and state.st_size > max_bytes


def _open_private(path: str, flags: int) -> int:
    """Open a regular file (0600) without following links, and without blocking on a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
