"""Records that were looked for, or why there are none."""

from __future__ import annotations

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.batches.records import BatchRecord, FileRecord


def num_waiting(record: BatchRecord | None) -> int:
    """How many lines of a batch have no result."""
    assert record is not None
    return record.total - record.completed - record.failed


def found_file(record: FileRecord | None, file_id: str) -> FileRecord:
    """The record. Raises RequestError (404) if it is None."""
    if record is None:
        problem = f"there is no file '{file_id[:100]}'"
        raise RequestError(RequestFailure(FailureReason.FILE_NOT_FOUND, problem, "id"))
    return record


def found_batch(record: BatchRecord | None, batch_id: str) -> BatchRecord:
    """The record. Raises RequestError (404) if it is None."""
    if record is None:
        problem = f"there is no batch '{batch_id[:100]}'"
        raise RequestError(RequestFailure(FailureReason.BATCH_NOT_FOUND, problem, "id"))
    return record
