"""Runs one line of a batch by what runs the same request over HTTP, and returns the answer instead of sending it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Message, Scope

from diptych.errors import RequestError
from diptych.failure_statuses import RequestFailure
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import new_request_id
from services.gateway.http.error_response import error_response, internal_failure
from services.gateway.http.request_body import body_too_large_failure
from services.gateway.http.request_scope import failure_of, request_ids_of
from services.gateway.openai.batch_schema import LineResponse
from services.gateway.openai.response_schema import PromptDetails
from services.gateway.openai.tenancy import Caller
from services.gateway.service import GatewayService

# Lines that are parsed and tokenized at a time, so that requests over HTTP find an idle preparer.
MAX_PREPARING = 1
# Characters of a line's name in logs, as many as of a client's own request id.
MAX_NAME_CHARS = 128

log = logging.getLogger(__name__)


class _AnswerTokens(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails = PromptDetails()


class _AnswerHead(msgspec.Struct, frozen=True):
    usage: _AnswerTokens = _AnswerTokens()


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to a line. `failure` says why it is not a success, if the gateway knows a reason."""

    status: int
    request_id: str
    body: bytes
    failure: RequestFailure | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    @property
    def succeeded(self) -> bool:
        """Whether the line was answered."""
        return self.status == 200

    def to_response(self) -> LineResponse:
        """What the result of the line says."""
        return LineResponse(self.status, self.request_id, msgspec.Raw(self.body))


class LineRunner:
    """Runs lines through `service`, which counts them apart from HTTP requests."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._preparing = asyncio.Semaphore(MAX_PREPARING)

    async def run_line(
        self,
        endpoint: str,
        body: bytes,
        tenant: str,
        urgent: bool,
        batch: str,
        custom_id: str,
        timeout_s: float,
    ) -> LineAnswer:
        """Answer the body of a line, within `timeout_s`. `urgent` says whether its tenant may ask for any priority.

        If the task is cancelled, the line is aborted on its worker.
        """
        request_id = new_request_id()
        name = f"{batch}:{quote(custom_id, safe='')}"[:MAX_NAME_CHARS]
        state: dict[str, Any] = {"request_id": request_id, "client_id": name, "route": endpoint}
        scope: Scope = {"type": "http", "method": "POST", "path": endpoint, "headers": [], "state": state}
        caller = Caller(time.monotonic(), tenant, timeout_s, urgent, request_id, client_id=name, bulk=True)
        return await self._answer_body(scope, endpoint, body, caller)

    async def _answer_body(self, scope: Scope, endpoint: str, body: bytes, caller: Caller) -> LineAnswer:
        status, parts = 500, list[bytes]()

        async def never_leave() -> Message:
            """There is no client that could leave."""
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        async def gather(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        try:
            response = await self._make_response(endpoint, body, caller)
            await response(scope, never_leave, gather)
        except Exception:
            log.exception("the gateway failed on this line", extra=about_request(request_ids_of(scope)))
            parts.clear()
            await error_response(internal_failure(caller.request_id))(scope, never_leave, gather)
        text = b"".join(parts)
        head = msgspec.json.decode(text, type=_AnswerHead) if status == 200 else _AnswerHead()
        used = head.usage
        cached = used.prompt_tokens_details.cached_tokens
        return LineAnswer(
            status,
            caller.request_id,
            text,
            failure_of(scope),
            used.prompt_tokens,
            cached,
            used.completion_tokens,
        )

    async def _make_response(self, endpoint: str, body: bytes, caller: Caller) -> Response:
        """The response of the HTTP route, or its refusal."""
        max_bytes = self._service.rules.limits.max_body_bytes
        if len(body) > max_bytes:
            return error_response(body_too_large_failure(max_bytes))
        create = (
            self._service.create_chat_completion
            if endpoint == "/v1/chat/completions"
            else self._service.create_completion
        )
        try:
            async with self._preparing:
                return await create(body, caller)
        except RequestError as error:
            return error_response(error.failure)
