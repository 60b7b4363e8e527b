"""Turns step times that `benchmarks/gpu_decode.py --profile` measured into step costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.costs.fit import FittedLines, fit_decode, fit_prefill
from planner.costs.step import StepCost
from planner.types import CostModel, Parallelism


def costs_from_points(raw: Mapping[str, Any]) -> tuple[dict[Parallelism, CostModel], dict[str, float]]:
    """Fits costs to `{tp, pp, decode: [{batch, context, seconds}], prefill: [{tokens, seconds}]}`.

    `context` is the context of each row in tokens. Each prefill entry is one prompt computed alone. Returns the cost by
    split, and the relative errors of the fits by name.

    Raises:
        KeyError: a key is missing.
        ConfigError: there are too few points.
    """
    prefill = fit_prefill([(one["tokens"], one["tokens"] ** 2, one["seconds"]) for one in raw["prefill"]])
    decode = fit_decode(
        [(one["batch"] * one["context"], one["batch"], one["seconds"]) for one in raw["decode"]]
    )
    parallelism = Parallelism(int(raw.get("tp", 1)), int(raw.get("pp", 1)))
    return {parallelism: StepCost(prefill.lines[0], decode.lines, parallelism.pp)}, fit_errors(
        prefill=prefill, decode=decode
    )


def fit_errors(**fits: FittedLines) -> dict[str, float]:
    """The errors of several fits under the names that a profile uses: "prefill_mean", "prefill_held_out", …"""
    return {
        f"{name}_{kind}": value
        for name, fit in fits.items()
        for kind, value in (
            ("mean", fit.error.mean),
            ("max", fit.error.largest),
            ("held_out", fit.error.held_out),
        )
    }
