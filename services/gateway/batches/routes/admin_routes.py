"""What operators see and do of everybody's files and batches. These routes exist only with an admin key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.files.file_routes import (
    json_answer,
    parse_limit,
    storage_errors,
)
from services.gateway.batches.records import BatchRecord, FileRecord
from services.gateway.batches.store import BatchStore
from services.gateway.openai.admin_schema import (
    AdminBatch,
    AdminBatchList,
    AdminFile,
    AdminFileList,
    Tenant,
    TenantList,
)
from services.gateway.openai.schemas.batch_schema import FileDeleted

Endpoint = Callable[[Request], Awaitable[Response]]

MAX_LISTED, DEFAULT_LISTED = 100, 20


class AdminBatchRoutes:
    """The handlers. `tenant` is a digest of a key, "" where no key is required. Errors leave as `RequestError`."""

    def __init__(
        self, store: BatchStore, feeder: BatchFeeder, tenants: Collection[str] | None = None
    ) -> None:
        """`tenants` are those whose keys are accepted; None: everybody's."""
        self._store, self._feeder, self._tenants = store, feeder, tenants

    async def list_tenants(self, request: Request) -> Response:
        """`GET /admin/tenants`: what each tenant keeps, the largest first."""
        with storage_errors():
            uses = await self._store.tenant_uses()
        return json_answer(
            TenantList(
                data=[
                    Tenant(
                        tenant=tenant,
                        accepted=self._tenants is None or tenant in self._tenants,
                        bytes=use.bytes,
                        files=use.files,
                        open_batches=use.open_batches,
                        lines=use.lines,
                    )
                    for tenant, use in uses.items()
                ]
            )
        )

    async def list_batches(self, request: Request) -> Response:
        """`GET /admin/batches`, of `tenant` if one is given. Raises RequestError (400) if a parameter is wrong."""
        query = request.query_params
        limit = parse_limit(query, DEFAULT_LISTED, MAX_LISTED)
        with storage_errors():
            found = await self._store.list_batches(query.get("tenant"), query.get("after"), limit + 1)
        data = [_show_batch(record) for record in found[:limit]]
        return json_answer(AdminBatchList(data=data, has_more=len(found) > limit))

    async def get_batch(self, request: Request) -> Response:
        """`GET /admin/batches/{id}`. Raises RequestError (404) if there is no such batch."""
        with storage_errors():
            return json_answer(_show_batch(await self._store.find_batch(None, request.path_params["id"])))

    async def cancel_batch(self, request: Request) -> Response:
        """`POST /admin/batches/{id}/cancel`. Raises RequestError: 404 if there is none, 409 if it has ended."""
        with storage_errors():
            record = await self._store.cancel_batch(None, request.path_params["id"])
        self._feeder.cancel_batch(record)
        return json_answer(_show_batch(record))

    async def list_files(self, request: Request) -> Response:
        """`GET /admin/files`, of `tenant` if one is given. Raises RequestError (400) if a parameter is wrong."""
        query = request.query_params
        limit = parse_limit(query, DEFAULT_LISTED, MAX_LISTED)
        with storage_errors():
            found = await self._store.list_files(
                query.get("tenant"), None, query.get("after"), limit + 1, "desc"
            )
        data = [_show_file(record) for record in found[:limit]]
        return json_answer(AdminFileList(data=data, has_more=len(found) > limit))

    async def delete_file(self, request: Request) -> Response:
        """`DELETE /admin/files/{id}`. Raises RequestError (404) if there is no such file."""
        file_id: str = request.path_params["id"]
        with storage_errors():
            await self._store.delete_file(None, file_id)
        return json_answer(FileDeleted(file_id))


def admin_batch_handlers(
    routes: AdminBatchRoutes | None, refuse: Endpoint
) -> list[tuple[str, str, Endpoint]]:
    """The methods and paths of these routes with their handlers: `refuse` where files and batches are off."""
    return [
        ("GET", "/admin/tenants", routes.list_tenants if routes else refuse),
        ("GET", "/admin/batches", routes.list_batches if routes else refuse),
        ("GET", "/admin/batches/{id}", routes.get_batch if routes else refuse),
        ("POST", "/admin/batches/{id}/cancel", routes.cancel_batch if routes else refuse),
        ("GET", "/admin/files", routes.list_files if routes else refuse),
        ("DELETE", "/admin/files/{id}", routes.delete_file if routes else refuse),
    ]


def _show_batch(record: BatchRecord) -> AdminBatch:
    """A batch without what its tenant wrote into it."""
    shown = record.to_object()
    return AdminBatch(
        tenant=record.tenant,
        id=record.id,
        endpoint=record.endpoint,
        input_file_id=record.input_file,
        status=record.status,
        created_at=record.created_at,
        expires_at=record.expires_at,
        model=record.model,
        output_file_id=shown.output_file_id,
        error_file_id=shown.error_file_id,
        request_counts=shown.request_counts,
    )


def _show_file(record: FileRecord) -> AdminFile:
    """A file without its name, which its tenant chose."""
    return AdminFile(
        tenant=record.tenant,
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        purpose=record.purpose,
    )
