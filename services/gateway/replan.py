"""The gateway's end of replanning: `POST /admin/replan` gives traffic away, and takes in what became of it.

There only with an admin key, for the replanner of `diptych serve --replan`.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diptych.metrics import Metrics
from services.gateway.errors import JSON
from services.gateway.parse import parse
from services.gateway.ready import Prober
from services.gateway.traffic import Told, Totals, Traffic

MAX_DEPTH = 4


class Replanning:
    """One route. What the replanner says becomes metrics, and how many workers `/ready` waits for."""

    def __init__(self, traffic: Traffic, prober: Prober, metrics: Metrics) -> None:
        self._traffic, self._prober, self._metrics = traffic, prober, metrics
        self._totals = Totals()

    async def meet(self, request: Request) -> Response:
        told = parse(await request.body() or b"{}", Told, MAX_DEPTH)
        self._note(told)
        heard = self._traffic.since(told.boot, told.after)
        self._metrics.replan_unheard.inc(heard.lost)
        return Response(msgspec.json.encode(heard), media_type=JSON)

    def _note(self, told: Told) -> None:
        metrics, news = self._metrics, self._totals.news
        if told.pools is not None:
            self._prober.expect(told.pools)
        for trigger, total in told.decisions.items():
            metrics.replan_decisions.labels(trigger).inc(news(("decision", trigger), total))
        for what, total in told.alarms.items():
            metrics.replan_alarms.labels(what).inc(news(("alarm", what), total))
        for action, outcomes in told.actions.items():
            for outcome, total in outcomes.items():
                metrics.replan_actions.labels(action, outcome).inc(news((action, outcome), total))
        for role, count in told.target.items():
            metrics.replan_target.labels(role).set(count)
        if told.attainment is not None:
            metrics.replan_expected.set(told.attainment)
