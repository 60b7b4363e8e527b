"""The plot of a report. Imports matplotlib, so it is imported only when there is something to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planner import plots
from planner.terms import Slo
from services.bench.study import Point


def draw(path: Path, name: str, points: Sequence[Point], slo: Slo) -> list[Path]:
    """Attainment against rate, a PNG and its figures as JSON beside it. Returns the files."""
    marks = tuple(plots.Point(one.rate, one.attainment, one.low, one.high) for one in points)
    return plots.attainment(path, [plots.Curve(name, marks)], {"": slo})
