"""Stages that only read prompts: a batch enters as soon as the first stage is free, and they leave in order."""

from __future__ import annotations

from planner.des_base import Fleet, Instance, prompts, stage_times
from planner.terms import Cost


class Pipe(Instance):
    """Reads prompts with `stages` stages. A batch starts in a stage when both are done with what came before."""

    def __init__(self, fleet: Fleet, role: str, cost: Cost, kv_tokens: float, stages: int) -> None:
        super().__init__(fleet, role, cost, kv_tokens)
        self._free_s = [0.0] * stages
        self._busy = False

    def wake(self) -> None:
        if not self._busy:
            self._busy = True
            self.clock.soon(self._enter, None)

    def _enter(self, _: object) -> None:
        batch = self.take()
        self._busy = bool(batch)
        if not batch:
            return
        free_s, now_s = self._free_s, self.clock.now_s
        first_s, other_s = stage_times(self.cost, prompts(batch), len(free_s))
        for rank in range(len(free_s)):
            now_s = free_s[rank] = max(now_s, free_s[rank]) + (other_s if rank else first_s)
        self.clock.at(free_s[0], self._enter, None)
        self.clock.at(now_s, self.read, batch)
