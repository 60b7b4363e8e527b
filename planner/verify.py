"""The last word on a plan: the product's own scheduler, router and hand-off, in virtual time.

The search uses a simulator that is fast and knows only queues and batches (`planner.des`); what it proposes is put to
`planner.simulator` here, on seeds of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.des import Limits
from planner.plan_file import StepsOf
from planner.profile import Profile
from planner.request import FRESH, Request
from planner.simulator import deployment, simulate
from planner.sizing import grown, shrunk
from planner.terms import Job, Placement, Served, Slo
from planner.trial import Trial, joint

STEP = 1.06  # of the rates tried: coarser than the search's, since a run takes longer
UP, DOWN = 3, 64  # how many of them: a fortieth of the rate is as good as nothing
GROWN = 6  # instances that are added to a placement that carries too little
MOST_REQUESTS = 2000
ROWS, BATCH_TOKENS = 256, 2048  # that an instance of the product takes on at once, by default


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the product's own decisions make of a placement: joint attainment at the rate asked about, and the highest
    rate tried that keeps the promises (0: none of them). `requests` of a run, after which seeds nobody searched with.
    """

    attainment: float
    shares: dict[str, float]
    goodput_rps: float
    requests: int


def limits(slos: Sequence[Slo], chunk_tokens: int = BATCH_TOKENS) -> Limits:
    """What the product's instances take on at once, in the search's simulator: `chunk_tokens` of prompts beside rows
    within the TPOT objective where an instance does both (0: whole prompts first).
    """
    return Limits(
        BATCH_TOKENS, decode_rows=ROWS, chunk_tokens=chunk_tokens, step_s=min(slo.tpot_s for slo in slos)
    )


def taken_on(request: Request, placement: Placement) -> StepsOf:
    """What each instance takes on in a step: of tokens, what was asked for where an instance does both."""
    asked = request.limits.chunk_tokens
    tokens = asked if placement.colocated and asked > 0 else BATCH_TOKENS
    return StepsOf(min(ROWS, tokens), tokens, asked > 0 or not placement.colocated)


def verify(request: Request, placement: Placement, rate: float, climb: bool) -> Verdict:
    """Runs `placement` at `rate`, and with `climb` at neighbouring rates until the promises turn."""
    trial = _trial(request, placement, rate)
    shares = trial.shares(placement, rate)

    def keeps(at: float) -> bool:
        return trial.passes(placement, at)

    good = rate if _kept(trial, shares) else 0.0
    if climb and good:
        for _ in range(UP):
            if not keeps(good * STEP):
                break
            good *= STEP
    elif climb:
        good = _below(keeps, rate)
    return Verdict(joint(shares, trial.counted()), shares, good, len(trial.samples[0]))


def _below(keeps: Callable[[float], bool], rate: float) -> float:
    """The highest of the rates below one that fails, in a few runs: ever longer strides down, then bisection."""
    fails, passes = 0, 1
    while not keeps(rate * STEP**-passes):
        if passes == DOWN:
            return 0.0
        fails, passes = passes, 2 * passes
    while passes - fails > 1:
        middle = (fails + passes) // 2
        fails, passes = (fails, middle) if keeps(rate * STEP**-middle) else (middle, passes)
    return rate * STEP**-passes


def strengthened(request: Request, placement: Placement, rate: float, below: float) -> Placement | None:
    """`placement` with up to `GROWN` instances more, of what helps most, so that the product's decisions carry `rate`.

    None if that is not enough, not lighter than `below`, or more than the hardware.
    """
    trial = _trial(request, placement, rate)
    found = grown(request, trial, placement, rate, GROWN, below)
    return None if found is None else shrunk(request, trial, found, rate)


def carried(request: Request, placement: Placement, rate: float) -> float:
    """The highest rate tried, from `rate` down, that the product's decisions carry; 0 if they carry none."""
    return min(rate, verify(request, placement, rate, True).goodput_rps)


def _trial(request: Request, placement: Placement, rate: float) -> Trial:
    count = round(min(MOST_REQUESTS, max(request.requests, rate * request.horizon_s)))
    sample = tuple(request.workload.sample(count, 1.0, 2 * FRESH, request.cv))
    return Trial((sample,), request.slos, _Product(request), effort=request.effort)


def _kept(trial: Trial, shares: dict[str, float]) -> bool:
    return all(share >= trial.slo(kind).attainment - 1e-9 for kind, share in shares.items())


@dataclass(frozen=True, slots=True)
class _Product:
    request: Request

    def __call__(self, placement: Placement, jobs: Sequence[Job]) -> Sequence[Served]:
        request = self.request
        tpot_s = min(slo.tpot_s for slo in request.slos.values())
        steps = taken_on(request, placement)
        found = deployment(
            placement,
            {name: _named(request, name) for name in {pool.device for pool in placement.pools}},
            link=request.link(placement),
            max_num_seqs=steps.max_num_seqs,
            max_num_batched_tokens=steps.max_num_batched_tokens,
            chunked_prefill=steps.chunked_prefill,
            tpot_s=tpot_s if placement.colocated and steps.chunked_prefill else None,
            prefix_caching=any(job.prefix for job in jobs),
            max_model_len=max(request.model.max_len, request.longest),
        )
        machines = tuple(
            replace(machine, cost=request.bare(pool, request.nodes(placement, pool)))
            for machine, pool in zip(found.machines, placement.pools, strict=True)
        )
        return simulate(replace(found, machines=machines, local_prefill="never"), jobs)


def _named(request: Request, device: str) -> Profile:
    return request.profiles[request.stock(device).device.name]
