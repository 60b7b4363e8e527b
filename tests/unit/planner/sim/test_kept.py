"""Requests that evict KV in both simulators: what is moved and held is what is kept, and decisions take time."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from statistics import fmean
from typing import Any

import pytest

from planner.costs.kv.eviction import DecidingCost
from planner.sim.exact.deployment import InstanceSpec, SimDeployment
from planner.sim.exact.simulate import simulate_exact
from planner.sim.fast.cluster import simulate_fast
from planner.sim.fast.instance import InstanceLimits
from planner.types import (
    BOTH,
    InstancePool,
    Job,
    JobResult,
    KvClassWork,
    KvKeep,
    LinkSpec,
    Parallelism,
    Placement,
)
from tests.unit.planner.sim.class_samples import CLASSES, COST, PAIR
from tests.unit.planner.sim.fast_samples import jobs

KEEP = KvKeep(0.95, 0.3, 2e-6, 1e-6, KvClassWork(context=0.4))
COLOCATED = Placement((InstancePool(BOTH, Parallelism(), 2),))
TOKEN_BYTES = 700.0


def exact(
    placement: Placement, asked: list[Job], keep: KvKeep | None, room: int = 40_000, **rest: Any
) -> list[JobResult]:
    machines = tuple(InstanceSpec(COST, room) for _ in placement.pools)
    deployment = SimDeployment(placement, machines, token_bytes=TOKEN_BYTES, keep=keep, **rest)
    return sorted(simulate_exact(deployment, asked), key=lambda one: one.job.at_s)


def fast(
    placement: Placement, asked: list[Job], keep: KvKeep | None, room: float = 40_000
) -> list[JobResult]:
    cost = COST if keep is None else DecidingCost(COST, keep)
    return simulate_fast(
        placement, lambda pool: cost, asked, kv_tokens=lambda pool: room, token_bytes=TOKEN_BYTES, keep=keep,
        limits=InstanceLimits(chunk_tokens=2048),
    )  # fmt: skip


def asked(count: int = 150) -> list[Job]:
    return [
        replace(job, prompt=min(job.prompt, 900), output=min(job.output, 300)) for job in jobs(count, 6.0, 1)
    ]


@pytest.mark.parametrize("placement", [PAIR, COLOCATED], ids=str)
def test_the_simulators_agree(placement: Placement) -> None:
    quick, real = fast(placement, asked(), KEEP), exact(placement, asked(), KEEP)
    assert not [one for one in (*quick, *real) if one.failed]
    for times in (lambda one: one.ttft_s, lambda one: one.tpot_s):
        assert fmean(map(times, quick)) == pytest.approx(fmean(map(times, real)), rel=0.06)
    assert sorted(one.moved_bytes for one in quick) == sorted(one.moved_bytes for one in real)


def test_what_moves_is_what_is_kept_in_whole_chunks() -> None:
    for one in exact(PAIR, asked(40), KEEP):
        chunks = ceil((0.3 * one.job.prompt + 9) / 64)
        assert one.moved_bytes == (chunks * 64 * TOKEN_BYTES if one.job.output > 1 else 0)


def test_an_instance_holds_more_requests_at_once() -> None:
    """With room for two whole ones, requests do not wait for memory any more; one that is held whole does."""
    together = [Job(0.001 * number, 600, 200) for number in range(8)]
    whole, kept = (
        [one.ended_s for one in exact(PAIR, together, keep, 64 * 28)]
        for keep in (None, replace(KEEP, share=0.05))
    )
    assert max(kept) < 0.8 * max(whole)
    whole, kept = ([one.ended_s for one in fast(PAIR, together, keep, 64 * 28)] for keep in (None, KEEP))
    assert max(kept) < 0.8 * max(whole)


def test_decisions_take_the_time_that_was_measured() -> None:
    [plain], [slow] = (
        exact(PAIR, [Job(0.0, 500, 130)], replace(KEEP, prompt_s=prompt, answer_s=answer))
        for prompt, answer in ((0.0, 0.0), (1e-4, 1e-5))
    )
    assert slow.ttft_s - plain.ttft_s == pytest.approx(500 * 1e-4)
    # At the end of the prompt, and when 64 and 128 tokens of the answer have their KV.
    assert slow.ended_s - plain.ended_s == pytest.approx(500 * 1e-4 + (564 + 628) * 1e-5)


def test_a_step_on_kept_kv_costs_less() -> None:
    [whole], [kept] = (
        exact(PAIR, [Job(0.0, 900, 60)], keep) for keep in (None, replace(KEEP, prompt_s=0, answer_s=0))
    )
    assert kept.tpot_s < whole.tpot_s
    heavy = replace(KEEP, work=KvClassWork(token=2.0))
    [slow] = exact(PAIR, [Job(0.0, 900, 60)], heavy)
    assert slow.ttft_s > 1.5 * whole.ttft_s


def test_several_classes_at_once_are_refused() -> None:
    machines = tuple(InstanceSpec(COST, 4000) for _ in PAIR.pools)
    with pytest.raises(ValueError, match="one KV class"):
        simulate_exact(
            SimDeployment(PAIR, machines, kv_classes=CLASSES, keep=KEEP, link=LinkSpec()), [Job(0, 9, 9)]
        )
