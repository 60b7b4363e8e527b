"""Bulk work on a worker: a second engine over the same runner and pool, with only what online requests leave.

    online step ──▶ time left? ──▶ unit of bulk work, at most `slice_s` ──▶ messages, next online step

The two engines have nothing in common but runner, sampler and pool: a bulk sequence is never in an online step, so the
plans of online steps are those of a worker without bulk work. Slabs of bulk sequences are lent (`kvcache.lending`): an
online request that needs them takes them back at once, and the bulk sequence waits and is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import msgspec

from diptych.messages import WorkerStats
from engine.bulk.budget import BulkBudget, BulkScheduler, BulkTime
from engine.loop import Engine
from engine.outputs import SequenceOutput
from engine.protocols import StepRunner, StepSampler
from engine.sequence import EngineLimits, Sequence
from engine.sequence_table import DEADLINE_FAILURE
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.lending import lend_pool

T = TypeVar("T")


class UnitRunner(Protocol):
    """Computes units below other programs (`worker.unit_thread.UnitThread`)."""

    def run(self, unit: Callable[[], T]) -> T:
        """The result of `unit`; raises what it raises."""


class DirectUnits:
    """Computes units in the thread that asks for them."""

    def run(self, unit: Callable[[], T]) -> T:
        """The result of `unit`; raises what it raises."""
        return unit()


class BulkEngine(Engine):
    """The engine of bulk work beside the engine of online requests, which has the same `runner` and `sampler`.

    `kv` is the pool of the online engine. `cpu_clock` tells the seconds for which the calling thread has had a
    core (`time.thread_time`); None: bulk work does not notice that others want the cores. `unit_runner` computes units
    while no online request is near; by default the calling thread does, as it does beside online requests.
    """

    def __init__(
        self,
        runner: StepRunner,
        limits: EngineLimits,
        kv: KvAllocator | KvArenas,
        sampler: StepSampler,
        time: BulkTime,
        cpu_clock: Callable[[], float] | None = None,
        unit_runner: UnitRunner | None = None,
    ) -> None:
        self.bulk_scheduler = BulkScheduler(limits)
        super().__init__(runner, self.bulk_scheduler, lend_pool(kv, self._give_back), sampler)
        self.budget, self._max_evicting = BulkBudget(time, self.bulk_scheduler.step_time), limits.max_evicting
        self._cpu_clock, self._unit_runner = cpu_clock, unit_runner or DirectUnits()
        # Whether no online request was near when the unit began, and seconds of a core for which its step ran.
        self._is_alone = False
        self._step_core_s: float | None = None
        self.units, self.unit_seconds = 0, 0.0

    @property
    def rests_until_s(self) -> float:
        """Clock time until which bulk work rests, since others want the cores."""
        return self.budget.rests_until_s

    def note_request(self, now_s: float) -> None:
        """An online request has arrived at this worker."""
        self.budget.note_request(now_s)

    def record_online(self, begun_s: float, ended_s: float) -> None:
        """An online step ran between these clock times."""
        self.budget.record_online(begun_s, ended_s)

    def make_way(self, online_engine: Engine) -> None:
        """Leave `online_engine` the memory for all its sequences that evict: bulk sequences get what is left."""
        most, scheduler = self._max_evicting, self.scheduler
        if most is None or not len(scheduler):
            return
        left = max(0, most - sum(seq.keep.evicts for seq in online_engine.scheduler.sequences()))
        if scheduler.limits.max_evicting != left:
            scheduler.limits = replace(scheduler.limits, max_evicting=left)
        evicting = [seq for seq in self._list_holders() if seq.keep.evicts]
        for seq in sorted(evicting, key=lambda seq: seq.precedence)[left:]:
            self._preempt_sequence(seq.key, lambda: 0.0)

    def _list_holders(self) -> list[Sequence]:
        """The sequences that hold memory."""
        return [*self.scheduler.running.values(), *self.scheduler.adopted.values()]

    def run_unit(self, online_engine: Engine, clock: Callable[[], float]) -> list[SequenceOutput]:
        """Run one unit of bulk work if there is time; returns its outputs, and the failures of those that are late."""
        begun_s = clock()
        unit_s = self.budget.begin_unit(
            online_engine.scheduler, online_engine.has_work, self.has_work, begun_s
        )
        if unit_s <= 0:
            late = self.scheduler.expired_keys(begun_s)
            return [self._fail_sequence(key, *DEADLINE_FAILURE) for key in late]
        self.bulk_scheduler.unit_s, self._is_alone = unit_s, self.budget.is_alone(begun_s)
        run = self._unit_runner.run if self._is_alone else DirectUnits().run
        outputs, core_s = run(lambda: self._measure_core(lambda: self.step(clock)))
        ended_s = clock()
        seconds = ended_s - begun_s
        self.budget.record_unit(seconds, 0.0 if core_s is None else seconds - core_s, ended_s)
        # Units that nobody waits for are as long as they are for want of a core: that says nothing about their plans.
        self.bulk_scheduler.record_unit(core_s if self._is_alone and core_s is not None else seconds)
        self.units += 1
        self.unit_seconds += seconds
        return outputs

    def _measure_core(self, work: Callable[[], T]) -> tuple[T, float | None]:
        """What `work` returns, and for how many seconds the calling thread had a core meanwhile, if that is known."""
        if self._cpu_clock is None:
            return work(), None
        begun_s = self._cpu_clock()
        return work(), self._cpu_clock() - begun_s

    def _run_jobs(self, jobs: list[Any]) -> list[Any]:
        run = super()._run_jobs
        results, self._step_core_s = self._measure_core(lambda: run(jobs))
        return results

    def _learn_from_step(self, jobs: list[Any], seconds: float) -> None:
        core_s = self._step_core_s if self._is_alone else None
        super()._learn_from_step(jobs, seconds if core_s is None else core_s)

    def complete_stats(self, stats: WorkerStats) -> WorkerStats:
        """`stats` of the online engine, with those of bulk work added."""
        return msgspec.structs.replace(
            stats,
            bulk_running=self.table.num_running,
            bulk_waiting=len(self.scheduler.waiting),
            bulk_units=self.units,
            bulk_seconds=self.unit_seconds,
            bulk_tokens=self.table.counters.tokens,
            bulk_preemptions=self.table.counters.preempted.total(),
        )

    def _give_back(self, arena: str) -> bool:
        """Take the memory of the sequence with the worst precedence in an arena; False if none has any."""
        holders = self.scheduler.limits.select_arena(self._list_holders(), arena)
        worst = max(holders, key=lambda seq: seq.precedence, default=None)
        if worst is not None:
            self._preempt_sequence(worst.key, lambda: 0.0)
        return worst is not None
