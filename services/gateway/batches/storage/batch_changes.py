"""How the row of a batch changes, from its creation to its end; called in the database thread, in a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.specs import StorageShares
from services.gateway.batches import tables
from services.gateway.batches.database_thread import ResultFiles
from services.gateway.batches.records import BATCH_PURPOSE, BatchRecord
from services.gateway.batches.storage.lookups import found_batch, found_file
from services.gateway.batches.storage.tenant_shares import find_batch_refusal, find_refusal
from services.gateway.openai.schemas.batch_schema import BatchProblem
from services.gateway.openai.validate import invalid_value_error


def add_batch(
    db: sqlite3.Connection, record: BatchRecord, shares: StorageShares, now: int, free_bytes: int
) -> None:
    """Add a new batch, whose input then stays. Raises RequestError as `BatchStore.add_batch`."""
    source = found_file(tables.find_file(db, record.tenant, record.input_file, now), record.input_file)
    if source.purpose != BATCH_PURPOSE:
        raise invalid_value_error("input_file_id", "names a file that was not uploaded with purpose 'batch'")
    use = tables.tenant_use(db, record.tenant)
    refusal = find_batch_refusal(shares, use) or find_refusal(shares, use, source.bytes, 2, free_bytes)
    if refusal is not None:
        raise RequestError(refusal)
    tables.add_batch(db, record, source.bytes)


def cancel_batch(db: sqlite3.Connection, tenant: str | None, batch_id: str, now: int) -> BatchRecord:
    """Have a batch cancelled. Raises RequestError as `BatchStore.cancel_batch`."""
    record = found_batch(tables.find_batch(db, batch_id, tenant), batch_id)
    if record.status == "cancelling":
        return record
    if record.status not in ("validating", "in_progress"):
        problem = f"a batch with status '{record.status}' cannot be cancelled"
        raise RequestError(RequestFailure(FailureReason.BATCH_HAS_ENDED, problem))
    return tables.cancel_batch(db, batch_id, now)


def fail_batch(
    db: sqlite3.Connection,
    files: ResultFiles,
    record: BatchRecord,
    problems: Sequence[BatchProblem],
    now: int,
) -> BatchRecord:
    """End a batch of which no line has run, without results."""
    for file_id in (record.output_file, record.error_file):
        files.remove_content(file_id)
    errors = msgspec.json.encode(list(problems)).decode()
    failed = tables.end_batch(db, record.id, "failed", now, errors=errors)
    release_input(db, files, failed, now)
    return failed


def finalize_batch(db: sqlite3.Connection, batch_id: str, outcome: str, now: int) -> BatchRecord:
    """Note that the results of a batch are about to be complete, and as what it will end."""
    record = tables.find_batch(db, batch_id)
    assert record is not None
    late = outcome == "completed" and record.status == "cancelling"
    values: dict[str, Any] = {"outcome": "cancelled" if late else outcome, "finalizing_at": now}
    if values["outcome"] != "cancelled":
        values["status"] = "finalizing"
    return tables.update_batch(db, batch_id, **values)


def release_input(db: sqlite3.Connection, files: ResultFiles, record: BatchRecord, now: int) -> None:
    """The batch does not read its input any more, which may have been deleted meanwhile."""
    if tables.release_file(db, record.input_file, now):
        files.remove_later(record.input_file)
