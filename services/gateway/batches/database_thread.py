"""The one thread that uses the database. Jobs that wait together share a transaction, and one sync of the disk.

    run_job() ─▶ queue ─▶ BEGIN ─ job, job, … ─ fsync of the files they appended to ─ COMMIT ─▶ their callers go on

A job appends results to files through `ResultFiles`. A row says how many bytes of each file are committed, and what
lies behind them is written over. So a result is in its file exactly if its line is marked as done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from services.gateway.batches import tables
from services.gateway.batches.data_dir import NEW_FILE_FLAGS, DataDir, is_disk_full, sync_folder, write_whole
from services.gateway.batches.storage.answer_spool import PIECE_BYTES, SpooledResult
from services.gateway.batches.storage.open_database import open_database

# Most jobs of one transaction.
MAX_GROUP = 256
# Most files that are kept open between groups.
MAX_OPEN_FILES = 64
# Seconds to wait at the end for the jobs that are queued.
CLOSE_TIMEOUT_S = 10.0

T = TypeVar("T")
Job = Callable[[sqlite3.Connection, "ResultFiles"], T]

log = logging.getLogger(__name__)


class StorageError(Exception):
    """The disk or the database failed, and nothing of the job is kept. The text says why."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.cause = error

    @property
    def disk_full(self) -> bool:
        """Whether there was no room."""
        return is_disk_full(self.cause)


class ResultFiles:
    """The files that results are appended to, open while their batches run."""

    def __init__(self, data_dir: DataDir) -> None:
        self._folder = data_dir
        self._open: dict[str, int] = {}
        self._written: set[str] = set()
        self._unused: list[str] = []

    def append(self, file_id: str, offset: int, data: bytes) -> None:
        """Write `data` at `offset`, the committed length of the file. Raises OSError."""
        write_whole(self._descriptor(file_id), data, offset)
        self._written.add(file_id)

    def append_lines(self, file_id: str, offset: int, lines: Iterable[bytes | SpooledResult]) -> int:
        """Write lines at `offset`, the committed length of the file; returns its new length. Raises OSError.

        Many short lines are written together, and a long one in pieces.
        """
        gathered = bytearray()
        for piece in chain.from_iterable(
            (line,) if isinstance(line, bytes) else line.iter_pieces() for line in lines
        ):
            gathered += piece
            if len(gathered) >= PIECE_BYTES:
                self.append(file_id, offset, bytes(gathered))
                offset += len(gathered)
                gathered.clear()
        if gathered:
            self.append(file_id, offset, bytes(gathered))
        return offset + len(gathered)

    def size(self, file_id: str) -> int:
        """How many bytes a file has; 0 if there is none. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return self._folder.content_path(file_id).stat().st_size
        return 0

    def cut(self, file_id: str, num_bytes: int) -> None:
        """Cut a file to its committed length. Raises OSError."""
        os.ftruncate(self._descriptor(file_id), num_bytes)
        self._written.add(file_id)

    def close_file(self, file_id: str) -> None:
        """Close a file, which is complete."""
        if (descriptor := self._open.pop(file_id, None)) is not None:
            os.fsync(descriptor)
            os.close(descriptor)
        self._written.discard(file_id)

    def remove_content(self, file_id: str) -> None:
        """Close and remove a file."""
        self.close_file(file_id)
        self._folder.remove_content(file_id)

    @property
    def num_unused(self) -> int:
        """How many contents are to be removed later."""
        return len(self._unused)

    def remove_later(self, file_id: str) -> None:
        """Remove a content once the rows say for good that nobody needs it.

        If that does not come about, it is removed at the next start.
        """
        self._unused.append(file_id)

    def remove_unused(self) -> None:
        """Remove what was to be removed later. Raises OSError."""
        while self._unused:
            self.remove_content(self._unused.pop())

    def forget_unused(self, behind: int = 0) -> None:
        """The rows do not say so: keep the contents behind the first ones."""
        del self._unused[behind:]

    def sync_written(self) -> None:
        """Make everything that was appended last. Raises OSError."""
        for file_id in self._written:
            os.fsync(self._descriptor(file_id))
        self._written.clear()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, file_id: str) -> int:
        if file_id not in self._open:
            self._close_oldest()
            path = self._folder.content_path(file_id)
            is_new = not path.exists()
            self._open[file_id] = os.open(path, NEW_FILE_FLAGS, 0o600)
            if is_new:
                sync_folder(path.parent)
        return self._open[file_id]

    def _close_oldest(self) -> None:
        """Close a file, if many are open; rather one that needs no sync. Raises OSError."""
        if len(self._open) < MAX_OPEN_FILES:
            return
        unwritten = (file_id for file_id in self._open if file_id not in self._written)
        oldest = next(unwritten, next(iter(self._open)))
        if oldest in self._written:
            os.fsync(self._open[oldest])
            self._written.discard(oldest)
        os.close(self._open.pop(oldest))


@dataclass(eq=False, slots=True)
class _QueuedJob:
    work: Job[Any]
    done: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class DatabaseThread:
    """Runs jobs on the database, one group after the other.

    `trouble` says why nothing can be written at the moment; "" if it can.
    """

    def __init__(self, data_dir: DataDir) -> None:
        """Open the database, or make it.

        Raises:
            StartError: it is not ours, of another version, or cannot be read.
        """
        self.trouble = ""
        self.files = ResultFiles(data_dir)
        self._db = open_database(data_dir)
        # The time that was settled when the last process ended, in Unix seconds.
        self.settled_s = tables.read_clock(self._db)
        self._jobs: queue.SimpleQueue[_QueuedJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_groups, name="batches", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """The thread's identity in this process."""
        assert self._thread.ident is not None
        return self._thread.ident

    async def run_job(self, work: Job[T]) -> T:
        """Run `work` in a transaction; returns what it returned, once that is on disk.

        Raises:
            StorageError: the disk or the database failed, and nothing of it is kept.
        """
        job = _QueuedJob(work, asyncio.get_running_loop().create_future())
        self._jobs.put(job)
        result: T = await job.done
        return result

    def close(self, settled_s: float) -> None:
        """Run the jobs that wait, keep the settled time, and close everything. Idempotent."""
        if self._thread.is_alive():
            self.settled_s = settled_s
            self._jobs.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run_groups(self) -> None:
        """The thread's main function."""
        closing = False
        while not closing:
            queued_jobs: list[_QueuedJob] = []
            closing = self._gather_jobs(queued_jobs)
            # What fails together may succeed alone: a job that only reads needs no room on the disk.
            if queued_jobs and not self._run_group(queued_jobs) and len(queued_jobs) > 1:
                for job in queued_jobs:
                    self._run_group([job])
            for job in queued_jobs:
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    job.done.get_loop().call_soon_threadsafe(_report_job, job)
        # Without it the next process trusts the clock an hour later.
        with contextlib.suppress(sqlite3.Error):
            tables.write_clock(self._db, self.settled_s or 0.0)
        self.files.close()
        self._db.close()

    def _gather_jobs(self, queued_jobs: list[_QueuedJob]) -> bool:
        """Wait for a job, and take all that wait with it. Returns whether the thread shall end."""
        job = self._jobs.get()
        while job is not None:
            queued_jobs.append(job)
            if len(queued_jobs) == MAX_GROUP or self._jobs.empty():
                return False
            job = self._jobs.get()
        return True

    def _run_group(self, queued_jobs: list[_QueuedJob]) -> bool:
        """Run jobs in one transaction. Returns False if it failed; then nothing is kept."""
        before = self._db.total_changes
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for job in queued_jobs:
                self._run_alone(job)
            self.files.sync_written()
            self._db.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            self.files.forget_unused()
            if not self.trouble:
                log.error("writing files and batches failed; what waits is tried again: %s", error)
            self.trouble = "the disk is full" if is_disk_full(error) else f"the disk failed: {error}"
            for job in queued_jobs:
                job.error = StorageError(error)
            return False
        if self._db.total_changes > before:
            self.trouble = ""
        try:
            self.files.remove_unused()
        except OSError as error:
            log.warning("a file that is not needed is removed at the next start: %s", error)
        return True

    def _run_alone(self, job: _QueuedJob) -> None:
        """Run one job of a group. What it raises, but for failures of the disk, undoes this job alone."""
        self._db.execute("SAVEPOINT job")
        num_unused = self.files.num_unused
        try:
            job.result, job.error = job.work(self._db, self.files), None
        except (OSError, sqlite3.Error):
            raise
        except Exception as error:
            self._db.execute("ROLLBACK TO job")
            self.files.forget_unused(num_unused)
            job.error = error
        self._db.execute("RELEASE job")


def _report_job(job: _QueuedJob) -> None:
    """Tell the caller how its job ended; called on its event loop."""
    if job.done.done():
        return
    if job.error is not None:
        job.done.set_exception(job.error)
    else:
        job.done.set_result(job.result)
