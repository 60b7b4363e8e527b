"""Adapts an engine to the role that its worker takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from diptych.specs import WorkerSpec
from engine.loop import Engine
from engine.scheduling import saturation
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from worker.saturation_store import SaturationStore


class RoleTuning:
    """Adapts an engine to a role. A prefill worker limits its steps to the tokens that saturate the device.

    More tokens per step would only make other prompts wait. The number comes from `store`, or is measured with `clock`
    before the worker first serves as a prefill worker.
    """

    def __init__(
        self,
        engine: Engine,
        kv: KvAllocator | KvArenas,
        store: SaturationStore,
        clock: Callable[[], float],
    ) -> None:
        self.engine, self.kv, self._store, self._clock = engine, kv, store, clock
        self._saturation_tokens: int | None = None

    def tune_for(self, role: str) -> None:
        """Set the engine's limits for `role`.

        No sequence may run in the engine, and the pool needs slabs for one step.
        """
        limits, busy = self.engine.scheduler.limits, 0
        if role == "prefill":
            if self._saturation_tokens is None:
                self._saturation_tokens = self._store.read_tokens()
            if self._saturation_tokens is None:
                longest = min(limits.max_num_batched_tokens, limits.max_model_len)
                arena = self.kv.arena_of(limits.kv_classes[0])
                curve = saturation.measure_curve(self.engine.runner.run, arena, longest, self._clock)
                self._saturation_tokens = saturation.saturation_length(curve)
                self._store.write_tokens(self._saturation_tokens)
            busy = self._saturation_tokens
        self.engine.scheduler.limits = replace(limits, saturation_tokens=busy)


def choose_step_clock(spec: WorkerSpec) -> Callable[[], float]:
    """The clock that measures steps: the CPU time of the thread if one thread computes them, else wall-clock time.

    With CPU time, other programs on the machine do not distort the measurement.
    """
    return time.thread_time if computes_in_one_thread(spec) else time.monotonic


def computes_in_one_thread(spec: WorkerSpec) -> bool:
    """Whether the thread that runs a step computes all of it."""
    return spec.threads == spec.tp == spec.pp == 1
