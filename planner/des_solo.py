"""An instance whose steps follow each other; those that only decode are taken together until somebody comes or goes."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil, inf, sqrt

from planner.des_base import Fleet, Instance, Run, prompts
from planner.terms import PREFILL, Batch, Cost

LINE_ERROR = 1e-6  # relative, of a step's time: what may be off a straight line and still be summed as one


class Solo(Instance):
    """Prompts first, whole (or in slices beside the rows that decode, if the limits say so); else one token a row.

    While rows decode and nobody comes, their context grows by one each step. Where the cost of that is a straight line,
    n steps are summed in closed form; whoever comes in between cuts the sum at the end of the step under way. The same
    requests are in the same steps as if each were taken alone.

    With several `stages`, a step has as many parts, one in each stage, and lasts as long as the longest takes through
    all stages: rows are shared evenly, and what is read of a prompt in a step is in one part. Who joins waits for the
    end of such a step; and while all seats are taken, until somebody ends.
    """

    def __init__(self, fleet: Fleet, role: str, cost: Cost, kv_tokens: float, stages: int = 1) -> None:
        super().__init__(fleet, role, cost, kv_tokens)
        self._stages = stages
        self._due: list[tuple[int, int, Run]] = []  # a heap: by the turn that is their last
        self._joins: deque[Run] = deque()
        self._rows = self._context = self._turn = 0
        self._busy = False
        # Steps of decoding under way: how many, from when, the first one's time and by what each next is longer.
        self._steps, self._began_s, self._step_s, self._slope_s = 0, 0.0, 0.0, 0.0
        self._event = 0  # the number of the event that ends them

    def wake(self) -> None:
        if not self._busy:
            self._busy = True
            self.clock.soon(self._start, None)
        elif self._steps > 1:
            self._cut()

    def join(self, run: Run) -> None:
        self._joins.append(run)
        if self._rows < self.fleet.limits.decode_rows:
            self.wake()

    def _sit(self) -> None:
        """Who waits for a seat takes one, first come first served."""
        joins, seats = self._joins, self.fleet.limits.decode_rows
        while joins and self._rows < seats:
            run = joins.popleft()
            run.ends = self._turn + run.steps
            heappush(self._due, (run.ends, run.index, run))
            self._context += run.prompt
            self._rows += 1

    def _start(self, _: object) -> None:
        self._sit()
        if self.queue and (self._mix() if self.fleet.limits.chunk_tokens else self._prefill()):
            return
        if self._rows:
            self._decode()
        else:
            self._busy = False

    def _prefill(self) -> bool:
        batch = self.take()
        if batch:
            self.clock.at(self.clock.now_s + self.cost.step_s(prompts(batch)), self._read, batch)
        return bool(batch)

    def _read(self, batch: list[Run]) -> None:
        self.read(batch)
        self._start(None)

    def _decode(self) -> None:
        steps = self._due[0][0] - self._turn
        self._step_s, self._slope_s = self._decode_s(0), 0.0
        if steps > 1:
            steps = self._straight(steps)
        self._steps, self._began_s = steps, self.clock.now_s
        self._until(steps)

    def _decode_s(self, steps: int) -> float:
        """The seconds of the step after so many."""
        rows, context = self._rows, self._context + steps * self._rows
        if self._stages > 1:
            parts = min(self._stages, rows)
            rows, context = -(-rows // parts), context // parts
        return self.cost.step_s(Batch(0, 0.0, rows, context))

    def _straight(self, steps: int) -> int:
        """The steps, at most `steps`, whose times are on a line; sets the line's slope."""
        first_s = self._step_s
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

    def _after(self, steps: int) -> float:
        """The seconds that so many of the steps under way take."""
        return steps * self._step_s + self._slope_s * (steps * (steps - 1) / 2)

    def _until(self, steps: int) -> None:
        self._event += 1
        self.clock.at(self._began_s + self._after(steps), self._decoded, self._event)

    def _cut(self) -> None:
        """Ends the steps under way with the one that is on, or that ends now."""
        if self._step_s <= 0:
            return  # all of them end now
        passed_s = self.clock.now_s - self._began_s
        base_s = self._step_s - self._slope_s / 2
        if self._slope_s > 1e-12 * self._step_s:
            root_s = sqrt(base_s * base_s + 2 * self._slope_s * passed_s)
            steps = max(1, ceil((root_s - base_s) / self._slope_s))
        else:
            steps = max(1, ceil(passed_s / self._step_s))
        while steps > 1 and self._began_s + self._after(steps - 1) >= self.clock.now_s:
            steps -= 1  # the root is not exact to the last bit
        while self._began_s + self._after(steps) < self.clock.now_s:
            steps += 1
        if steps < self._steps:
            self._steps = steps
            self._until(steps)

    def _decoded(self, event: int) -> None:
        if event != self._event:
            return
        steps, self._steps = self._steps, 0
        self._stepped(steps)
        self._start(None)

    def _stepped(self, steps: int) -> None:
        """Every row has so many tokens more; those that have all of theirs leave."""
        self._turn += steps
        self._context += steps * self._rows
        while self._due and self._due[0][0] <= self._turn:
            run = heappop(self._due)[2]
            self._rows -= 1
            self._context -= run.prompt + run.steps
            self.fleet.finished(run, self)

    def _mix(self) -> bool:
        """A step of all rows and slices of the prompts in front, if there is room for any."""
        budget = self._budget()
        parts = [(0, 0.0)] * self._stages  # tokens and squares of each
        over, kept = list[Run](), list[Run]()
        queue = self.queue
        while queue and (least := min(parts))[0] < budget:
            run = queue[0]
            if not run.done:
                if not self.takes(run):
                    break
                self.admit(run)
            tokens, squares = least
            cut = min(run.prompt - run.done, budget - tokens)
            end = run.done + cut
            parts[parts.index(least)] = tokens + cut, squares + (end * end - run.done * run.done)
            run.done = end
            (over if end == run.prompt else kept).append(queue.popleft())
        queue.extendleft(reversed(kept))
        times_s = [self._mixed_s(*part) for part in parts if part[0]]
        if times_s:
            self.clock.at(self.clock.now_s + max(times_s), self._mixed, over)
        return bool(times_s)

    def _mixed_s(self, tokens: int, squares: float) -> float:
        """Seconds of a part that reads so much: it goes through all stages before its next step begins."""
        parts = max(1, min(self._stages, self._rows))
        return self.cost.step_s(Batch(tokens, squares, -(-self._rows // parts), self._context // parts))

    def _budget(self) -> int:
        """Tokens of prompts in a part's next step: the chunk, less the rows, and less what would make it too long."""
        limits = self.fleet.limits
        if self.role == PREFILL and limits.prefill_tokens < inf:
            return int(limits.prefill_tokens)
        most = max(limits.slice_tokens, limits.chunk_tokens - -(-self._rows // self._stages))
        if not self._rows or limits.step_s == inf or self._fits(most):
            return most
        low = limits.slice_tokens
        while most - low > limits.slice_tokens:
            middle = (low + most) // 2
            low, most = (middle, most) if self._fits(middle) else (low, middle)
        return low

    def _fits(self, tokens: int) -> bool:
        done = self.queue[0].done
        return self._mixed_s(tokens, float((done + tokens) ** 2 - done**2)) <= self.fleet.limits.step_s

    def _mixed(self, over: list[Run]) -> None:
        if self._rows:
            self._stepped(1)
        self.read(over)
        self._start(None)
