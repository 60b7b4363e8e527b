"""Runs placements in the compiled fast simulator, where it knows all that they need (`planner.sim.fast.kernel`).

A run gives the results of `planner.sim.fast.cluster.simulate_fast` to the bit, as arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite
from typing import Any

from planner.costs.roofline import RooflineCost
from planner.costs.step import StepCost
from planner.sim.fast.instance import InstanceLimits
from planner.types import BOTH, DECODE, PREFILL, CostModel, InstancePool, Job, LinkSpec, Placement, StepBatch

# Most lines of a decode cost.
MAX_LINES = 4
# Where samples are shorter, Python is done before machine code would be loaded.
MIN_JOBS = 500
Array = Any


@dataclass(frozen=True, slots=True, eq=False)
class JobTable:
    """Jobs as arrays, in order of arrival, with the number of each job's kind in `kinds`."""

    at_s: Array
    prompt: Array
    output: Array
    kind: Array
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CompiledResults:
    """Moments of each request: arrival, begin of prefill, first token, room for KV, KV moved, end.

    `spare` is how many more requests of each kind might have missed their SLOs. If it is negative for one, the run
    ended early.
    """

    moments_s: Array
    spare: tuple[int, ...]

    @property
    def served_s(self) -> Array:
        """The moments of the requests that did not fail."""
        return self.moments_s[self.moments_s[:, 2] < inf]


@cache
def is_compiled() -> bool:
    """Whether machine code is on disk or can be stored there, so that not every process compiles it."""
    from diptych.kernels.cache import is_stored, machine_kernel_folder

    folder = machine_kernel_folder()
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0" or folder is None:
        return False
    if os.access(folder, os.W_OK):
        return True
    from planner.sim.fast import kernel

    return is_stored(kernel.run_all) and is_stored(kernel.fill_step_s)


def tabulate_jobs(jobs: Sequence[Job]) -> JobTable:
    """The table of jobs that are ordered by arrival."""
    import numpy as np

    kinds = tuple(sorted({job.kind for job in jobs}))
    numbers = {name: number for number, name in enumerate(kinds)}
    return JobTable(
        np.array([job.at_s for job in jobs]),
        np.array([job.prompt for job in jobs], np.int64),
        np.array([job.output for job in jobs], np.int64),
        np.array([numbers[job.kind] for job in jobs], np.int64),
        kinds,
    )


def cost_row(cost: Any) -> list[float] | None:
    """A row of the kernel's table of costs (`planner.sim.fast.kernel_data`); None for a cost that it does not know.

    It knows the two step costs, with constant seconds more for a step, and enlarged by factors.
    """
    more = 0.0, 1.0, 1.0
    if hasattr(cost, "prefill") and hasattr(cost, "cost"):
        more, cost = (1.0, cost.prefill, cost.decode), cost.cost
    extra_s = 0.0
    if hasattr(cost, "extra_s") and hasattr(cost, "cost"):
        extra_s, cost = cost.extra_s, cost.cost
    if isinstance(cost, RooflineCost):
        row = [1.0, extra_s, cost.pp, cost.hop_s, cost.fixed, cost.weights, cost.product, cost.logit]
        return [*row, cost.square, cost.context, cost.touch, 0.0, 0.0, 0.0, *more, *[0.0] * (3 * MAX_LINES)]
    if isinstance(cost, StepCost) and len(cost.decode) <= MAX_LINES:
        constant, token, square = cost.prefill
        lines = [number for line in cost.decode for number in line]
        row = [0.0, extra_s, cost.pp, cost.hop_s, constant, 0.0, token, 0.0, square, 0.0, 0.0]
        lines += [0.0] * (3 * MAX_LINES - len(lines))
        return [*row, cost.shared, cost.cross, len(cost.decode), *more, *lines]
    return None


def step_seconds(cost: CostModel, batches: Array, whole: bool = True) -> Array | None:
    """Seconds of each batch (prompt tokens, squares, rows, context), of all stages or of the slowest; None: unknown."""
    import numpy as np

    from planner.sim.fast import kernel

    if (row := cost_row(cost)) is None:
        return None
    took_s = np.empty(len(batches))
    kernel.fill_step_s(np.array(row, np.float64), batches, whole, took_s)
    return took_s


def compile_cluster(
    placement: Placement,
    costs: Callable[[InstancePool], CostModel],
    limits: InstanceLimits,
    kv_tokens: Callable[[InstancePool], float],
    link: LinkSpec,
    token_bytes: float,
) -> CompiledCluster | None:
    """The instances of a placement; None if the kernel does not know their roles, stages or costs."""
    if limits.first_again or limits.rotates_rows or not is_compiled():
        return None
    rows = [cost_row(costs(pool)) for pool in placement.pools]
    whole = not limits.chunk_tokens and any(pool.parallelism.pp > 1 for pool in placement.role(BOTH))
    if whole or None in rows:
        return None
    return CompiledCluster(placement, costs, limits, kv_tokens, link, token_bytes)


class CompiledCluster:
    """The instances of a placement; each run begins with them idle. See `compile_cluster`."""

    def __init__(
        self,
        placement: Placement,
        costs: Callable[[InstancePool], CostModel],
        limits: InstanceLimits,
        kv_tokens: Callable[[InstancePool], float],
        link: LinkSpec,
        token_bytes: float,
    ) -> None:
        import numpy as np

        from planner.sim.fast import kernel_data as data

        roles = (PREFILL, BOTH, DECODE)
        pools = [pool for role in roles for pool in placement.role(role) for _ in range(pool.count)]
        first_both = sum(pool.role == PREFILL for pool in pools)
        first_decode = sum(pool.role != DECODE for pool in pools)
        self._stages = max(pool.parallelism.pp for pool in pools)
        self._inst = np.zeros((len(pools), data.NUM_INST), np.int64)
        self._inst_s = np.zeros((len(pools), data.NUM_INST_S))
        self._costs = np.array([cost_row(costs(pool)) for pool in pools], np.float64)
        for pool, row, row_s in zip(pools, self._inst, self._inst_s, strict=True):
            cost = costs(pool)
            row[data.ROLE], row[data.STAGES] = roles.index(pool.role), pool.parallelism.pp
            row[data.PIPELINE] = pool.role == PREFILL and pool.parallelism.pp > 1
            row[[data.QUEUE, data.PULLS, data.JOINS]] = data.NONE
            row_s[[data.CAPACITY, data.FREE]] = kv_tokens(pool)
            row_s[data.TOKEN_S] = cost.step_s(StepBatch(512, 512.0 * 512.0)) / 512
            row_s[data.ROW_S] = cost.step_s(StepBatch(0, 0.0, 32, 32 * 512)) / 32
        self._limits = np.array(
            [
                *(limits.prefill_tokens, limits.decode_rows, limits.chunk_tokens, limits.step_s),
                *(limits.slice_tokens, link.bytes_per_s, link.latency_s, token_bytes),
            ]
        )
        self._now = np.array([0, 0, first_both, first_decode, len(pools), 0], np.int64)

    def run(
        self,
        jobs: JobTable,
        rate: float,
        warmup: int = 0,
        slos: Sequence[tuple[float, float]] = (),
        spare: Sequence[int] = (),
    ) -> CompiledResults:
        """Serves the jobs at `rate` times the speed at which they come.

        Args:
            warmup: how many of the first jobs may miss their SLOs.
            slos: limits of TTFT and TPOT of each kind; empty: none counts.
            spare: how many requests of each kind may miss them; with more the run ends at once.
        """
        import numpy as np

        from planner.sim.fast import kernel
        from planner.sim.fast import kernel_data as data

        count, room = len(jobs.at_s), 4 * len(jobs.at_s) + 1024
        at_s = jobs.at_s / rate
        order, bits = np.argsort(at_s, kind="stable"), max(1, count.bit_length())
        seats = int(self._limits[data.DECODE_ROWS]) if isfinite(self._limits[data.DECODE_ROWS]) else count
        while True:
            req, req_s = np.zeros((count, data.NUM_REQ), np.int64), np.zeros((count, data.NUM_REQ_S))
            req[:, data.PROMPT], req[:, data.OUTPUT_STEPS] = jobs.prompt, jobs.output - 1
            req[:, data.TOTAL], req[:, data.KIND] = jobs.prompt + jobs.output, jobs.kind
            req[:, [data.NEXT, data.SOURCE]] = data.NONE
            req[: warmup if slos else count, data.KIND] = data.NONE
            req_s[:, data.AT_S] = at_s
            limits, left = np.array(slos, np.float64).reshape(-1, 2), np.array(spare, np.int64)
            due = np.zeros((len(self._inst), max(1, min(seats, count))), np.int64)
            free_s, parts = np.zeros((len(self._inst), self._stages)), np.zeros((self._stages, 2))
            now, event_s, event = self._now.copy(), np.zeros(room), np.zeros((room, 4), np.int64)
            state = data.State(
                *(self._inst.copy(), self._inst_s.copy(), req, req_s, self._costs, self._limits, due),
                *(free_s, parts, now, np.zeros(1), event_s, event, limits, left),
            )
            kernel.run_all(state, order, bits)
            if now[data.STOP] != data.OVERFLOW:
                return CompiledResults(req_s, tuple(left.tolist()))
            room *= 4
