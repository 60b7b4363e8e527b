"""What is kept of files and batches, for the event loop: every change is on disk when its method returns.

The methods raise `StorageError` if the disk or the database fails, and RequestError if a client asked for something
that is not there. A `tenant` of None stands for all tenants: operators ask for it.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from diptych.specs import StorageShares
from services.gateway.batches import tables
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.database_thread import DatabaseThread, Job, ResultFiles
from services.gateway.batches.records import BatchRecord, FileRecord, InputLine, LineEnd
from services.gateway.batches.storage import batch_changes as changes
from services.gateway.batches.storage import results
from services.gateway.batches.storage.lookups import found_batch, found_file, num_waiting
from services.gateway.batches.storage.settled_clock import SettledClock
from services.gateway.batches.storage.tenant_shares import (
    TenantUse,
    find_line_refusal,
    find_refusal,
)
from services.gateway.openai.schemas.batch_schema import ENDED_STATUSES, BatchProblem
from services.gateway.openai.validate import invalid_value_error

# How many rows are added or removed in one transaction, so that jobs of others wait for milliseconds.
MAX_ROWS = 2000
# How many files that have expired are removed in one transaction, and pages of the database given back to the disk.
MAX_EXPIRED, MAX_PAGES = 100, 512
# The settled time is kept on disk at most this often, in seconds, after so long.
CLOCK_INTERVAL_S = 300.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class BatchStore:
    """Files, batches and lines of all tenants. `by_status` and `held_bytes` are as of a moment ago."""

    def __init__(
        self,
        data_dir: DataDir,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        shares: StorageShares | None = None,
        tenants: Collection[str] | None = None,
    ) -> None:
        """Open what lies in `data_dir`. `clock` gives Unix seconds, `monotonic` seconds that never jump.

        `tenants` are those whose keys are accepted; None: everybody's.

        Raises:
            StartError: it cannot be read, or is of another version.
        """
        self.data_dir, self.shares, self._tenants = data_dir, shares or StorageShares(), tenants
        self._clock, self._monotonic = clock, monotonic
        self._thread = DatabaseThread(data_dir)
        self._settled, self._kept_clock_s = SettledClock(self._thread.settled_s), float("-inf")
        self.by_status: dict[str, int] = {}
        self.held_bytes = 0
        # What tenants keep, as of their last change.
        self._uses: dict[str, TenantUse] = {}

    @property
    def trouble(self) -> str:
        """Why nothing can be written at the moment; "" if it can."""
        return self._thread.trouble

    @property
    def database(self) -> DatabaseThread:
        """The thread that does the work."""
        return self._thread

    @property
    def now(self) -> int:
        """The time in Unix seconds for what is made now."""
        return int(self._settled.stamp(self._clock(), self._monotonic()))

    @property
    def settled_s(self) -> float:
        """The time in Unix seconds by which files and batches expire: a jump of the clock counts after an hour."""
        return self._settled.read(self._clock(), self._monotonic())

    def close(self) -> None:
        """Finish what is being written, and let others use the folder. Idempotent."""
        self._thread.close(self.settled_s)
        self.data_dir.close()

    async def probe(self) -> None:
        """Write something small. Raises StorageError while nothing can be written."""
        now = self.now
        await self._thread.run_job(lambda db, _: tables.write_probe(db, now))

    async def recover(self) -> list[BatchRecord]:
        """Bring files and rows together after a start; returns the batches that have not ended.

        Batches of tenants whose keys are not accepted any more are about to be cancelled then.
        """
        now = int(self.settled_s)

        def work(db: sqlite3.Connection, files: ResultFiles) -> tuple[list[BatchRecord], list[int]]:
            found = results.recover_batches(db, files, self.data_dir, self._tenants, now)
            self._uses = tables.tenant_uses(db)
            return found, results.leftover_lines(db)

        found, leftover = await self._change(work)
        for batch in leftover:
            await self._drop_lines(batch)
        return found

    # ---- files

    async def add_file(self, record: FileRecord) -> None:
        """Add a file whose content is in its place. Raises RequestError (413) if its tenant may not keep it."""
        free_bytes = self.data_dir.spare_bytes() + record.bytes

        def work(db: sqlite3.Connection, files: ResultFiles) -> None:
            refusal = find_refusal(
                self.shares, tables.tenant_use(db, record.tenant), record.bytes, 1, free_bytes
            )
            if refusal is not None:
                raise RequestError(refusal)
            tables.add_file(db, record)

        await self._change(work, record.tenant)

    async def find_file(self, tenant: str | None, file_id: str) -> FileRecord:
        """A file of a tenant. Raises RequestError (404) if there is none."""
        now = int(self.settled_s)
        found = await self._thread.run_job(lambda db, _: tables.find_file(db, tenant, file_id, now))
        return found_file(found, file_id)

    async def list_files(
        self, tenant: str | None, purpose: str | None, after: str | None, limit: int, order: str
    ) -> list[FileRecord]:
        """The files of a tenant behind the file `after`. Raises RequestError (400) if there is no such file."""
        now = int(self.settled_s)
        found = await self._thread.run_job(
            lambda db, _: tables.list_files(db, tenant, purpose, after, limit, order, now)
        )
        if found is None:
            raise invalid_value_error("after", "names no file of yours")
        return found

    async def delete_file(self, tenant: str | None, file_id: str) -> None:
        """Delete a file. Its content stays while a batch reads it. Raises RequestError (404) if there is none."""
        now = int(self.settled_s)

        def work(db: sqlite3.Connection, files: ResultFiles) -> None:
            found = found_file(tables.find_file(db, tenant, file_id, now), file_id)
            if tables.delete_file(db, file_id, now):
                files.remove_later(file_id)
            self._note_use(db, found.tenant)

        await self._change(work)

    async def remove_unused(self) -> int | None:
        """Remove what has expired: contents of files, and rows that were kept long enough.

        Returns when the next file expires. Everything is done in small pieces, with jobs of others in between.
        """
        more = True
        while more:
            now, settled_s = int(self.settled_s), self._clock_to_keep()

            def work(
                db: sqlite3.Connection,
                files: ResultFiles,
                now: int = now,
                settled_s: float | None = settled_s,
            ) -> tuple[bool, int | None]:
                if settled_s is not None:
                    tables.write_clock(db, settled_s)
                expired = tables.take_expired(db, now, MAX_EXPIRED)
                for file_id in expired:
                    files.remove_later(file_id)
                num_rows = tables.forget_rows(db, now, MAX_ROWS)
                num_free = tables.give_back(db, MAX_PAGES)
                return bool(expired or num_rows or num_free), tables.next_expiry(db)

            more, next_expiry = await self._change(work)
        return next_expiry

    def content_path(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self.data_dir.content_path(file_id)

    # ---- tenants

    async def tenant_use(self, tenant: str) -> TenantUse:
        """What a tenant keeps."""
        return await self._thread.run_job(lambda db, _: self._note_use(db, tenant))

    async def tenant_uses(self) -> dict[str, TenantUse]:
        """What all tenants keep."""
        return await self._thread.run_job(lambda db, _: tables.tenant_uses(db))

    def upload_refusal(self, tenant: str, num_bytes: int) -> RequestFailure | None:
        """Why a tenant may not upload so many bytes, which are on disk already; None if it may."""
        free_bytes = self.data_dir.spare_bytes() + num_bytes
        return find_refusal(self.shares, self._use_of(tenant), num_bytes, 1, free_bytes)

    def line_refusal(self, tenant: str) -> RequestFailure | None:
        """Why no other line of a tenant may have a result; None if it may, as of its last change."""
        return find_line_refusal(self.shares, self._use_of(tenant), self.data_dir.spare_bytes())

    def _use_of(self, tenant: str) -> TenantUse:
        return self._uses.get(tenant, TenantUse())

    # ---- batches

    async def add_batch(self, record: BatchRecord) -> None:
        """Add a new batch.

        Raises:
            RequestError: 404, its input is no file of the tenant; 400, it is not for batches; 429, too many are open;
                413, its results may not be kept; 507, the disk is full.
        """
        now, free_bytes = int(self.settled_s), self.data_dir.spare_bytes()

        self.data_dir.check_space(0)
        await self._change(
            lambda db, _: changes.add_batch(db, record, self.shares, now, free_bytes), record.tenant
        )

    async def find_batch(self, tenant: str | None, batch_id: str) -> BatchRecord:
        """A batch of a tenant. Raises RequestError (404) if there is none."""
        found = await self._thread.run_job(lambda db, _: tables.find_batch(db, batch_id, tenant))
        return found_batch(found, batch_id)

    async def list_batches(self, tenant: str | None, after: str | None, limit: int) -> list[BatchRecord]:
        """The batches of a tenant behind the batch `after`. Raises RequestError (400) if there is no such batch."""
        found = await self._thread.run_job(lambda db, _: tables.list_batches(db, tenant, after, limit))
        if found is None:
            raise invalid_value_error("after", "names no batch of yours")
        return found

    async def cancel_batch(self, tenant: str | None, batch_id: str) -> BatchRecord:
        """Have a batch cancelled. Raises RequestError: 404 if there is none, 409 if it has ended or is about to."""
        now = self.now
        return await self._change(lambda db, _: changes.cancel_batch(db, tenant, batch_id, now))

    async def count_check(self, batch_id: str) -> int:
        """Count that the check of an input file begins; returns how often it has begun, this time included.

        The number survives a crash of this process.
        """
        return await self._thread.run_job(lambda db, _: tables.count_check(db, batch_id))

    async def fail_batch(self, batch_id: str, problems: Sequence[BatchProblem]) -> BatchRecord:
        """A batch is refused before any line runs, unless it is cancelled meanwhile."""
        now = self.now

        def work(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            record = tables.find_batch(db, batch_id)
            assert record is not None
            if record.status != "validating":
                return record
            failed = changes.fail_batch(db, files, record, problems, now)
            self._note_use(db, record.tenant)
            return failed

        return await self._change(work)

    async def begin_batch(self, batch_id: str, lines: Sequence[InputLine], model: str) -> BatchRecord:
        """A batch is valid: its lines may run, unless it is cancelled meanwhile.

        It fails if its tenant may not have so many lines. The rows of lines are written in pieces, with jobs of others
        in between; if this process ends before the last one, the batch has not begun.
        """
        now = self.now

        def prepare(db: sqlite3.Connection, files: ResultFiles) -> tuple[int, BatchRecord]:
            record = tables.find_batch(db, batch_id)
            assert record is not None
            use, most = tables.tenant_use(db, record.tenant), self.shares.max_lines
            if record.status == "validating" and use.lines - record.total + len(lines) > most:
                problem = (
                    f"your open batches have {use.lines - record.total} lines, and with the {len(lines)} lines of "
                    f"this file they would be above the share of a key, {most} (--max-tenant-lines); wait until "
                    "one has ended, or cancel one"
                )
                problems = [BatchProblem("line_share_full", problem)]
                failed = changes.fail_batch(db, files, record, problems, now)
                self._note_use(db, record.tenant)
                return tables.number_of(db, batch_id), failed
            return tables.number_of(db, batch_id), tables.update_batch(db, batch_id, total=len(lines))

        number, record = await self._change(prepare)
        # Rows are left if this was tried before, and the disk was full.
        await self._drop_lines(number)
        if record.status == "failed":
            return record
        for begin in range(0, len(lines), MAX_ROWS):
            piece = lines[begin : begin + MAX_ROWS]
            await self._thread.run_job(
                lambda db, _, piece=piece: tables.add_lines(db, batch_id, piece)  # type: ignore[misc]
            )

        def begin_all(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            record = tables.find_batch(db, batch_id)
            assert record is not None
            begun: dict[str, Any] = {"model": model, "in_progress_at": now}
            if record.status == "validating":
                begun["status"] = "in_progress"
            return tables.update_batch(db, batch_id, **begun)

        return await self._change(begin_all)

    async def waiting_lines(self, batch_id: str, behind: int, limit: int) -> list[InputLine]:
        """At most `limit` lines without a result, with numbers above `behind`."""
        return await self._thread.run_job(lambda db, _: tables.waiting_lines(db, batch_id, behind, limit))

    async def count_waiting(self, batch_id: str) -> int:
        """How many lines have no result."""
        return await self._thread.run_job(lambda db, _: num_waiting(tables.find_batch(db, batch_id)))

    async def end_lines(self, batch_id: str, ends: Sequence[LineEnd]) -> BatchRecord:
        """Write the results of lines. A line that has a result already keeps it."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            record = results.write_ends(db, files, batch_id, ends)
            self._note_use(db, record.tenant)
            return record

        return await self._change(work)

    async def finalize_batch(self, batch_id: str, outcome: str) -> BatchRecord:
        """No line runs any more: results are about to be complete, and the batch will end as `outcome`.

        A batch that was cancelled before it was complete ends as cancelled.
        """
        now = self.now
        return await self._change(lambda db, _: changes.finalize_batch(db, batch_id, outcome, now))

    async def end_batch(self, batch_id: str) -> BatchRecord:
        """The results are complete: publish them, and end the batch with its outcome."""
        now = self.now

        def work(db: sqlite3.Connection, files: ResultFiles) -> tuple[int, BatchRecord]:
            record = tables.find_batch(db, batch_id)
            assert record is not None
            if record.status in ENDED_STATUSES:
                # This was tried before, and the disk failed while its lines were forgotten.
                return tables.number_of(db, batch_id), record
            results.publish_results(db, files, record, now)
            ended = tables.end_batch(db, batch_id, record.outcome, now)
            changes.release_input(db, files, ended, now)
            self._note_use(db, ended.tenant)
            return tables.number_of(db, batch_id), ended

        number, ended = await self._change(work)
        await self._drop_lines(number)
        return ended

    async def _drop_lines(self, batch: int) -> None:
        """Forget all lines of a batch that has ended or not begun, in pieces."""
        while await self._thread.run_job(lambda db, _: tables.drop_lines(db, batch, MAX_ROWS)) == MAX_ROWS:
            pass

    def _clock_to_keep(self) -> float | None:
        """The settled time, if it is to be written again."""
        settled_s = self.settled_s
        if abs(settled_s - self._kept_clock_s) < CLOCK_INTERVAL_S:
            return None
        self._kept_clock_s = settled_s
        return settled_s

    def _note_use(self, db: sqlite3.Connection, tenant: str) -> TenantUse:
        use = self._uses[tenant] = tables.tenant_use(db, tenant)
        return use

    async def _change(self, job: Job[T], tenant: str | None = None) -> T:
        """Run a job that changes files or batches, and read the totals; those of `tenant` too."""

        def counted(db: sqlite3.Connection, files: ResultFiles) -> T:
            result = job(db, files)
            if tenant is not None:
                self._note_use(db, tenant)
            self.by_status, self.held_bytes = tables.count_batches(db), tables.sum_bytes(db)
            return result

        return await self._thread.run_job(counted)
