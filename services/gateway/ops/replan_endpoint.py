"""`POST /admin/replan`: gives traffic events to the replanner, and takes its report.

The route exists only with an admin key, for the replanner of `diptych serve --replan`.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.error_response import JSON_TYPE
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.traffic_feed import CounterTotals, ReplanReport, TrafficFeed
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.request_limits import MAX_REPORT_BYTES
from services.gateway.ops.readiness import CanaryProber

MAX_BODY_DEPTH = 4
# What a replanner does, and what usually becomes of it.
ACTIONS, OUTCOMES = ("flip", "start", "stop"), ("done", "failed")


class ReplanRoute:
    """The handler of the route. The report goes into metrics, and sets how many workers `/ready` expects."""

    def __init__(self, traffic: TrafficFeed, prober: CanaryProber, metrics: GatewayMetrics) -> None:
        self._traffic, self._prober, self._metrics = traffic, prober, metrics
        # From 0 on: what a series begins with is no increase to Prometheus.
        for action in ACTIONS:
            for outcome in OUTCOMES:
                metrics.replan.actions.labels(action, outcome)
        self._totals = CounterTotals()
        # The replanner's last report; None before the first.
        self.report: ReplanReport | None = None

    async def exchange_report(self, request: Request) -> Response:
        """Apply the replanner's report, and answer with new traffic. Raises RequestError if the report is invalid."""
        async with request.state.body.limit_bytes(MAX_REPORT_BYTES) as body:
            report = parse_body(body or b"{}", ReplanReport, MAX_BODY_DEPTH)
        self._apply_report(report)
        traffic = self._traffic.events_since(report.boot, report.after)
        self._metrics.replan.dropped.inc(traffic.lost)
        return Response(msgspec.json.encode(traffic), media_type=JSON_TYPE)

    def _apply_report(self, report: ReplanReport) -> None:
        """Bring the metrics and the expected number of workers up to date."""
        self.report = report
        metrics, increase = self._metrics, self._totals.take_increase
        if report.pools is not None:
            self._prober.expect_workers(report.pools)
        for trigger, total in report.decisions.items():
            metrics.replan.decisions.labels(trigger).inc(increase(("decision", trigger), total))
        for what, total in report.alarms.items():
            metrics.replan.alarms.labels(what).inc(increase(("alarm", what), total))
        for action, outcomes in report.actions.items():
            for outcome, total in outcomes.items():
                metrics.replan.actions.labels(action, outcome).inc(increase((action, outcome), total))
        for role, count in report.target.items():
            metrics.replan.target.labels(role).set(count)
        if report.attainment is not None:
            metrics.replan.expected.set(report.attainment)
