"""An instance of several stages, step by step: each stage has its own queue, and the last hands back to the first.

As in the paper's simulator, rows that decode go round in groups: a stage takes all groups that wait for it as one, and
a group is never parted, unless a limit on what one step decodes says so.
"""

from __future__ import annotations

from collections import deque

from planner.des_base import Fleet, Instance, Run, prompts, stage_times
from planner.terms import Batch, Cost


class _Group:
    """Rows that take each step together. `members` are in order of their turn; some of them may be gone."""

    __slots__ = ("context", "due", "members", "rows", "turn")

    def __init__(self) -> None:
        self.rows = self.context = self.turn = 0
        self.due: dict[int, list[Run]] = {}
        self.members: list[Run] = []

    def seat(self, run: Run, steps: int) -> None:
        """`run`, with so many steps to go."""
        run.ends = self.turn + steps
        self.due.setdefault(run.ends, []).append(run)
        self.members.append(run)
        self.rows += 1
        self.context += run.prompt + run.steps - steps

    def step(self) -> list[Run]:
        """One token for each row; who has all of its own, and is gone."""
        self.turn += 1
        self.context += self.rows
        over = self.due.pop(self.turn, [])
        self.rows -= len(over)
        for run in over:
            self.context -= run.prompt + run.steps
        if len(self.members) > 2 * self.rows + 8:
            self.members = self.present()
        return over

    def present(self) -> list[Run]:
        return [run for run in self.members if run.ends > self.turn]

    def follow(self, other: _Group) -> _Group:
        """This group and, behind it, `other`, as one; the smaller moves over to the larger."""
        if len(self.members) >= len(other.members):
            self._adopt(other, len(self.members))
            return self
        other._adopt(self, 0)
        return other

    def _adopt(self, gone: _Group, place: int) -> None:
        moved = gone.present()
        for run in moved:
            run.ends += self.turn - gone.turn
            self.due.setdefault(run.ends, []).append(run)
        self.members[place:place] = moved
        self.rows += gone.rows
        self.context += gone.context

    def part(self, rows: float, tokens: float) -> tuple[_Group, _Group]:
        """The first members, at most `rows` with `tokens` of context after their step; and the others."""
        front, rest = _Group(), _Group()
        into = front
        for run in self.present():
            left = run.ends - self.turn
            context = run.prompt + run.steps - left + 1
            if into is front and (front.rows + 1 > rows or front.context + front.rows + context > tokens):
                into = rest
            into.seat(run, left)
        return front, rest


class _Stage:
    __slots__ = ("decodes", "idle", "prefills", "rank")

    def __init__(self, rank: int) -> None:
        self.rank, self.idle = rank, True
        self.prefills: deque[list[Run]] = (
            deque()
        )  # batches from the stage before; the first stage has a queue instead
        self.decodes: deque[_Group] = deque()


class Ring(Instance):
    """`stages` in a ring. Each takes a batch of prompts if it has one, else the rows that wait for it."""

    def __init__(self, fleet: Fleet, role: str, cost: Cost, kv_tokens: float, stages: int) -> None:
        super().__init__(fleet, role, cost, kv_tokens)
        self._stages = [_Stage(rank) for rank in range(stages)]
        self._rows = 0  # that have a seat
        self._joins: deque[Run] = deque()  # that have none yet

    def wake(self) -> None:
        self._rouse(self._stages[0])

    def join(self, run: Run) -> None:
        self._joins.append(run)
        self._sit()

    def _sit(self) -> None:
        """Who waits for a seat takes one, first come first served."""
        joins, decodes, seats = self._joins, self._stages[0].decodes, self.fleet.limits.decode_rows
        while joins and self._rows < seats:
            self._rows += 1
            run = joins.popleft()
            if not decodes or decodes[-1].turn:
                decodes.append(_Group())
            decodes[-1].seat(run, run.steps)
            self.wake()

    def _rouse(self, stage: _Stage) -> None:
        if stage.idle:
            stage.idle = False
            self.clock.soon(self._next, stage)

    def _after(self, stage: _Stage) -> _Stage:
        return self._stages[(stage.rank + 1) % len(self._stages)]

    def _stage_s(self, stage: _Stage, batch: Batch) -> float:
        return stage_times(self.cost, batch, len(self._stages))[1 if stage.rank else 0]

    def _next(self, stage: _Stage) -> None:
        now_s = self.clock.now_s
        if batch := self._prompts(stage):
            self.clock.at(now_s + self._stage_s(stage, prompts(batch)), self._read, (stage, batch))
        elif stage.decodes:
            group = self._group(stage.decodes)
            work = Batch(0, 0.0, group.rows, group.context)
            self.clock.at(now_s + self._stage_s(stage, work), self._decoded, (stage, group))
        else:
            stage.idle = True

    def _prompts(self, stage: _Stage) -> list[Run]:
        if not stage.rank:
            return self.take() if self.queue else []
        return stage.prefills.popleft() if stage.prefills else []

    def _group(self, decodes: deque[_Group]) -> _Group:
        """All that wait, in order, as far as the limits go."""
        limits = self.fleet.limits
        group = decodes.popleft()
        while decodes:
            group = group.follow(decodes.popleft())
        if group.rows > limits.turn_rows or group.context + group.rows > limits.turn_tokens:
            group, rest = group.part(limits.turn_rows, limits.turn_tokens)
            decodes.append(rest)
        return group

    def _read(self, what: tuple[_Stage, list[Run]]) -> None:
        stage, batch = what
        after = self._after(stage)
        if after.rank:
            after.prefills.append(batch)
            self._rouse(after)
        else:
            self.read(batch)
        self._next(stage)

    def _decoded(self, what: tuple[_Stage, _Group]) -> None:
        stage, group = what
        after = self._after(stage)
        if not after.rank:
            over = group.step()
            self._rows -= len(over)
            for run in over:
                self.fleet.finished(run, self)
            self._sit()
        if group.rows:
            after.decodes.append(group)
            self._rouse(after)
        self._next(stage)
