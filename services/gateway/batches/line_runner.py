"""Runs one line of a batch by what runs the same request over HTTP, and spools the answer instead of sending it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import new_request_id
from diptych.request import MIN_PRIORITY
from services.gateway.batches.records import new_line_id, result_text, spooled_result
from services.gateway.batches.storage.answer_spool import AnswerSpool, SpooledResult
from services.gateway.generation.whole_answer import complete_answer, write_parts
from services.gateway.http.connection import ClientStalled
from services.gateway.http.error_response import internal_failure, log_failure
from services.gateway.http.error_shapes import error_json
from services.gateway.http.request_body import body_too_large_failure
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


def refuse_line(failure: RequestFailure, endpoint: str, request_id: str = "") -> LineAnswer:
    """The answer to a line that fails, or is not run."""
    return LineAnswer(failure.status, request_id, error_json(endpoint, failure, request_id), failure)


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
        name = f"{batch}:{quote(custom_id, safe='')}"[:MAX_NAME_CHARS]
        # Its priority is checked, and counts for nothing: lines are below every request.
        best = MIN_PRIORITY if urgent else 0
        caller = Caller(
            time.monotonic(), tenant, timeout_s, best, new_request_id(), client_id=name, bulk=True
        )
        ids, spool = caller.request_ids, AnswerSpool(self._folder)
        try:
            async with self._preparing:
                self._check_length(body)
                generation, output_format = await self._service.create_generation(endpoint, body, caller)
            ids = generation.ids
            with generation.run_sequences(self._service.open):
                await complete_answer(generation, output_format)
                await write_parts(generation, output_format, lambda part, _: spool.write(part))
        except RequestError as error:
            failure = error.failure
        except ClientStalled:
            # The disk did not take the answer in time, and its memory was needed for the answers of other lines.
            failure = RequestFailure(FailureReason.OVERLOADED, "the answer could not be written in time")
        except Exception:
            log.exception("the gateway failed on this line", extra=about_request(ids))
            failure = internal_failure(caller.request_id)
        else:
            used = generation.usage
            cached = used.prompt_tokens_details.cached_tokens
            tokens = used.prompt_tokens, cached, used.completion_tokens
            return LineAnswer(200, caller.request_id, spool, None, *tokens)
        log_failure(ids, failure)
        return refuse_line(failure, endpoint, caller.request_id)

    def _check_length(self, body: bytes) -> None:
        """Raise RequestError if a body is longer than it may be over HTTP."""
        max_bytes = self._service.rules.limits.max_body_bytes
        if len(body) > max_bytes:
            raise RequestError(body_too_large_failure(max_bytes))
