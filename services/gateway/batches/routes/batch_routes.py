"""The routes of `/v1/batches`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diptych.errors import RequestError
from services.gateway.batches.feeder import BatchFeeder
from services.gateway.batches.files.file_routes import (
    json_answer,
    list_answer,
    parse_limit,
    storage_errors,
)
from services.gateway.batches.records import BatchRecord, new_batch_id, new_file_id
from services.gateway.batches.store import BatchStore
from services.gateway.http.error_response import SHUTTING_DOWN
from services.gateway.openai.schemas.batch_schema import (
    MAX_EXPIRY_S,
    BatchRequest,
    window_seconds,
)

MAX_BATCHES_LISTED, DEFAULT_BATCHES_LISTED = 100, 20


class BatchRoutes:
    """The handlers. Errors leave them as `RequestError`."""

    def __init__(
        self, store: BatchStore, feeder: BatchFeeder, is_draining: Callable[[], bool] = lambda: False
    ) -> None:
        """`is_draining` says whether the gateway is shutting down."""
        self._store, self._feeder, self._is_draining = store, feeder, is_draining

    async def create_batch(self, request: Request, asked: BatchRequest) -> Response:
        """`POST /v1/batches`. Raises RequestError if the batch is refused; its file is checked later."""
        if self._is_draining():
            raise RequestError(SHUTTING_DOWN)
        now = self._store.now
        kept = asked.output_expires_after
        record = BatchRecord(
            id=new_batch_id(),
            tenant=request.state.tenant,
            urgent=int(request.state.best_priority < 0),
            endpoint=asked.endpoint,
            window=asked.completion_window,
            status="validating",
            input_file=asked.input_file_id,
            output_file=new_file_id(),
            error_file=new_file_id(),
            created_at=now,
            expires_at=now + window_seconds(asked.completion_window),
            output_expiry_s=MAX_EXPIRY_S if kept is None else kept.seconds,
            metadata=None if asked.metadata is None else msgspec.json.encode(asked.metadata).decode(),
        )
        with storage_errors():
            await self._store.add_batch(record)
        self._feeder.add_batch(record)
        return json_answer(record.to_object())

    async def list_batches(self, request: Request) -> Response:
        """`GET /v1/batches`. Raises RequestError (400) if a parameter is wrong."""
        query = request.query_params
        limit = parse_limit(query, DEFAULT_BATCHES_LISTED, MAX_BATCHES_LISTED)
        with storage_errors():
            found = await self._store.list_batches(request.state.tenant, query.get("after"), limit + 1)
        return await list_answer(found, limit)

    async def get_batch(self, request: Request) -> Response:
        """`GET /v1/batches/{id}`. Raises RequestError (404) if the tenant has no such batch."""
        with storage_errors():
            record = await self._store.find_batch(request.state.tenant, request.path_params["id"])
        return json_answer(record.to_object())

    async def cancel_batch(self, request: Request) -> Response:
        """`POST /v1/batches/{id}/cancel`. Raises RequestError: 404 if there is none, 409 if it has ended."""
        with storage_errors():
            record = await self._store.cancel_batch(request.state.tenant, request.path_params["id"])
        self._feeder.cancel_batch(record)
        return json_answer(record.to_object())
