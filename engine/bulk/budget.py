"""When bulk work may run beside online work, for how long, and what fits into that time: decisions, without an engine.

`engine.bulk.engine.BulkEngine` and the exact simulator (`planner.sim.exact.bulk`) decide by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.scheduling.prefill_adder import ArenaRoom, KvStock, PrefillAdder
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.scheduling.step_time import MIN_PREFILL_TOKENS, StepTimeModel
from engine.sequence import EngineLimits, Sequence

# The share of the time between two tokens of online answers that a step and a unit of bulk work may take together.
TPOT_SHARE = 0.5
# The share of its time for which a unit is planned at first, the least share, and the most.
FIRST_MARGIN, MIN_MARGIN, MAX_MARGIN = 0.1, 0.05, 0.9
# How the share changes: it shrinks when a unit took too long, and grows while units keep within their time; faster
# until the first one took too long.
SHRINK, GROW, FIRST_GROW = 0.7, 1.02, 1.1
# Weight of the past in the estimate of the time between two online tokens. A longer time counts at once.
STEP_MEMORY = 0.9
# Online requests are near while any is here, and for so many seconds after: the next one may follow soon. Canaries do
# not count.
NEAR_S = 5.0
# If a unit waited for a core for more than this share of its time while online requests are near, the machine is busy,
# and bulk work rests: at first for as long as the unit took, then for twice as long each time, up to so many seconds.
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
        self.step_time.add_sample(rows, tokens, seconds)
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
        step_time = self.step_time
        return max(1, int((self._planned_s - step_time.base_s) / max(step_time.row_s, 1e-7)))

    def schedule(self, stock: KvStock) -> StepPlan:
        """The next unit's plan. It changes nothing."""
        plan, most = super().schedule(stock), self._most_rows
        left_out = set(plan.decode[most:])
        grow = tuple([pair for pair in plan.grow if pair[0] not in left_out])
        return replace(plan, decode=plan.decode[:most], grow=grow)

    def _open_adder(self, rooms: dict[str, ArenaRoom], rows: int, new_seqs: list[Sequence]) -> PrefillAdder:
        adder = super()._open_adder(rooms, rows, new_seqs)
        decode_s = self.step_time.seconds(min(rows, self._most_rows), 0)
        fit = int((self._planned_s - decode_s) / self.step_time.token_s)
        adder.budget = min(adder.budget, max(fit, 0 if rows else MIN_PREFILL_TOKENS))
        return adder


class BulkBudget:
    """The time for units of bulk work. `step_time` is that of units (`BulkScheduler.step_time`)."""

    def __init__(self, time: BulkTime, step_time: StepTimeModel) -> None:
        self.time, self._step_time = time, step_time
        # Estimate of the seconds between two tokens of online answers, without units of bulk work.
        self._online_s = 0.0
        # Clock time at which the last online step ended, and seconds of bulk work since then; None: there was a pause.
        self._ended_s: float | None = None
        self._since_s = 0.0
        # How long bulk work rests after a unit that had to wait for a core, and until when.
        self._rest_s, self.rests_until_s = 0.0, float("-inf")
        # Clock time until which online requests are near.
        self._near_until_s = float("-inf")

    def note_request(self, now_s: float) -> None:
        """An online request arrives, or is here."""
        self._near_until_s = now_s + NEAR_S

    def is_alone(self, now_s: float) -> bool:
        """Whether no online request is near, so that bulk work holds up nobody."""
        return now_s >= self._near_until_s

    def record_online(self, begun_s: float, ended_s: float) -> None:
        """An online step ran between these clock times."""
        seconds = ended_s - (begun_s if self._ended_s is None else self._ended_s + self._since_s)
        self._online_s = max(seconds, STEP_MEMORY * self._online_s + (1 - STEP_MEMORY) * seconds)
        self._ended_s, self._since_s = ended_s, 0.0

    def time_left(self, online_scheduler: Scheduler, has_work: bool) -> float:
        """Seconds for which bulk work may run now; `has_work`: the online engine could run a step.

        With an SLO it is at most `TPOT_SHARE` of it, since a request may arrive at any time. While online sequences
        decode, it is what their steps leave of that. Prompts come first, so while any is prefilled or waits, there is
        no time.
        """
        slice_s, tpot_s = self.time.slice_s, self.time.tpot_s
        most_s = slice_s if tpot_s is None else min(slice_s, TPOT_SHARE * tpot_s)
        if not has_work:
            return most_s
        prefills = online_scheduler.waiting or not all(
            seq.decoding for seq in online_scheduler.running.values()
        )
        if tpot_s is None or prefills:
            return 0.0
        return max(0.0, min(slice_s, TPOT_SHARE * tpot_s - self._online_s))

    def begin_unit(self, online_scheduler: Scheduler, has_work: bool, wanted: bool, now_s: float) -> float:
        """Seconds for a unit that would begin now; 0 if none may, or none is `wanted`. Others as in `time_left`."""
        if any(not seq.tenancy.canary for seq in online_scheduler.sequences()):
            self.note_request(now_s)
        if not has_work:
            self._ended_s = None
        if not wanted:
            return 0.0
        left_s = self.time_left(online_scheduler, has_work)
        if now_s < self.rests_until_s or (has_work and left_s < self._step_time.seconds(1, 0)):
            return 0.0
        return left_s

    def record_unit(self, seconds: float, waited_s: float, ended_s: float) -> None:
        """A unit took so many seconds, for `waited_s` of which it waited for a core. A rest is for online requests."""
        self._since_s += seconds
        if self.is_alone(ended_s):
            self._rest_s = 0.0
        elif waited_s > BUSY_SHARE * seconds:
            self._rest_s = min(MAX_REST_S, max(seconds, 2 * self._rest_s))
        else:
            self._rest_s /= 2
        self.rests_until_s = ended_s + self._rest_s
