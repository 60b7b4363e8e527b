"""Other ways to size a fleet, to compare with: a plan that never changes, and the rule of NVIDIA Dynamo's planner.

Dynamo 1.6's throughput loop (optimization target "sla"), from a reading of its source: every 180 s it forecasts the
requests, the mean prompt and the mean answer, each by itself; the capacity of an engine is the best rate among batches
of 1 to 128 whose bare pass meets the SLO; replicas are ceil(demand / capacity), at most 8 more or fewer at once,
at least one, and shrunk in proportion to fit the budget. Queueing, quantiles, transfers and role flips are not in it.
Its reactive loop, off by default, may be switched on: the replicas above are a lower bound then, one more is started
where every engine would miss its SLO with what waits for it, and one stopped where the others could take its
share. Own code from that description. Where it leaves a choice, the rule is given what is true of the engines here:
their costs, how many prompt tokens they batch, and that they reserve KV for a whole answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.replanning.elastic_fleet import WorkerGauge
from diptych.slo import Slo
from planner.replan.attainment_cache import FleetSize
from planner.replan.decide import (
    READY,
    STARTING,
    FleetAction,
    FleetDecision,
    FleetWorker,
    ReplanPolicy,
    Start,
    Stop,
    count_fleet,
)
from planner.replan.evaluate import FleetHardware
from planner.types import DECODE, PREFILL, StepBatch

INTERVAL_S, MAX_CHANGE, MAX_BATCH, MAX_ROWS = 180.0, 8, 128, 256
SAFE_SHARE = 0.8  # share of an SLO that must be met, for a fleet that has one replica less
MIN_POINTS = 5  # observations, before which the last value is the forecast
LEVEL_NOISE, TREND_NOISE, OBSERVED_NOISE = 1.0, 0.1, 10.0


class FleetController(Protocol):
    """What a replanner is to a simulated day."""

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None: ...

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None: ...

    def tick(self, now_s: float, workers: tuple[FleetWorker, ...]) -> FleetDecision: ...


class StaticFleet:
    """The plan of the first day for ever."""

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None:
        """Nothing is learnt."""

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None:
        """Nothing is learnt."""

    def tick(self, now_s: float, workers: tuple[FleetWorker, ...]) -> FleetDecision:
        fleet = count_fleet(workers, READY, STARTING)
        return FleetDecision(now_s, "", fleet, fleet)


class KalmanPredictor:
    """A local linear trend, one step ahead: level and slope as Dynamo's predictor weighs them, on raw values."""

    def __init__(self) -> None:
        self._level = self._trend = 0.0
        self._cov = (OBSERVED_NOISE, 0.0, OBSERVED_NOISE)  # of level, of both, of trend
        self._points = 0

    def observe(self, value: float) -> None:
        self._points += 1
        if self._points == 1:
            self._level = value
            return
        level, both, trend = self._cov
        guess, slope = self._level + self._trend, self._trend
        level, both, trend = level + 2 * both + trend + LEVEL_NOISE, both + trend, trend + TREND_NOISE
        gain, gain_slope = level / (level + OBSERVED_NOISE), both / (level + OBSERVED_NOISE)
        wrong = value - guess
        self._level, self._trend = guess + gain * wrong, slope + gain_slope * wrong
        self._cov = ((1 - gain) * level, (1 - gain) * both, trend - gain_slope * both)
        self._last = value

    def predict(self) -> float:
        if self._points < MIN_POINTS:
            return self._level if self._points < 2 else self._last
        return max(self._level + self._trend, 0.0)


class LastValuePredictor:
    """The last value."""

    def __init__(self) -> None:
        self._last = 0.0

    def observe(self, value: float) -> None:
        self._last = value

    def predict(self) -> float:
        return self._last


@dataclass(slots=True)
class _Interval:
    came: int = 0
    prompts: int = 0
    ended: int = 0
    outputs: int = 0
    read: int = 0
    cached: int = 0


class DynamoPlanner:
    """`ceil(demand / capacity)` on means, every `INTERVAL_S`; starts and stops workers, and never flips one.

    A `reactive` one also looks, at every tick, at what `gauges` (to be set) tells of the workers that are ready.
    `spare` is a share of the demand for which there is to be room too: not of Dynamo, but what it may be given by hand.
    """

    def __init__(
        self,
        hardware: FleetHardware,
        slo: Slo,
        policy: ReplanPolicy,
        predictor: type[KalmanPredictor] | type[LastValuePredictor] = LastValuePredictor,
        reactive: bool = False,
        spare: float = 0.0,
    ) -> None:
        self._hardware, self._slo, self._policy = hardware, slo, policy
        self._seen = _Interval()
        self._requests, self._prompt, self._output = predictor(), predictor(), predictor()
        self._hits = 0.0
        self._due_s = INTERVAL_S
        self._bound: FleetSize | None = None  # what the latest interval called for
        self.reactive, self._spare = reactive, spare
        self.gauges: Callable[[], Iterable[WorkerGauge]] = tuple

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None:
        self._seen.came += 1
        self._seen.prompts += prompt

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None:
        seen = self._seen
        seen.ended, seen.outputs = seen.ended + 1, seen.outputs + output
        seen.read, seen.cached = seen.read + prompt, seen.cached + cached

    def tick(self, now_s: float, workers: tuple[FleetWorker, ...]) -> FleetDecision:
        now = target = count_fleet(workers, READY, STARTING)
        due = now_s >= self._due_s and self._observed(now)
        starting = any(worker.state == STARTING for worker in workers)
        if due and self._bound and not self.reactive:
            target = self._fitted(self._bound)
        elif due and self._bound and starting:  # it does not react meanwhile, but keeps to its lower bound
            at_least = FleetSize(max(now.prefill, self._bound.prefill), max(now.decode, self._bound.decode))
            target = self._fitted(at_least)
        elif self.reactive and self._bound and not starting:
            target = self._fitted(self._reacted(now, tuple(self.gauges())))
        trigger = "interval" if due else "" if target == now else "load"
        return FleetDecision(now_s, trigger, now, target, tuple(self._actions(workers, now, target)))

    def _observed(self, now: FleetSize) -> bool:
        """Whether an interval that has ended said anything."""
        self._due_s += INTERVAL_S
        seen, self._seen = self._seen, _Interval()
        if not seen.came or not seen.ended:
            return False
        self._requests.observe(seen.came)
        self._prompt.observe(seen.prompts / seen.came)
        self._output.observe(seen.outputs / seen.ended)
        self._hits = min(seen.cached / seen.read, 0.95) if seen.read else 0.0
        self._bound = self._limited(self._wanted(), now)
        return True

    def _wanted(self) -> FleetSize:
        rate = self.demand(self._requests.predict()) / INTERVAL_S
        prompt, output = max(self._prompt.predict(), 1.0), max(self._output.predict(), 1.0)
        prefill = self.prefill_rate(prompt * (1 - self._hits))
        decode = self.decode_rate(prompt, output)
        return FleetSize(max(1, math.ceil(rate / prefill)), max(1, math.ceil(rate / decode)))

    def demand(self, requests: float) -> float:
        """What is planned for, if so many are forecast."""
        return requests * (1 + self._spare)

    def prefill_rate(self, prompt: float) -> float:
        """Most requests per second of an engine whose bare pass keeps the TTFT; those of batch 1, if none does."""
        rates = [
            (batch / ttft_s, ttft_s)
            for batch in range(1, MAX_BATCH + 1)
            for ttft_s in (self._read_s(batch * prompt, prompt),)
        ]
        return max((rate for rate, ttft_s in rates if ttft_s <= self._slo.ttft_s), default=rates[0][0])

    def _read_s(self, tokens: float, prompt: float) -> float:
        """So many tokens, of prompts of that length, in batches as large as the engine takes."""
        cost, seconds = self._hardware.costs[PREFILL], 0.0
        most = max(self._hardware.limits.prefill_tokens, prompt)
        while tokens > 0:
            piece = min(tokens, most)
            seconds += cost.step_s(StepBatch(round(piece), piece * min(prompt, piece)))
            tokens -= piece
        return seconds

    def decode_rate(self, prompt: float, output: float) -> float:
        """Most requests per second of an engine whose steps keep the TPOT, by Little's law, in mid-answer."""
        context = prompt + output / 2
        room = self._hardware.kv_tokens.get(DECODE, math.inf)
        most = int(max(1, min(room / (prompt + output), MAX_ROWS, MAX_BATCH)))
        cost = self._hardware.costs[DECODE]
        rates = []
        for batch in range(1, most + 1):
            itl_s = cost.step_s(StepBatch(rows=batch, context=round(batch * context)))
            rates.append((batch / (output * itl_s), itl_s))
        return max((rate for rate, itl_s in rates if itl_s <= self._slo.tpot_s), default=rates[0][0])

    # --- the reactive loop ---

    def _reacted(self, now: FleetSize, gauges: tuple[WorkerGauge, ...]) -> FleetSize:
        """One more or less of either role, by what waits for the engines, and no less than the latest interval said."""
        prefillers = [gauge for gauge in gauges if gauge.role == PREFILL]
        decoders = [gauge for gauge in gauges if gauge.role == DECODE]
        assert self._bound is not None
        return FleetSize(
            max(now.prefill + self._more_prefillers(prefillers), self._bound.prefill),
            max(now.decode + self._more_decoders(decoders), self._bound.decode),
        )

    def _more_prefillers(self, prefillers: list[WorkerGauge]) -> int:
        """By the TTFT of the next prompt, of mean length, behind what waits."""
        prompt = max(self._prompt.predict(), 1.0) * (1 - self._hits)
        own_s, most_s = self._read_s(prompt, prompt), self._slo.ttft_s
        if not prefillers:
            return 0
        if all(self._read_s(one.waiting + prompt, prompt) > most_s for one in prefillers):
            return 1
        if len(prefillers) == 1 or own_s >= most_s:
            return 0
        share = len(prefillers) / (len(prefillers) - 1)
        slack_s = SAFE_SHARE * (most_s - own_s)
        calm = all(self._read_s(one.waiting * share + prompt, prompt) - own_s < slack_s for one in prefillers)
        return -1 if calm else 0

    def _more_decoders(self, decoders: list[WorkerGauge]) -> int:
        """By the time of a step with all that is there and waits for room."""
        if not decoders:
            return 0
        if all(self._step_s(one, 1.0) > self._slo.tpot_s for one in decoders):
            return 1
        if len(decoders) == 1:
            return 0
        share = len(decoders) / (len(decoders) - 1)
        room = self._hardware.kv_tokens.get(DECODE, math.inf)
        fits = all((one.kv + one.queued_kv) * share < room for one in decoders)
        return (
            -1
            if fits and all(self._step_s(one, share) < SAFE_SHARE * self._slo.tpot_s for one in decoders)
            else 0
        )

    def _step_s(self, decoder: WorkerGauge, share: float) -> float:
        context = round((decoder.kv + decoder.queued_kv) * share)
        return self._hardware.costs[DECODE].step_s(
            StepBatch(rows=round(decoder.rows * share), context=context)
        )

    # --- both ---

    def _limited(self, fleet: FleetSize, now: FleetSize) -> FleetSize:
        return FleetSize(
            min(max(fleet.prefill, now.prefill - MAX_CHANGE, 1), now.prefill + MAX_CHANGE),
            min(max(fleet.decode, now.decode - MAX_CHANGE, 1), now.decode + MAX_CHANGE),
        )

    def _fitted(self, fleet: FleetSize) -> FleetSize:
        """Within the budget: both shrunk by the same factor, and one of each at least."""
        policy = self._policy
        held = policy.held(fleet)
        if held <= policy.budget:
            return fleet
        prefill = max(1, int(fleet.prefill * policy.budget / held))
        left = policy.budget - prefill * policy.size(PREFILL)
        return FleetSize(prefill, max(1, min(fleet.decode, left // policy.size(DECODE))))

    def _actions(
        self, workers: tuple[FleetWorker, ...], now: FleetSize, target: FleetSize
    ) -> list[FleetAction]:
        """Stops first; starts only as far as the budget goes while others drain."""
        actions: list[FleetAction] = []
        held = sum(self._policy.size(worker.role) for worker in workers)
        for role in (PREFILL, DECODE):
            mine = [w for w in workers if w.role == role and w.state in (READY, STARTING)]
            mine.sort(key=lambda worker: (worker.state == READY, worker.load, worker.name))
            actions += [
                Stop(worker.name) for worker in mine[: max(getattr(now, role) - getattr(target, role), 0)]
            ]
        for role in (PREFILL, DECODE):
            room = (self._policy.budget - held) // self._policy.size(role)
            if (count := min(getattr(target, role) - getattr(now, role), room)) > 0:
                held += count * self._policy.size(role)
                actions.append(Start(role, count))
        return actions
