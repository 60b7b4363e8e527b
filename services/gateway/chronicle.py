"""What the relay does, told to metrics, to the log, and to the request log. Changes nothing."""

from __future__ import annotations

import logging
from collections import Counter

from diptych.metrics import Metrics
from router.effects import (
    Arrive,
    Began,
    Cancelled,
    Down,
    Effect,
    Event,
    Fail,
    Finish,
    FromWorker,
    Local,
    Moved,
    Quarantined,
    Queued,
    Retried,
    Unfit,
    Up,
)
from router.relay import Relay
from services.gateway.request_log import RequestLog

AGAIN_S = 10.0  # between warnings that prompts are read by decode workers

log = logging.getLogger(__name__)


class Chronicle:
    """Is told of every event before the relay handles it, and of every effect after it was done."""

    def __init__(self, relay: Relay, metrics: Metrics, request_log: RequestLog | None) -> None:
        self._relay, self._metrics, self._request_log = relay, metrics, request_log
        self._queued_s: dict[str, float] = {}  # since when a request has been waiting in the gateway
        self._late: Counter[str] = Counter()  # as far as it was told
        self._lines: Counter[str] = Counter()
        self._links_given_up = 0
        self._warned_s = float("-inf")
        self._speaker: str | None = None

    def happens(self, event: Event) -> None:
        """The relay is about to handle this."""
        self._speaker = event.worker if isinstance(event, FromWorker) else None
        if self._request_log is not None and isinstance(event, Arrive):
            self._request_log.arrive(event.request, event.pin is not None)

    def note(self, effect: Effect, now_s: float) -> None:
        """This was done."""
        self._tell(effect, now_s)
        self._count(effect, now_s)
        if self._request_log is not None:
            member = self._relay.fleet.members.get(effect.worker) if isinstance(effect, Up) else None
            live = self._relay.live.get(effect.request) if isinstance(effect, Began) else None
            pid = member.hello.pid if member else None
            self._request_log.note(effect, self._speaker, pid, live.chunks if live else ())

    def look(self, now_s: float) -> None:
        """Bring what the relay counts itself up to date."""
        relay, metrics = self._relay, self._metrics
        metrics.queued.set(len(self._queued_s))
        metrics.unread_tokens.set(relay.admission.queued_tokens)
        metrics.foreseen.set(relay.admission.wait_s(now_s))
        metrics.suspects.set(len(relay.docket))
        metrics.links_given_up.inc(relay.fleet.links_given_up - self._links_given_up)
        self._links_given_up = relay.fleet.links_given_up
        for kind, count in _news(relay.late, self._late):
            metrics.late.labels(kind).inc(count)
            if self._request_log is not None:
                self._request_log.late(kind, count)
        if self._request_log is not None:
            for outcome, count in _news(self._request_log.file.outcomes, self._lines):
                metrics.log_lines.labels(outcome).inc(count)

    def _tell(self, effect: Effect, now_s: float) -> None:
        match effect:
            case Fail(request, _, code, message):
                log.warning("request %s failed: %s: %s", request, code, message)
            case Retried(request, code, epoch, delivered):
                log.warning(
                    "request %s loses attempt %d after %d tokens: %s", request, epoch, delivered, code
                )
            case Local(_, reason) if now_s - self._warned_s >= AGAIN_S:
                self._warned_s = now_s
                log.warning("prompts are read by decode workers: %s", reason.replace("_", " "))
            case Quarantined(request):
                log.error("request %s is taken for the cause of crashes, and refused from now on", request)
            case Up(worker, role, incarnation):
                log.info("worker %s (%s, life %s) is up", worker, role, incarnation)
            case Down(worker, _, reason):
                log.warning("worker %s is lost: %s", worker, reason)
            case Unfit(worker, text):
                log.error("worker %s cannot serve with the others:\n%s", worker, text)

    def _count(self, effect: Effect, now_s: float) -> None:
        metrics = self._metrics
        match effect:
            case Queued(request):
                self._queued_s[request] = now_s
            case Began(request):
                if (queued_s := self._queued_s.pop(request, None)) is not None:
                    metrics.queue_wait.observe(now_s - queued_s)
            case Finish(request) | Fail(request) | Cancelled(request):
                self._queued_s.pop(request, None)
            case Moved():
                metrics.transfer_seconds.labels(effect.transport).observe(effect.seconds)
                metrics.transfer_bytes.labels(effect.transport).inc(effect.num_bytes)
                metrics.transfer_parts.labels("hidden").inc(effect.hidden_s)
                metrics.transfer_parts.labels("exposed").inc(effect.exposed_s)
            case Retried(_, code, _, delivered):
                metrics.retries.labels(code).inc()
                if delivered:
                    metrics.migrated.labels(code).inc()
            case Local(_, reason):
                metrics.local.labels(reason).inc()
            case Quarantined():
                metrics.quarantined.inc()
            case Down():
                metrics.lost.inc()


def _news(counts: Counter[str], told: Counter[str]) -> list[tuple[str, int]]:
    """What `counts` has more than was told, which is brought up to it."""
    news = [(name, count - told[name]) for name, count in counts.items() if count > told[name]]
    told.update(dict(news))
    return news
