"""The folder under `--data-dir`: who may use it, what lies in it, and how much room its disk has.

    lock               held by the gateway that uses the folder; the kernel releases it when the process ends
    batches.sqlite3    the tables of `tables`
    files/ID           the content of a file, or the results of a batch that runs
    uploads/ID         an upload that is not complete; removed at the next start
    running            the lines in flight, see `running_lines`

Everything is for the owner alone: folders have mode 0700 and files 0600.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from diptych.errors import RequestError, StartError
from diptych.failure_statuses import FailureReason, RequestFailure

LOCK_NAME, DATABASE_NAME, FILES_NAME, UPLOADS_NAME = "lock", "batches.sqlite3", "files", "uploads"
RUNNING_NAME = "running"
KNOWN_NAMES = frozenset({LOCK_NAME, DATABASE_NAME, FILES_NAME, UPLOADS_NAME, RUNNING_NAME})
# Uploads and batches are refused while the disk has fewer bytes or inodes than this, so that results can still be
# written.
MIN_FREE_BYTES, MIN_FREE_INODES = 64 << 20, 1024
OTHERS_MODE = stat.S_IRWXG | stat.S_IRWXO
NEW_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class DataDir:
    """The folder, locked by this process until `close`."""

    def __init__(self, path: str) -> None:
        """Make the folder if it is missing, check it, and lock it.

        Raises:
            StartError: it cannot be made or written, others may read it, it holds something else, or another gateway
                uses it.
        """
        self.path = Path(path)
        self.files, self.uploads = self.path / FILES_NAME, self.path / UPLOADS_NAME
        self.database = self.path / DATABASE_NAME
        # Bytes that are being written at the moment.
        self._claimed = 0
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_folder(self.path)
            self._lock = _lock_file(self.path / LOCK_NAME)
        except OSError as error:
            raise _unusable_error(self.path, error) from error
        try:
            for folder in (self.files, self.uploads):
                folder.mkdir(mode=0o700, exist_ok=True)
            for left in self.uploads.iterdir():
                left.unlink()
            self._found = set(os.listdir(self.files))
        except OSError as error:
            self.close()
            raise _unusable_error(self.path, error) from error

    def close(self) -> None:
        """Let other processes use the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def content_path(self, file_id: str) -> Path:
        """Where the content of a file lies. The id must be one that this gateway has made."""
        return self.files / file_id

    def remove_content(self, file_id: str) -> None:
        """Remove the content of a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.content_path(file_id).unlink()

    def remove_others(self, known: Iterable[str]) -> None:
        """Remove what was found at the start, but the `known` files: contents whose row was never committed."""
        for name in self._found.difference(known):
            self.remove_content(name)
        self._found.clear()

    def free_bytes(self) -> int:
        """How many bytes the disk has left for this process."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def disk_bytes(self) -> int:
        """How many bytes the whole disk has."""
        found = os.statvfs(self.path)
        return found.f_blocks * found.f_frsize

    def spare_bytes(self) -> int:
        """How many bytes uploads may still take: the disk keeps some for results, and some inodes."""
        found = os.statvfs(self.path)
        # A file system that makes inodes as it needs them has a total of 0.
        if found.f_files and found.f_favail < MIN_FREE_INODES:
            return 0
        return max(0, self.free_bytes() - MIN_FREE_BYTES - self._claimed)

    def check_space(self, num_bytes: int) -> None:
        """Check that `num_bytes` more leave room for results.

        Raises:
            RequestError: 507, they do not.
        """
        if self.spare_bytes() <= num_bytes:
            raise RequestError(storage_failure(OSError(errno.ENOSPC, "too little is left")))

    @contextlib.contextmanager
    def claim_space(self, num_bytes: int) -> Iterator[None]:
        """A block in which `num_bytes` are written, which leave room for results, whatever is written beside them.

        Raises:
            RequestError: 507, they would not.
        """
        self.check_space(num_bytes)
        self._claimed += num_bytes
        try:
            yield
        finally:
            self._claimed -= num_bytes


def storage_failure(error: BaseException) -> RequestFailure:
    """What a client is told when the disk does not do what it should; the log has the cause."""
    if is_disk_full(error):
        return RequestFailure(
            FailureReason.STORAGE_FULL, "the server's disk for files and batches is full", cause=str(error)
        )
    problem = "the server's disk for files and batches failed"
    return RequestFailure(FailureReason.STORAGE_FAILED, problem, cause=str(error))


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of the system or of SQLite says that there is no room left."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return full or "disk is full" in str(error)


def write_whole(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError; a part may be written then."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def sync_folder(path: Path) -> None:
    """Make the names in a folder last. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_folder(path: Path) -> None:
    """Raise StartError if others may look into the folder, or if it holds something else."""
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & OTHERS_MODE:
        raise StartError(
            "the data directory is open to other users of this machine",
            f"{path} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}; "
            "it holds prompts and answers of all tenants",
            f"chmod 700 {path}, as the user that runs the gateway, or another --data-dir",
        )
    strange = sorted(
        name for name in os.listdir(path) if name not in KNOWN_NAMES and not name.startswith(DATABASE_NAME)
    )
    if strange and DATABASE_NAME not in os.listdir(path):
        raise StartError(
            "the data directory is used for something else",
            f"{path} holds {strange[0][:60]!r}, and no data of a gateway",
            "give --data-dir an empty folder, or a new name",
        )


def _lock_file(path: Path) -> int:
    """A descriptor of the locked lock file, which says who holds it. Raises StartError if another process does."""
    descriptor = os.open(path, NEW_FILE_FLAGS, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise StartError(
            "the data directory is in use by another gateway",
            f"{path.parent} is locked by process {holder or 'unknown'}",
            "stop that gateway, or give each gateway a --data-dir of its own",
        ) from None
    # A gateway can start while the disk is full; then nobody is told who holds the lock.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    return descriptor


def _unusable_error(path: Path, error: OSError) -> StartError:
    return StartError(
        "the data directory cannot be used",
        f"{error.filename or path}: {error.strerror}",
        "give --data-dir a folder on a local disk that the gateway's user may write to",
    )
