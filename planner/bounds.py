"""Rates that a placement cannot exceed, whatever its scheduler does: what a search may drop without simulating.

Each bound holds for the very samples of a trial: to keep enough promises at a rate, that many requests must be
computed, moved and held between the first arrival and the last moment that still counts. Costs are taken to be convex
and never to fall (`planner.cost`, `planner.roofline`): then n steps cost at least n times a step with the mean batch
(Jensen), and work above a step's constant adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.terms import BOTH, DECODE, PREFILL, Batch, Cost, Job, Link, Placement, Pool, Slo
from planner.trial import EPSILON, Trial

FINER = (
    1.05  # between two batch sizes tried, the cost of the smaller one counts for the rows of the larger one
)
NO_LIMIT = math.inf
MOST_ROWS = 4096.0  # in one step, where neither time nor memory ends it


class CostOf(Protocol):
    """What a step of a pool's instance costs."""

    def __call__(self, pool: Pool, nodes: int = 1) -> Cost:
        """With its stages on so many nodes."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a placement runs on: cost and KV capacity of a pool's instance, the link of a pair, KV bytes of a token.

    `nodes` is on how many nodes the stages of a pool's instance lie. Bounds leave that out: it only makes steps longer.
    `rows` write a token in a step at most, and `batch_tokens` of prompts are read in one (`planner.des.Limits`).
    """

    cost: CostOf
    kv_tokens: Callable[[Pool], float]
    link: Callable[[Placement], Link]
    token_bytes: float
    nodes: Callable[[Placement, Pool], int] = lambda placement, pool: 1
    rows: float = NO_LIMIT
    batch_tokens: float = NO_LIMIT

    def costs(self, placement: Placement) -> Callable[[Pool], Cost]:
        """Of the pools of that placement."""
        return lambda pool: self.cost(pool, self.nodes(placement, pool))


@dataclass(frozen=True, slots=True)
class Demand:
    """The least that must be done for enough of a trial's requests, over all its samples.

    `jobs` are those whose promise can be kept at all, by kind; `need` is how many of each must be. `span_s` is from
    first to last arrival at one request per second; how long after the last one a request may still have its first
    token in time is `first_s`, and its last one `late_s`.
    """

    jobs: dict[str, list[Job]]
    need: dict[str, int]
    span_s: float
    first_s: float
    late_s: float

    def least(self, of: Callable[[Job], float]) -> float:
        """Sum of `of` over the requests that have the least of it."""
        return sum(sum(sorted(map(of, self.jobs[kind]))[: self.need[kind]]) for kind in self.need)

    def rate(self, seconds: float, after_s: float) -> float:
        """The rate at which `seconds` of work still fit, if they may end `after_s` after the last arrival."""
        left = seconds - after_s
        return self.span_s / left if left > 0.0 else NO_LIMIT


def bounds(trial: Trial, site: Site, placement: Placement) -> dict[str, float]:
    """Requests per second that `placement` cannot exceed, by what forbids more.

    `ttft`, `tpot`, `slo`: 0 where too many requests miss that promise (or only both together) with nobody else there;
    `memory`: 0 where the requests do not fit. `prefill`, `decode`, `link`, `kv`: where that resource is full. Empty for
    hybrids, which have no bound but infinity.
    """
    roles = [pool.role for pool in placement.pools]
    if len(set(roles)) < len(roles) or set(roles) not in ({BOTH}, {PREFILL, DECODE}):
        return {}
    reads = next(placement.role(PREFILL, BOTH))
    writes = next(placement.role(DECODE, BOTH))
    alone = _alone(trial, site, placement, reads, writes)
    if min(alone.values()) <= 0.0:
        return {name: rate for name, rate in alone.items() if rate <= 0.0}
    demand = _demand(trial, lambda job, slo: _kept(site, placement, reads, writes, job, slo) == (True, True))
    found = {**_computing(demand, site, reads, writes), "kv": _holding(demand, site, writes)}
    if reads is not writes:
        found["link"] = _moving(demand, site, placement, reads, writes)
    return found


def ceiling(found: dict[str, float]) -> float:
    """The lowest of the bounds; infinity where there is none."""
    return min(found.values(), default=NO_LIMIT)


def first_s(cost: Cost, job: Job) -> float:
    """The least time to a job's first token."""
    return cost.step_s(Batch(job.prompt, float(job.prompt) * job.prompt))


def each_s(cost: Cost, job: Job) -> float:
    """The least time of a token after the first; 0 for an answer of one token."""
    return cost.step_s(Batch(0, 0.0, 1, job.prompt)) if job.output > 1 else 0.0


def saturation(
    site: Site, jobs: Sequence[Job], slos: Mapping[str, Slo], placement: Placement
) -> dict[str, float]:
    """Requests per second at which each resource of `placement` would be busy all the time: prefill, decode, link, and
    compute where one instance does both. An estimate by means, not a bound: batches as large as TPOT, memory and what
    an instance takes on allow.
    """
    found: dict[str, float] = {}
    reads = sum(pool.count / _read_s(site, jobs, pool) for pool in placement.role(PREFILL))
    writes = sum(pool.count * _written(site, jobs, slos, pool) for pool in placement.role(DECODE))
    shared = 0.0
    for pool in placement.role(BOTH):
        each = _read_s(site, jobs, pool) + 1.0 / _written(site, jobs, slos, pool)
        shared += pool.count / each
    if any(placement.role(PREFILL)):
        found["prefill"] = reads + shared
    if any(placement.role(DECODE)):
        found["decode"] = writes + shared
    if not found:
        found["compute"] = shared
    if any(placement.role(PREFILL)) and any(placement.role(DECODE)):
        link = site.link(placement)
        pairs = min(sum(pool.count for pool in placement.role(role)) for role in (PREFILL, DECODE))
        moved_s = _mean_s(jobs, lambda job: job.prompt * site.token_bytes / link.bytes_per_s)
        found["link"] = (pairs / moved_s if moved_s else NO_LIMIT) + shared
    return found


def _mean_s(jobs: Sequence[Job], of: Callable[[Job], float]) -> float:
    return sum(map(of, jobs)) / len(jobs)


def _read_s(site: Site, jobs: Sequence[Job], pool: Pool) -> float:
    """Seconds of the slowest stage for a prompt, in full batches."""
    cost = site.cost(pool)
    work, constant_s = _work(cost), cost.stage_s(Batch(1, 1.0))
    return _mean_s(jobs, lambda job: work(job) + constant_s * min(1.0, job.prompt / site.batch_tokens))


def _written(site: Site, jobs: Sequence[Job], slos: Mapping[str, Slo], pool: Pool) -> float:
    """Answers per second of one instance, with the largest batch that keeps TPOT and fits its memory."""
    cost, stages = site.cost(pool), pool.split.pp
    tokens = max(_mean_s(jobs, lambda job: job.output - 1), 1e-9)
    context = _mean_s(jobs, lambda job: job.prompt + job.output / 2.0)
    tpot_s = min(slo.tpot_s for slo in slos.values())
    held = _mean_s(jobs, lambda job: job.prompt + job.output)
    most = max(1.0, min(site.kv_tokens(pool) / held, site.rows, MOST_ROWS * stages) / stages)
    sizes = [size for size in _sizes(most) if cost.step_s(_rows(size, context)) <= tpot_s] or [1.0]
    return sizes[-1] / cost.stage_s(_rows(sizes[-1], context)) / tokens


def _rows(size: float, context: float) -> Batch:
    return Batch(0, 0.0, math.floor(size), math.floor(size * context))


def _alone(trial: Trial, site: Site, placement: Placement, reads: Pool, writes: Pool) -> dict[str, float]:
    """0 for each promise that too few requests can keep, infinity for the others."""
    counts, room = trial.counted(), min(site.kv_tokens(reads), site.kv_tokens(writes))
    kept = {name: dict.fromkeys(counts, 0) for name in ("ttft", "tpot", "slo", "memory")}
    for job in trial.jobs():
        ttft, tpot = _kept(site, placement, reads, writes, job, trial.slo(job.kind))
        fits = job.prompt + job.output <= room
        for name, good in (("ttft", ttft), ("tpot", tpot), ("slo", ttft and tpot), ("memory", fits)):
            kept[name][job.kind] += good
    return {
        name: NO_LIMIT if all(good[kind] >= _need(trial.slo(kind), counts[kind]) for kind in counts) else 0.0
        for name, good in kept.items()
    }


def _kept(
    site: Site, placement: Placement, reads: Pool, writes: Pool, job: Job, slo: Slo
) -> tuple[bool, bool]:
    """Whether a job keeps its TTFT and its TPOT, if it is alone."""
    tpot_s = each_s(site.cost(writes), job)
    if reads is not writes and job.output > 1:
        link = site.link(placement)
        tpot_s += (link.latency_s + job.prompt * site.token_bytes / link.bytes_per_s) / job.output
    return first_s(site.cost(reads), job) <= slo.ttft_s, tpot_s <= slo.tpot_s


def _computing(demand: Demand, site: Site, reads: Pool, writes: Pool) -> dict[str, float]:
    prefill_s = demand.least(_work(site.cost(reads)))
    decode_s = _decoding(demand, site, writes)
    if reads is writes:
        return {"compute": demand.rate((prefill_s + decode_s) / reads.count, demand.late_s)}
    return {
        "prefill": demand.rate(prefill_s / reads.count, demand.first_s),
        "decode": demand.rate(decode_s / writes.count, demand.late_s),
    }


def _work(cost: Cost) -> Callable[[Job], float]:
    """Seconds that a prompt adds to a step of its slowest stage."""
    constant_s = cost.stage_s(Batch(1, 1.0))
    return lambda job: cost.stage_s(Batch(job.prompt, float(job.prompt) * job.prompt)) - constant_s


def _decoding(demand: Demand, site: Site, writes: Pool) -> float:
    """Seconds of the slowest stage for the tokens after the first, with batches as good as they can be."""
    cost, kv_tokens = site.cost(writes), site.kv_tokens(writes)
    rows = demand.least(lambda job: job.output - 1)
    context = demand.least(lambda job: (job.output - 1) * (job.prompt + job.output / 2.0 - 1.0))
    if rows <= 0.0:
        return 0.0
    mean = max(context, 0.0) / rows
    most = min(rows, kv_tokens / mean if mean else rows, site.rows)
    return rows * min(
        cost.stage_s(Batch(0, 0.0, math.floor(size), math.floor(size * mean))) / (size * FINER)
        for size in _sizes(most)
    )


def _sizes(most: float) -> Iterator[float]:
    size = 1.0
    while size <= max(most, 1.0):
        yield size
        size = max(size * FINER, math.floor(size) + 1.0 if size < 1.0 / (FINER - 1.0) else 0.0)


def _holding(demand: Demand, site: Site, writes: Pool) -> float:
    """By Little: token-seconds of KV that are held while answers are written, over those there are."""
    cost, room = site.cost(writes), site.kv_tokens(writes)
    if math.isinf(room):
        return NO_LIMIT
    held = demand.least(lambda job: job.prompt * (job.output - 1) * each_s(cost, job))
    return demand.rate(held / (room * writes.count), demand.late_s)


def _moving(demand: Demand, site: Site, placement: Placement, reads: Pool, writes: Pool) -> float:
    link = site.link(placement)
    seconds = demand.least(
        lambda job: (job.prompt * site.token_bytes / link.bytes_per_s) if job.output > 1 else 0.0
    )
    return demand.rate(seconds / min(reads.count, writes.count), demand.late_s)


def _demand(trial: Trial, possible: Callable[[Job, Slo], bool]) -> Demand:
    counts = trial.counted()
    jobs: dict[str, list[Job]] = {kind: [] for kind in counts}
    first_after_s = late_s = 0.0
    for job in trial.jobs():
        slo = trial.slo(job.kind)
        if possible(job, slo):
            jobs[job.kind].append(job)
            first_after_s = max(first_after_s, slo.ttft_s)
            late_s = max(late_s, slo.ttft_s + (job.output * slo.tpot_s if job.output > 1 else 0.0))
    samples = len(trial.samples)
    need = {kind: _need(trial.slo(kind), count) for kind, count in counts.items()}
    return Demand(jobs, need, _span(trial.samples), first_after_s * samples, late_s * samples)


def _span(samples: Sequence[Sequence[Job]]) -> float:
    return sum(sample[-1].at_s for sample in samples)


def _need(slo: Slo, count: int) -> int:
    return math.ceil(slo.attainment * count - EPSILON)
