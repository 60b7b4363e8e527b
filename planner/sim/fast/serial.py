"""Simulates an instance that runs one step after the other.

For speed, consecutive decode-only steps are simulated as one event, until a request joins or leaves.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil, inf, sqrt

from planner.sim.fast.instance import (
    FastInstance,
    FastRequest,
    FullPools,
    InstanceListener,
    prefill_batch,
)
from planner.types import PREFILL, CostModel, StepBatch

# If step times deviate from a straight line by at most this share, the steps are summed in closed form.
LINE_ERROR = 1e-6


class SerialInstance(FastInstance):
    """Prefills whole prompts first (or slices beside decode rows, with chunked prefill); else decodes a token per row.

    While no request joins, the context grows by one token per row and step. If step times then lie on a straight line,
    n steps are summed in closed form; an arrival cuts the sum after the current step. Each request is in the same steps
    as if every step were simulated.
    With several `stages`, a step has one part per stage and lasts as long as the longest part takes through all stages:
    rows are shared evenly, and each slice of a prompt is in one part. A request joins at the end of a step, or when a
    seat is free.
    """

    def __init__(
        self, listener: InstanceListener, role: str, cost: CostModel, kv_tokens: float, stages: int = 1
    ) -> None:
        super().__init__(listener, role, cost, kv_tokens)
        self._stages = stages
        # A heap of (step with which the request is finished, number of the request, request).
        self._due: list[tuple[int, int, FastRequest]] = []
        self._joins: deque[FastRequest] = deque()
        self._rows = self._step_number = 0
        # Tokens of context as their classes of KV make them cost, and by how many they grow with each step.
        self._context = self._growth = 0.0
        self._busy = False
        # The current run of decode steps, scheduled as one event: their number, their begin, the time of the first
        # step, and the growth of each further step.
        self._steps, self._began_s, self._step_s, self._slope_s = 0, 0.0, 0.0, 0.0
        # Number of the event that ends this run of steps. Earlier events are void.
        self._event = 0

    def wake(self) -> None:
        """A request has arrived: starts a step if idle, or ends a run of decode steps after the current step."""
        if not self._busy:
            self._busy = True
            self.clock.schedule_last(self._start_step, None)
        elif self._steps > 1:
            self._end_after_current_step()

    def start_decode(self, request: FastRequest) -> None:
        """`request` decodes here from the next step on, or as soon as a seat is free."""
        self._joins.append(request)
        if self._rows < self.listener.limits.decode_rows:
            self.wake()

    def _fill_seats(self) -> None:
        """Gives free seats to waiting requests, first come first served."""
        joins, seats = self._joins, self.listener.limits.decode_rows
        while joins and self._rows < seats:
            request = joins.popleft()
            request.ends = self._step_number + request.steps
            heappush(self._due, (request.ends, request.index, request))
            self._context += request.prompt * request.work.context
            self._growth += request.work.context
            self._rows += 1

    def _start_step(self, _: object) -> None:
        """Starts the next step: prefill if possible, else decode; else the instance is idle."""
        self._fill_seats()
        if self.queue and (
            self._start_mixed() if self.listener.limits.chunk_tokens else self._start_prefill()
        ):
            return
        if self._rows:
            self._start_decode()
        else:
            self._busy = False

    def _start_prefill(self) -> bool:
        """Starts a step that prefills whole prompts; False if none can begin."""
        requests = self.take_batch()
        if requests:
            self.clock.schedule_at(
                self.clock.now_s + self.cost.step_s(prefill_batch(requests)), self._on_prefilled, requests
            )
        return bool(requests)

    def _on_prefilled(self, requests: list[FastRequest]) -> None:
        """A prefill step has ended."""
        self.finish_prefill(requests)
        self._start_step(None)

    def _start_decode(self) -> None:
        """Starts as many decode steps as can be summed, at most until the first row is finished."""
        steps = self._due[0][0] - self._step_number
        self._step_s, self._slope_s = self._decode_s(0), 0.0
        if steps > 1:
            steps = self._linear_steps(steps)
        self._steps, self._began_s = steps, self.clock.now_s
        self._schedule_end(steps)

    def _decode_s(self, steps: int) -> float:
        """Seconds of the decode step that follows after `steps` further steps."""
        rows, context = self._rows, self._context + steps * self._growth
        if self._stages > 1:
            parts = min(self._stages, rows)
            rows, context = -(-rows // parts), context // parts
        return self.cost.step_s(StepBatch(0, 0.0, rows, context))

    def _linear_steps(self, steps: int) -> int:
        """How many steps, at most `steps`, have times on a straight line; sets the line's slope."""
        first_s = self._step_s
        # A cost can consist of several lines, so the middle of the range is compared too. If it deviates, the range
        # is halved.
        while True:
            last = steps - 1
            last_s = self._decode_s(last)
            self._slope_s = (last_s - first_s) / last
            if steps == 2:
                return steps
            middle = last // 2
            if abs(self._decode_s(middle) - first_s - self._slope_s * middle) <= LINE_ERROR * last_s:
                return steps
            steps = middle + 1 if middle > 1 else 2

    def _steps_seconds(self, steps: int) -> float:
        """Seconds of the first `steps` decode steps under way."""
        return steps * self._step_s + self._slope_s * (steps * (steps - 1) / 2)

    def _schedule_end(self, steps: int) -> None:
        """Schedules the end of the decode steps under way after `steps` of them."""
        self._event += 1
        self.clock.schedule_at(self._began_s + self._steps_seconds(steps), self._on_decoded, self._event)

    def _end_after_current_step(self) -> None:
        """Shortens the run of decode steps that is scheduled as one event, so that it ends with the current step.

        Called when a request arrives, which may join after the current step.
        """
        if self._step_s <= 0:
            # The steps take no time, so all of them end now.
            return
        # Solves `_steps_seconds(n) = passed_s` for n, rounded up: the number of the step that is under way.
        passed_s = self.clock.now_s - self._began_s
        base_s = self._step_s - self._slope_s / 2
        if self._slope_s > 1e-12 * self._step_s:
            root_s = sqrt(base_s * base_s + 2 * self._slope_s * passed_s)
            steps = max(1, ceil((root_s - base_s) / self._slope_s))
        else:
            steps = max(1, ceil(passed_s / self._step_s))
        while steps > 1 and self._began_s + self._steps_seconds(steps - 1) >= self.clock.now_s:
            # This corrects the rounding of the root.
            steps -= 1
        while self._began_s + self._steps_seconds(steps) < self.clock.now_s:
            steps += 1
        if steps < self._steps:
            self._steps = steps
            self._schedule_end(steps)

    def _on_decoded(self, event: int) -> None:
        """The decode steps under way have ended, unless `event` was replaced by a later one."""
        if event != self._event:
            return
        steps, self._steps = self._steps, 0
        self._advance_rows(steps)
        self._start_step(None)

    def _advance_rows(self, steps: int) -> None:
        """Adds the given number of tokens to every row; finished rows leave."""
        self._step_number += steps
        self._context += steps * self._growth
        while self._due and self._due[0][0] <= self._step_number:
            request = heappop(self._due)[2]
            self._rows -= 1
            self._context -= (request.prompt + request.steps) * request.work.context
            self._growth -= request.work.context
            if not self._rows:
                # What rounding has left.
                self._context = self._growth = 0.0
            self.listener.on_finished(request, self)

    def _start_mixed(self) -> bool:
        """Starts a step of all rows and slices of the first prompts; False if no prompt token fits."""
        budget = self._prompt_budget()
        # The part of each stage as (prompt tokens, these as they cost, sum of squares as they cost).
        parts = [(0, 0.0, 0.0)] * self._stages
        over, kept = list[FastRequest](), list[FastRequest]()
        queue, full = self.queue, FullPools(self)
        while queue and (least := min(parts))[0] < budget:
            request = queue[0]
            if not request.done:
                if request.pool in full or not self.can_begin(request):
                    if full.is_last(request):
                        break
                    # Its pool is full: those of other pools pass it by.
                    kept.append(queue.popleft())
                    continue
                self.begin_prompt(request)
            tokens, costing, squares = least
            cut = min(request.prompt - request.done, budget - tokens)
            end, work = request.done + cut, request.work
            squares += (end * end - request.done * request.done) * work.square
            parts[parts.index(least)] = tokens + cut, costing + cut * work.token, squares
            request.done = end
            (over if end == request.prompt else kept).append(queue.popleft())
        queue.extendleft(reversed(kept))
        times_s = [self._mixed_s(*part[1:]) for part in parts if part[0]]
        if times_s:
            self.clock.schedule_at(self.clock.now_s + max(times_s), self._on_mixed, over)
        return bool(times_s)

    def _mixed_s(self, tokens: float, squares: float) -> float:
        """Seconds of a part with `tokens` prompt tokens and its share of the rows, through all stages."""
        parts = max(1, min(self._stages, self._rows))
        return self.cost.step_s(StepBatch(tokens, squares, -(-self._rows // parts), self._context // parts))

    def _prompt_budget(self) -> int:
        """Prompt tokens for a part of the next step: the chunk less the rows, or less if the step were too long."""
        limits = self.listener.limits
        if self.role == PREFILL and limits.prefill_tokens < inf:
            return int(limits.prefill_tokens)
        most = max(limits.slice_tokens, limits.chunk_tokens - -(-self._rows // self._stages))
        if not self._rows or limits.step_s == inf or self._fits_step_limit(most):
            return most
        low = limits.slice_tokens
        while most - low > limits.slice_tokens:
            middle = (low + most) // 2
            low, most = (middle, most) if self._fits_step_limit(middle) else (low, middle)
        return low

    def _fits_step_limit(self, tokens: int) -> bool:
        """Whether a part with this many tokens of the first prompt stays within `step_s`."""
        done, work = self.queue[0].done, self.queue[0].work
        squares = float((done + tokens) ** 2 - done**2)
        return self._mixed_s(tokens * work.token, squares * work.square) <= self.listener.limits.step_s

    def _on_mixed(self, over: list[FastRequest]) -> None:
        """A mixed step has ended; `over` are the prompts whose prefill it completed."""
        if self._rows:
            self._advance_rows(1)
        self.finish_prefill(over)
        self._start_step(None)
