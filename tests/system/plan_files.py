"""What the plans of tests predict."""

from __future__ import annotations

from planner.placement.plan_file import (
    PlanPrediction,
)

PREDICTED = PlanPrediction(
    goodput_rps=7.5,
    goodput_per_device_rps=3.75,
    interval_rps=(7.0, 8.0),
    attainment=0.92,
    requests=600,
    seeds=3,
)
