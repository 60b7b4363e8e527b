"""Simulates a pipeline of stages step by step: each stage has its own queue, and rows go round the stages in a ring.

As in DistServe's simulator, decode rows move through the stages in groups. A stage runs all groups that wait for it as
one batch. A group is split only if a limit on the rows of one step requires it.
"""

from __future__ import annotations

from collections import deque

from planner.sim.fast.instance import (
    FastInstance,
    FastRequest,
    InstanceListener,
    prefill_batch,
    stage_times,
)
from planner.types import CostModel, StepBatch


class _RowGroup:
    """Rows that are always in the same step.

    `steps_done` counts the group's steps; `members` may include finished rows.
    """

    __slots__ = ("context", "due", "growth", "members", "rows", "steps_done")

    def __init__(self) -> None:
        self.rows = self.steps_done = 0
        # Tokens of context as their classes of KV make them cost, and by how many they grow with each step.
        self.context = self.growth = 0.0
        self.due: dict[int, list[FastRequest]] = {}
        self.members: list[FastRequest] = []

    def seat(self, request: FastRequest, steps: int) -> None:
        """Adds `request`, which needs `steps` more steps."""
        request.ends = self.steps_done + steps
        self.due.setdefault(request.ends, []).append(request)
        self.members.append(request)
        self.rows += 1
        self.context += (request.prompt + request.steps - steps) * request.work.context
        self.growth += request.work.context

    def step(self) -> list[FastRequest]:
        """Generates one token for each row; returns the requests that are finished by it, which leave the group."""
        self.steps_done += 1
        self.context += self.growth
        over = self.due.pop(self.steps_done, [])
        self.rows -= len(over)
        for request in over:
            self.context -= (request.prompt + request.steps) * request.work.context
            self.growth -= request.work.context
        if len(self.members) > 2 * self.rows + 8:
            self.members = self.present()
        return over

    def present(self) -> list[FastRequest]:
        """The members that are not finished."""
        return [request for request in self.members if request.ends > self.steps_done]

    def follow(self, other: _RowGroup) -> _RowGroup:
        """Joins the group and `other`, in this order; the smaller group is moved into the larger one."""
        if len(self.members) >= len(other.members):
            self._adopt(other, len(self.members))
            return self
        other._adopt(self, 0)
        return other

    def _adopt(self, group: _RowGroup, place: int) -> None:
        """Moves the rows of `group` into this group, at position `place`."""
        moved = group.present()
        for request in moved:
            request.ends += self.steps_done - group.steps_done
            self.due.setdefault(request.ends, []).append(request)
        self.members[place:place] = moved
        self.rows += group.rows
        self.context += group.context
        self.growth += group.growth

    def part(self, rows: float, tokens: float) -> tuple[_RowGroup, _RowGroup]:
        """Splits the group: the first members, at most `rows` with `tokens` of context after the step, and the rest."""
        front, rest = _RowGroup(), _RowGroup()
        into = front
        for request in self.present():
            left = request.ends - self.steps_done
            context = request.prompt + request.steps - left + 1
            if into is front and (front.rows + 1 > rows or front.context + front.rows + context > tokens):
                into = rest
            into.seat(request, left)
        return front, rest


class _PipelineStage:
    """A stage with the batches that wait for it."""

    __slots__ = ("decodes", "idle", "prefills", "rank")

    def __init__(self, rank: int) -> None:
        self.rank, self.idle = rank, True
        # Batches that come from the previous stage. The first stage takes prompts from the instance's queue instead.
        self.prefills: deque[list[FastRequest]] = deque()
        self.decodes: deque[_RowGroup] = deque()


class GroupedPipeline(FastInstance):
    """A ring of `stages` stages. Each runs a prefill batch if one waits, else the decode rows that wait for it."""

    def __init__(
        self, listener: InstanceListener, role: str, cost: CostModel, kv_tokens: float, stages: int
    ) -> None:
        super().__init__(listener, role, cost, kv_tokens)
        self._stages = [_PipelineStage(rank) for rank in range(stages)]
        # Number of requests that have a seat.
        self._rows = 0
        # Requests that wait for a seat.
        self._joins: deque[FastRequest] = deque()

    def wake(self) -> None:
        """Starts the first stage if it is idle and has work."""
        self._wake_stage(self._stages[0])

    def start_decode(self, request: FastRequest) -> None:
        """Lets `request` decode here as soon as a seat is free."""
        self._joins.append(request)
        self._fill_seats()

    def _fill_seats(self) -> None:
        """Gives free seats to waiting requests, first come first served."""
        joins, decodes, seats = self._joins, self._stages[0].decodes, self.listener.limits.decode_rows
        while joins and self._rows < seats:
            self._rows += 1
            request = joins.popleft()
            if not decodes or decodes[-1].steps_done:
                decodes.append(_RowGroup())
            decodes[-1].seat(request, request.steps)
            self.wake()

    def _wake_stage(self, stage: _PipelineStage) -> None:
        """Starts an idle stage after all other events of this moment."""
        if stage.idle:
            stage.idle = False
            self.clock.schedule_last(self._run_stage, stage)

    def _next_stage(self, stage: _PipelineStage) -> _PipelineStage:
        """The stage after this one; the first stage follows the last."""
        return self._stages[(stage.rank + 1) % len(self._stages)]

    def _stage_s(self, stage: _PipelineStage, batch: StepBatch) -> float:
        """Seconds of the batch in this stage."""
        return stage_times(self.cost, batch, len(self._stages))[1 if stage.rank else 0]

    def _run_stage(self, stage: _PipelineStage) -> None:
        """Starts the stage's next batch: a prefill batch if one waits, else decode rows; else the stage is idle."""
        now_s = self.clock.now_s
        if requests := self._next_prompts(stage):
            self.clock.schedule_at(
                now_s + self._stage_s(stage, prefill_batch(requests)), self._on_prefilled, (stage, requests)
            )
        elif stage.decodes:
            group = self._next_group(stage.decodes)
            work = StepBatch(0, 0.0, group.rows, group.context)
            self.clock.schedule_at(now_s + self._stage_s(stage, work), self._on_decoded, (stage, group))
        else:
            stage.idle = True

    def _next_prompts(self, stage: _PipelineStage) -> list[FastRequest]:
        """The next prefill batch of the stage; empty if none waits."""
        if not stage.rank:
            return self.take_batch() if self.queue else []
        return stage.prefills.popleft() if stage.prefills else []

    def _next_group(self, decodes: deque[_RowGroup]) -> _RowGroup:
        """Joins the groups that wait, in order, and splits off what exceeds the limits of a step."""
        limits = self.listener.limits
        group = decodes.popleft()
        while decodes:
            group = group.follow(decodes.popleft())
        if group.rows > limits.batch_rows or group.context + group.rows > limits.batch_tokens:
            group, rest = group.part(limits.batch_rows, limits.batch_tokens)
            decodes.append(rest)
        return group

    def _on_prefilled(self, what: tuple[_PipelineStage, list[FastRequest]]) -> None:
        """A prefill batch leaves a stage: it goes on to the next one, or is finished after the last."""
        stage, requests = what
        after = self._next_stage(stage)
        if after.rank:
            after.prefills.append(requests)
            self._wake_stage(after)
        else:
            self.finish_prefill(requests)
        self._run_stage(stage)

    def _on_decoded(self, what: tuple[_PipelineStage, _RowGroup]) -> None:
        """A group leaves a stage; after the last stage each of its rows has one more token."""
        stage, group = what
        after = self._next_stage(stage)
        if not after.rank:
            over = group.step()
            self._rows -= len(over)
            for request in over:
                self.listener.on_finished(request, self)
            self._fill_seats()
        if group.rows:
            after.decodes.append(group)
            self._wake_stage(after)
        self._run_stage(stage)
