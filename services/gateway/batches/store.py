"""What is kept of files and batches, for the event loop: every change is on disk when its method returns.

The methods raise `StorageError` if the disk or the database fails, and RequestError if a client asked for something
that is not there.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.shown_text import quote_text
from services.gateway.batches import tables
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.database_thread import DatabaseThread, Job, ResultFiles
from services.gateway.batches.records import (
    OUTPUT_PURPOSE,
    BatchRecord,
    FileRecord,
    InputLine,
    LineEnd,
    result_text,
)
from services.gateway.openai.batch_schema import BatchProblem, LineFailure, LineResult
from services.gateway.openai.validate import invalid_value_error

# Most batches of a tenant that have not ended.
MAX_OPEN_BATCHES = 1000
# How many lines are failed in one transaction when a batch ends early.
FAILED_LINES = 1000
# The totals are counted at most this often, in seconds, after changes that are not of files or batches themselves.
TOTALS_INTERVAL_S = 1.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class BatchStore:
    """Files, batches and lines of all tenants. `by_status` and `held_bytes` are as of a moment ago."""

    def __init__(self, folder: DataDir, clock: Callable[[], float] = time.time) -> None:
        """Open what lies in `folder`. `clock` gives Unix seconds.

        Raises:
            StartError: it cannot be read, or is of another version.
        """
        self.folder, self._clock = folder, clock
        self._thread = DatabaseThread(folder)
        self.by_status: dict[str, int] = {}
        self.held_bytes = 0
        self._counted_s = float("-inf")

    @property
    def trouble(self) -> str:
        """Why nothing can be written at the moment; "" if it can."""
        return self._thread.trouble

    @property
    def now(self) -> int:
        """The time in Unix seconds."""
        return int(self._clock())

    def close(self) -> None:
        """Finish what is being written, and let others use the folder. Idempotent."""
        self._thread.close()
        self.folder.close()

    async def probe(self) -> None:
        """Write something small. Raises StorageError while nothing can be written."""
        await self._thread.run_job(lambda db, _: tables.write_probe(db, self.now))

    async def recover(self) -> list[BatchRecord]:
        """Bring files and rows together after a start; returns the batches that have not ended."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> list[BatchRecord]:
            found = tables.open_batches(db)
            self.folder.remove_others(tables.known_contents(db))
            found = [_whole_results(db, files, record) for record in found]
            self._count_totals(db)
            return found

        return await self._thread.run_job(work)

    # ---- files

    async def add_file(self, record: FileRecord) -> None:
        """Add a file whose content is in its place."""
        await self._change(lambda db, files: tables.add_file(db, record))

    async def find_file(self, tenant: str, file_id: str) -> FileRecord:
        """A file of a tenant. Raises RequestError (404) if there is none."""
        found = await self._thread.run_job(lambda db, _: tables.find_file(db, tenant, file_id, self.now))
        return _found_file(found, file_id)

    async def list_files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, order: str
    ) -> list[FileRecord]:
        """The files of a tenant behind the file `after`. Raises RequestError (400) if there is no such file."""
        found = await self._thread.run_job(
            lambda db, _: tables.list_files(db, tenant, purpose, after, limit, order, self.now)
        )
        if found is None:
            raise invalid_value_error("after", "names no file of yours")
        return found

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Its content stays while a batch reads it. Raises RequestError (404) if there is none."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> None:
            _found_file(tables.find_file(db, tenant, file_id, self.now), file_id)
            tables.mark_deleted(db, file_id)

        await self._change(work)
        await self.remove_unused()

    async def remove_unused(self) -> int | None:
        """Remove files that are deleted or expired, and not read any more. Returns when the next one expires."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> tuple[list[str], int | None]:
            return tables.take_unused(db, self.now), tables.next_expiry(db)

        unused, next_expiry = await self._change(work)

        # After the rows are gone for good: a content without a row is removed at the next start, at the latest.
        def remove(db: sqlite3.Connection, files: ResultFiles) -> None:
            for file_id in unused:
                files.remove_content(file_id)

        if unused:
            await self._thread.run_job(remove)
        return next_expiry

    def content_path(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self.folder.content_path(file_id)

    # ---- batches

    async def add_batch(self, record: BatchRecord) -> None:
        """Add a new batch.

        Raises:
            RequestError: 404, its input is no file of the tenant; 400, it is not for batches; 429, too many are open.
        """

        def work(db: sqlite3.Connection, files: ResultFiles) -> None:
            _found_file(tables.find_file(db, record.tenant, record.input_file, self.now), record.input_file)
            if tables.input_in_use(db, record.tenant, record.input_file, self.now) is None:
                raise invalid_value_error(
                    "input_file_id", "names a file that was not uploaded with purpose 'batch'"
                )
            if tables.count_open(db, record.tenant) >= MAX_OPEN_BATCHES:
                problem = f"{MAX_OPEN_BATCHES} batches are open; wait until one has ended, or cancel one"
                raise RequestError(RequestFailure(FailureReason.TOO_MANY_BATCHES, problem))
            tables.add_batch(db, record)

        await self._change(work)

    async def find_batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """A batch of a tenant. Raises RequestError (404) if there is none."""
        found = await self._thread.run_job(lambda db, _: tables.find_batch(db, batch_id, tenant))
        return _found_batch(found, batch_id)

    async def list_batches(self, tenant: str, after: str | None, limit: int) -> list[BatchRecord]:
        """The batches of a tenant behind the batch `after`. Raises RequestError (400) if there is no such batch."""
        found = await self._thread.run_job(lambda db, _: tables.list_batches(db, tenant, after, limit))
        if found is None:
            raise invalid_value_error("after", "names no batch of yours")
        return found

    async def cancel_batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Have a batch cancelled. Raises RequestError: 404 if there is none, 409 if it has ended or is about to."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            record = _found_batch(tables.find_batch(db, batch_id, tenant), batch_id)
            if record.status == "cancelling":
                return record
            if record.status not in ("validating", "in_progress"):
                problem = f"a batch with status '{record.status}' cannot be cancelled"
                raise RequestError(RequestFailure(FailureReason.BATCH_HAS_ENDED, problem))
            return tables.update_batch(
                db, batch_id, status="cancelling", outcome="cancelled", cancelling_at=self.now
            )

        return await self._change(work)

    async def count_check(self, batch_id: str) -> int:
        """Count that the check of an input file begins; returns how often it has begun, this time included.

        The number survives a crash of this process.
        """
        return await self._thread.run_job(lambda db, _: tables.count_check(db, batch_id))

    async def fail_batch(self, batch_id: str, problems: Sequence[BatchProblem]) -> BatchRecord:
        """A batch is refused before any line runs, unless it is cancelled meanwhile."""
        errors = msgspec.json.encode(list(problems)).decode()

        def work(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            record = tables.find_batch(db, batch_id)
            assert record is not None
            if record.status != "validating":
                return record
            for file_id in (record.output_file, record.error_file):
                files.remove_content(file_id)
            return tables.update_batch(db, batch_id, status="failed", failed_at=self.now, errors=errors)

        return await self._change(work)

    async def begin_batch(self, batch_id: str, lines: Sequence[InputLine], model: str) -> BatchRecord:
        """A batch is valid: its lines may run, unless it is cancelled meanwhile."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            record = tables.find_batch(db, batch_id)
            assert record is not None
            tables.add_lines(db, batch_id, lines)
            begun = {"total": len(lines), "model": model, "in_progress_at": self.now}
            if record.status == "validating":
                begun["status"] = "in_progress"
            return tables.update_batch(db, batch_id, **begun)

        return await self._change(work)

    async def waiting_lines(self, batch_id: str, behind: int, limit: int) -> list[InputLine]:
        """At most `limit` lines without a result, with numbers above `behind`."""
        return await self._thread.run_job(lambda db, _: tables.waiting_lines(db, batch_id, behind, limit))

    async def count_waiting(self, batch_id: str) -> int:
        """How many lines have no result."""
        return await self._thread.run_job(lambda db, _: tables.count_waiting(db, batch_id))

    async def end_lines(self, batch_id: str, ends: Sequence[LineEnd]) -> BatchRecord:
        """Write the results of lines. A line that has a result already keeps it."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            record = _write_ends(db, files, batch_id, ends)
            if time.monotonic() - self._counted_s > TOTALS_INTERVAL_S:
                self._count_totals(db)
            return record

        return await self._thread.run_job(work)

    async def finalize_batch(self, batch_id: str, outcome: str) -> BatchRecord:
        """No line runs any more: results are about to be complete, and the batch will end as `outcome`."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            values: dict[str, Any] = {"outcome": outcome, "finalizing_at": self.now}
            if outcome != "cancelled":
                values["status"] = "finalizing"
            return tables.update_batch(db, batch_id, **values)

        return await self._change(work)

    async def fail_waiting(self, batch_id: str, failure: LineFailure, make_id: Callable[[], str]) -> int:
        """Fail up to `FAILED_LINES` lines that have no result; returns how many are left."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> int:
            lines = tables.waiting_lines(db, batch_id, -1, FAILED_LINES)
            ends = [
                LineEnd(
                    number=line.number,
                    succeeded=False,
                    text=result_text(LineResult(make_id(), line.custom_id, error=failure)),
                )
                for line in lines
            ]
            _write_ends(db, files, batch_id, ends)
            return tables.count_waiting(db, batch_id)

        return await self._thread.run_job(work)

    async def end_batch(self, batch_id: str) -> BatchRecord:
        """The results are complete: publish them, and end the batch with its outcome."""

        def work(db: sqlite3.Connection, files: ResultFiles) -> BatchRecord:
            record = tables.find_batch(db, batch_id)
            assert record is not None
            self._publish(db, files, record, record.output_file, record.output_bytes, "output")
            self._publish(db, files, record, record.error_file, record.error_bytes, "error")
            tables.drop_lines(db, batch_id)
            ended: dict[str, Any] = {"status": record.outcome, f"{record.outcome}_at": self.now}
            return tables.update_batch(db, batch_id, **ended)

        return await self._change(work)

    def _publish(
        self,
        db: sqlite3.Connection,
        files: ResultFiles,
        batch: BatchRecord,
        file_id: str,
        num_bytes: int,
        kind: str,
    ) -> None:
        """Make a file of results one of the tenant's files; an empty one is removed."""
        if not num_bytes:
            return files.remove_content(file_id)
        files.cut(file_id, num_bytes)
        files.close_file(file_id)
        now = self.now
        record = FileRecord(
            id=file_id,
            tenant=batch.tenant,
            purpose=OUTPUT_PURPOSE,
            name=f"{batch.id}_{kind}.jsonl",
            bytes=num_bytes,
            created_at=now,
            expires_at=now + batch.output_expiry_s,
        )
        tables.add_file(db, record)

    async def _change(self, work: Job[T]) -> T:
        """Run a job that changes files or batches, and count both again."""

        def counted(db: sqlite3.Connection, files: ResultFiles) -> T:
            result = work(db, files)
            self._count_totals(db)
            return result

        return await self._thread.run_job(counted)

    def _count_totals(self, db: sqlite3.Connection) -> None:
        self.by_status, self.held_bytes = tables.count_batches(db), tables.sum_bytes(db)
        self._counted_s = time.monotonic()


def _write_ends(
    db: sqlite3.Connection, files: ResultFiles, batch_id: str, ends: Sequence[LineEnd]
) -> BatchRecord:
    """Append results to their files, and mark their lines; lines that have a result are left out."""
    record = tables.find_batch(db, batch_id)
    assert record is not None
    new = tables.mark_done(db, batch_id, ends)
    if not new:
        return record
    output = b"".join(end.text for end in new if end.succeeded)
    errors = b"".join(end.text for end in new if not end.succeeded)
    if output:
        files.append(record.output_file, record.output_bytes, output)
    if errors:
        files.append(record.error_file, record.error_bytes, errors)
    num_succeeded = sum(end.succeeded for end in new)
    return tables.update_batch(
        db,
        batch_id,
        output_bytes=record.output_bytes + len(output),
        error_bytes=record.error_bytes + len(errors),
        completed=record.completed + num_succeeded,
        failed=record.failed + len(new) - num_succeeded,
        input_tokens=record.input_tokens + sum(end.input_tokens for end in new),
        cached_tokens=record.cached_tokens + sum(end.cached_tokens for end in new),
        output_tokens=record.output_tokens + sum(end.output_tokens for end in new),
    )


def _whole_results(db: sqlite3.Connection, files: ResultFiles, record: BatchRecord) -> BatchRecord:
    """Cut the files of results to their committed lengths. If one is shorter, all lines of the batch run again."""
    lengths = {record.output_file: record.output_bytes, record.error_file: record.error_bytes}
    if any(files.size(file_id) < num_bytes for file_id, num_bytes in lengths.items()):
        log.error("results of batch %s are lost, so all its lines run again", record.id)
        record = tables.restart_batch(db, record)
        lengths = dict.fromkeys(lengths, 0)
    for file_id, num_bytes in lengths.items():
        if files.size(file_id) > num_bytes:
            files.cut(file_id, num_bytes)
    return record


def _found_file(record: FileRecord | None, file_id: str) -> FileRecord:
    """The record. Raises RequestError (404) if it is None."""
    if record is None:
        problem = f"there is no file {quote_text(file_id)}"
        raise RequestError(RequestFailure(FailureReason.FILE_NOT_FOUND, problem, "id"))
    return record


def _found_batch(record: BatchRecord | None, batch_id: str) -> BatchRecord:
    """The record. Raises RequestError (404) if it is None."""
    if record is None:
        problem = f"there is no batch {quote_text(batch_id)}"
        raise RequestError(RequestFailure(FailureReason.BATCH_NOT_FOUND, problem, "id"))
    return record
