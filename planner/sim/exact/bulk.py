"""Bulk work beside online requests in virtual time: a second engine over a pool, as `engine.bulk.engine.BulkEngine`.

When a unit may run, for how long, and what is in it is decided by `engine.bulk.budget`; memory is lent by
`kvcache.lending`. The backlog never ends. Lines come to the worker by themselves: the gateway's part is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import cast

from diptych.errors import ConfigError
from diptych.request import BULK_PRIORITY, SamplingParams, Tenancy
from engine.bulk.budget import BulkBudget, BulkScheduler, BulkTime
from engine.sequence import Sequence, SequenceRefused
from kvcache.lending import lend_pool
from planner.sim.exact.engine import SimEngine, SimSequence
from planner.types import PREFILL, InstancePool, KvKeep

BULK_ORIGIN = Tenancy(priority=BULK_PRIORITY)


@dataclass(frozen=True, slots=True)
class SimBulkSpec:
    """A backlog of lines with `prompt` and `output` tokens, of which each worker holds `lines` at a time.

    `slice_s` and `tpot_s` are those of `engine.bulk.budget.BulkTime`, in seconds.
    """

    prompt: int
    output: int
    lines: int
    slice_s: float
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimBulkUse:
    """What was done of the backlog: lines that ended, new tokens, tokens of prompts, seconds in units, preemptions."""

    lines: int
    tokens: int
    prompt_tokens: int
    seconds: float
    preemptions: int


class SimBulkEngine(SimEngine):
    """The engine of bulk work beside `online_engine`, as long as `wanted` returns True."""

    def __init__(self, online_engine: SimEngine, spec: SimBulkSpec, wanted: Callable[[], bool]) -> None:
        self._planner = BulkScheduler(online_engine.limits)
        lent = lend_pool(online_engine.kv, self._give_back)
        super().__init__(
            online_engine.limits,
            online_engine.stages,
            False,
            False,
            online_engine.work,
            scheduler=self._planner,
            kv=lent,
        )
        self._online_engine, self._spec, self._wanted = online_engine, spec, wanted
        self.budget = BulkBudget(BulkTime(spec.slice_s, spec.tpot_s), self._planner.step_time)
        self._made = self._ended = self._computed = 0
        self._seconds = 0.0

    @property
    def runs_beside_answers(self) -> bool:
        """Whether a unit may follow each online step."""
        return self._spec.tpot_s is not None and self._wanted()

    def begin_unit(self, now_s: float) -> float | None:
        """Begins a unit if there is time for one. Returns when it ends, or None.

        Raises:
            ConfigError: a line is too long for the worker.
        """
        wanted = self._wanted()
        if wanted:
            self._take_lines(now_s)
        online_engine = self._online_engine
        unit_s = self.budget.begin_unit(
            online_engine.scheduler, online_engine.ready, wanted and self.ready, now_s
        )
        if unit_s <= 0:
            return None
        self._planner.unit_s = unit_s
        run = self.begin_step(now_s, waited_for=True)
        return None if run is None else run.ends[-1]

    def end_unit(self, now_s: float) -> None:
        """The unit that was begun has ended."""
        run = self.run
        assert run is not None, "no unit runs"
        self._computed += sum(count for _, count in run.parts)
        self._ended += sum(bool(one.finish) for one in self.finish(now_s))
        seconds = now_s - run.begun_s
        self._seconds += seconds
        self.budget.record_unit(seconds, 0.0, now_s)
        self._planner.record_unit(seconds)

    @property
    def use(self) -> SimBulkUse:
        """What has been done so far. Tokens that were computed again after a preemption count as those of prompts."""
        tokens = self._ended * self._spec.output + sum(len(seq.output) for seq in self.scheduler.sequences())
        return SimBulkUse(self._ended, tokens, self._computed, self._seconds, self.preempted.total())

    def _take_lines(self, now_s: float) -> None:
        """Takes lines of the backlog until there are as many as the worker holds."""
        spec = self._spec
        while len(self.scheduler) < spec.lines:
            line = SimSequence(
                f"bulk-{self._made}",
                1,
                cast(list[int], range(spec.prompt)),
                SamplingParams(spec.output, 0),
                inf,
                output=cast(list[int], range(0)),
                tenancy=BULK_ORIGIN,
                max_output=spec.output,
                size=spec.prompt,
                kv_class=next(iter(self.limits.kv_classes)),
            )
            self._made += 1
            try:
                self.scheduler.add(line, now_s)
            except SequenceRefused as refusal:
                why = "; ".join(part for part in (refusal.what, refusal.why) if part)
                fix = "use shorter lines: --bulk PROMPT:OUTPUT"
                raise ConfigError("lines of bulk work are too long for an instance", why, fix) from None

    def _give_back(self, arena: str) -> bool:
        """As `engine.bulk.engine.BulkEngine._give_back`."""
        holders: list[Sequence] = [*self.scheduler.running.values(), *self.scheduler.adopted.values()]
        mine = self.limits.select_arena(holders, arena)
        worst = max(mine, key=lambda seq: seq.precedence, default=None)
        if worst is not None:
            self._preempt_sequence(worst.key)
        return worst is not None


def check_bulk(pools: Iterable[InstancePool], keep: KvKeep | None) -> None:
    """Raises ConfigError: bulk work is not simulated on these pools, whose requests `keep` so much of their KV."""
    if any(pool.role != PREFILL and pool.parallelism.pp > 1 for pool in pools):
        why = "the batches of a pipeline divide its time among them"
        raise ConfigError("bulk work is not simulated on pipelines", why, "use PP1, or no bulk work")
    if keep is not None:
        why = "lines would evict too, and hold fewer slabs"
        raise ConfigError("bulk work is not simulated beside eviction", why, "leave out --kv-keep")
