"""Fits the rates of bulk work (`planner.types.BulkRates`) to what `engine.cpu.block.rate_probe` has measured.

Times are those of one layer of the model, in seconds. A layer takes a time for each pass over its weights and a time
for each row, and rows of prompts take another one, since a unit of a prompt has hundreds of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from diptych.errors import ConfigError
from planner.types import MAX_NUMBER, BulkRates, LayerTime

# Up to this many rows a measurement counts as one of decoding rows, from it on as one of a prompt's.
MAX_DECODE_ROWS = 64
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RatePoints:
    """What was measured. Products are (rows, seconds) of one layer, by kind of weights: "exact" and perhaps "int4".

    `attention` and `prompt_attention` are (bytes, seconds) and (operations, seconds), `copies`, `reads` and `writes`
    (bytes, seconds).
    """

    threads: int
    layer_weights: float
    products: Mapping[str, Points]
    attention: Points
    prompt_attention: Points
    end_row_s: float
    copies: Points
    reads: Points
    writes: Points
    disk_direct: bool
    coded_attention: Points = ()
    # (rows of a prompt, seconds that coded KV adds to its attention).
    coded_rows: Points = ()


def fit_bulk_rates(points: RatePoints) -> tuple[BulkRates, dict[str, float]]:
    """The rates, and how far they are off in the mean from what was measured, by name ("bulk_exact_mean", ...).

    Raises:
        ConfigError: there are too few measurements of products.
    """
    layers = {kind: _fit_layer(some) for kind, some in points.products.items()}
    if "exact" not in layers:
        raise ConfigError("rates of bulk work cannot be fitted", "no product was measured", "measure again")
    rates = BulkRates(
        threads=points.threads,
        layer_weights=points.layer_weights,
        exact=layers["exact"],
        attention=_fit_rate(points.attention),
        prompt_attention=_fit_rate(points.prompt_attention),
        end_row_s=points.end_row_s,
        copy=_fit_rate(points.copies),
        disk_read=_fit_rate(points.reads),
        disk_write=_fit_rate(points.writes),
        disk_direct=points.disk_direct,
        int4=layers.get("int4"),
        coded_attention=_fit_rate(points.coded_attention) if points.coded_attention else None,
        coded_row_s=sum(s for _, s in points.coded_rows) / max(1, sum(n for n, _ in points.coded_rows)),
    )
    errors = {f"bulk_{kind}": _mean_error(some, layers[kind]) for kind, some in points.products.items()}
    errors["bulk_attention"] = _rate_error(points.attention, rates.attention)
    errors["bulk_disk_read"] = _rate_error(points.reads, rates.disk_read)
    errors["bulk_disk_write"] = _rate_error(points.writes, rates.disk_write)
    return rates, {f"{name}_mean": error for name, error in errors.items()}


def _fit_layer(points: Points) -> LayerTime:
    """The two lines of a layer. Raises ConfigError."""
    few = [one for one in points if one[0] <= MAX_DECODE_ROWS]
    many = [one for one in points if one[0] >= MAX_DECODE_ROWS]
    return LayerTime(*_fit_line(few), *_fit_line(many))


def _fit_line(points: Points) -> tuple[float, float]:
    """The line a + b * rows with the least relative error, neither of them negative. Raises ConfigError."""
    if len({rows for rows, _ in points}) < 2:
        why = "a line needs two numbers of rows"
        raise ConfigError("rates of bulk work cannot be fitted", why, "measure again")
    rows, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    columns = np.column_stack([1 / seconds, rows / seconds])
    scale = columns.max(axis=0)
    base_s, row_s = nnls(columns / scale, np.ones(len(seconds)))[0] / scale
    return float(base_s), float(row_s)


def _fit_rate(points: Points) -> float:
    """Amount per second: that of the measurement in the middle."""
    rates = sorted(amount / max(seconds, 1e-12) for amount, seconds in points)
    return min(MAX_NUMBER, rates[len(rates) // 2])


def _mean_error(points: Points, layer: LayerTime) -> float:
    def predict(rows: float) -> float:
        if rows <= MAX_DECODE_ROWS:
            return layer.decode_s(rows)
        return layer.prompt_pass_s + rows * layer.prompt_row_s

    return _mean_off(points, predict)


def _rate_error(points: Points, rate: float) -> float:
    return _mean_off(points, lambda amount: amount / rate)


def _mean_off(points: Points, predict: Callable[[float], float]) -> float:
    """The mean relative error of a prediction."""
    return sum(abs(predict(amount) / seconds - 1) for amount, seconds in points) / max(1, len(points))
