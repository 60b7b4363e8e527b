"""The bodies of `/v1/files` and `/v1/batches`, in OpenAI's shapes. Times are Unix seconds."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from diptych.errors import RequestError
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.validate import invalid_value_error

MAX_BODY_DEPTH = 4
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
# How long a file may be kept that says when it expires, and how long one is kept that does not say it.
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400
MAX_WINDOW_S = 7 * 86400
WINDOW_PATTERN = r"^[1-9][0-9]{0,5}[smhd]$"
SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}

BatchEndpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/rerank",
    "/v1/rerank",
    "/score",
    "/v1/score",
]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
# Statuses from which a batch does not move any more.
ENDED_STATUSES = frozenset({"failed", "completed", "expired", "cancelled"})
ALL_STATUSES: tuple[str, ...] = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
)  # fmt: skip
# Which preparation a line of each endpoint takes (`services.gateway.preparation.resolve_body.ROUTES`).


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a file expires: so many seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/batches`."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=128)]
    endpoint: BatchEndpoint
    completion_window: Annotated[str, Meta(pattern=WINDOW_PATTERN)]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file, as its owner sees it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    status: str = "processed"
    status_details: str | None = None
    object: str = "file"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FileDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "file"


class BatchProblem(msgspec.Struct, frozen=True):
    """Why a batch failed; `line` counts from 1, and is null if the whole file is at fault."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchProblems(msgspec.Struct, frozen=True):
    data: list[BatchProblem]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all lines that were answered."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int = 0


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, as its owner sees it. Times are null until they come."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int | None
    errors: BatchProblems | None = None
    model: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | UnsetType = UNSET
    metadata: dict[str, str] | None = None
    object: str = "batch"


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class LineResponse(msgspec.Struct, frozen=True):
    """What the HTTP route would have answered to the line's body."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineFailure(msgspec.Struct, frozen=True):
    """Why a line was not run."""

    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True):
    """One line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineFailure | None = None


def window_seconds(window: str) -> int:
    """The seconds of a completion window such as "24h".

    Raises:
        RequestError: 400, it is not a number with a unit, or longer than `MAX_WINDOW_S`.
    """
    number = int(window[:-1]) if re.match(WINDOW_PATTERN, window) else 0
    seconds = number * SECONDS_BY_UNIT.get(window[-1:], 0)
    if not 0 < seconds <= MAX_WINDOW_S:
        raise invalid_value_error(
            "completion_window",
            "must be '24h', or another number with one of the units s, m, h and d, up to '7d'",
        )
    return seconds


def check_batch_body(body: bytes) -> bytes:
    """The body of a new batch, checked and encoded again: within the bounds of metadata, without repeated fields.

    Raises:
        RequestError: 400, with the field at fault in `param`.
    """
    asked = parse_body(body, BatchRequest, MAX_BODY_DEPTH)
    check_metadata(asked.metadata)
    return msgspec.json.encode(asked)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Check the bounds of a batch's metadata. Raises RequestError (400) if it has too much of anything."""
    pairs: dict[str, Any] = metadata or {}
    if len(pairs) > MAX_METADATA_PAIRS:
        raise _metadata_error(f"has {len(pairs)} pairs; at most {MAX_METADATA_PAIRS} are kept")
    for key, value in pairs.items():
        if not 0 < len(key) <= MAX_METADATA_KEY_CHARS:
            raise _metadata_error(f"keys must have 1 to {MAX_METADATA_KEY_CHARS} characters")
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise _metadata_error(f"values must have at most {MAX_METADATA_VALUE_CHARS} characters")


def _metadata_error(problem: str) -> RequestError:
    return invalid_value_error("metadata", problem)
