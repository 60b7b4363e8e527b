"""Reports what the relay does to the metrics, the log and the request log. Changes nothing itself."""

from __future__ import annotations

import logging
from collections import Counter

from diptych.logs.log_format import about_request
from diptych.logs.request_ids import RequestIds, ids_of_sequence
from router.effects import (
    AttemptBegan,
    AttemptRetried,
    DeliverTokens,
    FailRequest,
    FinishRequest,
    KvMoved,
    OverdraftSettled,
    PrefilledLocally,
    RelayEffect,
    RelayEvent,
    RequestArrived,
    RequestCancelled,
    RequestQuarantined,
    RequestQueued,
    WorkerDown,
    WorkerSaid,
    WorkerUnfit,
    WorkerUp,
)
from router.requests.relay import ATTEMPT_MESSAGES, Relay
from router.workers.kv_classes import holds_class, pool_size, saved_chunk_bytes
from services.gateway.metrics.bulk import BulkTelemetry
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_events import FleetEvents
from services.gateway.metrics.request_log import RequestLog

# Seconds between two warnings that decode workers prefill prompts.
WARNING_INTERVAL_S = 10.0

log = logging.getLogger(__name__)


class RelayTelemetry:
    """Receives every event before the relay handles it, and every effect after it was applied.

    Bulk work is counted apart, and is not in the request log.
    """

    def __init__(self, relay: Relay, metrics: GatewayMetrics, request_log: RequestLog | None) -> None:
        self._relay, self._metrics, self._request_log = relay, metrics, request_log
        self.fleet_events = FleetEvents()
        self.bulk = BulkTelemetry(relay, metrics.bulk)
        # The time at which each request began to wait in the gateway.
        self._queued_s: dict[str, float] = {}
        # From 0 on: what a series begins with is no increase to Prometheus.
        for kind in ATTEMPT_MESSAGES:
            metrics.late.labels(kind.__name__)
        # Number of late messages, by type, that the metrics have counted already.
        self._late: Counter[str] = Counter()
        # Number of lines of the request log that the metrics have counted already.
        self._lines: Counter[str] = Counter()
        self._links_given_up = 0
        # Bytes of KV that each (source, target) has moved. A pair is forgotten when one of its workers is lost.
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        self._warned_s = float("-inf")
        # The ids of each open request, for its log lines.
        self._ids: dict[str, RequestIds] = {}
        self._speaker: str | None = None

    def on_event(self, event: RelayEvent) -> None:
        """Called before the relay handles `event`."""
        self._speaker = event.worker if isinstance(event, WorkerSaid) else None
        if isinstance(event, RequestArrived):
            for request in event.requests:
                ids = self._ids[request.id] = ids_of_sequence(request.id, request.tenancy.client_id)
                self.bulk.add_request(request)
                if self._request_log is not None and not request.tenancy.bulk:
                    self._request_log.log_arrival(request, ids, event.pinned_pair is not None)

    def on_effect(self, effect: RelayEffect, now_s: float) -> None:
        """Called after `effect` was applied: log it, and count it in metrics and request log."""
        if type(effect) is DeliverTokens and self._request_log is None and effect.request not in self.bulk:
            # Most effects are these, and of them there is nothing to log or count here.
            return
        self._log_effect(effect, now_s)
        if (getattr(effect, "request", None) or "") in self.bulk:
            self.bulk.on_effect(effect)
        else:
            self._record_effect(effect, now_s)
        if isinstance(effect, FinishRequest | FailRequest | RequestCancelled):
            self._ids.pop(effect.request, None)

    def _record_effect(self, effect: RelayEffect, now_s: float) -> None:
        """Count an effect that does not concern bulk work, and write it to the request log."""
        self._count_effect(effect, now_s)
        self._keep_fleet_event(effect, now_s)
        if self._request_log is not None:
            worker_state = (
                self._relay.fleet.workers.get(effect.worker) if isinstance(effect, WorkerUp) else None
            )
            state = self._relay.live.get(effect.request) if isinstance(effect, AttemptBegan) else None
            pid = worker_state.hello.pid if worker_state else None
            self._request_log.on_effect(effect, self._speaker, pid, state.chunks if state else ())

    def update_gauges(self, now_s: float) -> None:
        """Update gauges and counters that mirror counts of the relay; called at every tick."""
        relay, metrics = self._relay, self._metrics
        self.bulk.update_gauges()
        predicted_wait_s = relay.admission.predicted_wait_s(now_s)
        metrics.queued.set(len(self._queued_s))
        metrics.history.sample_queue(now_s, len(self._queued_s), predicted_wait_s)
        metrics.unprefilled_tokens.set(relay.admission.queued_tokens)
        metrics.foreseen.set(predicted_wait_s)
        metrics.overdrawn.set(relay.pairs.num_overdrawn)
        metrics.suspects.set(len(relay.quarantine))
        metrics.links_given_up.inc(relay.fleet.links_given_up - self._links_given_up)
        self._links_given_up = relay.fleet.links_given_up
        for kind, count in _take_increases(relay.late_messages, self._late):
            metrics.late.labels(kind).inc(count)
            if self._request_log is not None:
                self._request_log.log_late_messages(kind, count)
        if self._request_log is not None:
            for outcome, count in _take_increases(self._request_log.file.outcomes, self._lines):
                metrics.log_lines.labels(outcome).inc(count)

    def _log_effect(self, effect: RelayEffect, now_s: float) -> None:
        """Write the log line of an effect, if it has one."""
        match effect:
            case FailRequest(request, failure):
                about = self._about(request, failure.code)
                log.warning("the request failed: %s: %s", failure.code, failure.message, extra=about)
            case AttemptRetried(request, code, epoch, delivered, why):
                line, about = "attempt %d is given up after %d tokens: %s: %s", self._about(request, code)
                log.warning(line, epoch - 1, delivered, code, why, extra=about)
            case PrefilledLocally(_, reason) if now_s - self._warned_s >= WARNING_INTERVAL_S:
                self._warned_s = now_s
                log.warning("decode workers prefill prompts: %s", reason.replace("_", " "))
            case RequestQuarantined(request):
                line = "the request is taken for the cause of worker crashes and is refused from now on"
                log.error(line, extra=self._about(request))
            case WorkerUp(worker, role, incarnation):
                log.info("worker %s (%s, incarnation %s) is up", worker, role, incarnation)
            case WorkerDown(worker, _, reason):
                log.warning("worker %s is lost: %s", worker, reason)
            case WorkerUnfit(worker, text):
                for line in text.splitlines():
                    log.error("worker %s cannot serve with the others: %s", worker, line)

    def _keep_fleet_event(self, effect: RelayEffect, now_s: float) -> None:
        """Keep a change of the fleet for `/status`."""
        match effect:
            case WorkerUp(worker, role):
                self.fleet_events.add_up(now_s, worker, role)
            case WorkerDown(worker, _, reason):
                self.fleet_events.add_lost(now_s, worker, reason)
            case WorkerUnfit(worker, text):
                self.fleet_events.add_unfit(now_s, worker, text)

    def _about(self, request: str, kind: str = "") -> dict[str, object]:
        """The `extra` of log records about a request."""
        return about_request(self._ids.get(request) or ids_of_sequence(request), kind)

    def _count_effect(self, effect: RelayEffect, now_s: float) -> None:
        """Count an effect in the metrics."""
        metrics = self._metrics
        match effect:
            case RequestQueued(request):
                self._queued_s[request] = now_s
            case AttemptBegan(request):
                if (queued_s := self._queued_s.pop(request, None)) is not None:
                    metrics.queue_wait.observe(now_s - queued_s)
            case FinishRequest(request) | FailRequest(request) | RequestCancelled(request):
                self._queued_s.pop(request, None)
            case KvMoved():
                metrics.transfer_seconds.labels(effect.transport).observe(effect.seconds)
                metrics.nixl.observe_transfer(effect.transport, effect.seconds, effect.num_bytes)
                metrics.transfer_bytes.labels(effect.transport).inc(effect.num_bytes)
                if {effect.source, effect.target} <= self._relay.fleet.workers.keys():
                    self.moved_bytes[effect.source, effect.target] += effect.num_bytes
                metrics.transfer_parts.labels("hidden").inc(effect.hidden_s)
                metrics.transfer_parts.labels("exposed").inc(effect.exposed_s)
                self._count_saved_bytes(effect)
            case AttemptRetried(_, code, _, delivered):
                metrics.retries.labels(code).inc()
                if delivered:
                    metrics.migrated.labels(code).inc()
            case PrefilledLocally(_, reason):
                metrics.local.labels(reason).inc()
            case OverdraftSettled(_, in_time):
                metrics.overdrafts.labels("in_time" if in_time else "late").inc()
            case RequestQuarantined():
                metrics.quarantined.inc()
            case WorkerDown(worker):
                metrics.lost.inc()
                for pair in [pair for pair in self.moved_bytes if worker in pair]:
                    del self.moved_bytes[pair]

    def _count_saved_bytes(self, moved: KvMoved) -> None:
        """Count the bytes that a transfer would have had more without a codec."""
        kv_class, worker_state = moved.kv_class, self._relay.fleet.workers.get(moved.target)
        if worker_state is None or not holds_class(worker_state.hello, kv_class):
            return
        saved, size = (
            saved_chunk_bytes(worker_state.hello, kv_class),
            pool_size(worker_state.hello, kv_class).chunk_bytes,
        )
        if saved:
            self._metrics.kv.saved_bytes.labels(kv_class, "transfer").inc(moved.num_bytes * saved / size)


def _take_increases(counts: Counter[str], reported: Counter[str]) -> list[tuple[str, int]]:
    """By how much each of `counts` exceeds `reported`, which is then brought up to `counts`."""
    increases = [(name, count - reported[name]) for name, count in counts.items() if count > reported[name]]
    reported.update(dict(increases))
    return increases
