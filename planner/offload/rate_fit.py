"""Fits the rates of bulk work (`planner.types.BulkRates`) to what `engine.cpu.offload.rate_probe` has measured.

Times are those of one layer of the model, in seconds. A unit takes a time for each pass over its weights and a time
for each row, and rows of prompts take another one, since a unit of a prompt has hundreds of rows. What attention takes
at a short context is in these; the rates of attention are what grows with the context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from diptych.errors import ConfigError
from planner.types import MAX_NUMBER, BulkRates, LayerTime

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RatePoints:
    """What was measured, by kind of weights: "exact" and perhaps "int4".

    `products` are (rows, seconds) of a unit of decoding rows in one layer, `prompts` those of one of prompts. `steps`
    are (batches, sequences, seconds) of decode steps without their layers, and without `logit_row_s` of each sequence.
    `attention` and `prompt_attention` are (bytes, seconds) and (operations, seconds), `copies`, `reads` and `writes`
    (bytes, seconds).
    """

    threads: int
    layer_weights: float
    products: Mapping[str, Points]
    prompts: Mapping[str, Points]
    steps: Sequence[tuple[int, int, float]]
    attention: Points
    prompt_attention: Points
    logit_row_s: float
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
    layers = {
        kind: LayerTime(*_fit_line(some), *_fit_line(points.prompts.get(kind, ())))
        for kind, some in points.products.items()
    }
    if "exact" not in layers:
        raise ConfigError("rates of bulk work cannot be fitted", "no product was measured", "measure again")
    end_pass_s, end_row_s = _fit_steps(points.steps)
    rates = BulkRates(
        threads=points.threads,
        layer_weights=points.layer_weights,
        exact=layers["exact"],
        attention=_fit_growth(points.attention, lambda _: 1.0),
        # A prompt's operations grow with the square of its length, and the rest of its attention with the length.
        prompt_attention=_fit_growth(points.prompt_attention, math.sqrt),
        end_row_s=end_row_s + points.logit_row_s,
        end_pass_s=end_pass_s,
        copy=_fit_rate(points.copies),
        disk_read=_fit_rate(points.reads),
        disk_write=_fit_rate(points.writes),
        disk_direct=points.disk_direct,
        int4=layers.get("int4"),
        coded_attention=_fit_growth(points.coded_attention, lambda _: 1.0)
        if points.coded_attention
        else None,
        coded_row_s=sum(s for _, s in points.coded_rows) / max(1, sum(n for n, _ in points.coded_rows)),
    )
    errors = {
        f"bulk_{kind}": _mean_error(some, points.prompts[kind], layers[kind])
        for kind, some in points.products.items()
    }
    errors["bulk_disk_read"] = _rate_error(points.reads, rates.disk_read)
    errors["bulk_disk_write"] = _rate_error(points.writes, rates.disk_write)
    return rates, {f"{name}_mean": error for name, error in errors.items()}


def _fit_line(points: Points) -> tuple[float, float]:
    """The line a + b * rows with the least relative error, neither of them negative. Raises ConfigError."""
    if len({rows for rows, _ in points}) < 2:
        why = "a line needs two numbers of rows"
        raise ConfigError("rates of bulk work cannot be fitted", why, "measure again")
    rows, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    base_s, row_s = _fit_relative([np.ones(len(rows)), rows], seconds)
    return base_s, row_s


def _fit_steps(steps: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Seconds of a step beside its layers, for each batch and for each sequence. Raises ConfigError."""
    if len({step[:2] for step in steps}) < 2:
        raise ConfigError(
            "rates of bulk work cannot be fitted", "too few steps were measured", "measure again"
        )
    batches, sequences, seconds = (np.array(column, float) for column in zip(*steps, strict=True))
    pass_s, row_s = _fit_relative([batches, sequences], seconds)
    return pass_s, row_s


def _fit_growth(points: Points, of_other: Callable[[float], float]) -> float:
    """Amount per second, where seconds also grow with `of_other(amount)`; that of the middle if there is one amount."""
    if len({amount for amount, _ in points}) < 2:
        return _fit_rate(points)
    amounts, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    other = np.array([of_other(amount) for amount in amounts])
    growth_s = _fit_relative([other, amounts], seconds)[1]
    return min(MAX_NUMBER, 1 / growth_s) if growth_s > 0 else MAX_NUMBER


def _fit_relative(columns: Sequence[NDArray[np.float64]], seconds: NDArray[np.float64]) -> list[float]:
    """The factors of columns, none of them negative, whose sum has the least relative error."""
    relative = np.column_stack([column / seconds for column in columns])
    scale = relative.max(axis=0)
    return [float(one) for one in nnls(relative / scale, np.ones(len(seconds)))[0] / scale]


def _fit_rate(points: Points) -> float:
    """Amount per second: that of the measurement in the middle."""
    rates = sorted(amount / max(seconds, 1e-12) for amount, seconds in points)
    return min(MAX_NUMBER, rates[len(rates) // 2])


def _mean_error(few: Points, many: Points, layer: LayerTime) -> float:
    """The mean relative error of the lines of a layer."""
    lines = ((few, layer.pass_s, layer.row_s), (many, layer.prompt_pass_s, layer.prompt_row_s))
    off = [abs((pass_s + rows * row_s) / s - 1) for some, pass_s, row_s in lines for rows, s in some]
    return sum(off) / max(1, len(off))


def _rate_error(points: Points, rate: float) -> float:
    return _mean_off(points, lambda amount: amount / rate)


def _mean_off(points: Points, predict: Callable[[float], float]) -> float:
    """The mean relative error of a prediction."""
    return sum(abs(predict(amount) / seconds - 1) for amount, seconds in points) / max(1, len(points))
