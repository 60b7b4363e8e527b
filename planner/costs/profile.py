"""What is known about a model on a device: step costs by split, room for KV, overheads, and their sources.

Measured splits (TP, PP) are used directly. Others are scaled from the nearest measured split, by the ratio that the
analytic model gives. If no split was measured, the analytic model is used. `how` names the case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.costs.capacity import kv_capacity_tokens
from planner.costs.model import ModelDims, find_model
from planner.costs.roofline import RooflineCost, roofline_cost
from planner.costs.step import StepCost
from planner.hardware import Device
from planner.hardware import find_device as named_device
from planner.types import BulkRates, CostModel, KvClassWork, KvKeep, LinkSpec, Parallelism, Seconds

# What the kinds of steps in `CostProfile.fit_error` are called in messages.
STEP_KIND_WORDS = {"prefill": "prefill", "decode": "decode", "mixed": "mixed steps", "all": "all steps"}


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beyond the model, as measured: per request at the gateway, per message to a worker, per engine step.

    `link` is the way of KV between two workers; an endless one was not measured.
    """

    gateway_s: Seconds = 0.0
    hop_s: Seconds = 0.0
    step_s: Seconds = 0.0
    link: LinkSpec = field(default_factory=LinkSpec)


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Costs of one model on one device. `rooms` are measured KV capacities in tokens; others follow from memory.

    `fit_error` holds relative errors by name ("prefill_mean", "decode_max", …). `kv_classes` says, by codec, what work
    on KV costs that is not in the codec of `model`, where that was measured; `kv_keep` what eviction does, at each
    threshold that was measured. `bulk` are the rates of blocks of bulk work, if they were measured.
    """

    model: ModelDims
    device: Device
    costs: Mapping[Parallelism, CostModel] = field(default_factory=dict)
    rooms: Mapping[Parallelism, int] = field(default_factory=dict)
    source: str = "analytic"
    fit_error: Mapping[str, float] = field(default_factory=dict)
    overheads: Overheads = field(default_factory=Overheads)
    kv_classes: Mapping[str, KvClassWork] = field(default_factory=dict)
    kv_keep: tuple[KvKeep, ...] = ()
    bulk: BulkRates | None = None

    def cost(self, parallelism: Parallelism, cross: int = 1) -> CostModel:
        """Seconds of a step with that split: measured, scaled from the nearest measured split, or analytic.

        With `cross` > 1 the stages lie on that many nodes (`Placement.cross`), and `cross - 1` of the ways between them
        are the slow ones between nodes.
        """
        cost = self._within(parallelism)
        if cross == 1 or not isinstance(cost, StepCost | RooflineCost):
            return cost
        return cost.across(cross - 1, self.device.node.inter, self.model.hidden * self.model.state_bytes)

    def _within(self, parallelism: Parallelism) -> CostModel:
        found = self.costs.get(parallelism)
        if found is not None:
            return found
        analytic = roofline_cost(self.model, parallelism, self.device)
        near = self._nearest(parallelism)
        if near is None:
            return analytic
        base = self.costs[near]
        # `_nearest` only looks for such costs.
        assert isinstance(base, StepCost)
        stages = replace(base, pp=parallelism.pp, hop_s=max(base.hop_s, analytic.hop_s))
        if near.tp == parallelism.tp:
            return stages
        return scale_cost(stages, roofline_cost(self.model, Parallelism(near.tp), self.device), analytic)

    def kv_tokens(self, parallelism: Parallelism) -> int:
        """Tokens of KV an instance has room for; 0 if its weights do not fit."""
        room = self.rooms.get(parallelism)
        return kv_capacity_tokens(self.model, parallelism, self.device.memory_bytes) if room is None else room

    def cost_source(self, parallelism: Parallelism) -> str:
        """Where the cost of that split comes from, in words, and how well it was fitted where that is known."""
        source = f"{self.source}; {self.fit_error_text}" if self.fit_error_text else self.source
        if parallelism in self.costs:
            return f"{parallelism}: {source}"
        near = self._nearest(parallelism)
        if near is None:
            return f"{parallelism}: analytic, from the data sheet of {self.device.name}"
        way = "divided by stages" if near.tp == parallelism.tp else "scaled by the analytic model"
        return f"{parallelism}: {way} from {near} ({source})"

    @property
    def fit_error_text(self) -> str:
        """How far the fitted costs are from what was measured, in words; "" where the profile does not say.

        Of each kind of step the mean error on steps that the fit has not seen, where that is known, else on all.
        """
        found = []
        for kind, doing in STEP_KIND_WORDS.items():
            names = (f"{kind}_held_out_mean", f"{kind}_held_out", f"{kind}_mean")
            error = next((self.fit_error[name] for name in names if name in self.fit_error), None)
            if error is not None:
                found.append(f"{doing} by {error:.1%}")
        return "off in the mean: " + ", ".join(found) if found else ""

    def _nearest(self, parallelism: Parallelism) -> Parallelism | None:
        """The profiled split with the nearest tp (ratio), then pp."""

        def far(one: Parallelism) -> tuple[float, int, Parallelism]:
            return abs(math.log(one.tp / parallelism.tp)), abs(one.pp - parallelism.pp), one

        return min(
            (one for one, cost in self.costs.items() if isinstance(cost, StepCost)), key=far, default=None
        )


def scale_cost(cost: StepCost, have_cost: RooflineCost, want_cost: RooflineCost) -> StepCost:
    """`cost`, measured where the analytic model says `have_cost`, for where it says `want_cost`: scales each number."""
    fixed = (want_cost.fixed + want_cost.weights) / (have_cost.fixed + have_cost.weights)
    token = (want_cost.product + want_cost.touch) / (have_cost.product + have_cost.touch)
    row = (want_cost.product + want_cost.touch + want_cost.logit) / (
        have_cost.product + have_cost.touch + have_cost.logit
    )
    square, context = want_cost.square / have_cost.square, want_cost.context / have_cost.context
    a, b, c = cost.prefill
    return replace(
        cost,
        prefill=(a * fixed, b * token, c * square),
        decode=tuple((d * fixed, e * context, f * row) for d, e, f in cost.decode),
        cross=cost.cross * token,
    )


def analytic_profile(model: ModelDims | str, device: Device | str) -> CostProfile:
    """A profile without a single measurement: data sheets and published efficiency."""
    dims = find_model(model) if isinstance(model, str) else model
    return CostProfile(dims, named_device(device) if isinstance(device, str) else device)
