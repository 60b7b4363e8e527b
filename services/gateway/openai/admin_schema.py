"""What operators see of everybody's files and batches: OpenAI's words, with the tenant, and without tenants' texts."""

from __future__ import annotations

import msgspec

from services.gateway.openai.schemas.batch_schema import RequestCounts


class AdminBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, as an operator sees it. Times are Unix seconds."""

    tenant: str
    id: str
    endpoint: str
    input_file_id: str
    status: str
    created_at: int
    expires_at: int
    model: str | None
    output_file_id: str | None
    error_file_id: str | None
    request_counts: RequestCounts
    object: str = "batch"


class AdminBatchList(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of all tenants, newest first."""

    data: list[AdminBatch]
    has_more: bool
    object: str = "list"


class AdminFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file, as an operator sees it."""

    tenant: str
    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    purpose: str
    object: str = "file"


class AdminFileList(msgspec.Struct, frozen=True, kw_only=True):
    """Files of all tenants, newest first."""

    data: list[AdminFile]
    has_more: bool
    object: str = "list"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant keeps. `accepted`: its key is one of those that the gateway accepts."""

    tenant: str
    accepted: bool
    bytes: int
    files: int
    open_batches: int
    lines: int


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    """All tenants that keep something, the largest first."""

    data: list[Tenant]
    object: str = "list"
