"""The routes of `/v1/files`."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from services.gateway.batches.data_dir import storage_failure
from services.gateway.batches.database_thread import StorageError
from services.gateway.batches.files.upload import UploadedFile, receive_upload
from services.gateway.batches.records import BATCH_PURPOSE, BatchRecord, FileRecord, new_file_id
from services.gateway.batches.store import BatchStore
from services.gateway.http.connection import ClientStalled
from services.gateway.http.error_response import JSON_TYPE, SHUTTING_DOWN
from services.gateway.http.response_writer import ResponseWriter
from services.gateway.openai.schemas.batch_schema import MAX_EXPIRY_S, FileDeleted
from services.gateway.openai.validate import invalid_value_error

MAX_FILES_LISTED = 10_000
# Uploads at a time, and those of one tenant: it may have as many as are left for others.
MAX_UPLOADS, MAX_TENANT_UPLOADS = 8, 4
READ_BYTES = 256 << 10
# Other tasks run after so many bytes of a page were encoded.
PIECE_BYTES = 32 << 10


class FileRoutes:
    """The handlers. Errors leave them as `RequestError`."""

    def __init__(
        self,
        store: BatchStore,
        max_file_bytes: int,
        stall_s: float,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """A file may have `max_file_bytes`. A client that sends or reads nothing for `stall_s` is given up.

        `is_draining` says whether the gateway is shutting down.
        """
        self._store, self._max_file_bytes, self._stall_s = store, max_file_bytes, stall_s
        self._is_draining = is_draining
        # By tenant: how many uploads are open, and how many bytes of them are on disk.
        self._uploads: Counter[str] = Counter()
        self._uploaded: Counter[str] = Counter()

    async def upload_file(self, request: Request) -> Response:
        """`POST /v1/files`. Raises RequestError if the upload is refused; then nothing of it is kept."""
        tenant: str = request.state.tenant
        self._check_room(tenant)
        self._uploads[tenant] += 1
        try:
            record = await self._receive_file(request, tenant)
        finally:
            self._uploads[tenant] -= 1
            if not self._uploads[tenant]:
                del self._uploads[tenant]
                self._uploaded.pop(tenant, None)
        return json_answer(record.to_object())

    async def list_files(self, request: Request) -> Response:
        """`GET /v1/files`. Raises RequestError (400) if a parameter is wrong."""
        query = request.query_params
        limit = parse_limit(query, MAX_FILES_LISTED, MAX_FILES_LISTED)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid_value_error("order", "must be 'asc' or 'desc'")
        with storage_errors():
            found = await self._store.list_files(
                request.state.tenant, query.get("purpose"), query.get("after"), limit + 1, order
            )
        return await list_answer(found, limit)

    async def get_file(self, request: Request) -> Response:
        """`GET /v1/files/{id}`. Raises RequestError (404) if the tenant has no such file."""
        return json_answer((await self._find_file(request)).to_object())

    async def delete_file(self, request: Request) -> Response:
        """`DELETE /v1/files/{id}`. Raises RequestError (404) if the tenant has no such file."""
        file_id: str = request.path_params["id"]
        with storage_errors():
            await self._store.delete_file(request.state.tenant, file_id)
        return json_answer(FileDeleted(file_id))

    async def get_content(self, request: Request) -> Response:
        """`GET /v1/files/{id}/content`. Raises RequestError (404) if the tenant has no such file."""
        record = await self._find_file(request)
        try:
            descriptor = os.open(self._store.content_path(record.id), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RequestError(storage_failure(error)) from error
        return FileContent(descriptor, record.bytes, self._stall_s)

    def _check_room(self, tenant: str) -> None:
        """Raise RequestError if too many uploads are open (429), or the server shuts down (503)."""
        if self._is_draining():
            raise RequestError(SHUTTING_DOWN)
        own, left = self._uploads[tenant], MAX_UPLOADS - self._uploads.total()
        # The last place is for a tenant that has none.
        if left <= 0 or (own and own + 1 > min(MAX_TENANT_UPLOADS, left - 1)):
            problem = (
                f"too many uploads are open; at most {MAX_TENANT_UPLOADS} of a key, and {MAX_UPLOADS} in all; "
                "a key may have as many as are left for others"
            )
            raise RequestError(RequestFailure(FailureReason.TOO_MANY_UPLOADS, problem))

    async def _receive_file(self, request: Request, tenant: str) -> FileRecord:
        file_id, headers, counted = new_file_id(), request.headers, 0

        def check_share(num_bytes: int) -> None:
            """All uploads of the tenant count, as far as they have come."""
            nonlocal counted
            more, counted = num_bytes - counted, num_bytes
            self._uploaded[tenant] += more
            refusal = self._store.upload_refusal(tenant, self._uploaded[tenant])
            if refusal is not None:
                raise RequestError(refusal)

        with storage_errors():
            # From here on the store knows what the tenant keeps.
            await self._store.tenant_use(tenant)
        try:
            uploaded = await receive_upload(
                headers.get("content-type", ""),
                headers.get("content-length", ""),
                request.receive,
                self._store.data_dir,
                file_id,
                self._max_file_bytes,
                self._stall_s,
                check_share,
            )
            # From here on the store counts it, and it must not count twice for other uploads.
            self._uploaded[tenant], counted = self._uploaded[tenant] - counted, 0
            return await self._keep_file(uploaded, file_id, tenant)
        finally:
            self._uploaded[tenant] -= counted

    async def _keep_file(self, uploaded: UploadedFile, file_id: str, tenant: str) -> FileRecord:
        """Make an upload a file of its tenant. Raises RequestError if that fails; then it is removed."""
        now = self._store.now
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            purpose=BATCH_PURPOSE,
            name=uploaded.name,
            bytes=uploaded.num_bytes,
            created_at=now,
            expires_at=now + (uploaded.expiry_s or MAX_EXPIRY_S),
        )
        try:
            with storage_errors():
                await self._store.add_file(record)
        except BaseException:
            self._store.data_dir.remove_content(file_id)
            raise
        return record

    async def _find_file(self, request: Request) -> FileRecord:
        with storage_errors():
            return await self._store.find_file(request.state.tenant, request.path_params["id"])


class FileContent(Response):
    """Sends a file from an open descriptor, which it closes, only as fast as the client reads."""

    def __init__(self, descriptor: int, num_bytes: int, stall_s: float) -> None:
        super().__init__()
        self._descriptor, self._num_bytes, self._stall_s = descriptor, num_bytes, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(scope, send, self._stall_s)
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(self._num_bytes).encode()),
        ]
        try:
            await writer.start_response(200, headers)
            offset = 0
            while offset < self._num_bytes and scope["method"] != "HEAD":
                part = await asyncio.to_thread(os.pread, self._descriptor, READ_BYTES, offset)
                if not part:
                    raise OSError("the file is shorter than it was")
                await writer.write_body(part[: self._num_bytes - offset])
                offset += len(part)
            await writer.end_response()
        except (ClientStalled, OSError):
            writer.abort()
        except BaseException:
            writer.abort()
            raise
        finally:
            os.close(self._descriptor)


@contextmanager
def storage_errors() -> Iterator[None]:
    """A block in which failures of the disk become what clients see. Raises RequestError (507 or 500)."""
    try:
        yield
    except StorageError as error:
        raise RequestError(storage_failure(error.cause)) from error


def parse_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """The parameter `limit`. Raises RequestError (400) if it is not a number from 1 to `most`."""
    given = query.get("limit")
    if given is None:
        return default
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= most or len(given) > 9:
        raise invalid_value_error("limit", f"must be a number from 1 to {most}")
    return int(given)


async def list_answer(records: Sequence[FileRecord | BatchRecord], limit: int) -> Response:
    """A page (200) of records, of which one more than `limit` may have been found.

    It may have megabytes, so other tasks run in between.
    """
    pieces, num_bytes = list[msgspec.Raw](), 0
    for record in records[:limit]:
        pieces.append(msgspec.Raw(msgspec.json.encode(record.to_object())))
        num_bytes += len(pieces[-1])
        if num_bytes > PIECE_BYTES:
            num_bytes = 0
            await asyncio.sleep(0)
    first, last = (records[0].id, records[min(limit, len(records)) - 1].id) if records else (None, None)
    page = {"data": pieces, "has_more": len(records) > limit, "first_id": first, "last_id": last}
    return json_answer(page | {"object": "list"})


def json_answer(body: Any) -> Response:
    """A response (200) with `body` as JSON."""
    return Response(msgspec.json.encode(body), media_type=JSON_TYPE)
