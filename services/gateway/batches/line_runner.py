"""Runs one line of a batch by what runs the same request over HTTP, and returns the answer instead of sending it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Message, Scope

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import new_request_id
from services.gateway.batches.records import new_line_id, result_text, spooled_result
from services.gateway.batches.storage.answer_spool import AnswerSpool, SpooledResult
from services.gateway.generation.generation import Generation
from services.gateway.generation.streaming import GenerationResponse
from services.gateway.http.error_response import error_response, internal_failure
from services.gateway.http.request_body import body_too_large_failure
from services.gateway.http.request_scope import failure_of, request_ids_of
from services.gateway.openai.schemas.batch_schema import LineResponse, LineResult
from services.gateway.openai.tenancy import Caller
from services.gateway.service import GatewayService

# Lines that are parsed and tokenized at a time, so that requests over HTTP find an idle preparer.
MAX_PREPARING = 1
# Characters of a line's name in logs, as many as of a client's own request id.
MAX_NAME_CHARS = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to a line. `failure` says why it is not a success, if the gateway knows a reason.

    The body may be large, and is then in a spool.
    """

    status: int
    request_id: str
    body: bytes | AnswerSpool
    failure: RequestFailure | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    @property
    def succeeded(self) -> bool:
        """Whether the line was answered."""
        return self.status == 200

    def to_text(self, custom_id: str) -> bytes | SpooledResult:
        """The line of its result."""
        if isinstance(self.body, AnswerSpool):
            return spooled_result(custom_id, self.status, self.request_id, self.body)
        response = LineResponse(self.status, self.request_id, msgspec.Raw(self.body))
        return result_text(LineResult(new_line_id(), custom_id, response))


class LineRunner:
    """Runs lines through `service`, which counts them apart from HTTP requests.

    `folder` is on the disk of the results; large answers wait there.
    """

    def __init__(self, service: GatewayService, folder: Path) -> None:
        self._service, self._folder = service, folder
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
        spool, status, complete = AnswerSpool(self._folder), 500, False
        generation: Generation | None = None

        async def never_leave() -> Message:
            """There is no client that could leave."""
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        async def take_message(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                await spool.write(message.get("body", b""))
                complete = not message.get("more_body", False)

        try:
            response = await self._make_response(endpoint, body, caller)
            if isinstance(response, GenerationResponse):
                generation = response.generation
            await response(scope, never_leave, take_message)
        except Exception:
            log.exception("the gateway failed on this line", extra=about_request(request_ids_of(scope)))
            spool, status, generation = AnswerSpool(self._folder), 500, None
            await error_response(internal_failure(caller.request_id))(scope, never_leave, take_message)
        if not complete:
            # The disk did not take the answer in time, and its memory was needed for the answers of other lines.
            spool, generation = AnswerSpool(self._folder), None
            problem = "the answer could not be written in time"
            failure = RequestFailure(FailureReason.OVERLOADED, problem)
            await error_response(failure)(scope, never_leave, take_message)
        if status != 200 or generation is None:
            return LineAnswer(status, caller.request_id, spool, failure_of(scope))
        used = generation.usage
        cached = used.prompt_tokens_details.cached_tokens
        tokens = used.prompt_tokens, cached, used.completion_tokens
        return LineAnswer(status, caller.request_id, spool, failure_of(scope), *tokens)

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
