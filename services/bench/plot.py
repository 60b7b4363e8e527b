"""The plot of a report. Imports matplotlib, so it is imported only when there is something to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diptych.slo import Slo
from planner.report import plots
from services.bench.rate_search import RatePoint


def draw_curve(path: Path, name: str, points: Sequence[RatePoint], slo: Slo) -> list[Path]:
    """Attainment against rate, a PNG and its figures as JSON beside it. Returns the files."""
    marks = tuple(plots.CurvePoint(point.rate, point.attainment, point.low, point.high) for point in points)
    return plots.plot_attainment(path, [plots.Curve(name, marks)], {"": slo})
