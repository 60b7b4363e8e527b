"""The fast simulator: a placement, what its steps cost, and jobs, by events in virtual time.

It is the inner loop of the placement search, and knows what the search needs: queues, batches, stages, memory for KV
and a link. It does not run the scheduler and the router of the product; `planner.simulator` does, at more expense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

from planner.des_base import Clock, Instance, Limits, Run
from planner.des_pipe import Pipe
from planner.des_ring import Ring
from planner.des_solo import Solo
from planner.terms import BOTH, DECODE, PREFILL, Cost, Job, Link, Placement, Pool, Served, Split

__all__ = ["Limits", "run"]

Costs = Mapping[Split, Cost] | Callable[[Pool], Cost]
Room = Mapping[Split, float] | Callable[[Pool], float]

FAST = Link()


def run(
    placement: Placement,
    costs: Costs,
    jobs: Iterable[Job],
    *,
    limits: Limits = Limits(),  # noqa: B008
    kv_tokens: Room | None = None,
    link: Link = FAST,
    token_bytes: float = 0.0,
    single: bool = False,
) -> list[Served]:
    """How each of `jobs` fares, in their order.

    `costs` and `kv_tokens` (capacity of an instance; none: endless) are by split, or by pool. A new prompt goes to the
    instance, of those that read prompts, whose queue it would leave soonest (of equal ones, that with the fewest rows).
    From there its KV goes over the `link`, `token_bytes` for each token of the prompt, to the instance with the fewest
    rows, which pulls it when it has room for all that the request may come to. Until then the KV stays where it was
    read, and prompts that find no room wait. An instance's end of the link carries one transfer at a time; without
    readers KV comes from outside. A job that fits no instance fails with `"kv"`. `single` takes each step by itself and
    lets rows go round stages in groups as they came, as the paper's simulator does: without stages the same answers,
    later. So do rows that take turns, and instances that both read and decode where they have stages; those that cut
    prompts never do. All other stages share their rows evenly, whatever colocated instances do with prompts.
    """
    return Cluster(placement, costs, limits, kv_tokens, link, token_bytes, single).serve(jobs)


class Cluster:
    """All instances of a placement, and who gets what. Arguments as those of `run`."""

    def __init__(
        self,
        placement: Placement,
        costs: Costs,
        limits: Limits,
        kv_tokens: Room | None,
        link: Link,
        token_bytes: float,
        single: bool,
    ) -> None:
        self.clock, self.limits = Clock(), limits
        self._link, self._token_bytes = link, token_bytes
        self._single = single or limits.turns
        self._served: list[Served | None] = []
        made: dict[str, list[Instance]] = {PREFILL: [], DECODE: [], BOTH: []}
        for pool in placement.pools:
            made[pool.role] += self._instances(pool, costs, kv_tokens)
        self._readers = made[PREFILL] + made[BOTH]
        self._writers = made[DECODE] or made[BOTH]

    def _instances(self, pool: Pool, costs: Costs, kv_tokens: Room | None) -> list[Instance]:
        cost = costs[pool.split] if isinstance(costs, Mapping) else costs(pool)
        room = inf
        if kv_tokens is not None:
            room = kv_tokens[pool.split] if isinstance(kv_tokens, Mapping) else kv_tokens(pool)
        return [self._instance(pool.role, pool.split.pp, cost, room) for _ in range(pool.count)]

    def _instance(self, role: str, stages: int, cost: Cost, room: float) -> Instance:
        if role == PREFILL and stages > 1:
            return Pipe(self, role, cost, room, stages)
        cut = role == BOTH and self.limits.chunk_tokens > 0
        if role != PREFILL and not cut and (self._single or (role == BOTH and stages > 1)):
            return Ring(self, role, cost, room, stages)
        return Solo(self, role, cost, room, stages)

    def serve(self, jobs: Iterable[Job]) -> list[Served]:
        """All of `jobs`, to their end."""
        again = self.limits.first_again
        runs = [Run(index, job, job.output if again else job.output - 1) for index, job in enumerate(jobs)]
        self._served = [None] * len(runs)
        self.clock.run(sorted(runs, key=lambda run: run.job.at_s), self._arrive)
        lost = [run for run, served in zip(runs, self._served, strict=True) if served is None]
        assert not lost, f"{len(lost)} requests never ended"
        return [served for served in self._served if served is not None]

    def _arrive(self, run: Run) -> None:
        """To the reader with the least to read before it is done; without readers, straight to decoding."""
        run.began_s = run.first_s = run.ready_s = run.moved_s = self.clock.now_s
        able = [reader for reader in self._readers if self._able(reader, run)]
        if able:
            min(able, key=lambda reader: reader.wait_s(run)).offer(run)
        elif self._readers or not self._movable(run):
            self._served[run.index] = Served(run.job, inf, inf, self.clock.now_s, "kv")
        else:
            self._pass_on(run)

    def _able(self, reader: Instance, run: Run) -> bool:
        """Whether `run` can be read there, and then be decoded somewhere."""
        fits = reader.room(run) <= reader.capacity
        return fits and (reader.role == BOTH or self._movable(run))

    def _movable(self, run: Run) -> bool:
        return not self._writes(run) or any(run.hold <= writer.capacity for writer in self._writers)

    def _writes(self, run: Run) -> bool:
        return run.steps > 0 and bool(self._writers)

    def prefilled(self, run: Run, at: Instance) -> None:
        """The first token is written; what is left is decoded here or elsewhere."""
        run.first_s = run.ready_s = run.moved_s = self.clock.now_s
        if not self._writes(run):
            self._end(run)
            at.release(at.room(run))
        elif at.role == BOTH:
            at.seats += 1
            at.join(run)
        else:
            run.source = at
            self._pass_on(run)

    def _pass_on(self, run: Run) -> None:
        if not self._writes(run):
            self._end(run)
            return
        able = (writer for writer in self._writers if run.hold <= writer.capacity)
        target = min(able, key=lambda writer: (writer.seats + 1) * writer.row_s)
        target.seats += 1
        target.pulls.append(run)
        self._pull(target)

    def _pull(self, target: Instance) -> None:
        """Those in front whose KV has room are fetched."""
        while target.pulls and target.pulls[0].hold <= target.free:
            run = target.pulls.popleft()
            target.free -= run.hold
            run.ready_s = self.clock.now_s
            taken_s = run.prompt * self._token_bytes / self._link.bytes_per_s
            if taken_s + self._link.latency_s <= 0:
                self._moved((run, target))
                continue
            source = run.source or target  # without readers it comes from outside
            begin_s = max(self.clock.now_s, target.port_s, source.port_s)
            target.port_s = source.port_s = begin_s + taken_s
            self.clock.at(begin_s + taken_s + self._link.latency_s, self._moved, (run, target))

    def _moved(self, what: tuple[Run, Instance]) -> None:
        run, target = what
        run.moved_s = self.clock.now_s
        target.join(run)
        if run.source is not None:
            run.source.release(run.source.room(run))

    def finished(self, run: Run, at: Instance) -> None:
        """Its last token is written."""
        self._end(run)
        at.seats -= 1
        at.release(run.hold)
        if at.pulls:
            self._pull(at)

    def _end(self, run: Run) -> None:
        job, now_s = run.job, self.clock.now_s
        tpot_s = (now_s - run.first_s) / run.steps if run.steps and now_s > run.first_s else 0.0
        parts = {
            "queue": run.began_s - job.at_s,
            "prefill": run.first_s - run.began_s,
            "wait": run.ready_s - run.first_s,
            "transfer": run.moved_s - run.ready_s,
            "decode": now_s - run.moved_s,
        }
        self._served[run.index] = Served(job, run.first_s - job.at_s, tpot_s, now_s, "", parts)
