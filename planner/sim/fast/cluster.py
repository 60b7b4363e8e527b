"""The fast simulator: serves jobs on a placement with given step costs, as events in virtual time.

It is the inner loop of the placement search, and models only what the search needs: queues, batches, pipeline stages,
KV memory and links. It does not run Diptych's scheduler and router; `planner.sim.exact.simulate` does, but is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from diptych.chunks import CHUNK_TOKENS
from planner.sim.fast.grouped_pipeline import GroupedPipeline
from planner.sim.fast.instance import SAME_WORK, EventClock, FastInstance, FastRequest, InstanceLimits
from planner.sim.fast.prefill_pipeline import PrefillPipeline
from planner.sim.fast.serial import SerialInstance
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    CostModel,
    InstancePool,
    Job,
    JobResult,
    KvClass,
    KvKeep,
    LinkSpec,
    Parallelism,
    Placement,
)

CostLookup = Mapping[Parallelism, CostModel] | Callable[[InstancePool], CostModel]
RoomLookup = Mapping[Parallelism, float] | Callable[[InstancePool], float]

INSTANT_LINK = LinkSpec()
# The pool of a class of KV that no instance has.
NO_POOL = -1


def simulate_fast(
    placement: Placement,
    costs: CostLookup,
    jobs: Iterable[Job],
    *,
    limits: InstanceLimits = InstanceLimits(),  # noqa: B008
    kv_tokens: RoomLookup | None = None,
    link: LinkSpec = INSTANT_LINK,
    token_bytes: float = 0.0,
    single: bool = False,
    kv_classes: Sequence[KvClass] = (),
    keep: KvKeep | None = None,
) -> list[JobResult]:
    """Simulates `jobs` and returns their results in the same order.

    Args:
        costs, kv_tokens: step cost and KV capacity of an instance, by split or by pool; no `kv_tokens`: unlimited.
        link, token_bytes: the KV link, and the KV bytes of one token.
        kv_classes: several classes of KV; each instance has a pool for each, and `token_bytes` is not used. A job that
            names none gets the first.
        keep: what all requests keep of their KV, if they evict; the costs include its decisions
            (`planner.costs.kv.eviction.DecidingCost`).
        single: simulates each decode step by itself, and lets rows go round pipeline stages in groups, as DistServe's
            simulator does. Without stages the results are the same, only slower to compute.

    A new prompt goes to the prefill (or colocated) instance that would prefill it soonest; ties go to the instance with
    the fewest rows. Its KV then goes to the decode instance with the fewest rows, which pulls it when it has memory for
    the longest possible answer. Until then the KV stays at its prefill instance, where prompts without memory wait. An
    instance's end of the link carries one transfer at a time; without prefill instances KV comes from outside. A job
    that fits no instance, or is of a class that there is not, fails with "kv".

    Rows that alternate (`InstanceLimits`), and colocated instances with stages that prefill whole prompts, are
    simulated as with `single`. All other pipelines share their rows evenly among the stages.
    """
    what = placement, costs, limits, kv_tokens, link, token_bytes, single, kv_classes, keep
    return FastCluster(*what).serve_jobs(jobs)


class FastCluster:
    """All instances of a placement, and the routing between them. Arguments are those of `simulate_fast`."""

    def __init__(
        self,
        placement: Placement,
        costs: CostLookup,
        limits: InstanceLimits,
        kv_tokens: RoomLookup | None,
        link: LinkSpec,
        token_bytes: float,
        single: bool,
        kv_classes: Sequence[KvClass] = (),
        keep: KvKeep | None = None,
    ) -> None:
        self.clock, self.limits, self._link = EventClock(), limits, link
        work = SAME_WORK if keep is None else keep.work
        classes, self._keep = kv_classes or (KvClass("", 1.0, token_bytes, 1.0, work),), keep
        self.rooms = tuple(one.room for one in classes)
        self._classes, self._pools = classes, {one.name: pool for pool, one in enumerate(classes)}
        self._single = single or limits.rotates_rows
        self._results: list[JobResult | None] = []
        made: dict[str, list[FastInstance]] = {PREFILL: [], DECODE: [], BOTH: []}
        for pool in placement.pools:
            made[pool.role] += self._make_instances(pool, costs, kv_tokens)
        self._prefillers = made[PREFILL] + made[BOTH]
        self._decoders = made[DECODE] or made[BOTH]

    def _make_instances(
        self, pool: InstancePool, costs: CostLookup, kv_tokens: RoomLookup | None
    ) -> list[FastInstance]:
        """The instances of a pool."""
        cost = costs[pool.parallelism] if isinstance(costs, Mapping) else costs(pool)
        room = inf
        if kv_tokens is not None:
            room = kv_tokens[pool.parallelism] if isinstance(kv_tokens, Mapping) else kv_tokens(pool)
        return [self._make_instance(pool.role, pool.parallelism.pp, cost, room) for _ in range(pool.count)]

    def _make_instance(self, role: str, stages: int, cost: CostModel, room: float) -> FastInstance:
        """An instance of the class that simulates its role and stages at the least effort."""
        if role == PREFILL and stages > 1:
            return PrefillPipeline(self, role, cost, room, stages)
        cut = role == BOTH and self.limits.chunk_tokens > 0
        if role != PREFILL and not cut and (self._single or (role == BOTH and stages > 1)):
            return GroupedPipeline(self, role, cost, room, stages)
        return SerialInstance(self, role, cost, room, stages)

    def serve_jobs(self, jobs: Iterable[Job]) -> list[JobResult]:
        """Simulates `jobs` until all have ended; results are in the order of `jobs`."""
        again = self.limits.first_again
        requests = [
            self._make_request(index, job, job.output if again else job.output - 1)
            for index, job in enumerate(jobs)
        ]
        self._results = [None] * len(requests)
        self.clock.run_all(sorted(requests, key=lambda request: request.job.at_s), self._dispatch_prompt)
        lost = [request for request, result in zip(requests, self._results, strict=True) if result is None]
        assert not lost, f"{len(lost)} requests never ended"
        return [result for result in self._results if result is not None]

    def _make_request(self, index: int, job: Job, steps: int) -> FastRequest:
        """A request in progress, with the pool of its class; with one class all requests are of that."""
        pool = self._pools.get(job.kv_class, NO_POOL) if job.kv_class and len(self._classes) > 1 else 0
        request = FastRequest(index, job, steps, pool, self._classes[pool].work)
        if self._keep is not None:
            request.total_tokens = self._keep.held_tokens(request.total_tokens)
        return request

    def _dispatch_prompt(self, request: FastRequest) -> None:
        """Sends a prompt to the instance that would prefill it first; without prefill instances, to decoding."""
        request.began_s = request.first_s = request.ready_s = request.moved_s = self.clock.now_s
        able = [instance for instance in self._prefillers if self._can_serve(instance, request)]
        if able:
            min(able, key=lambda prefiller: prefiller.wait_s(request)).enqueue_prompt(request)
        elif self._prefillers or request.pool == NO_POOL or not self._can_move(request):
            self._results[request.index] = JobResult(request.job, inf, inf, self.clock.now_s, "kv")
        else:
            self._start_handoff(request)

    def _can_serve(self, instance: FastInstance, request: FastRequest) -> bool:
        """Whether the request can be prefilled on this instance and then decoded somewhere."""
        fits = request.pool != NO_POOL and instance.kv_needed(request) <= instance.capacity[request.pool]
        return fits and (instance.role == BOTH or self._can_move(request))

    def _can_move(self, request: FastRequest) -> bool:
        """Whether some decode instance has memory for the request, or no decoding is needed."""
        return not self._needs_decode(request) or any(
            request.total_tokens <= instance.capacity[request.pool] for instance in self._decoders
        )

    def _needs_decode(self, request: FastRequest) -> bool:
        """Whether tokens are left to generate after prefill, and there are instances that decode."""
        return request.steps > 0 and bool(self._decoders)

    def on_prefilled(self, request: FastRequest, instance: FastInstance) -> None:
        """The prompt is prefilled; the rest of the answer is decoded here (colocated) or elsewhere."""
        request.first_s = request.ready_s = request.moved_s = self.clock.now_s
        if not self._needs_decode(request):
            self._end_request(request)
            instance.release_kv(request, instance.kv_needed(request))
        elif instance.role == BOTH:
            if (dropped := instance.kv_needed(request) - request.total_tokens) > 0:
                instance.release_kv(request, dropped)
            instance.seats += 1
            instance.start_decode(request)
        else:
            request.source = instance
            self._start_handoff(request)

    def _start_handoff(self, request: FastRequest) -> None:
        """Queues the request at the decode instance with the least load; ends it if nothing is left to decode."""
        if not self._needs_decode(request):
            self._end_request(request)
            return
        able = (
            instance for instance in self._decoders if request.total_tokens <= instance.capacity[request.pool]
        )
        target = min(able, key=lambda decoder: (decoder.seats + 1) * decoder.row_s)
        target.seats += 1
        target.pulls.append(request)
        self._pull_ready(target)

    def _pull_ready(self, target: FastInstance) -> None:
        """Starts the transfers at the head of the queue whose KV fits into memory.

        Requests that find their pool full are passed by those of other pools.
        """
        pulls, full, passed = target.pulls, set[int](), list[FastRequest]()
        while pulls and len(full) < len(target.free):
            request = pulls.popleft()
            if request.pool in full or request.total_tokens > target.free[request.pool]:
                full.add(request.pool)
                passed.append(request)
            else:
                target.free[request.pool] -= request.total_tokens
                self._start_transfer(request, target)
        pulls.extendleft(reversed(passed))

    def _start_transfer(self, request: FastRequest, target: FastInstance) -> None:
        """The request's KV goes over the link as soon as both ends are free."""
        request.ready_s = self.clock.now_s
        taken_s = self._kv_bytes(request) / self._link.bytes_per_s
        if taken_s + self._link.latency_s <= 0:
            self._on_moved((request, target))
            return
        # Without prefill instances the KV comes from outside, so only the target's port is occupied.
        source = request.source or target
        # A port carries one transfer at a time, so the transfer begins when both ends are free.
        begin_s = max(self.clock.now_s, target.port_s, source.port_s)
        target.port_s = source.port_s = begin_s + taken_s
        self.clock.schedule_at(begin_s + taken_s + self._link.latency_s, self._on_moved, (request, target))

    def _kv_bytes(self, request: FastRequest) -> float:
        """Bytes of the KV of the prompt, as they are moved: all of it, or what is kept."""
        keep, token_bytes = self._keep, self._classes[request.pool].token_bytes
        return token_bytes * (
            request.prompt if keep is None else keep.bag_chunks(request.prompt) * CHUNK_TOKENS
        )

    def _on_moved(self, what: tuple[FastRequest, FastInstance]) -> None:
        """KV has arrived: decoding starts, and the prefill instance frees its memory."""
        request, target = what
        request.moved_s = self.clock.now_s
        target.start_decode(request)
        if request.source is not None:
            request.source.release_kv(request, request.source.kv_needed(request))

    def on_finished(self, request: FastRequest, instance: FastInstance) -> None:
        """The last token is generated: frees the seat and memory, and starts waiting transfers."""
        self._end_request(request)
        instance.seats -= 1
        instance.release_kv(request, request.total_tokens)
        if instance.pulls:
            self._pull_ready(instance)

    def _end_request(self, request: FastRequest) -> None:
        """Stores the result of a request, with its latency by stage in seconds."""
        job, now_s = request.job, self.clock.now_s
        tpot_s = (
            (now_s - request.first_s) / request.steps if request.steps and now_s > request.first_s else 0.0
        )
        parts = {
            "queue": request.began_s - job.at_s,
            "prefill": request.first_s - request.began_s,
            "wait": request.ready_s - request.first_s,
            "transfer": request.moved_s - request.ready_s,
            "decode": now_s - request.moved_s,
        }
        moved_bytes = 0.0 if request.source is None else self._kv_bytes(request)
        self._results[request.index] = JobResult(
            job, request.first_s - job.at_s, tpot_s, now_s, "", parts, moved_bytes
        )
