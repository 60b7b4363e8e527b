"""Plots of the planner and of `diptych bench`: each a PNG, and the same figures as JSON beside it.

The only module that imports matplotlib; import it where something is plotted, not before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diptych.slo import Slo, Slos

WIDTH_IN, HEIGHT_IN, DPI = 7.0, 4.4, 120
MARKERS = "osD^vP*X"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A measured y at x, between `low` and `high` where that is known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order in which they are joined."""

    name: str
    points: tuple[CurvePoint, ...]


def plot_attainment(
    path: Path, curves: Sequence[Curve], slos: Slos, unit: str = "requests/s", title: str = ""
) -> list[Path]:
    """Attainment (0 to 1) against rate, with the attainments wanted as lines. x of the points is in `unit`, `slos` are
    the SLOs by kind of request, "" for all others.

    Returns the files written: the PNG and its JSON.
    """
    figure, axes = _new_canvas(title or _slo_lines(slos))
    _draw_curves(axes, curves, scale=100.0)
    for wanted in sorted({slo.attainment for slo in slos.values()}):
        axes.axhline(wanted * 100, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"{wanted:.0%} wanted", (0.01, wanted * 100), (2, 3), textcoords="offset points",
                      xycoords=("axes fraction", "data"), fontsize=8)  # fmt: skip
    axes.set(xlabel=f"rate, {unit}", ylabel="requests that meet both SLOs, %", ylim=(0, 104))
    limits = {kind: _slo_json(slo) for kind, slo in slos.items()}
    return _write_files(
        figure, path, {"plot": "attainment", "unit": unit, "slos": limits, "curves": _curves_json(curves)}
    )


def plot_goodput(
    path: Path, curves: Sequence[Curve], rate_rps: float | None = None, title: str = ""
) -> list[Path]:
    """Goodput in requests per second against devices, a curve for each family; `rate_rps` is what is wanted."""
    figure, axes = _new_canvas(title or "goodput by devices")
    _draw_curves(axes, curves)
    if rate_rps is not None:
        axes.axhline(
            rate_rps, color="black", linestyle="--", linewidth=1, label=f"wanted: {rate_rps:g} requests/s"
        )
        axes.legend(fontsize=8)
    axes.set(xlabel="devices used", ylabel="goodput, requests/s")
    axes.set_ylim(bottom=0)
    return _write_files(
        figure, path, {"plot": "goodput", "rate_rps": rate_rps, "curves": _curves_json(curves)}
    )


def plot_break_even(path: Path, curves: Sequence[Curve], knob: str, title: str = "") -> list[Path]:
    """Goodput per device, disaggregated over colocated, while `knob` varies; above 1, disaggregation pays."""
    figure, axes = _new_canvas(title or "what disaggregation gains")
    _draw_curves(axes, curves)
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel=knob, ylabel="goodput per device: disaggregated / colocated")
    axes.set_ylim(bottom=0)
    return _write_files(figure, path, {"plot": "break_even", "knob": knob, "curves": _curves_json(curves)})


def _new_canvas(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    return figure, axes


def _draw_curves(axes: Axes, curves: Sequence[Curve], scale: float = 1.0) -> None:
    for index, curve in enumerate(curves):
        points = [point for point in curve.points if math.isfinite(point.y)]
        xs, ys = [point.x for point in points], [point.y * scale for point in points]
        (line,) = axes.plot(xs, ys, marker=MARKERS[index % len(MARKERS)], markersize=4, label=curve.name)
        if points and all(point.low is not None and point.high is not None for point in points):
            low = [(point.low or 0.0) * scale for point in points]
            high = [(point.high or 0.0) * scale for point in points]
            axes.fill_between(xs, low, high, alpha=0.2, color=line.get_color())
    if curves:
        axes.legend(fontsize=8)


def _slo_lines(slos: Slos) -> str:
    """Each kind with its SLO, a line each."""
    return "\n".join(
        f"{kind or 'others'}: {_slo_line(slo)}" if len(slos) > 1 else _slo_line(slo)
        for kind, slo in slos.items()
    )


def _slo_line(slo: Slo) -> str:
    limits = [
        f"{name.upper()} ≤ {limit_s * 1e3:g} ms"
        for name, limit_s in slo.limits_s().items()
        if limit_s is not None
    ]
    return ", ".join(limits) or "no SLO"


def _slo_json(slo: Slo) -> dict[str, float | None]:
    return {f"{name}_s": limit_s for name, limit_s in slo.limits_s().items()} | {"attainment": slo.attainment}


def _curves_json(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    return [asdict(curve) for curve in curves]


def _write_files(figure: Figure, path: Path, figures: Mapping[str, Any]) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    png, plain = path.with_suffix(".png"), path.with_suffix(".json")
    figure.savefig(png)
    plain.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    return [png, plain]
