"""Draws the rows of the dashboards from the data of a Prometheus, as Grafana would: our own small renderer.

Each row becomes one PNG. Grafana itself is not needed, and was not on the machine that drew the committed pictures.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.dashboard.panels import PanelSpec, RowSpec
from services.dashboard.write import list_dashboards
from tests.support.dashboard_queries import fill_variables
from tests.support.prometheus_server import PrometheusServer

matplotlib.use("Agg")

COLUMNS, PANEL_INCHES, DPI = 3, (3.6, 2.2), 80
MAX_NAMED = 6
# Grafana's names of units, for readers.
UNITS = {
    "percentunit": "share",
    "short": "number",
    "reqps": "1/s",
    "ops": "1/s",
    "Bps": "bytes/s",
    "GBs": "GB/s",
}
STEPS = 150
LEGEND = re.compile(r"\{\{(\w+)\}\}")

# A series: its name, its times in seconds since the beginning, its values.
Curve = tuple[str, list[float], list[float]]


def draw_rows(server: PrometheusServer, folder: Path, since_s: float, until_s: float) -> list[Path]:
    """Draw every row between two Unix times into `folder`. Returns the files. Raises httpx.HTTPError."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _draw_row(server, row, folder / f"dashboard-{row.slug}.png", since_s, until_s)
        for board in list_dashboards()
        for row in board.rows
    ]


def _draw_row(server: PrometheusServer, row: RowSpec, path: Path, since_s: float, until_s: float) -> Path:
    height = math.ceil(len(row.panels) / COLUMNS)
    size = (COLUMNS * PANEL_INCHES[0], height * PANEL_INCHES[1] + 0.3)
    figure = Figure(figsize=size, layout="constrained", dpi=DPI)
    figure.suptitle(row.title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    axes = figure.subplots(height, COLUMNS, squeeze=False).flatten()
    for axis, panel in zip(axes, row.panels, strict=False):
        _draw_panel(axis, panel, _curves(server, panel, since_s, until_s))
    for axis in axes[len(row.panels) :]:
        axis.set_axis_off()
    figure.savefig(path, pil_kwargs={"optimize": True})
    return path


def _curves(server: PrometheusServer, panel: PanelSpec, since_s: float, until_s: float) -> list[Curve]:
    """The series of all queries of a panel."""
    step_s = max(1.0, (until_s - since_s) / STEPS)
    shown_range = f"{max(1, round(until_s - since_s))}s"
    found = []
    for query in panel.queries:
        expr = fill_variables(query.expr, shown_range=shown_range)
        for series in server.query_range(expr, since_s, until_s, step_s):
            times = [float(at_s) - since_s for at_s, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            found.append((_name(query.legend, series["metric"]), times, values))
    return found


def _name(legend: str, labels: dict[str, str]) -> str:
    return LEGEND.sub(lambda label: labels.get(label[1], ""), legend)


def _draw_panel(axis: Axes, panel: PanelSpec, curves: list[Curve]) -> None:
    axis.set_title(f"{panel.title} [{UNITS.get(panel.unit, panel.unit)}]", fontsize=7, loc="left")
    axis.tick_params(labelsize=6)
    if not curves:
        axis.text(
            0.5, 0.5, "no data", ha="center", va="center", fontsize=8, color="gray", transform=axis.transAxes
        )
        return
    if panel.kind == "number":
        _draw_numbers(axis, curves)
    elif panel.kind == "table":
        _draw_table(axis, curves)
    elif panel.kind == "heat map":
        _draw_heat_map(axis, curves)
    else:
        _draw_lines(axis, curves, stacked=panel.kind == "stacked")


def _draw_numbers(axis: Axes, curves: list[Curve]) -> None:
    axis.set_axis_off()
    for index, (name, _, values) in enumerate(curves):
        at = 1 - (index + 0.5) / len(curves)
        axis.text(0.05, at, name, fontsize=9, va="center", transform=axis.transAxes)
        axis.text(
            0.95, at, f"{values[-1]:.4g}", fontsize=14, va="center", ha="right", transform=axis.transAxes
        )


def _draw_table(axis: Axes, curves: list[Curve]) -> None:
    axis.set_axis_off()
    cells = [[name, f"{values[-1]:.3g}"] for name, _, values in curves[:MAX_NAMED]]
    table = axis.table(cellText=cells, loc="center", colWidths=[0.75, 0.25])
    table.auto_set_font_size(False)
    table.set_fontsize(6)


def _draw_heat_map(axis: Axes, curves: list[Curve]) -> None:
    """Buckets are cumulative: each row of the map is the difference to the bucket below."""
    buckets = sorted(((float(name.replace("+Inf", "inf")), times, values) for name, times, values in curves))
    times = max((times for _, times, _ in buckets), key=len)
    whole = [one for one in buckets if len(one[1]) == len(times)]
    below = [0.0] * len(times)
    rows: list[list[float]] = []
    for _, _, values in whole:
        now = [0.0 if math.isnan(value) else value for value in values]
        rows.append([max(0.0, value - low) for value, low in zip(now, below, strict=True)])
        below = now
    axis.imshow(rows, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
    marks = range(0, len(whole), max(1, len(whole) // 6))
    axis.set_yticks(list(marks), [f"{whole[mark][0]:g}" for mark in marks])
    axis.set_xticks([])


def _draw_lines(axis: Axes, curves: list[Curve], stacked: bool) -> None:
    if stacked:
        longest = max((times for _, times, _ in curves), key=len)
        by_time: list[dict[float, float]] = [
            dict(zip(times, values, strict=True)) for _, times, values in curves
        ]
        heights: Any = [[_finite(one.get(at, 0.0)) for at in longest] for one in by_time]
        axis.stackplot(longest, heights, labels=[name for name, _, _ in curves], alpha=0.8)
    else:
        for name, times, values in curves:
            axis.plot(times, values, linewidth=0.9, label=name)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    axis.margins(x=0)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[:MAX_NAMED], labels[:MAX_NAMED], fontsize=5, loc="upper left", frameon=False)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
