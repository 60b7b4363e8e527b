"""Sends every query of dashboards and rules to Prometheus: which parse, which names are unknown, which are empty."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx

from services.dashboard.panels import metric_names, select_job
from services.dashboard.rules import alerts, recording_rules
from services.dashboard.write import list_dashboards
from tests.support.prometheus_server import JOB, PrometheusServer

TYPE_LINE = re.compile(r"^# TYPE (\S+) (\w+)$", re.MULTILINE)
# What Grafana puts in place of its variables: several scrapes, and the time that is shown.
RATE_WINDOW, SHOWN_RANGE = "15s", "10m"


@dataclass(slots=True)
class QueryReport:
    """What became of the queries; each list has the panels and legends, or the alerts, that it is about."""

    total: int = 0
    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


def fill_variables(expr: str, rate_window: str = RATE_WINDOW, shown_range: str = SHOWN_RANGE) -> str:
    """The query as Grafana sends it."""
    chosen = select_job(expr, JOB)
    return chosen.replace("$__rate_interval", rate_window).replace("$__range", shown_range)


def panel_queries() -> dict[str, str]:
    """Every query of the dashboards, by row, panel and legend, ready to be sent."""
    return {
        f"{row.title}: {panel.title}: {query.legend}": fill_variables(query.expr)
        for board in list_dashboards()
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
    }


def rule_queries(target: float) -> dict[str, str]:
    """Every query of the rules and alerts, by name."""
    recorded = {rule["record"]: rule["expr"] for rule in recording_rules()}
    return recorded | {one.name: one.expr for one in alerts(target)}


def exposed_names(page: str) -> set[str]:
    """The names of series that a page of metrics announces, whether they have samples yet or not."""
    names = set()
    for name, kind in TYPE_LINE.findall(page):
        names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


def check_queries(
    server: PrometheusServer, page: str, queries: dict[str, str], expect_data: Iterable[str] = ()
) -> QueryReport:
    """Send all queries. `page` is the deployment's `/metrics`; those named in `expect_data` should have results."""
    known = exposed_names(page) | server.metric_names() | {rule["record"] for rule in recording_rules()}
    report, expected = QueryReport(len(queries)), set(expect_data)
    for what, expr in queries.items():
        report.unknown += [f"{what}: {name}" for name in sorted(metric_names(expr) - known)]
        try:
            found = server.query(expr)
        except httpx.HTTPStatusError as error:
            report.wrong.append(f"{what}: {error.response.text[:200]}")
            continue
        if what in expected and not found:
            report.empty.append(what)
    return report
