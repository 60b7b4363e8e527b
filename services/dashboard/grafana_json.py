"""Dashboards as Grafana reads them, built with Grafana's own types (grafana-foundation-sdk)."""

from __future__ import annotations

import itertools
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from services.dashboard.panels import DashboardSpec, PanelSpec, select_job

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8


def dashboard_json(spec: DashboardSpec) -> str:
    """A dashboard as JSON text: the same text for the same `spec`."""
    builder = (
        dashboards.Dashboard(spec.title)
        .uid(spec.uid)
        .description(spec.about)
        .tags(["diptych"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboards.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboards.QueryVariable("job")
            .label("Deployment")
            .datasource(SOURCE)
            .query("label_values(diptych:ready, job)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    )
    ids = itertools.count(1)
    for row in spec.rows:
        builder = builder.with_row(dashboards.Row(row.title).id(next(ids)))
        for panel in row.panels:
            builder = builder.with_panel(_build_panel(panel, next(ids)))
    return JSONEncoder(sort_keys=True, indent=1).encode(builder.build()) + "\n"


def _build_panel(panel: PanelSpec, number: int) -> Any:
    builder = _kind_builder(panel).title(panel.title).description(panel.about).datasource(SOURCE)
    builder = builder.id(number).unit(panel.unit).span(panel.width).height(HEIGHT)
    for index, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + index))
            .expr(select_job(query.expr))
            .legend_format(query.legend)
        )
        if panel.kind == "heat map":
            target = target.format(PromQueryFormat.HEATMAP)
        if panel.kind in ("number", "table"):
            target = target.instant()
        if panel.kind == "table":
            target = target.format(PromQueryFormat.TABLE)
        builder = builder.with_target(target)
    return builder


def _kind_builder(panel: PanelSpec) -> Any:
    match panel.kind:
        case "heat map":
            return heatmap.Panel()
        case "number":
            return stat.Panel()
        case "table":
            return table.Panel()
    lines = timeseries.Panel().line_width(1).fill_opacity(8)
    if panel.kind == "stacked":
        normal = common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
        lines = lines.fill_opacity(60).stacking(normal)
    return lines
