"""The fast simulator: steps taken together are the steps one by one, and memory, links and queues hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import fmean

import pytest

from planner.sim.exact import simulate
from planner.sim.exact.deployment import InstanceSpec, SimDeployment
from planner.sim.fast import cluster
from planner.sim.fast.instance import InstanceLimits
from planner.sim.fast.serial import SerialInstance
from planner.types import (
    BOTH,
    DECODE,
    PREFILL,
    CostModel,
    InstancePool,
    Job,
    JobResult,
    LinkSpec,
    Parallelism,
    Placement,
    StepBatch,
)
from tests.unit.planner.sim.fast_samples import ODD, apart, jobs

ONE_EACH = Placement((InstancePool(PREFILL, Parallelism()), InstancePool(DECODE, Parallelism())))
COLOCATED = Placement((InstancePool(BOTH, Parallelism(), 2),))
TWO_THREE = Placement((InstancePool(PREFILL, Parallelism(), 2), InstancePool(DECODE, Parallelism(), 3)))
HYBRID = Placement(
    (
        InstancePool(BOTH, Parallelism()),
        InstancePool(PREFILL, Parallelism()),
        InstancePool(DECODE, Parallelism()),
    )
)


@dataclass(frozen=True)
class Lines:
    """Straight lines: 10 ms and 0.1 ms a token to read; 20 ms, 0.5 µs a token of context and 0.1 ms a row to write."""

    pp: int = 1
    bend: float = 0.0  # of a decode step's time over its context

    def step_s(self, batch: StepBatch) -> float:
        read = 0.010137 + 1.0171e-4 * batch.tokens + 1.0133e-9 * batch.squares if batch.tokens else 0.0
        write = 0.020119 + 5.0311e-7 * batch.context + 1.0093e-4 * batch.rows if batch.rows else 0.0
        return max(read, write) + min(read, write) / 2 + self.bend * sqrt(batch.context)

    def stage_s(self, batch: StepBatch) -> float:
        return self.step_s(batch) / self.pp


def cost(pool: InstancePool) -> CostModel:
    return Lines(pool.parallelism.pp)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [2.0, 12.0, 60.0])
@pytest.mark.parametrize("placement", [ONE_EACH, COLOCATED, TWO_THREE, HYBRID])
def test_steps_together_are_the_steps_one_by_one(placement: Placement, rate: float, seed: int) -> None:
    asked = jobs(80, rate, seed)
    room: Callable[[InstancePool], float] = lambda pool: 4000.0  # noqa: E731
    for kv_tokens, link in ((None, LinkSpec()), (room, ODD)):
        together, single = (
            cluster.simulate_fast(
                placement, cost, asked, kv_tokens=kv_tokens, link=link, token_bytes=1e5, single=single
            )
            for single in (False, True)
        )
        assert apart(together, single) < 1e-9


@pytest.mark.parametrize("rate", [3.0, 30.0])
@pytest.mark.parametrize(
    "limits",
    [
        InstanceLimits(decode_rows=3),
        InstanceLimits(decode_rows=3, chunk_tokens=256),
        InstanceLimits(200, 6, 256, 0.04),
    ],
    ids=["whole", "cut", "cut, within a time"],
)
@pytest.mark.parametrize("placement", [ONE_EACH, COLOCATED, TWO_THREE, HYBRID])
def test_steps_together_are_the_steps_one_by_one_where_seats_are_few(
    placement: Placement, limits: InstanceLimits, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = jobs(60, rate)

    def fared(single: bool = False) -> list[JobResult]:
        return cluster.simulate_fast(
            placement, cost, asked, limits=limits, kv_tokens=lambda pool: 6000.0, link=ODD, token_bytes=1e5,
            single=single,
        )  # fmt: skip

    together = fared()
    assert apart(together, fared(single=True)) < 1e-9
    monkeypatch.setattr(SerialInstance, "_linear_steps", lambda solo, steps: 1)
    assert apart(together, fared()) < 1e-9


def test_a_cost_that_is_no_straight_line_is_summed_piece_by_piece() -> None:
    asked = jobs(60, 4.0, output=800)
    together, single = (
        cluster.simulate_fast(ONE_EACH, lambda pool: Lines(bend=2e-4), asked, single=single)
        for single in (False, True)
    )
    assert fmean(one.tpot_s for one in single) > 0.03
    assert apart(together, single) < 1e-3


def test_the_same_question_has_the_same_answer() -> None:
    assert cluster.simulate_fast(ONE_EACH, cost, jobs(50, 9.0)) == cluster.simulate_fast(
        ONE_EACH, cost, jobs(50, 9.0)
    )


def test_jobs_are_answered_in_their_order_whenever_they_come() -> None:
    asked = list(reversed(jobs(30, 9.0)))
    assert [one.job for one in cluster.simulate_fast(ONE_EACH, cost, asked)] == asked


def test_one_request_alone_takes_what_its_steps_cost() -> None:
    (one,) = cluster.simulate_fast(ONE_EACH, cost, [Job(3.0, 500, 4)])
    read_s = Lines().step_s(StepBatch(500, 500.0**2))
    steps_s = [Lines().step_s(StepBatch(0, 0.0, 1, context)) for context in (500, 501, 502)]
    assert one.ttft_s == pytest.approx(read_s)
    assert one.tpot_s == pytest.approx(fmean(steps_s))
    assert one.ended_s == pytest.approx(3.0 + read_s + sum(steps_s))
    assert sum(one.parts.values()) == pytest.approx(one.ended_s - 3.0)


def test_parts_add_up_to_the_whole() -> None:
    served = cluster.simulate_fast(
        ONE_EACH,
        cost,
        jobs(100, 9.0),
        kv_tokens=lambda pool: 3000.0,
        link=LinkSpec(1e9, 0.002),
        token_bytes=1e5,
    )
    assert all(sum(one.parts.values()) == pytest.approx(one.ended_s - one.job.at_s) for one in served)
    assert max(one.parts["wait"] for one in served) > 0 < min(one.parts["prefill"] for one in served)


def test_an_answer_of_one_token_is_never_moved() -> None:
    served = cluster.simulate_fast(ONE_EACH, cost, [Job(0.0, 100, 1)], link=LinkSpec(1.0), token_bytes=1e9)
    assert (served[0].tpot_s, served[0].parts["transfer"]) == (0.0, 0.0)


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_a_phase_can_be_simulated_by_itself(role: str) -> None:
    served = cluster.simulate_fast(
        Placement((InstancePool(role, Parallelism()),)), cost, jobs(50, 5.0, output=50)
    )
    assert all((one.ttft_s == 0.0) == (role == DECODE) for one in served)
    assert all(one.tpot_s == 0.0 for one in served) == (role == PREFILL)


# ---- memory


class Watched:
    """A cost that notes how many tokens of KV each step of decoding stands on."""

    def __init__(self) -> None:
        self.most = 0.0

    def step_s(self, batch: StepBatch) -> float:
        self.most = max(self.most, batch.context + batch.rows)
        return Lines().step_s(batch)

    stage_s = step_s


@pytest.mark.parametrize("placement", [ONE_EACH, Placement((InstancePool(BOTH, Parallelism()),))])
def test_kv_never_grows_over_what_there_is(placement: Placement) -> None:
    watched = Watched()
    served = cluster.simulate_fast(
        placement,
        lambda pool: Lines() if pool.role == PREFILL else watched,
        jobs(150, 30.0),
        kv_tokens=lambda pool: 2500.0,
    )
    asked_alone = 32 * 512 + 32  # what an instance asks to learn its own speed
    assert all(not one.failed for one in served)
    assert watched.most <= asked_alone
    unlimited = cluster.simulate_fast(placement, cost, jobs(150, 30.0))
    assert max(one.ended_s for one in served) > max(one.ended_s for one in unlimited)


def test_prompts_wait_while_their_room_is_held_by_kv_not_yet_pulled() -> None:
    burst = [Job(0.0, 400, 200) for _ in range(8)]
    tight = cluster.simulate_fast(
        ONE_EACH, cost, burst, kv_tokens=lambda pool: 1200.0 if pool.role == PREFILL else 600.0
    )
    ample = cluster.simulate_fast(
        ONE_EACH, cost, burst, kv_tokens=lambda pool: inf if pool.role == PREFILL else 600.0
    )
    assert max(one.ttft_s for one in ample) < 0.5 < max(one.ttft_s for one in tight)


@pytest.mark.parametrize("placement", [ONE_EACH, COLOCATED])
def test_what_fits_nowhere_fails_and_harms_nobody(placement: Placement) -> None:
    asked = [Job(0.0, 100, 10), Job(0.1, 990, 20), Job(0.2, 100, 10)]
    served = cluster.simulate_fast(placement, cost, asked, kv_tokens={Parallelism(): 1000.0})
    assert [one.failed for one in served] == ["", "kv", ""]
    assert served[1].ttft_s == inf


def test_a_large_request_goes_where_it_fits() -> None:
    placement = Placement(
        (
            InstancePool(BOTH, Parallelism()),
            InstancePool(PREFILL, Parallelism(2)),
            InstancePool(DECODE, Parallelism(2)),
        )
    )
    kv_tokens = {Parallelism(): 500.0, Parallelism(2): 5000.0}
    served = cluster.simulate_fast(placement, cost, [Job(0.0, 3000, 50)] * 3, kv_tokens=kv_tokens)
    assert all(not one.failed and one.parts["prefill"] > 0 for one in served)


# ---- links and queues


def test_a_link_carries_one_prompt_after_the_other() -> None:
    bytes_per_s, token_bytes = 1e9, 1e6
    served = cluster.simulate_fast(
        ONE_EACH, cost, [Job(0.0, 500, 3)] * 4, link=LinkSpec(bytes_per_s, 0.01), token_bytes=token_bytes
    )
    taken = sorted(one.parts["transfer"] for one in served)
    assert taken == pytest.approx([0.5 * (place + 1) + 0.01 for place in range(4)])


def test_a_link_bounds_the_rate() -> None:
    """S15: beyond bandwidth / (mean prompt × bytes) transfers queue up without end; below they do not."""
    link, token_bytes, asked = LinkSpec(1e9), 1e5, jobs(600, 1.0, prompt=1000, output=20)
    bound = link.bytes_per_s / (fmean(job.prompt for job in asked) * token_bytes)
    for share, waits in ((0.8, False), (1.3, True)):
        fast = [replace(job, at_s=job.at_s / (share * bound)) for job in asked]
        placement = Placement((InstancePool(PREFILL, Parallelism()), InstancePool(DECODE, Parallelism())))
        served = cluster.simulate_fast(
            placement, lambda pool: Lines(pp=1), fast, link=link, token_bytes=token_bytes
        )
        last = fmean(one.parts["transfer"] for one in served[-50:])
        assert (last > 1.0) == waits


def test_prompts_go_to_the_shortest_queue_and_rows_to_the_emptiest_instance() -> None:
    two = Placement((InstancePool(PREFILL, Parallelism(), 2), InstancePool(DECODE, Parallelism(), 2)))
    served = cluster.simulate_fast(two, cost, [Job(0.0, 1000, 50), Job(0.0, 400, 50), Job(0.001, 400, 50)])
    assert served[1].ttft_s < served[2].ttft_s < served[0].ttft_s + 0.02
    alone = cluster.simulate_fast(ONE_EACH, cost, [Job(0.0, 100, 50)])[0].tpot_s
    pair = cluster.simulate_fast(two, cost, [Job(0.0, 100, 50)] * 2)
    assert [one.tpot_s for one in pair] == pytest.approx([alone] * 2)


def test_colocated_instances_share_requests_though_no_prompt_waits() -> None:
    asked = [Job(float(place), 100, 400) for place in range(10)]
    served = cluster.simulate_fast(COLOCATED, cost, asked)
    alone = cluster.simulate_fast(Placement((InstancePool(BOTH, Parallelism()),)), cost, asked[::2])
    assert max(one.tpot_s for one in served) == pytest.approx(max(one.tpot_s for one in alone), rel=0.02)


def test_a_faster_reader_gets_more() -> None:
    placement = Placement((InstancePool(PREFILL, Parallelism()), InstancePool(PREFILL, Parallelism(2))))
    seen = {Parallelism(): 0.0, Parallelism(2): 0.0}

    def counted(pool: InstancePool) -> CostModel:
        class One(Watched):
            def step_s(self, batch: StepBatch) -> float:
                seen[pool.parallelism] += batch.tokens
                return Lines().step_s(batch) / (3 if pool.parallelism.tp == 2 else 1)

            stage_s = step_s

        return One()

    cluster.simulate_fast(placement, counted, jobs(200, 40.0))
    assert seen[Parallelism(2)] > 2 * seen[Parallelism()]


# ---- limits


def test_a_batch_of_prompts_is_closed_at_its_limit() -> None:
    burst = [Job(0.0, 300, 1)] * 6
    served = cluster.simulate_fast(
        Placement((InstancePool(PREFILL, Parallelism()),)),
        cost,
        burst,
        limits=InstanceLimits(prefill_tokens=700),
    )
    assert len({one.ttft_s for one in served}) == 3
    alone = cluster.simulate_fast(
        Placement((InstancePool(PREFILL, Parallelism()),)),
        cost,
        burst,
        limits=InstanceLimits(prefill_tokens=100),
    )
    assert len({one.ttft_s for one in alone}) == 6


@pytest.mark.parametrize("limits", [InstanceLimits(batch_rows=2), InstanceLimits(batch_tokens=250)])
def test_rows_beyond_the_limit_alternate(limits: InstanceLimits) -> None:
    served = cluster.simulate_fast(ONE_EACH, cost, [Job(0.0, 100, 11)] * 4, limits=limits)
    free = cluster.simulate_fast(ONE_EACH, cost, [Job(0.0, 100, 11)] * 4)
    assert fmean(one.tpot_s for one in served) == pytest.approx(
        2 * fmean(one.tpot_s for one in free), rel=0.1
    )
    assert max(one.tpot_s for one in served) < 1.15 * min(one.tpot_s for one in served)


class Seats:
    """A cost that notes the most rows of a step, but for what an instance asks to learn its own speed."""

    def __init__(self) -> None:
        self.most = 0

    def step_s(self, batch: StepBatch) -> float:
        self.most = max(self.most, batch.rows if batch.context != 32 * 512 else 0)
        return Lines().step_s(batch)

    stage_s = step_s


@pytest.mark.parametrize("chunk_tokens", [0, 256])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("role", [DECODE, BOTH])
def test_no_more_rows_are_written_than_there_are_seats(role: str, pp: int, chunk_tokens: int) -> None:
    """With whole prompts, with prompts that are cut, with stages, and in instances that only decode."""
    seats = Seats()
    pools = (
        InstancePool(role, Parallelism(1, pp)),
        *([InstancePool(PREFILL, Parallelism(), 4)] if role == DECODE else []),
    )
    limits = InstanceLimits(decode_rows=6, chunk_tokens=chunk_tokens)
    asked = jobs(60, 40.0)
    served = cluster.simulate_fast(
        Placement(pools), lambda pool: seats if pool.role == role else Lines(), asked, limits=limits
    )
    assert not [one for one in served if one.failed]
    shared = pp if role == DECODE or chunk_tokens else 1  # rows that stages share evenly
    assert 6 // pp <= seats.most <= 6 // shared


def test_who_finds_no_seat_waits_for_one() -> None:
    asked, limits = [Job(0.0, 100, 11)] * 4, InstanceLimits(decode_rows=2)
    first, second = cluster.simulate_fast(ONE_EACH, cost, asked, limits=limits)[1:3]
    free = cluster.simulate_fast(ONE_EACH, cost, asked)
    assert first.ended_s == pytest.approx(free[0].ended_s, rel=0.05)
    assert second.ended_s == pytest.approx(first.ended_s + 10 * first.tpot_s, rel=0.05)
    together = cluster.simulate_fast(
        Placement((InstancePool(BOTH, Parallelism()),)), cost, asked, limits=limits
    )
    assert together[2].ttft_s > together[1].ended_s > together[1].ttft_s  # nor is a prompt begun without one


@pytest.mark.parametrize("pp", [1, 2])
def test_how_others_cut_prompts_does_not_change_instances_that_decode(pp: int) -> None:
    """And those that only read fill their steps as far as they did before."""
    placement = Placement((InstancePool(DECODE, Parallelism(1, pp)),))
    whole, cut, free = (
        cluster.simulate_fast(placement, cost, jobs(60, 12.0), limits=limits)
        for limits in (
            InstanceLimits(decode_rows=256),
            InstanceLimits(decode_rows=256, chunk_tokens=256),
            InstanceLimits(),
        )
    )
    assert whole == cut == free
    pair = Placement((InstancePool(PREFILL, Parallelism()), InstancePool(DECODE, Parallelism(1, pp))))
    small, large = (
        cluster.simulate_fast(
            pair, cost, jobs(60, 12.0), limits=InstanceLimits(2048, 256, chunk_tokens=tokens)
        )
        for tokens in (256, 2048)
    )
    assert small == large


def test_rows_that_alternate_share_no_step_with_slices() -> None:
    with pytest.raises(ValueError, match="rotating rows"):
        InstanceLimits(batch_rows=4, chunk_tokens=256)


def test_slices_keep_tokens_flowing_while_a_long_prompt_is_read() -> None:
    one = Placement((InstancePool(BOTH, Parallelism()),))
    asked = [Job(0.0, 50, 200), Job(0.5, 8000, 4)]
    whole = cluster.simulate_fast(one, cost, asked)
    cut = cluster.simulate_fast(one, cost, asked, limits=InstanceLimits(chunk_tokens=256))
    tight = cluster.simulate_fast(one, cost, asked, limits=InstanceLimits(chunk_tokens=2048, step_s=0.06))
    assert cut[0].tpot_s < whole[0].tpot_s * 1.1
    assert whole[1].ttft_s < tight[1].ttft_s < cut[1].ttft_s * 1.5
    assert cut[1].ttft_s > whole[1].ttft_s


def test_slices_are_the_whole_prompt() -> None:
    """One slice that holds everything costs what the whole prompt does."""
    one = Placement((InstancePool(BOTH, Parallelism()),))
    (whole,), (cut,) = (
        cluster.simulate_fast(one, cost, [Job(0.0, 700, 5)], limits=limits)
        for limits in (InstanceLimits(), InstanceLimits(chunk_tokens=4096))
    )
    assert cut.ttft_s == pytest.approx(whole.ttft_s)
    assert cut.tpot_s == pytest.approx(whole.tpot_s)


# ---- against the product's own decisions


@pytest.mark.parametrize(
    "placement",
    [
        ONE_EACH,
        Placement((InstancePool(PREFILL, Parallelism(), 2), InstancePool(DECODE, Parallelism()))),
        Placement((InstancePool(BOTH, Parallelism()),)),
    ],
)
def test_the_search_s_simulator_agrees_with_the_product_s(placement: Placement) -> None:
    """At loads where both queue a little: means within a few per cent, and nobody fails in either."""
    asked, room = jobs(150, 6.0), 40_000
    fast = cluster.simulate_fast(
        placement,
        cost,
        asked,
        limits=InstanceLimits(chunk_tokens=2048),
        kv_tokens=lambda pool: room,
        token_bytes=1.0,
    )
    machines = tuple(InstanceSpec(cost(pool), room) for pool in placement.pools)
    real = simulate.simulate_exact(SimDeployment(placement, machines, token_bytes=1.0), asked)
    assert not [one for one in (*fast, *real) if one.failed]
    for times in (lambda one: one.ttft_s, lambda one: one.tpot_s):
        assert fmean(map(times, fast)) == pytest.approx(fmean(map(times, real)), rel=0.06)


# ---- stages


def test_stages_that_read_take_the_next_batch_early() -> None:
    split = Parallelism(1, 2)
    served = cluster.simulate_fast(
        Placement((InstancePool(PREFILL, split),)),
        cost,
        [Job(0.0, 500, 1)] * 3,
        limits=InstanceLimits(prefill_tokens=500),
    )
    step_s = Lines().step_s(StepBatch(500, 500.0**2))
    assert [one.ttft_s for one in served] == pytest.approx([step_s, 1.5 * step_s, 2 * step_s])


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_that_decode_share_their_rows(pp: int) -> None:
    """More tokens a second than one stage, none sooner; and never slower than groups as they come."""
    split, asked = Parallelism(1, pp), [Job(0.0, 100, 100)] * 16
    placement = Placement((InstancePool(PREFILL, Parallelism()), InstancePool(DECODE, split)))
    even = fmean(one.tpot_s for one in cluster.simulate_fast(placement, cost, asked))
    assert even == pytest.approx(Lines().step_s(StepBatch(0, 0.0, 16 // pp, 16 // pp * 150)), rel=0.02)
    spread = jobs(150, 12.0)
    even_s = fmean(one.tpot_s for one in cluster.simulate_fast(placement, cost, spread))
    ring_s = fmean(one.tpot_s for one in cluster.simulate_fast(placement, cost, spread, single=True))
    assert 0.7 * ring_s < even_s <= ring_s * 1.02


def test_of_a_prompt_one_stage_reads_at_a_time() -> None:
    """A second prompt is read meanwhile, in the other part; what is long goes on beside it, a chunk each step."""
    placement, limits = Placement((InstancePool(BOTH, Parallelism(1, 2)),)), InstanceLimits(chunk_tokens=512)

    def times(*prompts: int) -> list[float]:
        served = cluster.simulate_fast(
            placement, cost, [Job(0.0, tokens, 1) for tokens in prompts], limits=limits
        )
        return [one.ttft_s for one in served]

    step_s = Lines().step_s
    first_s, rest_s = (
        step_s(StepBatch(512, 512.0**2)),
        step_s(StepBatch(388, 900.0**2 - 512.0**2)),
    )
    assert times(400) == pytest.approx([step_s(StepBatch(400, 400.0**2))])
    assert times(400, 300) == pytest.approx([step_s(StepBatch(400, 400.0**2))] * 2)
    assert times(900) == pytest.approx([first_s + rest_s])
    assert times(900, 500) == pytest.approx([first_s + rest_s, first_s])
    # Two that go on keep their order, before whoever comes after them.
    two = [step_s(StepBatch(tokens, (512.0 + tokens) ** 2 - 512.0**2)) for tokens in (388, 88)]
    assert times(900, 600, 100)[:2] == pytest.approx([first_s + max(two)] * 2)


def test_a_step_lasts_as_long_as_its_longest_part() -> None:
    """That is the one with the longest prompt, though the other reads more tokens."""
    placement = Placement((InstancePool(BOTH, Parallelism(1, 2)),))
    asked = [Job(0.0, tokens, 1) for tokens in (2000, 1010, 1000)]
    served = cluster.simulate_fast(placement, cost, asked, limits=InstanceLimits(chunk_tokens=2048))
    assert [one.ttft_s for one in served] == pytest.approx([Lines().step_s(StepBatch(2000, 2000.0**2))] * 3)


def test_a_prompt_takes_the_time_that_it_takes_in_the_product_s_stages() -> None:
    placement, room = Placement((InstancePool(BOTH, Parallelism(1, 2)),)), 40_000
    asked = [Job(10.0 * at, tokens, 1) for at, tokens in enumerate((400, 900, 1500))]
    fast = cluster.simulate_fast(
        placement, cost, asked, limits=InstanceLimits(chunk_tokens=512), kv_tokens=lambda pool: room
    )
    machines = tuple(InstanceSpec(cost(pool), room, max_num_batched_tokens=512) for pool in placement.pools)
    real = simulate.simulate_exact(SimDeployment(placement, machines, token_bytes=1.0), asked)
    for one, other in zip(fast, sorted(real, key=lambda served: served.job.at_s), strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s, rel=0.01)


@pytest.mark.parametrize("limits", [InstanceLimits(), InstanceLimits(chunk_tokens=512)])
def test_a_colocated_instance_may_have_stages(limits: InstanceLimits) -> None:
    placement = Placement((InstancePool(BOTH, Parallelism(1, 2)),))
    served = cluster.simulate_fast(
        placement, cost, jobs(80, 8.0), limits=limits, kv_tokens=lambda pool: 20_000.0
    )
    assert all(0 < one.ttft_s < 2 and one.tpot_s < 0.2 for one in served)
