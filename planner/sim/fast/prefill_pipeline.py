"""Simulates a prefill pipeline: a batch enters as soon as the first stage is free, and batches leave in order."""

from __future__ import annotations

from planner.sim.fast.instance import FastInstance, InstanceListener, prefill_batch, stage_times
from planner.types import CostModel


class PrefillPipeline(FastInstance):
    """Prefills in `stages` stages. A batch enters a stage when the batch and the stage are done with earlier work."""

    def __init__(
        self, listener: InstanceListener, role: str, cost: CostModel, kv_tokens: float, stages: int
    ) -> None:
        super().__init__(listener, role, cost, kv_tokens)
        self._free_s = [0.0] * stages
        self._busy = False

    def wake(self) -> None:
        """Lets a batch enter the first stage at the end of this moment, unless that is scheduled already."""
        if not self._busy:
            self._busy = True
            self.clock.schedule_last(self._enter, None)

    def _enter(self, _: object) -> None:
        """Takes a batch, computes when it leaves each stage, and schedules its end and the next batch."""
        requests = self.take_batch()
        self._busy = bool(requests)
        if not requests:
            return
        free_s, now_s = self._free_s, self.clock.now_s
        first_s, other_s = stage_times(self.cost, prefill_batch(requests), len(free_s))
        for rank in range(len(free_s)):
            now_s = free_s[rank] = max(now_s, free_s[rank]) + (other_s if rank else first_s)
        self.clock.schedule_at(free_s[0], self._enter, None)
        self.clock.schedule_at(now_s, self.finish_prefill, requests)
