"""Does the work behind the generation and tokenization routes: prepare a body, and make the generation of its answer.

The service owns the open generations, so that a shutdown can end them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from msgspec import structs
from prometheus_client import CollectorRegistry

from diptych.chunks import RAW_CLASS
from diptych.errors import RequestError
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.request_ids import answer_id
from diptych.request import BULK_PRIORITY
from router.workers.kv_classes import ServedClasses
from services.gateway.generation.answer_memory import AnswerMemory
from services.gateway.generation.chat_format import ChatFormat
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.formats import OutputFormat, ResponseHead
from services.gateway.generation.generation import Generation, GenerationBackend
from services.gateway.generation.logprob_json import LogprobJson
from services.gateway.generation.streaming import PING_INTERVAL_S
from services.gateway.http.error_response import SHUTTING_DOWN
from services.gateway.messages.messages_format import MessagesFormat
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_events import RecentErrors
from services.gateway.openai.resolve import ResolvedRequest, fit_kv_class, fit_worker_context
from services.gateway.openai.schemas.batch_schema import BatchRequest
from services.gateway.openai.tenancy import Caller
from services.gateway.openai.validate import RequestRules
from services.gateway.outcomes import RequestOutcomes
from services.gateway.pooling.pooled_format import (
    EmbeddingFormat,
    RerankFormat,
    ScoreFormat,
)
from services.gateway.pooling.pooled_inputs import cannot_pool_error
from services.gateway.preparation.ignored_fields import IgnoredFields
from services.gateway.preparation.preparation_job import (
    BATCH_ROUTE,
    PreparationJob,
    PreparedReply,
    PreparedRequest,
)
from services.gateway.preparation.preparer_pool import PreparerPool
from services.gateway.responses.responses_format import ResponsesFormat

FormatMaker = Callable[[ResponseHead, ResolvedRequest, LogprobJson], OutputFormat]

# By path, which lines of batches name too: the name of the route for preparers, the prefix of ids, and the format.
GENERATION_ROUTES: Mapping[str, tuple[str, str, FormatMaker]] = {
    "/v1/chat/completions": ("chat", "chatcmpl-", ChatFormat),
    "/v1/completions": ("completion", "cmpl-", CompletionFormat),
    "/v1/responses": ("responses", "resp_", ResponsesFormat),
    "/v1/messages": ("messages", "msg_", MessagesFormat),
    "/v1/embeddings": ("embedding", "embd-", EmbeddingFormat),
    "/rerank": ("rerank", "rerank-", RerankFormat),
    "/v1/rerank": ("rerank", "rerank-", RerankFormat),
    "/score": ("score", "score-", ScoreFormat),
    "/v1/score": ("score", "score-", ScoreFormat),
}
POOLED_ROUTES = frozenset({"embedding", "rerank", "score"})


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """Time limits of requests, in seconds."""

    request_s: float = 600.0
    stall_s: float = 30.0
    ping_s: float = PING_INTERVAL_S


class FrontReports(Protocol):
    """The fronts, of a gateway that has some, as the routes of operators see them."""

    @property
    def num_open(self) -> int:
        """HTTP requests that they generate."""

    def report(self) -> list[dict[str, Any]]:
        """The part of `/status` about them."""

    async def render_metrics(self, registry: CollectorRegistry) -> bytes:
        """The body of `/metrics`."""


@dataclass
class GatewayService:
    """Does the work of the generation and tokenization routes, and holds the open generations.

    `fingerprint` returns the `system_fingerprint` of answers (model, weights, numerics), or None until it is known.
    `longest` returns how many tokens (prompt and answer) the workers can take, or None until that is known.
    `kv_classes` returns the KV classes that the workers have.
    `only_batches`: the workers do bulk work only, so that requests over HTTP are refused. `only_pools`: there are no
    decode workers, so that prompts are pooled and nothing is generated. `workers_pool` returns whether any can pool.
    `open` holds the generations whose answer is being written. `errors` are the latest error responses. `outcomes`
    are told how every sequence ends. `fronts` are those of `--gateways`, if they take HTTP.
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
    workers_pool: Callable[[], bool] = lambda: True
    only_pools: bool = False
    outcomes: RequestOutcomes = field(default_factory=RequestOutcomes)
    fronts: FrontReports | None = None

    def __post_init__(self) -> None:
        self._names = LogprobJson(self.rules.tokenizer)
        self._ignored_fields = IgnoredFields(self.metrics.registry)
        self._id_names = LogprobJson(self.rules.tokenizer, ids_as_names=True)
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

    async def create_generation(
        self, path: str, body: bytes, caller: Caller
    ) -> tuple[Generation, OutputFormat]:
        """What answers a body that was sent to `path`: a generation that has not begun, and the format of its answer.

        Raises RequestError if the request is refused.
        """
        route, prefix, make_format = GENERATION_ROUTES[path]
        resolved = await self._resolve_request(route, body, caller)
        if self.draining:
            raise RequestError(SHUTTING_DOWN)
        # The id contains the HTTP request's id, so that logs can be searched for it.
        name, keep = answer_id(prefix, caller.request_id), resolved.keep
        head = ResponseHead(
            name, int(time.time()), resolved.model, self.fingerprint(),
            keep=keep.threshold, keep_rule=keep.rule,
        )  # fmt: skip
        longest_s = self.timeouts.request_s
        generation = Generation(
            name,
            resolved,
            self.rules.tokenizer,
            self.backend,
            self.metrics,
            self.rules.limits.max_stream_bytes,
            self._answers,
            self.outcomes,
            arrived_s=caller.arrived_s,
            deadline_s=caller.arrived_s + min(longest_s, caller.timeout_s or longest_s),
            own_deadline=caller.timeout_s is not None and caller.timeout_s < longest_s,
            markup=self.rules.markup,
        )
        return generation, make_format(
            head, resolved, self._id_names if resolved.ids_as_names else self._names
        )

    async def make_reply(self, route: str, body: bytes, caller: Caller) -> bytes:
        """The JSON that a preparer process makes of a body. Raises RequestError if the request is refused."""
        prepared = await self.preparers.prepare_body(PreparationJob(route, body, caller))
        assert isinstance(prepared, PreparedReply)
        return prepared.body

    async def check_batch(self, body: bytes, caller: Caller) -> BatchRequest:
        """What the body of a new batch asks for. It waits for a preparer like other bodies, but asks for no admission
        to generate: full queues are no reason to refuse work that can wait.

        Raises RequestError if the body is refused, or too many bodies wait to be prepared.
        """
        if self.draining:
            raise RequestError(SHUTTING_DOWN)
        return msgspec.json.decode(await self.make_reply(BATCH_ROUTE, body, caller), type=BatchRequest)

    @property
    def num_open(self) -> int:
        """HTTP requests that are generated."""
        return len(self.open) + (0 if self.fronts is None else self.fronts.num_open)

    async def render_metrics(self) -> bytes:
        """The body of `/metrics`."""
        if self.fronts is None:
            return self.metrics.render_text()
        return await self.fronts.render_metrics(self.metrics.registry)

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
        if route in POOLED_ROUTES and not self.workers_pool():
            raise cannot_pool_error("none of its workers does; vLLM's and bulk workers never do")
        if route not in POOLED_ROUTES and self.only_pools:
            what = "this deployment has no decode workers: POST /v1/embeddings, /rerank or /score"
            raise RequestError(RequestFailure(FailureReason.ONLY_POOLING, what))
        prepared = await self.preparers.prepare_body(PreparationJob(route, body, caller))
        assert isinstance(prepared, PreparedRequest)
        self._ignored_fields.count_fields(prepared.ask.ignored_fields)
        ask = fit_worker_context(prepared.ask, self.context_tokens)
        if caller.client_id:
            ask = replace(ask, origin=structs.replace(ask.origin, client_id=caller.client_id))
        if ask.origin.priority < caller.best_priority:
            # It asks for none: its key's requests are behind those of others.
            ask = replace(ask, origin=structs.replace(ask.origin, priority=caller.best_priority))
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
