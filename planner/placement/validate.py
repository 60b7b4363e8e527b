"""Validates a plan with the exact simulator: Diptych's own scheduler, router and hand-off, in virtual time.

The search uses the fast simulator, which only knows queues and batches (`planner.sim.fast.cluster`). Here the plan that
it found runs in `planner.sim.exact.simulate`, on fresh seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diptych.slo import Slo, strictest_slo
from planner.costs.profile import CostProfile
from planner.placement import candidates
from planner.placement.plan_file import PlanStepLimits
from planner.placement.problem import FRESH_SEED, Problem
from planner.placement.sizing import grow_deployment, shrink_deployment
from planner.placement.trial import WARMUP, Trial, overall_attainment
from planner.sim.exact.deployment import SimDeployment, build_deployment
from planner.sim.exact.simulate import ResultSink, simulate_exact
from planner.sim.fast.instance import InstanceLimits
from planner.types import BOTH, Job, JobResult, Placement, keeps_steps_within_tpot

# Ratio of two neighbouring rates. It is larger than in the search, since a run takes longer.
RATE_STEP = 1.06
# Most rate steps that are tried upwards and downwards. 64 steps down are a fortieth of the rate, which counts as 0.
STEPS_UP, STEPS_DOWN = 3, 64
# Most rate steps upwards if decode instances also prefill, since the search has not explored local prefill.
FURTHER = 8
# Most instances that may be added to a placement that carries too little.
MAX_ADDED = 6
MAX_REQUESTS = 2000
# The run that confirms a goodput has this many times the requests. Short runs may hide a queue that grows.
LONGER_RUN = 3
# A worker's default limits per step: decode rows, and prefill tokens.
MAX_ROWS, BATCH_TOKENS = 256, 2048


@dataclass(frozen=True, slots=True)
class Validation:
    """The exact simulator's result for a placement, from one run of `requests` on a seed that the search did not use.

    `goodput_rps` is the highest rate tried that meets the SLOs (0: none), `fails_rps` the lowest rate tried above it,
    which misses them (None: none was tried). `attainment` (joint) and `shares` (by kind) are measured at `rate_rps`:
    the goodput, or the given rate if no rate meets the SLOs. `local_prefill` is the setting that the run used.
    """

    rate_rps: float
    attainment: float
    shares: dict[str, float]
    goodput_rps: float
    fails_rps: float | None
    requests: int
    local_prefill: str = "never"


def product_limits(slos: Sequence[Slo], chunk_tokens: int = BATCH_TOKENS) -> InstanceLimits:
    """The batch limits of Diptych's workers, for the fast simulator.

    A colocated instance prefills at most `chunk_tokens` per step beside its decode rows, in steps kept within the TPOT
    SLO; with 0 it prefills whole prompts before it decodes.
    """
    return InstanceLimits(
        BATCH_TOKENS, decode_rows=MAX_ROWS, chunk_tokens=chunk_tokens, step_s=strictest_slo(slos).tpot_s
    )


def step_limits(problem: Problem, placement: Placement) -> PlanStepLimits:
    """The batch limits that each worker of the deployment gets.

    The user's chunk size applies if the placement has colocated instances. It is one setting for the whole deployment,
    so it also limits the prefill instances of a hybrid.
    """
    asked, beside = problem.limits.chunk_tokens, any(placement.role(BOTH))
    tokens = asked if beside and asked > 0 else BATCH_TOKENS
    return PlanStepLimits(
        max_num_seqs=min(MAX_ROWS, tokens),
        max_num_batched_tokens=tokens,
        chunked_prefill=asked > 0 or not beside,
    )


def validate_placement(problem: Problem, placement: Placement, rate: float, climb: bool) -> Validation:
    """Do what `validate_rate` does; for a disaggregated placement, try local prefill as well.

    With local prefill, decode instances prefill a prompt where that is sooner. Its result is returned only if it meets
    the SLOs at a rate one `RATE_STEP` above the best rate without it.
    """
    plain = validate_rate(problem, placement, rate, climb)
    if candidates.family_of(placement) != "disaggregated" or (plain.goodput_rps and not climb):
        return plain
    start = plain.goodput_rps * RATE_STEP or rate
    down = climb and not plain.goodput_rps
    return _find_goodput(problem, placement, start, "auto", FURTHER if climb else 0, down) or plain


def validate_rate(problem: Problem, placement: Placement, rate: float, climb: bool) -> Validation:
    """Simulates `placement` at `rate`. With `climb`, neighbouring rates are tried too, to find the highest that meets
    the SLOs.
    """
    return _validate_from(
        problem, placement, rate, candidates.local_prefill_mode(placement), STEPS_UP if climb else 0, climb
    )


def confirm_goodput(problem: Problem, placement: Placement, validation: Validation) -> Validation:
    """Repeats the run at the found goodput with more requests, and lowers the goodput if it is not confirmed."""
    rate, local_prefill = validation.goodput_rps, validation.local_prefill
    found = _validate_from(problem, placement, rate, local_prefill, 0, True, LONGER_RUN)
    return replace(found, fails_rps=found.fails_rps or validation.fails_rps)


def _validate_from(
    problem: Problem,
    placement: Placement,
    rate: float,
    local_prefill: str,
    up: int,
    down: bool,
    longer: int = 1,
) -> Validation:
    """What `_find_goodput` finds; if no rate meets the SLOs, the figures at `rate`."""
    tried: dict[float, dict[str, float] | None] = {}
    if up or down:
        found = _find_goodput(problem, placement, rate, local_prefill, up, down, longer, tried)
        if found is not None:
            return found
    trial = _exact_trial(problem, placement, rate, local_prefill, longer)
    shares = trial.shares(placement, rate)
    good = not (up or down) and trial.sustains(placement, rate) and _meets_slos(trial, shares)
    attained = overall_attainment(shares, trial.counted())
    return Validation(
        rate,
        attained,
        shares,
        rate if good else 0.0,
        None if good else min(tried, default=rate),
        len(trial.samples[0]),
        local_prefill,
    )


def _find_goodput(
    problem: Problem,
    placement: Placement,
    rate: float,
    local_prefill: str,
    up: int,
    down: bool,
    longer: int = 1,
    tried: dict[float, dict[str, float] | None] | None = None,
) -> Validation | None:
    """Tries `rate`. If it meets the SLOs, tries up to `up` higher rates; else (if `down`) lower ones until one does.

    A run ends as soon as it is certain that its rate misses the SLOs. None: no rate meets them. `tried` gets the shares
    at each rate, None where it misses.
    """
    trial = _exact_trial(problem, placement, rate, local_prefill, longer)
    tried = {} if tried is None else tried

    def meets(at: float) -> bool:
        tried[at] = trial.shares_if_met(placement, at) if trial.sustains(placement, at) else None
        return tried[at] is not None

    good = rate if meets(rate) else 0.0
    if good:
        for _ in range(up):
            if not meets(good * RATE_STEP):
                break
            good *= RATE_STEP
    elif down:
        good = _highest_below(meets, rate)
    shares = tried.get(good)
    if shares is None:
        return None
    fails = min((one for one in tried if one > good), default=None)
    attained = overall_attainment(shares, trial.counted())
    return Validation(good, attained, shares, good, fails, len(trial.samples[0]), local_prefill)


def _highest_below(meets: Callable[[float], bool], rate: float) -> float:
    """The highest rate below `rate` that meets the SLOs: doubles the number of steps down, then bisects."""
    fails, passes = 0, 1
    while not meets(rate * RATE_STEP**-passes):
        if passes == STEPS_DOWN:
            return 0.0
        fails, passes = passes, 2 * passes
    while passes - fails > 1:
        middle = (fails + passes) // 2
        fails, passes = (fails, middle) if meets(rate * RATE_STEP**-middle) else (middle, passes)
    return rate * RATE_STEP**-passes


def add_instances(problem: Problem, placement: Placement, rate: float, below: float) -> Placement | None:
    """Adds up to `MAX_ADDED` instances to `placement`, each where it helps most, until it carries `rate`.

    The runs use the exact simulator. Returns None if that is not enough, not lighter than `below`, or does not fit.
    """
    trial = _exact_trial(problem, placement, rate, candidates.local_prefill_mode(placement))
    found = grow_deployment(problem, trial, placement, rate, MAX_ADDED, below)
    return None if found is None else shrink_deployment(problem, trial, found, rate)


def carried_rate(problem: Problem, placement: Placement, rate: float) -> float:
    """The highest rate, at most `rate`, that the exact simulator finds to meet the SLOs; 0 if none does."""
    return min(rate, validate_rate(problem, placement, rate, True).goodput_rps)


def _exact_trial(
    problem: Problem, placement: Placement, rate: float, local_prefill: str, longer: int = 1
) -> Trial:
    """A trial in the exact simulator: one sample on a fresh seed, `longer` times the usual length."""
    wanted = max(problem.requests, rate * problem.horizon_s)
    count = longer * round(min(MAX_REQUESTS, wanted))
    sample = tuple(problem.source.sample(count, 1.0, 2 * FRESH_SEED, problem.cv))
    # A run shorter than its horizon ends before a growing queue shows, so the rate is capped by `sustained_rps`.
    most_rps = problem.most_rps if count >= wanted else problem.sustained_rps

    def sustained(placement: Placement) -> float:
        return most_rps(candidates.with_local_prefill(placement) if local_prefill == "auto" else placement)

    return Trial(
        (sample,),
        problem.slos,
        _ExactRunner(problem, local_prefill),
        round(WARMUP * count),
        problem.effort,
        sustained,
    )


def _meets_slos(trial: Trial, shares: dict[str, float]) -> bool:
    """Whether each kind reaches its target attainment."""
    return all(share >= trial.slo(kind).attainment - 1e-9 for kind, share in shares.items())


@dataclass(frozen=True, slots=True)
class _ExactRunner:
    """Runs a placement in the exact simulator, in the form in which `diptych serve --plan` starts it."""

    problem: Problem
    local_prefill: str

    def __call__(self, placement: Placement, jobs: Sequence[Job]) -> Sequence[JobResult]:
        return simulate_exact(self._deployment(placement, jobs), jobs)

    def serve_into(self, placement: Placement, jobs: Sequence[Job], sink: ResultSink) -> None:
        """Hands each result to `sink`, which may end the run by an exception."""
        simulate_exact(self._deployment(placement, jobs), jobs, sink)

    def _deployment(self, placement: Placement, jobs: Sequence[Job]) -> SimDeployment:
        problem, started = self.problem, candidates.deployed_placement(placement)
        steps = step_limits(problem, placement)
        found = build_deployment(
            started,
            {name: _profile_named(problem, name) for name in {pool.device for pool in placement.pools}},
            link=problem.link(placement),
            max_num_seqs=steps.max_num_seqs,
            max_num_batched_tokens=steps.max_num_batched_tokens,
            chunked_prefill=steps.chunked_prefill,
            prefix_caching=any(job.prefix for job in jobs),
            max_model_len=max(problem.model.max_len, problem.longest),
            kv_classes=problem.kv_classes,
            keep=problem.keep,
        )
        # An instance has as many nodes as the plan gives it, whatever the role in which it is started.
        instances = tuple(
            replace(
                instance,
                cost=problem.bare_cost(pool, problem.nodes(placement, pool)),
                tpot_s=self._within_s(then.role, steps),
            )
            for instance, pool, then in zip(found.instances, placement.pools, started.pools, strict=True)
        )
        return replace(found, instances=instances, local_prefill=self.local_prefill)

    def _within_s(self, role: str, steps: PlanStepLimits) -> float | None:
        """The step time limit (the TPOT SLO) that `diptych serve` gives to instances that prefill beside decoding."""
        tpot_s = strictest_slo(self.problem.slos.values()).tpot_s
        within = keeps_steps_within_tpot(role, steps.chunked_prefill, self.local_prefill)
        return tpot_s if within and math.isfinite(tpot_s) else None


def _profile_named(problem: Problem, device: str) -> CostProfile:
    """The cost profile of the device with this name."""
    return problem.profiles[problem.group(device).device.name]
