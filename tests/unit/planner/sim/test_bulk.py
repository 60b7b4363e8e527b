"""Bulk work in the exact simulator: the units of the product's engine, in what online requests leave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean

import pytest

from diptych.errors import ConfigError
from planner.sim.exact.bulk import SimBulkEngine, SimBulkSpec
from planner.sim.exact.engine import PipelineStages, SimEngine
from planner.sim.exact.simulate import ExactSimulation
from planner.types import BOTH, DECODE, PREFILL, Job, JobResult, KvKeep, Parallelism, Placement, StepBatch
from planner.workload.workload import Workload
from tests.unit.engine.bulk_bench import BASE_S, ROW_S, SLICE_S, TOKEN_S, BulkBench
from tests.unit.planner.sim.exact_samples import MACHINE, of, placed

LINES = SimBulkSpec(100, 20, 32, SLICE_S)
SPLIT, WHOLE = placed((PREFILL, 1), (DECODE, 1)), placed((BOTH, 1))


@dataclass(frozen=True)
class LinearCost:
    """The cost of the steps of `BulkBench`."""

    def step_s(self, batch: StepBatch) -> float:
        return BASE_S + ROW_S * batch.rows + TOKEN_S * batch.tokens

    stage_s = step_s


def jobs(rate: float, count: int = 40) -> list[Job]:
    return Workload.of([Job(0.0, 200, 30, "")]).sample(count, rate, 0, 1.0)


def run(
    placement: Placement, bulk: SimBulkSpec | None, rate: float = 5.0, slabs: int = 400
) -> tuple[ExactSimulation, list[JobResult]]:
    served: list[JobResult] = []
    what = of(placement, replace(MACHINE, kv_tokens=64 * slabs), bulk=bulk)
    made = ExactSimulation(what, served.append)
    made.run(jobs(rate))
    return made, sorted(served, key=lambda one: one.job.at_s)


def test_units_are_those_of_the_engine() -> None:
    """The same backlog on the real engine and on the simulated one: units take the same times, to the bit."""
    bench = BulkBench(num_slabs=200, max_num_seqs=64, caching=False)
    online = SimEngine(bench.scheduler.limits, PipelineStages(LinearCost(), 1, 0.0), False, False)
    twin, now_s, units = SimBulkEngine(online, LINES, lambda: True), 0.0, list[float]()
    made = 0
    for _ in range(120):
        while len(bench.bulk.scheduler) < LINES.lines:
            bench.add_bulk(f"b{made}", LINES.prompt, LINES.output)
            made += 1
        assert bench.unit()
        end_s = twin.begin_unit(now_s)
        assert end_s is not None
        units.append(end_s - now_s)
        now_s = end_s
        twin.end_unit(now_s)
    assert units == pytest.approx(bench.unit_s, abs=1e-12)
    assert max(units) <= SLICE_S
    assert twin.use.lines == sum(len(out) == LINES.output for out in bench.out.values()) > LINES.lines
    assert twin.use.tokens == sum(map(len, bench.out.values()))


@pytest.mark.parametrize("placement", [SPLIT, WHOLE], ids=["split", "whole"])
def test_without_an_slo_a_request_waits_for_one_unit_at_most(placement: Placement) -> None:
    alone, before = run(placement, None)
    made, served = run(placement, LINES)
    assert not alone.bulk_uses and len(made.bulk_uses) == 1
    use, span_s = made.bulk_uses[0], made.events.now_s - made.begun_s
    assert use.lines > 0 and 0.2 < use.seconds / span_s < 1 and use.preemptions == 0
    assert len(served) == len(before) and not any(one.failed for one in served)
    for one, other in zip(served, before, strict=True):
        assert one.ended_s <= other.ended_s + 3 * SLICE_S
    # Beside answers there is no unit, so that the time per token hardly changes.
    assert mean(one.tpot_s for one in served) < 1.25 * mean(one.tpot_s for one in before)


def test_with_slos_units_run_beside_answers_within_half_of_the_time_per_token() -> None:
    made, served = run(WHOLE, replace(LINES, tpot_s=0.05), rate=8.0)
    less, _ = run(WHOLE, LINES, rate=8.0)
    assert made.bulk_uses[0].tokens > less.bulk_uses[0].tokens
    assert max(one.tpot_s for one in served) < 0.05
    assert mean(one.tpot_s for one in served) > 1.5 * mean(one.tpot_s for one in run(WHOLE, None, 8.0)[1])


def test_memory_is_taken_back_and_only_lines_hold_some_at_the_end() -> None:
    made, served = run(WHOLE, LINES, rate=20.0, slabs=20)
    assert made.bulk_uses[0].preemptions > 0
    assert len(served) == 40 and not any(one.failed for one in served)
    (worker,) = made.gateways[0].workers.values()
    assert all(name.startswith("bulk-") for name in worker.engines[0].kv.owners())


def test_the_same_jobs_always_give_the_same_figures() -> None:
    first, second = (run(SPLIT, replace(LINES, tpot_s=0.04)) for _ in range(2))
    assert first[1] == second[1] and first[0].bulk_uses == second[0].bulk_uses


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="not simulated on pipelines"):
        ExactSimulation(of(placed((BOTH, 1), split=Parallelism(1, 2)), bulk=LINES), lambda _: None)
    with pytest.raises(ConfigError, match="not simulated beside eviction"):
        ExactSimulation(of(SPLIT, bulk=LINES, keep=KvKeep(0.95, 0.5)), lambda _: None)
    with pytest.raises(ConfigError, match="too long for an instance") as caught:
        run(WHOLE, replace(LINES, prompt=5000))
    assert "--bulk" in caught.value.fix and len(caught.value.lines()) <= 6
