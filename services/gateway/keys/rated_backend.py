"""Holds requests to the rates of their keys, between what asks for generations and what makes their tokens.

    RateMiddleware ── early: a key without requests left; headers of answers
    Generation ─▶ RatedBackend ── refuses, or takes what the prompt needs ─▶ RelayBackend
                      └─ CountedSink takes each token as it comes

Every route that generates, and every line of a batch, hands its sequences to the backend: so none is forgotten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.logs.log_format import about_request
from diptych.logs.request_ids import ids_of_sequence
from diptych.messages import Output
from diptych.request import Request
from router.effects import TelemetryEffect
from services.gateway.generation.generation import GenerationBackend, SequenceSink
from services.gateway.http.error_response import error_response
from services.gateway.keys.key_rates import KeyRates
from services.gateway.keys.named_keys import NamedKeys
from services.gateway.openai.schemas.response_schema import KvDetails
from services.gateway.outcomes import Ending, RequestOutcomes

KEY_GONE = RequestFailure(
    FailureReason.RATE_LIMIT_EXCEEDED, "the key of this batch is not accepted any more", wait_s=60.0
)

log = logging.getLogger(__name__)


class RatedBackend:
    """A `GenerationBackend` that refuses requests beyond the rates of their keys, and counts those of the others."""

    def __init__(
        self, backend: GenerationBackend, keys: NamedKeys, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend, self._keys, self._clock = backend, keys, clock

    def submit_requests(self, asked_requests: Sequence[tuple[Request, SequenceSink]]) -> None:
        """Start the sequences of one HTTP request: all of them, or none if its key has no room for them now."""
        first = asked_requests[0][0]
        rates = self._keys.rates_of_tenant(first.tenancy.tenant)
        if rates is None and (not first.tenancy.bulk or self._keys.accepts_tenant(first.tenancy.tenant)):
            return self._backend.submit_requests(asked_requests)
        if rates is None:
            # A line of a batch whose name has left the file waits: the name may come back.
            return asked_requests[0][1].fail_sequence(KEY_GONE)
        now_s, prompt_tokens = self._clock(), count_prompt_tokens([request for request, _ in asked_requests])
        refusal = rates.find_refusal(prompt_tokens, now_s, first.tenancy.bulk)
        if refusal is not None:
            # This fails all sequences of the request.
            return asked_requests[0][1].fail_sequence(refusal)
        rates.admit_request(prompt_tokens, now_s)
        about = about_request(ids_of_sequence(first.id, first.tenancy.client_id))
        log.info("is of key %s", rates.key.name, extra=about)
        self._backend.submit_requests(
            [(request, CountedSink(sink, rates)) for request, sink in asked_requests]
        )

    def cancel_request(self, request: str, *others: str) -> None:
        """Cancel sequences of one HTTP request because its client has left."""
        self._backend.cancel_request(request, *others)

    def stop_request(self, request: str) -> None:
        """Stop a sequence whose text has ended."""
        self._backend.stop_request(request)

    def find_refusal(self, num_requests: int, tenant: str) -> RequestFailure | None:
        """Why requests would be refused because of load; `RateMiddleware` has asked for the key's rates before."""
        return self._backend.find_refusal(num_requests, tenant)


class CountedSink:
    """A `SequenceSink` that takes each token from the rates of its key, and hands everything on."""

    def __init__(self, sink: SequenceSink, rates: KeyRates) -> None:
        self._sink, self._rates = sink, rates
        self.record_effect: Callable[[TelemetryEffect, float], None] = sink.record_effect
        self.record_kv_class: Callable[[str, str, KvDetails | None], None] = sink.record_kv_class
        self.finish_sequence: Callable[[str, float], None] = sink.finish_sequence
        self.fail_sequence: Callable[[RequestFailure], None] = sink.fail_sequence

    def deliver_output(self, output: Output, now_s: float) -> None:
        """Count the new tokens of a step, and hand them on."""
        if output.tokens:
            self._rates.count_generated(len(output.tokens), now_s)
        self._sink.deliver_output(output, now_s)


class RateMiddleware:
    """ASGI middleware that refuses requests for `paths` whose key has none left, before their bodies are read.

    Answers for `paths` get the headers that say what is left.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: NamedKeys,
        outcomes: RequestOutcomes,
        paths: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app, self._keys, self._outcomes, self._clock = app, keys, outcomes, clock
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rates = None
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            rates = self._keys.rates_of_tenant(scope["state"]["tenant"])
        if rates is None or not rates.windows:
            return await self.app(scope, receive, send)
        limited = rates

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = limited.headers(self._clock())
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        refusal = rates.find_refusal(0, self._clock())
        if refusal is None:
            return await self.app(scope, receive, send_with_rates)
        self._outcomes.end_sequence(None, Ending.FAILED, refusal)
        await error_response(refusal)(scope, receive, send_with_rates)


def count_prompt_tokens(requests: Sequence[Request]) -> int:
    """The prompt tokens of the sequences of one HTTP request; those of one prompt count once."""
    prompts = {}
    for request in requests:
        tokens = request.prompt
        # Each sequence has its own view of the bytes of its prompt.
        prompts[id(tokens.obj) if isinstance(tokens, memoryview) else id(tokens)] = len(tokens)
    return sum(prompts.values())
