"""The last word on a plan: the product's own scheduler, router and hand-off, in virtual time.

The search uses a simulator that is fast and knows only queues and batches (`planner.des`); what it proposes is put to
`planner.simulator` here, on seeds of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner import candidates
from planner.des import Limits
from planner.plan_file import StepsOf
from planner.profile import Profile
from planner.request import FRESH, Request
from planner.simulator import deployment, simulate
from planner.sizing import grown, shrunk
from planner.terms import BOTH, Job, Placement, Served, Slo, within_tpot
from planner.trial import WARMUP, Trial, joint

STEP = 1.06  # of the rates tried: coarser than the search's, since a run takes longer
UP, DOWN = 3, 64  # how many of them: a fortieth of the rate is as good as nothing
FURTHER = 8  # up, where decode instances read prompts as well: the search has not looked at that
GROWN = 6  # instances that are added to a placement that carries too little
MOST_REQUESTS = 2000
LONGER = 3  # times the requests that confirm a goodput: a shorter run may end before a queue has grown
ROWS, BATCH_TOKENS = 256, 2048  # that an instance of the product takes on at once, by default


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the product's own decisions make of a placement, in one run of `requests` on a seed nobody searched with.

    `goodput_rps` is the highest rate tried that keeps the promises (0: none of them), `fails_rps` the lowest one tried
    above it, which does not (none: none was tried). Joint attainment, and each kind's share, are at `rate_rps`: the
    goodput, or the rate asked about if there is none. `local_prefill` says who read prompts (`diptych.config.Config`).
    """

    rate_rps: float
    attainment: float
    shares: dict[str, float]
    goodput_rps: float
    fails_rps: float | None
    requests: int
    local_prefill: str = "never"


def limits(slos: Sequence[Slo], chunk_tokens: int = BATCH_TOKENS) -> Limits:
    """What the product's instances take on at once, in the search's simulator: `chunk_tokens` of prompts beside rows
    within the TPOT objective where an instance does both (0: whole prompts first).
    """
    return Limits(
        BATCH_TOKENS, decode_rows=ROWS, chunk_tokens=chunk_tokens, step_s=min(slo.tpot_s for slo in slos)
    )


def taken_on(request: Request, placement: Placement) -> StepsOf:
    """What each instance takes on in a step: of tokens, what was asked for if there are instances that do both.

    A deployment has one such setting, so that of a hybrid those that only read prompts take on as much.
    """
    asked, beside = request.limits.chunk_tokens, any(placement.role(BOTH))
    tokens = asked if beside and asked > 0 else BATCH_TOKENS
    return StepsOf(min(ROWS, tokens), tokens, asked > 0 or not beside)


def judge(request: Request, placement: Placement, rate: float, climb: bool) -> Verdict:
    """As `verify`; of a pair also with prompts read by decode instances where that is sooner, if that is better.

    It is better if it keeps the promises at a rate a step above the highest that it keeps without.
    """
    plain = verify(request, placement, rate, climb)
    if candidates.family(placement) != "disaggregated" or (plain.goodput_rps and not climb):
        return plain
    start = plain.goodput_rps * STEP or rate
    auto = _found(request, placement, start, "auto", FURTHER if climb else 0, climb and not plain.goodput_rps)
    return auto if auto.goodput_rps else plain


def verify(request: Request, placement: Placement, rate: float, climb: bool) -> Verdict:
    """Runs `placement` at `rate`, and with `climb` at neighbouring rates until the promises turn."""
    return _found(request, placement, rate, candidates.local_prefill(placement), UP if climb else 0, climb)


def confirmed(request: Request, placement: Placement, verdict: Verdict) -> Verdict:
    """What of the verdict's goodput a longer run keeps."""
    rate, reads = verdict.goodput_rps, verdict.local_prefill
    found = _found(request, placement, rate, reads, 0, True, LONGER)
    return replace(found, fails_rps=found.fails_rps or verdict.fails_rps)


def _found(
    request: Request,
    placement: Placement,
    rate: float,
    local_prefill: str,
    up: int,
    down: bool,
    longer: int = 1,
) -> Verdict:
    """The verdict from `rate`, up to `up` steps up, or `down` to where the promises are kept."""
    trial = _trial(request, placement, rate, local_prefill, longer)
    tried: dict[float, dict[str, float]] = {}

    def keeps(at: float) -> bool:
        tried[at] = trial.shares(placement, at)
        return trial.sustains(placement, at) and _kept(trial, tried[at])

    good = rate if keeps(rate) else 0.0
    if good:
        for _ in range(up):
            if not keeps(good * STEP):
                break
            good *= STEP
    elif down:
        good = _below(keeps, rate)
    at, fails = good or rate, [one for one in tried if one > good]
    return Verdict(
        at, joint(tried[at], trial.counted()), tried[at], good, min(fails, default=None), len(trial.samples[0]),
        local_prefill,
    )  # fmt: skip


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
    trial = _trial(request, placement, rate, candidates.local_prefill(placement))
    found = grown(request, trial, placement, rate, GROWN, below)
    return None if found is None else shrunk(request, trial, found, rate)


def carried(request: Request, placement: Placement, rate: float) -> float:
    """The highest rate tried, from `rate` down, that the product's decisions carry; 0 if they carry none."""
    return min(rate, verify(request, placement, rate, True).goodput_rps)


def _trial(request: Request, placement: Placement, rate: float, local_prefill: str, longer: int = 1) -> Trial:
    wanted = max(request.requests, rate * request.horizon_s)
    count = longer * round(min(MOST_REQUESTS, wanted))
    sample = tuple(request.workload.sample(count, 1.0, 2 * FRESH, request.cv))
    # A run that is cut short of its horizon ends before a queue that only grows is seen.
    most_rps = request.most_rps if count >= wanted else request.sustained_rps

    def sustained(placement: Placement) -> float:
        return most_rps(candidates.reading(placement) if local_prefill == "auto" else placement)

    return Trial(
        (sample,),
        request.slos,
        _Product(request, local_prefill),
        round(WARMUP * count),
        request.effort,
        sustained,
    )


def _kept(trial: Trial, shares: dict[str, float]) -> bool:
    return all(share >= trial.slo(kind).attainment - 1e-9 for kind, share in shares.items())


@dataclass(frozen=True, slots=True)
class _Product:
    """Simulates what `diptych serve --plan` starts of a placement (`planner.candidates.deployed`)."""

    request: Request
    local_prefill: str

    def __call__(self, placement: Placement, jobs: Sequence[Job]) -> Sequence[Served]:
        request, started = self.request, candidates.deployed(placement)
        steps = taken_on(request, placement)
        found = deployment(
            started,
            {name: _named(request, name) for name in {pool.device for pool in placement.pools}},
            link=request.link(placement),
            max_num_seqs=steps.max_num_seqs,
            max_num_batched_tokens=steps.max_num_batched_tokens,
            chunked_prefill=steps.chunked_prefill,
            prefix_caching=any(job.prefix for job in jobs),
            max_model_len=max(request.model.max_len, request.longest),
        )
        # Stages lie where the placement has them, whatever its instances do once they are started.
        machines = tuple(
            replace(
                machine,
                cost=request.bare(pool, request.nodes(placement, pool)),
                tpot_s=self._within_s(then.role, steps),
            )
            for machine, pool, then in zip(found.machines, placement.pools, started.pools, strict=True)
        )
        return simulate(replace(found, machines=machines, local_prefill=self.local_prefill), jobs)

    def _within_s(self, role: str, steps: StepsOf) -> float | None:
        """How long a step may take, as `diptych serve` has it: where prompts are read beside answers."""
        tpot_s = min(slo.tpot_s for slo in self.request.slos.values())
        within = within_tpot(role, steps.chunked_prefill, self.local_prefill)
        return tpot_s if within and math.isfinite(tpot_s) else None


def _named(request: Request, device: str) -> Profile:
    return request.profiles[request.stock(device).device.name]
