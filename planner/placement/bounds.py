"""Computes upper bounds on the rate that a placement can carry, by which the search drops candidates.

A bound needs no simulation, and holds for the exact requests of a trial under any scheduler. To reach the target
attainment at a rate, a minimum number of requests must be prefilled, transferred, held in memory and decoded between
the first arrival and the last moment that still counts. Step costs are assumed to be convex and never to fall
(`planner.costs.step`, `planner.costs.roofline`): n steps then cost at least n times a step with the mean batch
(Jensen), and the costs of batches beyond the constant of a step add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.chunks import CHUNK_TOKENS
from diptych.slo import Slo, Slos, strictest_slo
from planner.placement.array_bounds import ArrayDemand
from planner.placement.trial import EPSILON, Trial
from planner.sim.fast.compiled import cost_row
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    CostModel,
    InstancePool,
    Job,
    KvClass,
    KvClassWork,
    KvKeep,
    LinkSpec,
    Placement,
    StepBatch,
)

# Between two batch sizes tried, the cost of the smaller one counts for the rows of the larger one.
BATCH_SIZE_RATIO = 1.05
NO_LIMIT = math.inf
SAME_WORK = KvClassWork()
# Most rows of a batch, if neither TPOT nor memory limits the batch.
MAX_ROWS = 4096.0


class PoolCost(Protocol):
    """Gives the step cost of one instance of a pool."""

    def __call__(self, pool: InstancePool, nodes: int = 1) -> CostModel:
        """The cost model of an instance whose pipeline stages lie on the given number of nodes."""


@dataclass(frozen=True, slots=True)
class PlacementSite:
    """Describes the model and hardware that a placement runs on, as bounds and simulations need it.

    `cost` and `kv_tokens` give step cost and KV capacity of one instance of a pool, `link` the KV link of a placement,
    `kv_classes` the classes of KV, each with its bytes and room; there is at least one. `nodes` gives the number of
    nodes that the stages of an instance lie on; bounds ignore it, since more nodes only make steps longer. A step
    decodes at most `rows` sequences and prefills at most `batch_tokens` tokens
    (`planner.sim.fast.instance.InstanceLimits`). `keep` is what requests keep of their KV, if they evict; `cost` then
    includes their decisions.
    """

    cost: PoolCost
    kv_tokens: Callable[[InstancePool], float]
    link: Callable[[Placement], LinkSpec]
    kv_classes: tuple[KvClass, ...]
    nodes: Callable[[Placement, InstancePool], int] = lambda placement, pool: 1
    rows: float = NO_LIMIT
    batch_tokens: float = NO_LIMIT
    keep: KvKeep | None = None

    @property
    def token_bytes(self) -> float:
        """The KV bytes of one token of the first class."""
        return self.kv_classes[0].token_bytes

    def kv_class(self, job: Job) -> KvClass:
        """The class of a job's KV: the first one if it names none."""
        if len(self.kv_classes) == 1 or not job.kv_class:
            return self.kv_classes[0]
        return next(one for one in self.kv_classes if one.name == job.kv_class)

    def kv_bytes(self, job: Job) -> float:
        """Bytes of the KV of a job's prompt, as they are moved."""
        tokens = job.prompt if self.keep is None else self.keep.bag_chunks(job.prompt) * CHUNK_TOKENS
        return tokens * self.kv_class(job).token_bytes

    def room(self, pool: InstancePool, job: Job) -> float:
        """Tokens that an instance holds of the class of a job's KV."""
        return self.kv_tokens(pool) * self.kv_class(job).room

    def kv_size(self, job: Job) -> float:
        """How many tokens of `kv_tokens` a token of the job's KV takes while it decodes."""
        found = self.kv_class(job)
        return found.share / found.room * (1.0 if self.keep is None else self.keep.share)

    def costs(self, placement: Placement) -> Callable[[InstancePool], CostModel]:
        """The step cost by pool, for the pools of this placement."""
        return lambda pool: self.cost(pool, self.nodes(placement, pool))


@dataclass(frozen=True, slots=True)
class LeastDemand:
    """The least work that must be done for enough requests of a trial to meet their SLOs, over all its samples.

    `jobs` are the requests that can meet their SLOs at all, by kind; `need` is how many of each kind must meet them.
    `span_s` is the time from first to last arrival at one request per second. After the last arrival, first tokens
    count until `first_s` later, and last tokens until `late_s` later.
    """

    jobs: dict[str, list[Job]]
    need: dict[str, int]
    span_s: float
    first_s: float
    late_s: float

    def least(self, of: Callable[[Job], float]) -> float:
        """Sum of `of` over the `need` requests of each kind for which it is smallest."""
        return sum(sum(sorted(map(of, self.jobs[kind]))[: self.need[kind]]) for kind in self.need)

    def rate(self, seconds: float, after_s: float) -> float:
        """The highest rate at which `seconds` of work fit until `after_s` seconds after the last arrival."""
        left = seconds - after_s
        return self.span_s / left if left > 0.0 else NO_LIMIT


def rate_bounds(trial: Trial, site: PlacementSite, placement: Placement) -> dict[str, float]:
    """Requests per second that `placement` cannot exceed, by the name of the limit.

    `ttft`, `tpot`, `slo`: 0 if too many requests miss that SLO (`slo`: both together) even without load; `memory`: 0 if
    too many requests do not fit. `prefill`, `decode`, `compute`, `link`, `kv`: the rate at which that resource is fully
    used. The result is empty for hybrids, for which no bound is known.
    """
    roles = [pool.role for pool in placement.pools]
    if len(set(roles)) < len(roles) or set(roles) not in ({BOTH}, {PREFILL, DECODE}):
        return {}
    prefill_pool = next(placement.role(PREFILL, BOTH))
    decode_pool = next(placement.role(DECODE, BOTH))
    if (quick := _array_demand(trial, site, placement, prefill_pool, decode_pool)) is not None:
        return _array_bounds(quick, site, prefill_pool, decode_pool)
    alone = _unloaded_bounds(trial, site, placement, prefill_pool, decode_pool)
    if min(alone.values()) <= 0.0:
        return {name: rate for name, rate in alone.items() if rate <= 0.0}
    demand = _least_demand(
        trial,
        lambda job, slo: (
            _meets_unloaded(site, placement, prefill_pool, decode_pool, job, slo) == (True, True)
        ),
    )
    found = {
        **_compute_bounds(demand, site, prefill_pool, decode_pool),
        "kv": _kv_bound(demand, site, decode_pool),
    }
    if prefill_pool is not decode_pool:
        found["link"] = _link_bound(demand, site, placement, prefill_pool, decode_pool)
    return found


def _array_demand(
    trial: Trial,
    site: PlacementSite,
    placement: Placement,
    prefill_pool: InstancePool,
    decode_pool: InstancePool,
) -> ArrayDemand | None:
    """The demand of many requests; None if there are few, or other classes of KV or costs than arrays are for."""
    prefill, decode = site.cost(prefill_pool), site.cost(decode_pool)
    plain = len(site.kv_classes) == 1 and site.kv_classes[0].room == 1.0 and site.keep is None
    if not plain or cost_row(prefill) is None or cost_row(decode) is None:
        return None
    arrays = trial.arrays()
    if arrays is None:
        return None
    counts = trial.counted()
    slos = [trial.slo(kind) for kind in arrays.kinds]
    needs = [_needed_count(slo, counts[kind]) for kind, slo in zip(arrays.kinds, slos, strict=True)]
    link = None if prefill_pool is decode_pool else site.link(placement)
    room = min(site.kv_tokens(prefill_pool), site.kv_tokens(decode_pool))
    return ArrayDemand(arrays, slos, needs, prefill, decode, link, site.token_bytes, room)


def _array_bounds(
    quick: ArrayDemand, site: PlacementSite, prefill_pool: InstancePool, decode_pool: InstancePool
) -> dict[str, float]:
    alone = quick.alone()
    if min(alone.values()) <= 0.0:
        return {name: rate for name, rate in alone.items() if rate <= 0.0}
    first_s, late_s = (seconds * quick.arrays.num_samples for seconds in quick.after_s())
    demand = LeastDemand({}, {}, quick.arrays.span_s, first_s, late_s)
    prefill_s = quick.prefill_s(site.cost(prefill_pool).stage_s(StepBatch(1, 1.0)))
    rows, context = quick.decoded()
    decode_s = _decode_seconds(site, decode_pool, rows, context, context)
    found = _phase_bounds(demand, prefill_pool, decode_pool, prefill_s, decode_s)
    room = site.kv_tokens(decode_pool)
    found["kv"] = (
        NO_LIMIT
        if math.isinf(room)
        else demand.rate(quick.held() / (room * decode_pool.count), demand.late_s)
    )
    if prefill_pool is not decode_pool:
        found["link"] = demand.rate(
            quick.moved_s() / min(prefill_pool.count, decode_pool.count), demand.late_s
        )
    return found


def lowest_bound(found: dict[str, float]) -> float:
    """The lowest of the bounds; infinity if there are none."""
    return min(found.values(), default=NO_LIMIT)


def _prompt_batch(job: Job, work: KvClassWork) -> StepBatch:
    """The batch of a step that prefills one prompt, whose KV costs `work`."""
    return StepBatch(job.prompt * work.token, float(job.prompt) * job.prompt * work.square)


def min_ttft_s(cost: CostModel, job: Job, work: KvClassWork = SAME_WORK) -> float:
    """TTFT of a job in seconds if the instance prefills nothing else: a lower bound."""
    return cost.step_s(_prompt_batch(job, work))


def min_tpot_s(cost: CostModel, job: Job, work: KvClassWork = SAME_WORK) -> float:
    """TPOT of a job in seconds if the instance decodes nothing else: a lower bound; 0 for an answer of one token."""
    return cost.step_s(StepBatch(0, 0.0, 1, job.prompt * work.context)) if job.output > 1 else 0.0


def saturation_rates(
    site: PlacementSite, jobs: Sequence[Job], slos: Slos, placement: Placement
) -> dict[str, float]:
    """Requests per second at which each resource of `placement` would reach 100 % utilisation.

    Resources are prefill, decode and link, or compute if all instances do both. This is an estimate from mean lengths,
    not a bound; batches are as large as TPOT, memory and the instance's limits allow.
    """
    found: dict[str, float] = {}
    prefill_rps = sum(pool.count / _prefill_s(site, jobs, pool) for pool in placement.role(PREFILL))
    decode_rps = sum(pool.count * _answers_per_s(site, jobs, slos, pool) for pool in placement.role(DECODE))
    both_rps = 0.0
    for pool in placement.role(BOTH):
        each = _prefill_s(site, jobs, pool) + 1.0 / _answers_per_s(site, jobs, slos, pool)
        both_rps += pool.count / each
    if any(placement.role(PREFILL)):
        found["prefill"] = prefill_rps + both_rps
    if any(placement.role(DECODE)):
        found["decode"] = decode_rps + both_rps
    if not found:
        found["compute"] = both_rps
    if any(placement.role(PREFILL)) and any(placement.role(DECODE)):
        link = site.link(placement)
        pairs = min(sum(pool.count for pool in placement.role(role)) for role in (PREFILL, DECODE))
        moved_s = _mean_s(jobs, lambda job: site.kv_bytes(job) / link.bytes_per_s)
        found["link"] = (pairs / moved_s if moved_s else NO_LIMIT) + both_rps
    return found


def _mean_s(jobs: Sequence[Job], of: Callable[[Job], float]) -> float:
    """Mean of `of` (seconds) over the jobs."""
    return sum(map(of, jobs)) / len(jobs)


def _prefill_s(site: PlacementSite, jobs: Sequence[Job], pool: InstancePool) -> float:
    """Mean seconds for which a prompt occupies the slowest pipeline stage when prefill batches are full.

    Each prompt pays its share of the constant cost of a step.
    """
    cost = site.cost(pool)
    work, constant_s = _prefill_work(site, cost), cost.stage_s(StepBatch(1, 1.0))
    return _mean_s(jobs, lambda job: work(job) + constant_s * min(1.0, job.prompt / site.batch_tokens))


def _answers_per_s(site: PlacementSite, jobs: Sequence[Job], slos: Slos, pool: InstancePool) -> float:
    """Answers per second of one instance with the largest batch that meets the TPOT SLO and fits into memory."""
    cost, stages = site.cost(pool), pool.parallelism.pp
    tokens = max(_mean_s(jobs, lambda job: job.output - 1), 1e-9)
    context = _mean_s(jobs, lambda job: (job.prompt + job.output / 2.0) * site.kv_class(job).work.context)
    tpot_s = strictest_slo(slos.values()).tpot_s
    held = _mean_s(jobs, lambda job: (job.prompt + job.output) * site.kv_size(job))
    most = max(1.0, min(site.kv_tokens(pool) / held, site.rows, MAX_ROWS * stages) / stages)
    sizes = [size for size in _batch_sizes(most) if cost.step_s(_decode_batch(size, context)) <= tpot_s] or [
        1.0
    ]
    return sizes[-1] / cost.stage_s(_decode_batch(sizes[-1], context)) / tokens


def _decode_batch(size: float, context: float) -> StepBatch:
    """A batch of `size` decode rows with `context` tokens of context each."""
    return StepBatch(0, 0.0, math.floor(size), math.floor(size * context))


def _unloaded_bounds(
    trial: Trial,
    site: PlacementSite,
    placement: Placement,
    prefill_pool: InstancePool,
    decode_pool: InstancePool,
) -> dict[str, float]:
    """Bounds from requests that run alone: 0 for each SLO (or memory) that too few requests meet, else infinity."""
    counts = trial.counted()
    met = {name: dict.fromkeys(counts, 0) for name in ("ttft", "tpot", "slo", "memory")}
    for job in trial.jobs():
        ttft, tpot = _meets_unloaded(site, placement, prefill_pool, decode_pool, job, trial.slo(job.kind))
        fits = job.prompt + job.output <= min(site.room(prefill_pool, job), site.room(decode_pool, job))
        for name, good in (("ttft", ttft), ("tpot", tpot), ("slo", ttft and tpot), ("memory", fits)):
            met[name][job.kind] += good
    return {
        name: NO_LIMIT
        if all(good[kind] >= _needed_count(trial.slo(kind), counts[kind]) for kind in counts)
        else 0.0
        for name, good in met.items()
    }


def _meets_unloaded(
    site: PlacementSite,
    placement: Placement,
    prefill_pool: InstancePool,
    decode_pool: InstancePool,
    job: Job,
    slo: Slo,
) -> tuple[bool, bool]:
    """Whether a job meets (its TTFT SLO, its TPOT SLO) when nothing else runs."""
    work = site.kv_class(job).work
    tpot_s = min_tpot_s(site.cost(decode_pool), job, work)
    if prefill_pool is not decode_pool and job.output > 1:
        link = site.link(placement)
        tpot_s += (link.latency_s + site.kv_bytes(job) / link.bytes_per_s) / job.output
    return slo.is_met(min_ttft_s(site.cost(prefill_pool), job, work), None), slo.is_met(None, tpot_s)


def _compute_bounds(
    demand: LeastDemand, site: PlacementSite, prefill_pool: InstancePool, decode_pool: InstancePool
) -> dict[str, float]:
    """The rates at which prefill and decode (or compute, for colocated instances) are fully used."""
    prefill_s = demand.least(_prefill_work(site, site.cost(prefill_pool)))
    decode_s = _least_decode_s(demand, site, decode_pool)
    return _phase_bounds(demand, prefill_pool, decode_pool, prefill_s, decode_s)


def _phase_bounds(
    demand: LeastDemand,
    prefill_pool: InstancePool,
    decode_pool: InstancePool,
    prefill_s: float,
    decode_s: float,
) -> dict[str, float]:
    if prefill_pool is decode_pool:
        return {"compute": demand.rate((prefill_s + decode_s) / prefill_pool.count, demand.late_s)}
    return {
        "prefill": demand.rate(prefill_s / prefill_pool.count, demand.first_s),
        "decode": demand.rate(decode_s / decode_pool.count, demand.late_s),
    }


def _prefill_work(site: PlacementSite, cost: CostModel) -> Callable[[Job], float]:
    """A function that gives the seconds a prompt adds to a prefill step, without the constant cost of the step."""
    constant_s = cost.stage_s(StepBatch(1, 1.0))
    return lambda job: cost.stage_s(_prompt_batch(job, site.kv_class(job).work)) - constant_s


def _least_decode_s(demand: LeastDemand, site: PlacementSite, decode_pool: InstancePool) -> float:
    """Least seconds of the slowest stage to decode all tokens after the first, with the cheapest batch size per row."""
    rows = demand.least(lambda job: job.output - 1)

    def decoded(job: Job) -> float:
        """Tokens of context over all its decode steps."""
        return (job.output - 1) * (job.prompt + job.output / 2.0 - 1.0)

    context = demand.least(lambda job: decoded(job) * site.kv_class(job).work.context)
    held = demand.least(lambda job: decoded(job) * site.kv_size(job))
    return _decode_seconds(site, decode_pool, rows, context, held)


def _decode_seconds(
    site: PlacementSite, decode_pool: InstancePool, rows: float, context: float, held: float
) -> float:
    """Least seconds of so many rows, tokens of context and tokens held over all decode steps."""
    cost, kv_tokens = site.cost(decode_pool), site.kv_tokens(decode_pool)
    if rows <= 0.0:
        return 0.0
    # Mean context of a row over all decode steps, in tokens as they cost, and in tokens as they are held.
    mean, mean_held = max(context, 0.0) / rows, max(held, 0.0) / rows
    most = min(rows, kv_tokens / mean_held if mean_held else rows, site.rows)
    return rows * min(
        cost.stage_s(StepBatch(0, 0.0, math.floor(size), math.floor(size * mean))) / (size * BATCH_SIZE_RATIO)
        for size in _batch_sizes(most)
    )


def _batch_sizes(most: float) -> Iterator[float]:
    """Batch sizes to try from 1 to `most`: consecutive integers first, then growing by `BATCH_SIZE_RATIO`."""
    size = 1.0
    while size <= max(most, 1.0):
        yield size
        size = max(
            size * BATCH_SIZE_RATIO, math.floor(size) + 1.0 if size < 1.0 / (BATCH_SIZE_RATIO - 1.0) else 0.0
        )


def _kv_bound(demand: LeastDemand, site: PlacementSite, decode_pool: InstancePool) -> float:
    """The rate at which KV memory is full: by Little's law, from the token-seconds of KV held during decode."""
    cost, room = site.cost(decode_pool), site.kv_tokens(decode_pool)
    if math.isinf(room):
        return NO_LIMIT
    held = demand.least(
        lambda job: (
            job.prompt * site.kv_size(job) * (job.output - 1) * min_tpot_s(cost, job, site.kv_class(job).work)
        )
    )
    return demand.rate(held / (room * decode_pool.count), demand.late_s)


def _link_bound(
    demand: LeastDemand,
    site: PlacementSite,
    placement: Placement,
    prefill_pool: InstancePool,
    decode_pool: InstancePool,
) -> float:
    """The rate at which the links between prefill and decode instances are full."""
    link = site.link(placement)
    seconds = demand.least(lambda job: site.kv_bytes(job) / link.bytes_per_s if job.output > 1 else 0.0)
    return demand.rate(seconds / min(prefill_pool.count, decode_pool.count), demand.late_s)


def _least_demand(trial: Trial, possible: Callable[[Job, Slo], bool]) -> LeastDemand:
    """Collects the requests for which `possible` says that they can meet their SLOs, and how many must meet them."""
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
    need = {kind: _needed_count(trial.slo(kind), count) for kind, count in counts.items()}
    return LeastDemand(jobs, need, _arrival_span(trial.samples), first_after_s * samples, late_s * samples)


def _arrival_span(jobs: Sequence[Sequence[Job]]) -> float:
    """Seconds of arrivals of all samples, one after the other."""
    return sum(sample[-1].at_s for sample in jobs)


def _needed_count(slo: Slo, count: int) -> int:
    """How many of `count` requests must meet their SLOs for the target attainment."""
    return math.ceil(slo.attainment * count - EPSILON)
