"""Measured steps, as `benchmarks/gpu_decode.py --profile` saves them, as costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.cost import StepCost
from planner.fit import Lines, fit_decode, fit_prefill
from planner.terms import Cost, Split


def costs_of(raw: Mapping[str, Any]) -> tuple[dict[Split, Cost], dict[str, float]]:
    """`{tp, pp, decode: [{batch, context, seconds}], prefill: [{tokens, seconds}]}` fitted, with relative errors.

    `context` is of each row. Every prompt is computed alone.

    Raises:
        KeyError: a key is missing.
        ConfigError: there are too few points.
    """
    prefill = fit_prefill([(one["tokens"], one["tokens"] ** 2, one["seconds"]) for one in raw["prefill"]])
    decode = fit_decode(
        [(one["batch"] * one["context"], one["batch"], one["seconds"]) for one in raw["decode"]]
    )
    split = Split(int(raw.get("tp", 1)), int(raw.get("pp", 1)))
    return {split: StepCost(prefill.lines[0], decode.lines, split.pp)}, told(prefill=prefill, decode=decode)


def told(**fits: Lines) -> dict[str, float]:
    """The errors of fits by name, as a profile keeps them: "prefill_mean", "prefill_held_out", …"""
    return {
        f"{name}_{kind}": value
        for name, fit in fits.items()
        for kind, value in (
            ("mean", fit.error.mean),
            ("max", fit.error.largest),
            ("held_out", fit.error.held_out),
        )
    }
