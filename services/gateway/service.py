"""Does the work behind the generation and tokenization routes: prepare a body, start its generation, make the response.

The service owns the open generations, so that a shutdown can end them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import structs
from starlette.responses import Response

from diptych.chunks import RAW_CLASS
from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.request_ids import answer_id
from diptych.request import BULK_PRIORITY
from router.routing.kv_classes import ServedClasses
from services.gateway.generation.answer_memory import AnswerMemory
from services.gateway.generation.chat_format import ChatFormat
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.formats import OutputFormat, ResponseHead
from services.gateway.generation.generation import Generation, GenerationBackend
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.streaming import PING_INTERVAL_S, GenerationResponse
from services.gateway.http.error_response import JSON_TYPE, SHUTTING_DOWN
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_events import RecentErrors
from services.gateway.openai.resolve import ResolvedRequest, fit_kv_class, fit_worker_context
from services.gateway.openai.schemas.batch_schema import BatchRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.outcomes import RequestOutcomes
from services.gateway.preparation.preparation_job import (
    BATCH_ROUTE,
    PreparationJob,
    PreparedReply,
    PreparedRequest,
)
from services.gateway.preparation.preparer_pool import PreparerPool


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """Time limits of requests, in seconds."""

    request_s: float = 600.0
    stall_s: float = 30.0
    ping_s: float = PING_INTERVAL_S


@dataclass
class GatewayService:
    """Does the work of the generation and tokenization routes, and holds the open generations.

    `fingerprint` returns the `system_fingerprint` of answers (model, weights, numerics), or None until it is known.
    `longest` returns how many tokens (prompt and answer) the workers can take, or None until that is known.
    `kv_classes` returns the KV classes that the workers have.
    `only_batches`: the workers do bulk work only, so that requests over HTTP are refused.
    `open` holds the generations whose response is being written. `errors` are the latest error responses. `outcomes`
    are told how every sequence ends.
    """

    rules: RequestRules
    backend: GenerationBackend
    metrics: GatewayMetrics
    preparers: PreparerPool
    fingerprint: Callable[[], str | None]
    timeouts: RequestTimeouts = RequestTimeouts()
    draining: bool = False
    open: set[Generation] = field(default_factory=set)
    errors: RecentErrors = field(default_factory=RecentErrors)
    longest: Callable[[], int | None] = lambda: None
    kv_classes: Callable[[], ServedClasses] = lambda: ServedClasses([RAW_CLASS], [RAW_CLASS])
    only_batches: bool = False
    outcomes: RequestOutcomes = field(default_factory=RequestOutcomes)

    def __post_init__(self) -> None:
        self._names = LogprobJson(self.rules.tokenizer)
        self._answers = AnswerMemory(self.rules.limits.max_answer_bytes)

    def check_admission(self, tenant: str) -> None:
        """Refuse a request before its body is read, so that a refusal costs little.

        Raises:
            RequestError: the server is shutting down, or admits no more requests of this tenant now.
        """
        if self.draining:
            raise RequestError(SHUTTING_DOWN)
        if (refusal := self.backend.find_refusal(1, tenant)) is not None:
            raise RequestError(refusal)

    async def create_chat_completion(self, body: bytes, caller: Caller) -> Response:
        """The response to `POST /v1/chat/completions`; the generation starts when the response is sent.

        Raises RequestError if the request is refused.
        """
        ask = await self._resolve_request("chat", body, caller)
        head = self._response_head("chatcmpl", ask, caller)
        return self._generation_response(head, ask, ChatFormat(head, ask, self._names), caller)

    async def create_completion(self, body: bytes, caller: Caller) -> Response:
        """The response to `POST /v1/completions`; the generation starts when the response is sent.

        Raises RequestError if the request is refused.
        """
        ask = await self._resolve_request("completion", body, caller)
        head = self._response_head("cmpl", ask, caller)
        return self._generation_response(head, ask, CompletionFormat(head, ask, self._names), caller)

    async def tokenize(self, body: bytes, caller: Caller) -> Response:
        """The response to `POST /tokenize`. Raises RequestError if the request is refused."""
        return await self._prepared_response("tokenize", body, caller)

    async def detokenize(self, body: bytes, caller: Caller) -> Response:
        """The response to `POST /detokenize`. Raises RequestError if the request is refused."""
        return await self._prepared_response("detokenize", body, caller)

    async def check_batch(self, body: bytes, caller: Caller) -> BatchRequest:
        """What the body of a new batch asks for. It waits for a preparer like other bodies, but asks for no admission
        to generate: full queues are no reason to refuse work that can wait.

        Raises RequestError if the body is refused, or too many bodies wait to be prepared.
        """
        if self.draining:
            raise RequestError(SHUTTING_DOWN)
        checked = await self.preparers.prepare_body(PreparationJob(BATCH_ROUTE, body, caller))
        assert isinstance(checked, PreparedReply)
        return msgspec.json.decode(checked.body, type=BatchRequest)

    def end_generations(self) -> None:
        """End all open generations with an error that their clients see."""
        for generation in list(self.open):
            generation.fail_request(SHUTTING_DOWN)

    def close(self) -> None:
        """End the preparer processes. Idempotent."""
        self.preparers.close()

    async def _resolve_request(self, route: str, body: bytes, caller: Caller) -> ResolvedRequest:
        """Parse, validate and tokenize a body in a preparer process. Raises RequestError if it is refused."""
        if self.only_batches:
            what = "this deployment serves batches only: POST /v1/batches"
            raise RequestError(RequestFailure(FailureReason.ONLY_BATCHES, what))
        prepared = await self.preparers.prepare_body(PreparationJob(route, body, caller))
        assert isinstance(prepared, PreparedRequest)
        ask = fit_worker_context(prepared.ask, self.context_tokens)
        if caller.client_id:
            ask = replace(ask, origin=structs.replace(ask.origin, client_id=caller.client_id))
        if caller.bulk:
            # Lines of batches are below every request over HTTP, whatever priority they ask for.
            ask = replace(ask, origin=structs.replace(ask.origin, priority=BULK_PRIORITY))
        if ask.kv is not None or ask.keep.evicts:
            ask = fit_kv_class(ask, self.kv_classes())
        return ask

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and answer together that can be served now."""
        return min(self.rules.context_tokens, self.longest() or self.rules.context_tokens)

    async def _prepared_response(self, route: str, body: bytes, caller: Caller) -> Response:
        """A response that a preparer process makes completely (`/tokenize`, `/detokenize`)."""
        prepared = await self.preparers.prepare_body(PreparationJob(route, body, caller))
        assert isinstance(prepared, PreparedReply)
        return Response(prepared.body, media_type=JSON_TYPE)

    def _response_head(self, prefix: str, resolved: ResolvedRequest, caller: Caller) -> ResponseHead:
        """The head of an answer. Its id contains the HTTP request's id, so that logs can be searched for it."""
        name = answer_id(prefix, caller.request_id)
        fingerprint = self.fingerprint()
        return ResponseHead(name, int(time.time()), resolved.model, fingerprint, keep=resolved.keep.threshold)

    def _generation_response(
        self, head: ResponseHead, resolved: ResolvedRequest, output_format: OutputFormat, caller: Caller
    ) -> Response:
        """The response that runs and writes the generation. Raises RequestError if the server is shutting down."""
        if self.draining:
            raise RequestError(SHUTTING_DOWN)
        timeouts = self.timeouts
        own_deadline = caller.timeout_s is not None and caller.timeout_s < timeouts.request_s
        allowed_s = min(timeouts.request_s, caller.timeout_s or timeouts.request_s)
        max_bytes = self.rules.limits.max_stream_bytes
        generation = Generation(
            head.id,
            resolved,
            self.rules.tokenizer,
            self.backend,
            self.metrics,
            max_bytes,
            self._answers,
            self.outcomes,
        )
        return GenerationResponse(
            generation,
            output_format,
            self.open,
            arrived_s=caller.arrived_s,
            deadline_s=caller.arrived_s + allowed_s,
            stall_s=timeouts.stall_s,
            ping_s=timeouts.ping_s,
            timings=caller.timings,
            own_deadline=own_deadline,
        )
