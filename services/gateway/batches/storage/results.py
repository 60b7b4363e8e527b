"""Results of lines in their files, and in the rows of their batches. Called in the transaction of a job."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Sequence

from services.gateway.batches import tables
from services.gateway.batches.data_dir import DataDir
from services.gateway.batches.database_thread import ResultFiles
from services.gateway.batches.records import (
    OUTPUT_PURPOSE,
    BatchRecord,
    FileRecord,
    LineEnd,
)
from services.gateway.openai.schemas.batch_schema import ENDED_STATUSES

log = logging.getLogger(__name__)


def write_ends(
    db: sqlite3.Connection, files: ResultFiles, batch_id: str, ends: Sequence[LineEnd]
) -> BatchRecord:
    """Append results to their files, and mark their lines; lines that have a result are left out."""
    record = tables.find_batch(db, batch_id)
    assert record is not None
    new = tables.mark_done(db, batch_id, ends)
    if not new:
        return record
    succeeded = [end.text for end in new if end.succeeded]
    failed = [end.text for end in new if not end.succeeded]
    output_bytes = files.append_lines(record.output_file, record.output_bytes, succeeded)
    error_bytes = files.append_lines(record.error_file, record.error_bytes, failed)
    return tables.update_batch(
        db,
        batch_id,
        output_bytes=output_bytes,
        error_bytes=error_bytes,
        completed=record.completed + len(succeeded),
        failed=record.failed + len(failed),
        input_tokens=record.input_tokens + sum(end.input_tokens for end in new),
        cached_tokens=record.cached_tokens + sum(end.cached_tokens for end in new),
        output_tokens=record.output_tokens + sum(end.output_tokens for end in new),
    )


def publish_results(db: sqlite3.Connection, files: ResultFiles, batch: BatchRecord, now: int) -> None:
    """Make the files of results files of the tenant; empty ones are removed."""
    for kind, file_id, num_bytes in (
        ("output", batch.output_file, batch.output_bytes),
        ("error", batch.error_file, batch.error_bytes),
    ):
        if not num_bytes:
            files.remove_content(file_id)
            continue
        files.cut(file_id, num_bytes)
        files.close_file(file_id)
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


def recover_batches(
    db: sqlite3.Connection, files: ResultFiles, data_dir: DataDir, tenants: Collection[str] | None, now: int
) -> list[BatchRecord]:
    """Bring files and rows together after a start; returns the batches that have not ended.

    Batches of others than `tenants` (None: of nobody) are cancelled: no line of them runs.
    """
    tables.release_deleted(db, now)
    data_dir.remove_others(tables.known_contents(db))
    found = [_recover_batch(db, files, record) for record in tables.open_batches(db)]
    strange = [record for record in found if tenants is not None and record.tenant not in tenants]
    if strange:
        log.warning("%d batches are cancelled: their API keys are no longer accepted", len(strange))
    for record in strange:
        if record.status in ("validating", "in_progress"):
            tables.cancel_batch(db, record.id, now)
    return tables.open_batches(db) if strange else found


def leftover_lines(db: sqlite3.Connection) -> list[int]:
    """The numbers of batches whose lines are not needed: of those that have ended or never begun."""
    needed = {
        tables.number_of(db, one.id) for one in tables.open_batches(db) if one.in_progress_at is not None
    }
    return [number for number in tables.batches_with_lines(db) if number not in needed]


def _recover_batch(db: sqlite3.Connection, files: ResultFiles, record: BatchRecord) -> BatchRecord:
    """Cut the files of results to their committed lengths. If one is shorter, all lines of the batch run again."""
    assert record.status not in ENDED_STATUSES
    if record.in_progress_at is None and record.total:
        # It had not begun with all of its lines. They are found again when the file is checked.
        record = tables.update_batch(db, record.id, total=0)
    lengths = {record.output_file: record.output_bytes, record.error_file: record.error_bytes}
    if any(files.size(file_id) < num_bytes for file_id, num_bytes in lengths.items()):
        log.error("results of batch %s are lost, so all its lines run again", record.id)
        record = tables.restart_batch(db, record)
        lengths = dict.fromkeys(lengths, 0)
    for file_id, num_bytes in lengths.items():
        if files.size(file_id) > num_bytes:
            files.cut(file_id, num_bytes)
    return record
