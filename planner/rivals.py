"""Other ways to size a fleet, to compare with: a plan that never changes, and the rule of NVIDIA Dynamo's planner.

Dynamo 1.6's throughput loop (optimization target "sla"), from a reading of its source: every 180 s it forecasts the
requests, the mean prompt and the mean answer, each by itself; the capacity of an engine is the best rate among batches
of 1 to 128 whose bare pass keeps the objective; replicas are ceil(demand / capacity), at most 8 more or fewer at once,
at least one, and shrunk in proportion to fit the budget. Queueing, quantiles, transfers and role flips are not in it.
Its reactive loop, off by default, may be switched on: the replicas above are a lower bound then, one more is started
where every engine would miss its objective with what waits for it, and one stopped where the others could take its
share. Own code from that description. Where it leaves a choice, the rule is told what is true of the engines here:
their costs, how many prompt tokens they batch, and that they reserve KV for a whole answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from planner.decide import READY, STARTING, Action, Decision, Policy, Start, Stop, Worker, fleet_of
from planner.elastic import Gauge, Hardware
from planner.known import Fleet
from planner.terms import DECODE, PREFILL, Batch, Slo

INTERVAL_S, MOST_CHANGE, MOST_BATCH, MOST_ROWS = 180.0, 8, 128, 256
SAFE = 0.8  # share of an objective that must do, for a fleet that has one replica less
LEAST_POINTS = 5  # observations, before which the last value is the forecast
LEVEL_NOISE, TREND_NOISE, OBSERVED_NOISE = 1.0, 0.1, 10.0


class Controller(Protocol):
    """What a replanner is to a simulated day."""

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None: ...

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None: ...

    def tick(self, now_s: float, workers: tuple[Worker, ...]) -> Decision: ...


class Static:
    """The plan of the first day for ever."""

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None:
        """Nothing is learnt."""

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None:
        """Nothing is learnt."""

    def tick(self, now_s: float, workers: tuple[Worker, ...]) -> Decision:
        fleet = fleet_of(workers, READY, STARTING)
        return Decision(now_s, "", fleet, fleet)


class Kalman:
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
        if self._points < LEAST_POINTS:
            return self._level if self._points < 2 else self._last
        return max(self._level + self._trend, 0.0)


class Constant:
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


class Dynamo:
    """`ceil(demand / capacity)` on means, every `INTERVAL_S`; starts and stops workers, and never flips one.

    A `reactive` one also looks, at every tick, at what `gauges` (to be set) tells of the workers that are ready.
    `spare` is a share of the demand for which there is to be room too: not of Dynamo, but what it may be given by hand.
    """

    def __init__(
        self,
        hardware: Hardware,
        slo: Slo,
        policy: Policy,
        predictor: type[Kalman] | type[Constant] = Constant,
        reactive: bool = False,
        spare: float = 0.0,
    ) -> None:
        self._hardware, self._slo, self._policy = hardware, slo, policy
        self._seen = _Interval()
        self._requests, self._prompt, self._output = predictor(), predictor(), predictor()
        self._hits = 0.0
        self._due_s = INTERVAL_S
        self._bound: Fleet | None = None  # what the latest interval called for
        self.reactive, self._spare = reactive, spare
        self.gauges: Callable[[], Iterable[Gauge]] = tuple

    def arrived(self, at_s: float, prompt: int, kind: str = "") -> None:
        self._seen.came += 1
        self._seen.prompts += prompt

    def ended(
        self, at_s: float, prompt: int, output: int, kind: str = "", good: bool | None = None, cached: int = 0
    ) -> None:
        seen = self._seen
        seen.ended, seen.outputs = seen.ended + 1, seen.outputs + output
        seen.read, seen.cached = seen.read + prompt, seen.cached + cached

    def tick(self, now_s: float, workers: tuple[Worker, ...]) -> Decision:
        now = target = fleet_of(workers, READY, STARTING)
        due = now_s >= self._due_s and self._observed(now)
        starting = any(worker.state == STARTING for worker in workers)
        if due and self._bound and not self.reactive:
            target = self._fitted(self._bound)
        elif due and self._bound and starting:  # it does not react meanwhile, but keeps to its lower bound
            at_least = Fleet(max(now.prefill, self._bound.prefill), max(now.decode, self._bound.decode))
            target = self._fitted(at_least)
        elif self.reactive and self._bound and not starting:
            target = self._fitted(self._reacted(now, tuple(self.gauges())))
        trigger = "interval" if due else "" if target == now else "load"
        return Decision(now_s, trigger, now, target, tuple(self._actions(workers, now, target)))

    def _observed(self, now: Fleet) -> bool:
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

    def _wanted(self) -> Fleet:
        rate = self.demand(self._requests.predict()) / INTERVAL_S
        prompt, output = max(self._prompt.predict(), 1.0), max(self._output.predict(), 1.0)
        prefill = self.prefill_rate(prompt * (1 - self._hits))
        decode = self.decode_rate(prompt, output)
        return Fleet(max(1, math.ceil(rate / prefill)), max(1, math.ceil(rate / decode)))

    def demand(self, requests: float) -> float:
        """What is planned for, if so many are forecast."""
        return requests * (1 + self._spare)

    def prefill_rate(self, prompt: float) -> float:
        """Most requests per second of an engine whose bare pass keeps the TTFT; those of batch 1, if none does."""
        rates = [
            (batch / ttft_s, ttft_s)
            for batch in range(1, MOST_BATCH + 1)
            for ttft_s in (self._read_s(batch * prompt, prompt),)
        ]
        return max((rate for rate, ttft_s in rates if ttft_s <= self._slo.ttft_s), default=rates[0][0])

    def _read_s(self, tokens: float, prompt: float) -> float:
        """So many tokens, of prompts of that length, in batches as large as the engine takes."""
        cost, seconds = self._hardware.costs[PREFILL], 0.0
        most = max(self._hardware.limits.prefill_tokens, prompt)
        while tokens > 0:
            piece = min(tokens, most)
            seconds += cost.step_s(Batch(round(piece), piece * min(prompt, piece)))
            tokens -= piece
        return seconds

    def decode_rate(self, prompt: float, output: float) -> float:
        """Most requests per second of an engine whose steps keep the TPOT, by Little's law, in mid-answer."""
        context = prompt + output / 2
        room = self._hardware.kv_tokens.get(DECODE, math.inf)
        most = int(max(1, min(room / (prompt + output), MOST_ROWS, MOST_BATCH)))
        cost = self._hardware.costs[DECODE]
        rates = []
        for batch in range(1, most + 1):
            itl_s = cost.step_s(Batch(rows=batch, context=round(batch * context)))
            rates.append((batch / (output * itl_s), itl_s))
        return max((rate for rate, itl_s in rates if itl_s <= self._slo.tpot_s), default=rates[0][0])

    # --- the reactive loop ---

    def _reacted(self, now: Fleet, gauges: tuple[Gauge, ...]) -> Fleet:
        """One more or less of either role, by what waits for the engines, and no less than the latest interval said."""
        readers = [gauge for gauge in gauges if gauge.role == PREFILL]
        writers = [gauge for gauge in gauges if gauge.role == DECODE]
        assert self._bound is not None
        return Fleet(
            max(now.prefill + self._more_readers(readers), self._bound.prefill),
            max(now.decode + self._more_writers(writers), self._bound.decode),
        )

    def _more_readers(self, readers: list[Gauge]) -> int:
        """By the TTFT of the next prompt, of mean length, behind what waits."""
        prompt = max(self._prompt.predict(), 1.0) * (1 - self._hits)
        own_s, most_s = self._read_s(prompt, prompt), self._slo.ttft_s
        if not readers:
            return 0
        if all(self._read_s(one.waiting + prompt, prompt) > most_s for one in readers):
            return 1
        if len(readers) == 1 or own_s >= most_s:
            return 0
        share = len(readers) / (len(readers) - 1)
        slack_s = SAFE * (most_s - own_s)
        calm = all(self._read_s(one.waiting * share + prompt, prompt) - own_s < slack_s for one in readers)
        return -1 if calm else 0

    def _more_writers(self, writers: list[Gauge]) -> int:
        """By the time of a step with all that is there and waits for room."""
        if not writers:
            return 0
        if all(self._step_s(one, 1.0) > self._slo.tpot_s for one in writers):
            return 1
        if len(writers) == 1:
            return 0
        share = len(writers) / (len(writers) - 1)
        room = self._hardware.kv_tokens.get(DECODE, math.inf)
        fits = all((one.kv + one.queued_kv) * share < room for one in writers)
        return (
            -1 if fits and all(self._step_s(one, share) < SAFE * self._slo.tpot_s for one in writers) else 0
        )

    def _step_s(self, writer: Gauge, share: float) -> float:
        context = round((writer.kv + writer.queued_kv) * share)
        return self._hardware.costs[DECODE].step_s(Batch(rows=round(writer.rows * share), context=context))

    # --- both ---

    def _limited(self, fleet: Fleet, now: Fleet) -> Fleet:
        return Fleet(
            min(max(fleet.prefill, now.prefill - MOST_CHANGE, 1), now.prefill + MOST_CHANGE),
            min(max(fleet.decode, now.decode - MOST_CHANGE, 1), now.decode + MOST_CHANGE),
        )

    def _fitted(self, fleet: Fleet) -> Fleet:
        """Within the budget: both shrunk by the same factor, and one of each at least."""
        policy = self._policy
        held = policy.held(fleet)
        if held <= policy.budget:
            return fleet
        prefill = max(1, int(fleet.prefill * policy.budget / held))
        left = policy.budget - prefill * policy.size(PREFILL)
        return Fleet(prefill, max(1, min(fleet.decode, left // policy.size(DECODE))))

    def _actions(self, workers: tuple[Worker, ...], now: Fleet, target: Fleet) -> list[Action]:
        """Stops first; starts only as far as the budget goes while others drain."""
        actions: list[Action] = []
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
