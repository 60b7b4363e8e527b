"""Files that are read and written past the page cache, so that what lies on disk takes no memory.

Without that the page cache would keep what is read as long as there is memory, and a limit of memory would be none.
Files are opened with O_DIRECT. Where a file system refuses that, pages are dropped after each read and write
(`posix_fadvise`), which is slower and keeps the promise, too.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import time
from pathlib import Path

from engine.offload.sizes import DISK_BLOCK

# Bytes of one system call.
PIECE_BYTES = 2 << 20
BURST_S = 0.002


class DiskRate:
    """Holds all reads and writes that share it to a number of bytes per second: a token bucket.

    It holds the bytes of `BURST_S` seconds, so that a thread which comes late makes up for it. Times are on
    `time.monotonic`. Threads may share it.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def reserve(self, num_bytes: int) -> float:
        """Until when (`time.monotonic`) moving `num_bytes` more takes. Move them, then wait for that time."""
        with self._lock:
            begun_s = max(self._free_s, time.monotonic() - BURST_S)
            self._free_s = begun_s + num_bytes / self.bytes_per_s
            return self._free_s


def _wait_until(end_s: float) -> None:
    time.sleep(max(0.0, end_s - time.monotonic()))


def allocate_memory(num_bytes: int) -> memoryview:
    """Writable memory that begins at a page, as O_DIRECT needs it. Pages take memory when they are first written."""
    return memoryview(mmap.mmap(-1, max(num_bytes, DISK_BLOCK)))


class DirectFile:
    """An open file that is read and written in whole blocks, past the page cache. Threads may share it.

    `rate` holds it to a rate; None: as fast as it is.
    """

    def __init__(self, file: int, path: Path, direct: bool, rate: DiskRate | None = None) -> None:
        self._file, self.path, self.direct, self._rate = file, path, direct, rate
        self.bytes_read = self.bytes_written = 0
        # System calls that have moved something, by which others see that a slow disk still works.
        self.num_moves = 0
        self._lock = threading.Lock()

    @classmethod
    def open_existing(cls, path: Path, rate: DiskRate | None = None) -> DirectFile:
        """Open a file for reading. Raises OSError."""
        file, direct = _open_direct(path, os.O_RDONLY)
        return cls(file, path, direct, rate)

    @classmethod
    def create_scratch(cls, folder: Path, num_bytes: int, rate: DiskRate | None = None) -> DirectFile:
        """A new file of `num_bytes` bytes without a name, so that nothing is left of it, however the process ends.

        Raises:
            OSError: the disk has no room, for example.
        """
        made, name = tempfile.mkstemp(prefix="block-", dir=folder)
        os.close(made)
        try:
            file, direct = _open_direct(Path(name), os.O_RDWR)
        finally:
            os.unlink(name)
        try:
            if num_bytes:
                os.posix_fallocate(file, 0, num_bytes)
        except OSError:
            os.close(file)
            raise
        return cls(file, folder, direct, rate)

    def read_into(self, memory: memoryview, at: int) -> None:
        """Fill `memory` from byte `at` on; both are whole blocks.

        Raises:
            OSError: the disk fails, or the file is too short.
        """
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            end_s = self._rate.reserve(len(piece)) if self._rate is not None else 0.0
            done = 0
            while done < len(piece):
                count = os.preadv(self._file, [piece[done:]], at + start + done)
                if not count:
                    raise OSError(errno.EIO, "the file is shorter than it was", str(self.path))
                done += count
                self._count_move()
            _wait_until(end_s)
        if not self.direct:
            os.posix_fadvise(self._file, at, len(memory), os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.bytes_read += len(memory)

    def write_from(self, memory: memoryview, at: int) -> None:
        """Write `memory` from byte `at` on; both are whole blocks. Raises OSError."""
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            end_s = self._rate.reserve(len(piece)) if self._rate is not None else 0.0
            done = 0
            while done < len(piece):
                done += os.pwritev(self._file, [piece[done:]], at + start + done)
                self._count_move()
            _wait_until(end_s)
        if not self.direct:
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, at, len(memory), os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.bytes_written += len(memory)

    def _count_move(self) -> None:
        with self._lock:
            self.num_moves += 1

    @property
    def used_bytes(self) -> int:
        """Bytes that the file takes on the disk."""
        return os.fstat(self._file).st_blocks * 512

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file; returns it, and whether it is read and written past the page cache by itself. Raises OSError."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags | os.O_CLOEXEC), False
