"""What dashboards are made of, as data: rows of panels with queries. `grafana_json` makes Grafana's JSON of them.

A query is written without its deployment: `select_job` limits every metric in it to one scrape job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# What a dashboard's reader chooses from: Grafana replaces the name by the chosen job.
JOB_VARIABLE = "$job"
RATE_WINDOW = "$__rate_interval"
METRIC = re.compile(r"(?<![\w:\"])((?:diptych|vllm):[\w:]+|process_\w+|up)\b(\{)?(?![\"(])")

PanelKind = Literal["lines", "stacked", "heat map", "number", "table"]
Unit = Literal["s", "reqps", "percentunit", "short", "bytes", "Bps", "ops", "GBs", "µs"]


@dataclass(frozen=True, slots=True)
class Query:
    """One query in PromQL; `legend` names its series, with `{{label}}` for a label's value."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One panel. `width` is of 24 columns. `about` says how to read it."""

    title: str
    queries: tuple[Query, ...]
    unit: Unit
    about: str
    kind: PanelKind = "lines"
    width: int = 8


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One row of a dashboard. `slug` names it in file names."""

    title: str
    slug: str
    panels: tuple[PanelSpec, ...]


@dataclass(frozen=True, slots=True)
class DashboardSpec:
    """One dashboard: `uid` is its address in Grafana and the name of its file."""

    uid: str
    title: str
    about: str
    rows: tuple[RowSpec, ...]


def select_job(expr: str, job: str = JOB_VARIABLE) -> str:
    """The query with every metric in it limited to the scrape job `job`."""
    return METRIC.sub(lambda found: f'{found[1]}{{job="{job}"' + (", " if found[2] else "}"), expr)


def quantile_queries(metric: str, quantiles: tuple[float, ...] = (0.5, 0.95, 0.99)) -> tuple[Query, ...]:
    """Quantiles of a histogram over all its series; `metric` is its name without `_bucket`."""
    return tuple(
        Query(
            f"histogram_quantile({quantile:g}, sum by (le) (rate({metric}_bucket[{RATE_WINDOW}])))",
            f"p{quantile * 100:g}",
        )
        for quantile in quantiles
    )


def rate_by(metric: str, label: str, legend: str = "") -> Query:
    """The rate per second of a counter, summed by a label."""
    return Query(f"sum by ({label}) (rate({metric}[{RATE_WINDOW}]))", legend or f"{{{{{label}}}}}")


def sum_rate(metric: str, legend: str) -> Query:
    """The rate per second of a counter, over all its series."""
    return Query(f"sum(rate({metric}[{RATE_WINDOW}]))", legend)


def metric_names(expr: str) -> set[str]:
    """The names of the metrics that a query asks for."""
    return {found[1] for found in METRIC.finditer(expr)}
