"""Admission: bounds how much work the gateway accepts, and answers 429 beyond the bounds (pure).

Three things are bounded: requests in flight, prompt tokens that are not prefilled yet, and the predicted wait for a
first token. All later queues are bounded because this one is. A refusal carries a Retry-After from the same prediction.

    wait = prompt tokens not prefilled yet / tokens prefilled per second; while prefill stands still, because the decode
           workers are full, at least: requests without a first token / requests that end per second

A prompt counts as a chunk of tokens at least: most of the time of a tiny one is not that of its tokens.

Both rates are measured only while requests wait, since a service with little to do does not show its capacity. A pause
without progress is expected to last as long again.

Tenants share the bounds as `router.requests.tenants` defines. The predicted wait of a tenant counts at most as many
prompt tokens of each other tenant as the tenant itself has waiting, since the queue serves tenants fairly.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.chunks import CHUNK_TOKENS
from diptych.failure_statuses import FailureReason, RequestFailure
from router.requests.tenants import RESERVED_PART, AdmissionDemand, TenantShares

# Weight of the past in a rate, applied at each departure.
RATE_DECAY = 0.95
# Departures have stalled when none came for this many times the usual interval.
STALL_FACTOR = 5.0
# Prompts that must have been prefilled before their tokens per second say anything of longer ones: the first to be
# ready is the shortest, and most of its time is not the time of its tokens.
LEAST_PROMPTS = 8
# Bounds of Retry-After in seconds (official clients ignore more than 120 s).
MIN_WAIT_S, MAX_WAIT_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The gateway's bounds: requests in flight, prompt tokens not prefilled yet, seconds until a first token.

    `shared` says that several tenants may send requests. A single tenant may use the bounds whole.
    """

    max_requests: int = 256
    max_queued_tokens: int = 1 << 20
    max_wait_s: float = 30.0
    shared: bool = True

    @property
    def max_group(self) -> int:
        """The most sequences of one HTTP request that can ever be admitted together."""
        kept = self.max_requests // RESERVED_PART if self.shared else 0
        return max(1, self.max_requests - kept)


class DepartureRate:
    """Departures (requests or tokens) per second while anything waits; older departures count less."""

    def __init__(self, least: int = 1) -> None:
        """`least`: how many departures must have been seen before anything is predicted."""
        self._least = least
        self._seen = 0
        self._units = self._seconds = self._departures = 0.0
        # Time of the last departure, or of the start of waiting if that came later; None while nothing waits.
        self._since_s: float | None = None

    def start_waiting(self, now_s: float) -> None:
        """Something waits from now on: time counts for the rate."""
        self._since_s = now_s if self._since_s is None else self._since_s

    def record_departure(self, units: float, now_s: float, *, idle: bool) -> None:
        """`units` have departed; `idle` if nothing waits any more."""
        if self._since_s is not None:
            self._units = RATE_DECAY * self._units + units
            self._seconds = RATE_DECAY * self._seconds + now_s - self._since_s
            self._departures = RATE_DECAY * self._departures + 1
            self._seen += 1
        self._since_s = None if idle else now_s

    def stop_waiting(self) -> None:
        """Nothing waits any more, without a departure: time does not count."""
        self._since_s = None

    def predict_wait_s(self, units: float, now_s: float) -> float | None:
        """Predicted seconds until `units` have departed; None if no rate is known."""
        if self._seen < self._least or not self._units or not self._seconds:
            return None
        return units * self._seconds / self._units + self._pause_s(now_s)

    def is_stalled(self, now_s: float) -> bool:
        """Whether the time since the last departure is much longer than usual."""
        return self._pause_s(now_s) * self._departures > STALL_FACTOR * self._seconds

    def _pause_s(self, now_s: float) -> float:
        """Seconds since the last departure, if anything waits."""
        return 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)


class Admission:
    """Counts the requests in flight, from `admit_request` to `mark_ended`, and their prompt tokens until prefilled."""

    def __init__(self, limits: AdmissionLimits | None = None) -> None:
        self.limits = limits or AdmissionLimits()
        bounds = self.limits.max_requests, self.limits.max_queued_tokens
        self.tenants = TenantShares(bounds, self.limits.shared)
        # Prompt tokens prefilled per second while requests wait for a first token.
        self._prefill_rate = DepartureRate(LEAST_PROMPTS)
        # Requests ended per second while requests wait for a first token.
        self._yield_rate = DepartureRate()
        # Requests ended per second while any request is in flight.
        self._service_rate = DepartureRate()

    @property
    def in_flight(self) -> int:
        """How many requests were admitted and have not ended."""
        return len(self.tenants)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are not prefilled yet."""
        return self.tenants.total.tokens

    @property
    def num_unprefilled(self) -> int:
        """Number of requests whose prompt is not prefilled yet."""
        return self.tenants.total.num_unprefilled

    def find_refusal(
        self, num_requests: int, prompt_tokens: int, now_s: float, tenant: str = ""
    ) -> RequestFailure | None:
        """Why `num_requests` more of `tenant`, with `prompt_tokens` in total, are refused now; None if they fit.

        They may fit only after requests of other tenants are ended: `requests_to_displace` lists these.
        """
        limits, held = self.limits, self.tenants.usage_of(tenant)
        demand = AdmissionDemand(tenant, (num_requests, prompt_tokens))
        excess, tokens = self.tenants.excess_of(demand)
        if excess and self.tenants.find_victims(demand, (excess, 0)) is None:
            after_s = self._yield_rate.predict_wait_s(excess, now_s) or self._service_rate.predict_wait_s(
                excess, now_s
            )
            text = f"{self.in_flight} requests are in flight, the limit is {limits.max_requests}"
            whose = f"; {held.requests} of them are of this API key" if tenant else ""
            # With more tenants than requests that fit, a share is 0, and the service is full.
            own = self.tenants.exceeds_share(0, demand) and self.tenants.share_of(0, tenant) > 0
            reason = FailureReason.TENANT_REQUESTS_FULL if own else FailureReason.TOO_MANY_REQUESTS
            return _refuse(reason, text + whose, after_s)
        if tokens and self.tenants.find_victims(demand, (excess, tokens)) is None:
            after_s = self._prefill_rate.predict_wait_s(tokens, now_s)
            text = f"{self.queued_tokens} prompt tokens wait already, the limit is {limits.max_queued_tokens}"
            whose = f"; {held.tokens} of them are of this API key" if tenant else ""
            own = self.tenants.exceeds_share(1, demand)
            reason = FailureReason.TENANT_QUEUE_FULL if own else FailureReason.QUEUE_FULL
            return _refuse(reason, text + whose, after_s)
        wait_s = self._predict_wait_s(*self.tenants.work_ahead(tenant), now_s) if held.tokens else 0.0
        if wait_s > limits.max_wait_s:
            text = f"a first token would take about {wait_s:.0f} s, the limit is {limits.max_wait_s:g} s"
            return _refuse(FailureReason.QUEUE_TOO_LONG, text, wait_s - limits.max_wait_s)
        return None

    def requests_to_displace(self, num_requests: int, prompt_tokens: int, tenant: str) -> list[str]:
        """The requests of other tenants that must end before this demand, which was not refused, can be admitted."""
        demand = AdmissionDemand(tenant, (num_requests, prompt_tokens))
        groups = self.tenants.find_victims(demand, self.tenants.excess_of(demand)) or []
        return [name for group in groups for name in group.unprefilled_tokens]

    def displacement_refusal(self, now_s: float) -> RequestFailure:
        """The error for a request that has to end to make room for other tenants."""
        text = "it waited while its API key had more than its share of the requests in flight, and others had less"
        return _refuse(FailureReason.DISPLACED, text, self._yield_rate.predict_wait_s(1, now_s))

    def predicted_wait_s(self, now_s: float) -> float:
        """Predicted seconds until all requests that wait now have their first token; 0 if no rate is known."""
        return self._predict_wait_s(self.queued_tokens, self.num_unprefilled, now_s)

    def _predict_wait_s(self, tokens: int, num_unprefilled: int, now_s: float) -> float:
        """Predicted seconds until `tokens` are prefilled; if prefill stands still, until decode workers have room."""
        work = max(tokens, CHUNK_TOKENS * num_unprefilled)
        wait_s = self._prefill_rate.predict_wait_s(work, now_s) or 0.0
        if self._prefill_rate.is_stalled(now_s):
            wait_s = max(wait_s, self._yield_rate.predict_wait_s(num_unprefilled, now_s) or 0.0)
        return wait_s

    def admit_request(
        self, request: str, prompt_tokens: int, now_s: float, tenant: str = "", group: str | None = None
    ) -> None:
        """Count an admitted request.

        `group` names its HTTP request, shared by all sequences of it; None: a single one.
        """
        self.tenants.add_request(request, prompt_tokens, tenant, request if group is None else group)
        self._service_rate.start_waiting(now_s)
        if self.num_unprefilled > 1:
            self._prefill_rate.start_waiting(now_s)
            self._yield_rate.start_waiting(now_s)

    def mark_begun(self, request: str) -> None:
        """A worker has started on the request, so its HTTP request cannot be displaced any more. Idempotent."""
        self.tenants.mark_begun(request)

    def mark_prefilled(self, request: str, now_s: float) -> None:
        """The request has its first token. Idempotent; ignored for a request that was not admitted."""
        if tokens := self.tenants.mark_prefilled(request):
            self._prefill_rate.record_departure(max(tokens, CHUNK_TOKENS), now_s, idle=False)
            self._pause_rates()

    def mark_ended(self, request: str, now_s: float) -> None:
        """The request has ended. Idempotent."""
        if request not in self.tenants:
            return
        tokens = self.tenants.remove_request(request)
        self._service_rate.record_departure(1, now_s, idle=not len(self.tenants))
        if not tokens:
            # Only prefilled requests count: one that ends before its prefill frees nothing that others wait for.
            self._yield_rate.record_departure(1, now_s, idle=False)
        self._pause_rates()

    def _pause_rates(self) -> None:
        """Measure no prefill rate while fewer than two requests wait: a single request does not show the capacity."""
        if self.num_unprefilled < 2:
            self._prefill_rate.stop_waiting()
            self._yield_rate.stop_waiting()


def _refuse(reason: FailureReason, message: str, wait_s: float | None) -> RequestFailure:
    """A refusal that tells the client to come back after about `wait_s` seconds; None: that is not known."""
    if wait_s is not None:
        wait_s = min(MAX_WAIT_S, max(MIN_WAIT_S, wait_s))
    return RequestFailure(reason, message, wait_s=wait_s)
