"""DistServe's two placement algorithms as the paper has them, which the planner's search is compared with."""

from __future__ import annotations

from planner.placement import candidates
from planner.placement.problem import Problem
from planner.placement.search import search_units
from planner.placement.sizing import combine_phases, instances_needed, search_phases
from planner.types import Placement


def algorithm_1(request: Problem, rate: float, marginal: bool = True) -> Placement | None:
    """DistServe's algorithm 1: the best instance of each phase, in the counts that their goodput needs for `rate`."""
    phases = search_phases(request, marginal, near=0.0)
    if phases.prefill.best is None or phases.decode.best is None:
        return None
    return combine_phases(phases.prefill.best, phases.decode.best, rate)


def algorithm_2(request: Problem, rate: float) -> Placement | None:
    """DistServe's algorithm 2 (v3): the best pair with KV within nodes, in the count that `rate` needs."""
    found = search_units(request.units("low"), request.trial, request.bound, request.weight, near=0.0)
    return (
        candidates.replicate_unit(found.best.placement, instances_needed(found.best, rate))
        if found.best
        else None
    )
