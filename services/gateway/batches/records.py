"""Rows of the tables, and the bodies that clients see of them."""

from __future__ import annotations

import secrets
from typing import cast

import msgspec

from services.gateway.batches.storage.answer_spool import AnswerSpool, SpooledResult, escape_line_ends
from services.gateway.openai.schemas.batch_schema import (
    BatchObject,
    BatchProblem,
    BatchProblems,
    BatchUsage,
    CachedTokens,
    FileObject,
    LineResponse,
    LineResult,
    RequestCounts,
)

BATCH_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `files`. Times are Unix seconds; `name` is the uploader's, and never a path here."""

    id: str
    tenant: str
    purpose: str
    name: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def to_object(self) -> FileObject:
        """What its owner sees."""
        return FileObject(
            id=self.id,
            bytes=self.bytes,
            created_at=self.created_at,
            filename=self.name,
            purpose=self.purpose,
            expires_at=self.expires_at,
        )


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `batches`. Times are Unix seconds.

    `output_file` and `error_file` are reserved with the batch; `output_bytes` and `error_bytes` are how many bytes of
    them are committed. `outcome` is the status that a finalizing or cancelling batch will end with. `urgent` says
    whether its tenant may ask for a better priority. `output_expiry_s` is how long the results are kept.
    """

    id: str
    tenant: str
    urgent: int
    endpoint: str
    window: str
    status: str
    input_file: str
    output_file: str
    error_file: str
    created_at: int
    expires_at: int
    output_expiry_s: int
    outcome: str = ""
    output_bytes: int = 0
    error_bytes: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    model: str | None = None
    metadata: str | None = None
    errors: str | None = None

    def to_object(self) -> BatchObject:
        """What its owner sees. Files of results are named once the batch has ended.

        Problems and metadata are JSON already, and are not decoded to be encoded again: lists have many of them.
        """
        ended = self.status in ("completed", "expired", "cancelled")
        return BatchObject(
            id=self.id,
            endpoint=self.endpoint,
            input_file_id=self.input_file,
            completion_window=self.window,
            status=self.status,
            created_at=self.created_at,
            expires_at=self.expires_at,
            errors=None
            if self.errors is None
            else BatchProblems(cast(list[BatchProblem], _as_json(self.errors))),
            model=self.model,
            output_file_id=self.output_file if ended and self.output_bytes else None,
            error_file_id=self.error_file if ended and self.error_bytes else None,
            in_progress_at=self.in_progress_at,
            finalizing_at=self.finalizing_at,
            completed_at=self.completed_at,
            failed_at=self.failed_at,
            expired_at=self.expired_at,
            cancelling_at=self.cancelling_at,
            cancelled_at=self.cancelled_at,
            request_counts=RequestCounts(self.total, self.completed, self.failed),
            usage=BatchUsage(
                input_tokens=self.input_tokens,
                input_tokens_details=CachedTokens(self.cached_tokens),
                output_tokens=self.output_tokens,
                total_tokens=self.input_tokens + self.output_tokens,
            ),
            metadata=None if self.metadata is None else cast(dict[str, str], _as_json(self.metadata)),
        )


class InputLine(msgspec.Struct, frozen=True):
    """A line of an input file: its number from 1 on, and where it lies in the file, which has its id too."""

    number: int
    offset: int
    num_bytes: int


class LineEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a line ended: `text` is its line of the output file, or of the error file if it did not succeed."""

    number: int
    succeeded: bool
    text: bytes | SpooledResult
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def _as_json(text: str) -> msgspec.Raw:
    """What is written into an answer as it is."""
    return msgspec.Raw(text.encode())


def new_file_id() -> str:
    """An id for a file. It is random, so clients cannot guess those of others."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """An id for a batch, random as those of files."""
    return f"batch_{secrets.token_hex(12)}"


def result_text(result: LineResult) -> bytes:
    """The line of a result in its file, with one line end, which is its last byte."""
    return escape_line_ends(msgspec.json.encode(result)) + b"\n"


def spooled_result(custom_id: str, status: int, request_id: str, spool: AnswerSpool) -> SpooledResult:
    """The line of a result whose answer has this body."""
    # Nothing else in the line has these digits.
    place = b'"%s"' % secrets.token_hex(16).encode()
    response = LineResponse(status, request_id, msgspec.Raw(place))
    before, _, after = result_text(LineResult(new_line_id(), custom_id, response)).partition(place)
    return SpooledResult(before, spool, after)


def new_line_id() -> str:
    """An id for the result of a line."""
    return f"batch_req_{secrets.token_hex(12)}"
