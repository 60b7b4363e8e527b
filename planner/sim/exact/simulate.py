"""The exact simulator: runs Diptych's own scheduling code in virtual time, with a step cost in place of the model.

    jobs ─▶ front ─▶ gateway (router.requests.relay, with its admission) ─▶ worker (engine.sequence_table) ─▶ KV links
              (kvtransfer.handoff) └─ one gateway for each cell of the deployment

All decisions are made by the product's own code: relay, routing policy, credits, admission, scheduler, the changes that
a step makes (`engine.sequence_table`), which request may fetch its KV (`engine.scheduling.kv_admission`), pacing,
prefix tree and the hand-off protocol. Only time, messages, steps and KV transfers are simulated.
`tests/unit/planner/sim/test_same_decisions.py` compares its decisions with those of the real engine.

Not simulated:

- Faults; and what each head keeps: every sequence keeps the same share of its rows.
- The host tier for preempted sequences: they are prefilled again.
- Names for the chunks of answers: a follow-up request finds only those chunks cached that the trace names.
- The gateway's CPU, except for the costs in `cpu_cost` (heartbeats never wait for it).
- Layer-by-layer transfer: KV that is announced during prefill arrives at the earliest when its step ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import Protocol, TypeVar, overload

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KEEP_ALL
from diptych.stats.tiers import TierStats
from engine.prefix_restores import PrefixRestores
from engine.sequence import EngineLimits
from planner.sim.exact.bulk import SimBulkEngine, SimBulkUse
from planner.sim.exact.cores import SimCores
from planner.sim.exact.deployment import InstanceSpec, SimDeployment, check_deployment
from planner.sim.exact.engine import PipelineStages, SimEngine
from planner.sim.exact.event_queue import EventQueue, rare_garbage_collection
from planner.sim.exact.gateway import SimGateway, SimGatewaySpec
from planner.sim.exact.links import SimLinks
from planner.sim.exact.prompts import SimPrefixIndex
from planner.sim.exact.tiers import SimTiers, SimTierStore, sum_tier_stats
from planner.sim.exact.worker import SimWorker
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    InstancePool,
    Job,
    JobResult,
    KvClass,
)
from router.requests.admission import Admission
from router.requests.relay import Relay
from router.workers.fleet import Fleet


class ResultSink(Protocol):
    """Receives the results of a long run one by one (`planner.attainment.AttainmentCounter`)."""

    def add(self, result: JobResult) -> None:
        """Takes the result of a request that has ended."""


T = TypeVar("T", bound=ResultSink)


@overload
def simulate_exact(
    deployment: SimDeployment, jobs: Iterable[Job], *, skips: bool = True
) -> list[JobResult]: ...
@overload
def simulate_exact(deployment: SimDeployment, jobs: Iterable[Job], tally: T, *, skips: bool = True) -> T: ...
def simulate_exact(
    deployment: SimDeployment, jobs: Iterable[Job], tally: T | None = None, *, skips: bool = True
) -> list[JobResult] | T:
    """Serves `jobs`, which are ordered by arrival time, until all have ended.

    Returns the results in the order in which requests ended. With a `tally`, results go there instead and are not kept.
    The simulation is deterministic: the same jobs always give the same results. Without `skips` every step is simulated
    by itself; the results are the same, but the run is slower.

    Raises:
        ConfigError: the deployment cannot serve some request, or its parts do not fit together.
        ValueError: a job arrives before its predecessor.
    """
    results: list[JobResult] = []
    ExactSimulation(deployment, results.append if tally is None else tally.add, skips).run(jobs)
    return results if tally is None else tally


class ExactSimulation:
    """One run. `ended` gets each result; `gateways` and KV `links` can be read afterwards, and when it `begun_s`."""

    def __init__(
        self, deployment: SimDeployment, ended: Callable[[JobResult], None], skips: bool = True
    ) -> None:
        check_deployment(deployment)
        self.deployment, self.skips, self._ended = deployment, skips and not deployment.overdraft, ended
        self.events = EventQueue()
        self.gateways: list[SimGateway] = []
        self.links: list[SimLinks] = []
        self.tier_stores: list[SimTierStore] = []
        self._class_names = {one.name for one in deployment.kv_classes}
        self.begun_s, self._all_came = 0.0, False

    @property
    def preempted(self) -> Counter[str]:
        """Preemptions by KV class; under "" if there is only one."""
        found: Counter[str] = Counter()
        for engine in self._engines():
            found.update(engine.preempted)
        return found

    @property
    def most_used(self) -> dict[str, int]:
        """Slabs of each KV class that an engine held at one time, at most; under "" if there is only one."""
        found: dict[str, int] = {}
        for engine in self._engines():
            for name, count in engine.most_used.items():
                found[name] = max(count, found.get(name, 0))
        return found

    @property
    def tier_stats(self) -> dict[str, TierStats]:
        """What was stored in each tier and read back, over all workers."""
        return sum_tier_stats(engine.restores for engine in self._engines())

    @property
    def bulk_uses(self) -> list[SimBulkUse]:
        """What each worker has done of the backlog of bulk work."""
        return [worker.bulk.use for worker in self._workers if worker.bulk is not None]

    @property
    def _workers(self) -> list[SimWorker]:
        return [worker for gateway in self.gateways for worker in gateway.workers.values()]

    def _engines(self) -> Iterator[SimEngine]:
        return (engine for worker in self._workers for engine in worker.engines)

    def _serves_online(self) -> bool:
        """Whether any request is open or yet to come."""
        return not self._all_came or any(gateway.open or gateway.coming for gateway in self.gateways)

    def run(self, jobs: Iterable[Job]) -> None:
        """Serves all jobs to the end.

        Raises:
            RuntimeError: if requests are still open when no event is left.
        """
        jobs_to_come = iter(jobs)
        first = next(jobs_to_come, None)
        if first is None:
            return
        self.events.now_s = self.begun_s = min(0.0, first.at_s)
        for _ in range(self.deployment.cells):
            self._make_cell()
        self._schedule_arrival(first, jobs_to_come, 0)
        for worker in self._workers:
            worker.start_bulk()
        with rare_garbage_collection():
            self.events.run()
        if left := sum(gateway.open for gateway in self.gateways):
            raise RuntimeError(f"{left} requests are still open, and no event is left")

    def _schedule_arrival(self, job: Job, jobs_to_come: Iterator[Job], number: int) -> None:
        """Schedules the arrival of `job`; the jobs after it (`jobs_to_come`) follow one by one."""
        self.events.at(job.at_s, self._route_to_cell, job, jobs_to_come, number)

    def _route_to_cell(self, job: Job, jobs_to_come: Iterator[Job], number: int) -> None:
        """Sends an arriving job to the least loaded gateway, and schedules the next arrival."""
        if job.kv_class and self._class_names and job.kv_class not in self._class_names:
            raise ValueError(f"no instance has a pool for KV of the class {job.kv_class!r}")
        gateway = min(self.gateways, key=attrgetter("load"))
        gateway.coming += 1
        self.events.at(self.events.now_s + self.deployment.gateway_s, gateway.arrive, job, number)
        if (following := next(jobs_to_come, None)) is not None:
            self._schedule_arrival(following, jobs_to_come, number + 1)
        else:
            self._all_came = True

    # ---- building the deployment

    def _make_cell(self) -> None:
        """Makes one cell: a gateway for prefill and decode instances, and one for colocated instances, if any."""
        pools = list(zip(self.deployment.placement.pools, self.deployment.instances, strict=True))
        for split in (True, False):
            part = [(pool, instance) for pool, instance in pools if (pool.role != BOTH) == split]
            if part:
                self._make_gateway(part, split)

    def _make_gateway(self, pools: list[tuple[InstancePool, InstanceSpec]], split: bool) -> None:
        """Makes a gateway with its workers and links; `split` if workers hand KV over."""
        deployment = self.deployment
        limits_s = (instance.tpot_s for _, instance in pools if instance.tpot_s is not None)
        relay = Relay(
            Fleet(lost_s=inf, stuck_s=inf),
            Admission(deployment.bounds),
            split=split,
            index=SimPrefixIndex() if deployment.prefix_caching else None,
            pipelined=deployment.pipelined,
            recovery_s=inf,
            local_prefill=deployment.local_prefill,
            tpot_s=min(limits_s, default=None),
            overdraft=deployment.overdraft,
        )
        spec = SimGatewaySpec(
            deployment.gateway_s,
            deployment.hop_s,
            deployment.timeout_s,
            deployment.max_tokens,
            deployment.max_model_len,
            deployment.beat_s,
            deployment.prefix_caching,
            deployment.cpu_cost,
            bool(deployment.kv_classes),
            KEEP_ALL if deployment.keep is None else deployment.keep.spec,
        )
        links, cores = SimLinks(self.events, deployment.link), SimCores(deployment.cores)
        stores = [SimTierStore(tier) for tier in deployment.tiers]
        self.tier_stores += stores
        devices = sum(pool.devices for pool, _ in pools)
        gateway = SimGateway(self.events, relay, spec, devices, self._ended, cores)
        for pool, instance in pools:
            for _ in range(pool.count):
                self._make_worker(gateway, links, cores, stores, pool, instance)
        self._link_workers(gateway)
        self.gateways.append(gateway)
        self.links.append(links)

    def _make_worker(
        self,
        gateway: SimGateway,
        links: SimLinks,
        cores: SimCores,
        stores: Sequence[SimTierStore],
        pool: InstancePool,
        spec: InstanceSpec,
    ) -> None:
        """Makes a worker, with one engine per pipeline stage: each runs one of the batches in the pipeline."""
        role = PREFILL if pool.role == PREFILL else DECODE
        name = f"{role}-{sum(worker.role == role for worker in gateway.workers.values())}"
        deployment, variation = self.deployment, spec.variation
        stages = PipelineStages(spec.cost, pool.parallelism.pp, spec.step_s, variation, cores)
        limits = _engine_limits(spec, pool.parallelism.pp, deployment)
        skips = self.skips and pool.parallelism.pp == 1 and variation is None and deployment.cpu_cost is None
        work = {one.name: one.work for one in deployment.kv_classes}
        engines = [
            SimEngine(limits, stages, deployment.prefix_caching, skips, work, deployment.keep)
            for _ in range(pool.parallelism.pp)
        ]
        chunk_bytes = {one.name: round(one.token_bytes * CHUNK_TOKENS) for one in deployment.kv_classes} or {
            "": round(deployment.token_bytes * CHUNK_TOKENS)
        }
        for engine in engines if stores else ():
            reader = SimTiers(self.events, stores, engine.kv, chunk_bytes)
            engine.restores = PrefixRestores(
                engine.kv, reader, chunk_bytes, engine.prefill_rate, lambda slabs: None
            )
        bulk = None
        if deployment.bulk is not None and role == DECODE:
            bulk = SimBulkEngine(engines[0], deployment.bulk, self._serves_online)
        worker = SimWorker(name, role, engines, self.events, links, chunk_bytes, gateway.on_message, bulk)
        traits = deployment.traits_of(pool)
        gateway.add_worker(worker, limits.num_slabs * pool.parallelism.pp, deployment.max_model_len, traits)

    def _link_workers(self, gateway: SimGateway) -> None:
        """Links each decode worker to the prefill workers it may pull from: all, or (low affinity) its unit's."""
        sources = [name for name, worker in gateway.workers.items() if worker.role == PREFILL]
        targets = [name for name, worker in gateway.workers.items() if worker.role == DECODE]
        units = min(len(sources), len(targets)) if self.deployment.placement.affinity == "low" else 1
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                if i % units == j % units:
                    gateway.add_link(source, target, self.deployment.link)


def class_slabs(instance: InstanceSpec, kv_classes: Sequence[KvClass], stages: int = 1) -> dict[str, int]:
    """The slabs that one of the `stages` batches of an instance has for each KV class."""
    return {
        one.name: max(1, int(instance.kv_tokens * one.room) // CHUNK_TOKENS // stages) for one in kv_classes
    }


def _engine_limits(instance: InstanceSpec, stages: int, deployment: SimDeployment) -> EngineLimits:
    """The limits of one of the `stages` batches in a pipeline: its share of memory and seats.

    If all requests evict, workers set memory aside for as many of them as they have seats.
    """
    seats = max(1, instance.max_num_seqs // stages)
    arenas = class_slabs(instance, deployment.kv_classes, stages)
    return EngineLimits(
        num_slabs=sum(arenas.values()) or max(1, instance.kv_tokens // CHUNK_TOKENS // stages),
        max_model_len=deployment.max_model_len,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, instance.max_num_batched_tokens),
        chunked_prefill=instance.chunked_prefill,
        max_waiting=1 << 40,
        max_waiting_tokens=1 << 50,
        saturation_tokens=instance.saturation_tokens,
        tpot_s=instance.tpot_s,
        arena_slabs=arenas,
        max_evicting=None if deployment.keep is None else seats,
    )
