"""The one preparer that reads input files of batches, beside those for requests, and the order in which files are read.

It has the lowest priority, starts with the first file, and ends when no file was read for a while. So files cost
requests neither a preparer nor a place in a queue.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import OrderedDict

import msgspec

from services.gateway.preparation.file_job import (
    CheckFileJob,
    FileJob,
    FileJobResult,
    FileUnreadable,
    ReadLines,
    ReadLinesJob,
)
from services.gateway.preparation.fork_server import LOWEST_NICE
from services.gateway.preparation.line_check import CheckedSlice
from services.gateway.preparation.preparer import Preparer, PreparerDied
from services.gateway.preparation.preparer_pool import FORK_RETRY_S, PreparerPool

# Most seconds of a job, which takes a fraction of a second of CPU time: others may leave it little of the CPU.
MAX_FILE_JOB_S = 120.0
# Seconds after its last job at which the preparer ends.
IDLE_S = 10.0

log = logging.getLogger(__name__)


class FileJobFailed(Exception):
    """The preparer was killed during the job, or did not end it in time."""


class FileOrder:
    """Which file is read next, a slice of it at a time: tenants in turns, whatever the number of their files.

    Of a tenant's files the one that was begun comes first, so that at most one of them is half read; then the one whose
    batch expires first.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[str, list[tuple[bool, int, int, str]]] = OrderedDict()
        self._waiting: set[str] = set()

    def push_file(self, tenant: str, batch: str, expires_at: int, order: int, begun: bool) -> None:
        """The file of a batch waits for its next slice, or for its first; once. `order` grows with their creation."""
        if batch in self._waiting:
            return
        self._waiting.add(batch)
        heapq.heappush(self._files.setdefault(tenant, []), (not begun, expires_at, order, batch))

    def pop_file(self) -> str | None:
        """The batch whose file is read next; None if none waits."""
        if not self._files:
            return None
        tenant = next(iter(self._files))
        batch = heapq.heappop(self._files[tenant])[-1]
        self._waiting.discard(batch)
        if self._files[tenant]:
            self._files.move_to_end(tenant)
        else:
            del self._files[tenant]
        return batch


class FileChecker:
    """Runs one job on a file at a time."""

    def __init__(self, pool: PreparerPool) -> None:
        self._pool = pool
        self._busy = asyncio.Lock()
        self._preparer: Preparer | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def check_slice(self, job: CheckFileJob) -> CheckedSlice | FileUnreadable:
        """Check a slice of a file. Raises FileJobFailed if that ends the process that does it."""
        result = await self._run_job(job)
        assert isinstance(result, CheckedSlice | FileUnreadable)
        return result

    async def read_lines(self, job: ReadLinesJob) -> ReadLines | FileUnreadable:
        """Read the first of some lines. Raises FileJobFailed if that ends the process that does it."""
        result = await self._run_job(job)
        assert isinstance(result, ReadLines | FileUnreadable)
        return result

    async def _run_job(self, job: FileJob) -> FileJobResult:
        async with self._busy:
            if self._idle is not None:
                self._idle.cancel()
            preparer, done = await self._find_preparer(), False
            try:
                async with asyncio.timeout(MAX_FILE_JOB_S):
                    result = await preparer.run_file_job(msgspec.msgpack.encode(job))
                done = True
                return result
            except (TimeoutError, PreparerDied) as error:
                why = str(error) or f"it took more than {MAX_FILE_JOB_S:g} s"
                log.warning("an input file could not be read: %s", why)
                raise FileJobFailed from error
            finally:
                # A preparer that was left in the middle of a job would give its result to the next one.
                if done:
                    self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_preparer)
                else:
                    self._end_preparer()

    def close(self) -> None:
        """End the preparer, if there is one. Idempotent."""
        if self._idle is not None:
            self._idle.cancel()
        self._end_preparer()

    async def _find_preparer(self) -> Preparer:
        """The preparer that runs, or a new one."""
        while self._preparer is None:
            try:
                self._preparer = await self._pool.fork_preparer(LOWEST_NICE)
            except OSError as error:
                log.warning("no file can be read: %s; trying again in %g s", error, FORK_RETRY_S)
                await asyncio.sleep(FORK_RETRY_S)
        return self._preparer

    def _end_preparer(self) -> None:
        preparer, self._preparer = self._preparer, None
        if preparer is not None:
            self._pool.end_preparer(preparer)
