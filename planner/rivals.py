"""Other ways to size a fleet, to compare with: a plan that never changes, and the rule of NVIDIA Dynamo's planner.

Dynamo 1.6's throughput loop (optimization target "sla"), from a reading of its source: every 180 s it forecasts the
requests, the mean prompt and the mean answer, each by itself; the capacity of an engine is the best rate among batches
of 1 to 128 whose bare pass keeps the objective; replicas are ceil(demand / capacity), at most 8 more or fewer at once,
at least one, and shrunk in proportion to fit the budget. Queueing, quantiles, transfers and role flips are not in it.
Its reactive loop is left out here. Own code from that description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from planner.decide import READY, STARTING, Action, Decision, Policy, Start, Stop, Worker, fleet_of
from planner.elastic import Hardware
from planner.known import Fleet
from planner.terms import DECODE, PREFILL, Batch, Slo

INTERVAL_S, MOST_CHANGE, MOST_BATCH, MOST_ROWS = 180.0, 8, 128, 256
PREFILL_BATCH_TOKENS = 8192  # longer batches are computed in pieces of as many tokens
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
    """`ceil(demand / capacity)` on means, every `INTERVAL_S`; starts and stops workers, and never flips one."""

    def __init__(
        self,
        hardware: Hardware,
        slo: Slo,
        policy: Policy,
        predictor: type[Kalman] | type[Constant] = Constant,
    ) -> None:
        self._hardware, self._slo, self._policy = hardware, slo, policy
        self._seen = _Interval()
        self._requests, self._prompt, self._output = predictor(), predictor(), predictor()
        self._hits = 0.0
        self._due_s = INTERVAL_S

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
        now = fleet_of(workers, READY, STARTING)
        if now_s < self._due_s:
            return Decision(now_s, "", now, now)
        self._due_s += INTERVAL_S
        seen, self._seen = self._seen, _Interval()
        if not seen.came or not seen.ended:
            return Decision(now_s, "", now, now)
        self._requests.observe(seen.came)
        self._prompt.observe(seen.prompts / seen.came)
        self._output.observe(seen.outputs / seen.ended)
        self._hits = min(seen.cached / seen.read, 0.95) if seen.read else 0.0
        target = self._fitted(self._limited(self._wanted(), now))
        return Decision(now_s, "interval", now, target, tuple(self._actions(workers, now, target)))

    def _wanted(self) -> Fleet:
        rate = self._requests.predict() / INTERVAL_S
        prompt, output = max(self._prompt.predict(), 1.0), max(self._output.predict(), 1.0)
        prefill = self.prefill_rate(prompt * (1 - self._hits))
        decode = self.decode_rate(prompt, output)
        return Fleet(max(1, math.ceil(rate / prefill)), max(1, math.ceil(rate / decode)))

    def prefill_rate(self, prompt: float) -> float:
        """Most requests per second of an engine whose bare pass keeps the TTFT; those of batch 1, if none does."""
        rates = [
            (batch / ttft_s, ttft_s)
            for batch in range(1, MOST_BATCH + 1)
            for ttft_s in (self._ttft(batch, prompt),)
        ]
        return max((rate for rate, ttft_s in rates if ttft_s <= self._slo.ttft_s), default=rates[0][0])

    def _ttft(self, batch: int, prompt: float) -> float:
        tokens, cost, seconds = batch * prompt, self._hardware.costs[PREFILL], 0.0
        while tokens > 0:
            piece = min(tokens, PREFILL_BATCH_TOKENS)
            seconds += cost.step_s(Batch(round(piece), piece * min(prompt, piece)))
            tokens -= piece
        return seconds

    def decode_rate(self, prompt: float, output: float) -> float:
        """Most requests per second of an engine whose steps keep the TPOT, by Little's law, in mid-answer."""
        context = prompt + output / 2
        room = self._hardware.kv_tokens.get(DECODE, math.inf)
        most = int(max(1, min(room / context, MOST_ROWS, MOST_BATCH)))
        cost = self._hardware.costs[DECODE]
        rates = []
        for batch in range(1, most + 1):
            itl_s = cost.step_s(Batch(rows=batch, context=round(batch * context)))
            rates.append((batch / (output * itl_s), itl_s))
        return max((rate for rate, itl_s in rates if itl_s <= self._slo.tpot_s), default=rates[0][0])

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
