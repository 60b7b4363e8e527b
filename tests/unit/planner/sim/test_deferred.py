"""The exact simulator with workers that cannot continue each other's answers: decode instances draw first tokens."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from planner.sim.exact.deployment import SimDeployment
from planner.sim.exact.simulate import ExactSimulation, simulate_exact
from planner.types import BOTH, DECODE, PREFILL, Job, JobResult, LinkSpec
from tests.unit.planner.sim.exact_samples import of, placed

FIRST = ("admission", "retry", "prefill_queue", "prefill", "deliver")
HANDOFF = ("decode_admission", "transfer", "first_decode")
JOBS = [Job(0.02 * number, 1 + 61 * number % 700, 1 + number % 40) for number in range(200)]


def limited(**rest: Any) -> SimDeployment:
    options: dict[str, Any] = {"link": LinkSpec(1e9, 1e-5), "token_bytes": 2048.0, "traits": ()} | rest
    return of(placed((PREFILL, 2), (DECODE, 2)), **options)


def by_job(results: list[JobResult]) -> list[JobResult]:
    return sorted(results, key=lambda one: one.job.at_s)


@pytest.mark.parametrize("caching", [False, True])
def test_all_parts_of_a_requests_time_sum_to_its_first_token(caching: bool) -> None:
    for served in simulate_exact(limited(prefix_caching=caching), JOBS):
        assert not served.failed
        deferred = served.job.output > 1
        assert all((name in served.parts) == deferred for name in HANDOFF)
        whole = sum(served.parts[name] for name in (*FIRST, *(HANDOFF if deferred else ())))
        assert whole == pytest.approx(served.ttft_s)


def test_steps_that_are_merged_are_the_same() -> None:
    one_by_one, merged = (simulate_exact(limited(), JOBS, skips=skips) for skips in (False, True))
    assert by_job(one_by_one) == by_job(merged)


def test_nothing_is_held_afterwards_and_every_request_ends_once() -> None:
    results: list[JobResult] = []
    run = ExactSimulation(limited(), results.append)
    run.run(JOBS)
    assert sorted(one.job.at_s for one in results) == [job.at_s for job in JOBS]
    for gateway in run.gateways:
        assert not gateway.relay.live and not len(gateway.relay.ledger) and not gateway.relay.late_messages
        for worker in gateway.workers.values():
            assert not worker.leases and all(engine.kv.used == 0 for engine in worker.engines)


def test_only_first_tokens_come_later_than_where_all_can_continue() -> None:
    """By the hand-off and one step; the ends of answers hardly do, since no token more is drawn."""
    jobs = [replace(job, at_s=job.at_s * 20) for job in JOBS if job.output > 1]
    plain, deferred = (by_job(simulate_exact(limited(**rest), jobs)) for rest in ({"traits": ("seed",)}, {}))
    assert mean(one.ttft_s for one in deferred) > mean(one.ttft_s for one in plain)
    for before, after in zip(plain, deferred, strict=True):
        late_s = sum(after.parts[name] for name in HANDOFF)
        assert after.ttft_s == pytest.approx(before.ttft_s + late_s, rel=0.2)
        assert after.moved_bytes == before.moved_bytes


def test_an_instance_that_does_both_is_as_it_was() -> None:
    results = [
        by_job(simulate_exact(of(placed((BOTH, 2)), traits=traits), JOBS)) for traits in ((), ("seed",))
    ]
    assert results[0] == results[1]
