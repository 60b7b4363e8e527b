"""Bulk work on a worker: a second engine over the same runner and pool, with only what online requests leave.

    online step ──▶ time left? ──▶ unit of bulk work, at most `slice_s` ──▶ messages, next online step

The two engines have nothing in common but runner, sampler and pool: a bulk sequence is never in an online step, so the
plans of online steps are those of a worker without bulk work. Slabs of bulk sequences are lent (`kvcache.lending`): an
online request that needs them takes them back at once, and the bulk sequence waits and is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from diptych.messages import WorkerStats
from engine.loop import Engine, SequenceOutput
from engine.prefill_adder import ArenaRoom, KvStock, PrefillAdder
from engine.protocols import StepRunner, StepSampler
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import EngineLimits, Sequence
from engine.sequence_table import DEADLINE_FAILURE
from engine.step_time import MIN_PREFILL_TOKENS
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.lending import lend_pool

# The share of the time between two tokens of online answers that a step and a unit of bulk work may take together.
TPOT_SHARE = 0.5
# The share of its time for which a unit is planned at first, the least share, and the most.
FIRST_MARGIN, MIN_MARGIN, MAX_MARGIN = 0.1, 0.05, 0.9
# How the share changes: it shrinks when a unit took too long, and grows while units keep within their time; faster
# until the first one took too long.
SHRINK, GROW, FIRST_GROW = 0.7, 1.02, 1.1
# Weight of the past in the estimate of the time between two online tokens. A longer time counts at once.
STEP_MEMORY = 0.9
# If a unit waited for a core for more than this share of its time, the machine is busy, and bulk work rests: at first
# for as long as the unit took, then for twice as long each time, up to so many seconds.
BUSY_SHARE, MAX_REST_S = 0.05, 0.2


@dataclass(frozen=True, slots=True)
class BulkTime:
    """How long bulk work may take: `slice_s` seconds at a time.

    `tpot_s` is the SLO of online answers' time per token. If it is set, bulk work is also done beside answers.
    """

    slice_s: float
    tpot_s: float | None = None


class BulkScheduler(Scheduler):
    """Plans units of bulk work: steps that are predicted to take at most `unit_s` seconds.

    If not all sequences fit into a unit, they take turns.
    """

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(replace(limits, chunked_prefill=True, tpot_s=None, saturation_tokens=0))
        self.unit_s = 0.0
        self._margin, self._growth = FIRST_MARGIN, FIRST_GROW
        # The sequences that decode in the unit that was planned last.
        self._chosen: tuple[str, ...] = ()

    def next_plan(self, stock: KvStock) -> StepPlan:
        """The next unit's plan."""
        plan = super().next_plan(stock)
        self._chosen = plan.decode
        return plan

    def record_step(self, rows: int, tokens: int, seconds: float) -> None:
        """A unit with `rows` decode rows and `tokens` prompt tokens took `seconds`. Its sequences go to the end."""
        super().record_step(rows, tokens, seconds)
        self.pace.add_sample(rows, tokens, seconds)
        for key in self._chosen:
            if key in self.running:
                self.running[key] = self.running.pop(key)

    def record_unit(self, seconds: float) -> None:
        """A unit took `seconds` in all."""
        if seconds > self.unit_s:
            self._margin, self._growth = max(MIN_MARGIN, self._margin * SHRINK), GROW
        else:
            self._margin = min(MAX_MARGIN, self._margin * self._growth)

    @property
    def _planned_s(self) -> float:
        """Seconds for which the next unit is planned."""
        return self._margin * self.unit_s

    @property
    def _most_rows(self) -> int:
        """How many decoding sequences fit into the next unit."""
        pace = self.pace
        return max(1, int((self._planned_s - pace.base_s) / max(pace.row_s, 1e-7)))

    def schedule(self, stock: KvStock) -> StepPlan:
        """The next unit's plan. It changes nothing."""
        plan, most = super().schedule(stock), self._most_rows
        left_out = set(plan.decode[most:])
        grow = tuple([pair for pair in plan.grow if pair[0] not in left_out])
        return replace(plan, decode=plan.decode[:most], grow=grow)

    def _open_adder(self, rooms: dict[str, ArenaRoom], rows: int, handed: list[Sequence]) -> PrefillAdder:
        adder = super()._open_adder(rooms, rows, handed)
        decode_s = self.pace.seconds(min(rows, self._most_rows), 0)
        fit = int((self._planned_s - decode_s) / self.pace.token_s)
        adder.budget = min(adder.budget, max(fit, 0 if rows else MIN_PREFILL_TOKENS))
        return adder


class BulkEngine(Engine):
    """The engine of bulk work beside the engine of online requests, which has the same `runner` and `sampler`.

    `holdings` is the pool of the online engine. `cpu_clock` tells the seconds for which the thread that runs units has
    had a core (`time.thread_time`); None: bulk work does not notice that others want the cores.
    """

    def __init__(
        self,
        runner: StepRunner,
        limits: EngineLimits,
        holdings: KvAllocator | KvArenas,
        sampler: StepSampler,
        time: BulkTime,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        self.planner = BulkScheduler(limits)
        super().__init__(runner, self.planner, lend_pool(holdings, self._give_back), sampler)
        self.time, self._max_evicting = time, limits.max_evicting
        self._cpu_clock = cpu_clock
        # Estimate of the seconds between two tokens of online answers, without units of bulk work.
        self._online_s = 0.0
        # Clock time at which the last online step ended, and seconds of bulk work since then; None: there was a pause.
        self._ended_s: float | None = None
        self._since_s = 0.0
        # How long bulk work rests after a unit that had to wait for a core, and until when.
        self._rest_s, self.rests_until_s = 0.0, float("-inf")
        self.units, self.unit_seconds = 0, 0.0

    def record_online(self, begun_s: float, ended_s: float) -> None:
        """An online step ran between these clock times."""
        seconds = ended_s - (begun_s if self._ended_s is None else self._ended_s + self._since_s)
        self._online_s = max(seconds, STEP_MEMORY * self._online_s + (1 - STEP_MEMORY) * seconds)
        self._ended_s, self._since_s = ended_s, 0.0

    def make_way(self, online: Engine) -> None:
        """Leave `online` the memory for all its sequences that evict: bulk sequences get what is left."""
        most, scheduler = self._max_evicting, self.scheduler
        if most is None or not len(scheduler):
            return
        left = max(0, most - sum(seq.keep.evicts for seq in online.scheduler.sequences()))
        if scheduler.limits.max_evicting != left:
            scheduler.limits = replace(scheduler.limits, max_evicting=left)
        evicting = [seq for seq in self._list_holders() if seq.keep.evicts]
        for seq in sorted(evicting, key=lambda seq: seq.precedence)[left:]:
            self._preempt_sequence(seq.key, lambda: 0.0)

    def _list_holders(self) -> list[Sequence]:
        """The sequences that hold memory."""
        return [*self.scheduler.running.values(), *self.scheduler.adopted.values()]

    def time_left(self, online: Engine) -> float:
        """Seconds for which bulk work may run now; 0 if there is none, or no time for it.

        With an SLO it is at most `TPOT_SHARE` of it, since a request may arrive at any time. While online sequences
        decode, it is what their steps leave of that. Prompts come first, so while any is prefilled or waits, there is
        no time.
        """
        if not self.has_work:
            return 0.0
        slice_s, tpot_s = self.time.slice_s, self.time.tpot_s
        most_s = slice_s if tpot_s is None else min(slice_s, TPOT_SHARE * tpot_s)
        if not online.has_work:
            return most_s
        scheduler = online.scheduler
        prefills = scheduler.waiting or not all(seq.decoding for seq in scheduler.running.values())
        if tpot_s is None or prefills:
            return 0.0
        return max(0.0, min(slice_s, TPOT_SHARE * tpot_s - self._online_s))

    def run_unit(self, online: Engine, clock: Callable[[], float]) -> list[SequenceOutput]:
        """Run one unit of bulk work if there is time; returns its outputs, and the failures of those that are late."""
        left_s, begun_s, beside = self.time_left(online), clock(), online.has_work
        if not beside:
            self._ended_s = None
        rests = begun_s < self.rests_until_s
        if left_s <= 0 or rests or (beside and left_s < self.planner.pace.seconds(1, 0)):
            late = self.scheduler.expired_keys(begun_s)
            return [self._fail_sequence(key, *DEADLINE_FAILURE) for key in late]
        self.planner.unit_s = left_s
        had_core_s = 0.0 if self._cpu_clock is None else self._cpu_clock()
        outputs = self.step(clock)
        ended_s = clock()
        seconds = ended_s - begun_s
        if self._cpu_clock is not None:
            self._rest_if_busy(seconds, seconds - (self._cpu_clock() - had_core_s), ended_s)
        self.planner.record_unit(seconds)
        self.units += 1
        self.unit_seconds += seconds
        self._since_s += seconds
        return outputs

    def _rest_if_busy(self, seconds: float, waited_s: float, now_s: float) -> None:
        """A unit of so many seconds waited for a core for `waited_s` of them."""
        if waited_s > BUSY_SHARE * seconds:
            self._rest_s = min(MAX_REST_S, max(seconds, 2 * self._rest_s))
        else:
            self._rest_s /= 2
        self.rests_until_s = now_s + self._rest_s

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
