"""What is counted of bulk work (`diptych.request.Tenancy.bulk`). No other metric of requests counts it."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from diptych.request import Request, RequestStage
from router.effects import DeliverTokens, FailRequest, FinishRequest, RelayEffect, RequestCancelled
from router.requests.relay import Relay


class BulkCounters:
    """Metrics of bulk work, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sequences = Counter(
            "diptych:bulk_sequences",
            "Ended sequences: done, failed, cancelled",
            ("outcome",),
            registry=registry,
        )
        self.tokens = Counter(
            "diptych:bulk_tokens",
            "Tokens of bulk work: prompt (counted at the first new token), generation",
            ("kind",),
            registry=registry,
        )
        self.open = Gauge(
            "diptych:bulk_sequences_open",
            "Open sequences: waiting in the gateway, running at a worker",
            ("state",),
            registry=registry,
        )
        for outcome in ("done", "failed", "cancelled"):
            self.sequences.labels(outcome)
        for kind in ("prompt", "generation"):
            self.tokens.labels(kind)
        for state in ("waiting", "running"):
            self.open.labels(state)


class BulkTelemetry:
    """Follows the bulk work of a relay: counts it, and knows which requests are bulk work."""

    def __init__(self, relay: Relay, counters: BulkCounters) -> None:
        self._relay, self._counters = relay, counters
        # The prompt tokens of each open request of bulk work; 0 once they are counted.
        self._prompts: dict[str, int] = {}
        self._totals = {"prompt": 0, "generation": 0}

    def __contains__(self, request: str) -> bool:
        """Whether an open request is bulk work."""
        return request in self._prompts

    def add_request(self, request: Request) -> None:
        """A request has arrived; it may be of any kind."""
        if request.tenancy.bulk:
            self._prompts[request.id] = len(request.prompt)

    def on_effect(self, effect: RelayEffect) -> None:
        """Count an effect that concerns bulk work."""
        match effect:
            case DeliverTokens(request, output) if request in self._prompts:
                self._count_tokens("prompt", self._prompts[request])
                self._prompts[request] = 0
                self._count_tokens("generation", len(output.tokens))
            case FinishRequest(request) | FailRequest(request) | RequestCancelled(request):
                if self._prompts.pop(request, None) is not None:
                    self._counters.sequences.labels(_OUTCOMES[type(effect)]).inc()

    def update_gauges(self) -> None:
        """Update the number of open sequences; called at every tick."""
        for state, count in self._count_open().items():
            self._counters.open.labels(state).set(count)

    def report(self) -> dict[str, Any]:
        """The part of `/status` about bulk work: open sequences, and tokens since the start."""
        return {**self._count_open(), "tokens": dict(self._totals)}

    def _count_open(self) -> dict[str, int]:
        """Sequences that wait in the gateway, and those that a worker has."""
        stages = self._relay.count_stages(bulk=True) if self._prompts else {}
        waiting = stages.get(RequestStage.ADMITTED.value, 0)
        return {"waiting": waiting, "running": sum(stages.values()) - waiting}

    def _count_tokens(self, kind: str, tokens: int) -> None:
        self._totals[kind] += tokens
        self._counters.tokens.labels(kind).inc(tokens)


_OUTCOMES = {FinishRequest: "done", FailRequest: "failed", RequestCancelled: "cancelled"}
