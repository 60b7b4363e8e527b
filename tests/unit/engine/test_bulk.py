"""The engine of bulk work: units of bounded length, only in the time that is left, in memory that is only lent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from diptych.eviction_spec import KeepSpec
from diptych.messages import WorkerStats
from diptych.request import Tenancy
from engine.bulk.budget import MAX_REST_S, NEAR_S, TPOT_SHARE, BulkScheduler, BulkTime
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from tests.unit.engine.bulk_bench import BULK, SLICE_S, BulkBench
from tests.unit.engine.fakes import EngineBench, alone, sampling, sequence

T = TypeVar("T")


def test_units_take_at_most_a_slice_and_use_most_of_it() -> None:
    bench = BulkBench(num_slabs=200, max_num_seqs=64)
    for i in range(30):
        bench.add_bulk(f"b{i}", 40 + 10 * i, 30)
    bench.settle()
    known = bench.unit_s[40:]
    assert len(known) > 40 and max(known) <= SLICE_S, max(known)
    busy = [seconds for seconds in known[: len(known) // 2] if seconds > SLICE_S / 2]
    assert len(busy) > len(known) // 4, "as long as there is enough to do"
    assert not bench.holdings.used
    bench.holdings.check_books()


def test_the_first_units_are_small_since_nothing_is_known_about_steps() -> None:
    bench = BulkBench(num_slabs=200)
    bench.add_bulk("b", 900)
    assert bench.unit()
    assert bench.runner.batches[0][0].tokens and len(bench.runner.batches[0][0].tokens) <= 32


def test_sequences_that_do_not_fit_into_a_unit_take_turns() -> None:
    bench = BulkBench(num_slabs=200, max_num_seqs=64)
    bench.bulk.budget.time = BulkTime(0.1)
    for i in range(40):
        bench.add_bulk(f"b{i}", 10, 300)
    while len(bench.out) < 40:
        assert bench.unit()
    bench.bulk.budget.time = BulkTime(0.01)
    before = {name: len(tokens) for name, tokens in bench.out.items()}
    for _ in range(60):
        assert bench.unit()
    gained = sorted(len(tokens) - before[name] for name, tokens in bench.out.items())
    assert gained[0] > 0 and gained[-1] - gained[0] <= 2
    assert 1 < len(bench.runner.batches[-1]) < 40


def test_a_sequence_that_runs_goes_on_although_the_prefix_of_another_takes_the_rest_of_its_share() -> None:
    """Half of the pool is lent to two sequences, more to one alone."""
    bench = BulkBench(num_slabs=12)
    bench.add_bulk("first", 130, 1)
    bench.settle()
    bench.add_bulk("long", 250, 80)
    while not bench.out.get("long"):
        assert bench.unit()
    bench.add_bulk("first", 130, 1)
    for _ in range(200):
        bench.unit()
    assert [len(bench.out[name]) for name in ("long", "first")] == [80, 2]
    assert not bench.holdings.used


@pytest.mark.parametrize("tpot_s", [None, 0.05])
def test_without_an_slo_bulk_work_runs_only_when_nothing_else_is_to_be_done(tpot_s: float | None) -> None:
    bench = BulkBench(tpot_s=tpot_s, num_slabs=100)
    bench.add_bulk("b", 20, 50)
    while not bench.out:
        assert bench.unit()
    bench.engine.add(sequence("online", 300, sampling(40)), bench.now_s)
    assert not bench.unit(), "a prompt waits"
    bench.online_step()
    assert not bench.unit(), "a prompt is prefilled"
    while len(bench.out.get("online", [])) < 20:
        bench.online_step()
    assert bench.unit() is (tpot_s is not None), "answers are decoded"
    bench.settle()
    assert {name: len(tokens) for name, tokens in bench.out.items()} == {"b": 50, "online": 40}


def test_beside_answers_a_unit_takes_what_their_slo_leaves() -> None:
    bench = BulkBench(tpot_s=0.012, num_slabs=200, max_num_seqs=16)
    for i in range(20):
        bench.add_bulk(f"b{i}", 60, 100)
    for _ in range(40):
        bench.unit()
    for i in range(4):
        bench.engine.add(sequence(f"online{i}", 10, sampling(60)), bench.now_s)
    gaps: list[float] = []
    last_s = 0.0
    while len(bench.scheduler):
        bench.online_step()
        if len(bench.out.get("online0", [])) > 2:
            gaps.append(bench.now_s - last_s)
        last_s = bench.now_s
        bench.unit()
    assert max(gaps) <= 0.012 and max(gaps) > 0.5 * TPOT_SHARE * 0.012


def test_online_steps_are_planned_as_if_there_were_no_bulk_work() -> None:
    def online_batches(bulk: int) -> tuple[list[list[tuple[list[int], int]]], dict[str, list[int]]]:
        bench = BulkBench(tpot_s=0.05, num_slabs=24)
        for i in range(bulk):
            bench.add_bulk(f"b{i}", 100, 300)
        for _ in range(30 if bulk else 0):
            bench.unit()
        batches: list[list[tuple[list[int], int]]] = []
        for i in range(12):
            bench.engine.add(sequence(f"r{i}", 90 + 20 * i, sampling(50)), 0.0)
        while len(bench.scheduler):
            at = len(bench.runner.batches)
            bench.online_step()
            batches += [[(work.tokens, work.start) for work in batch] for batch in bench.runner.batches[at:]]
            bench.unit()
        found = {name: tokens for name, tokens in bench.out.items() if name.startswith("r")}
        for seq in list(bench.bulk.scheduler.sequences()):
            bench.bulk.abort(seq.id, seq.epoch)
        assert not bench.holdings.used
        assert bench.bulk.table.counters.preempted.total() if bulk else not bench.bulk.units
        return batches, found

    assert online_batches(6) == online_batches(0)


def test_an_online_request_takes_lent_slabs_at_once_and_bulk_work_goes_on_later() -> None:
    bench = BulkBench(num_slabs=10, caching=False)
    seqs = [bench.add_bulk(f"b{i}", 100, 60) for i in range(2)]
    while len(bench.out) < 2:
        assert bench.unit()
    assert bench.holdings.lent == 4 == bench.bulk.table.num_running * 2
    bench.engine.add(sequence("online", 64 * 8, sampling(60)), bench.now_s)
    begun_s = bench.now_s
    bench.online_step()
    assert bench.now_s - begun_s < 0.05 and bench.runner.batches[-1][0].start == 0
    bench.settle()
    stats = bench.bulk.complete_stats(WorkerStats())
    assert stats.bulk_preemptions > 0 and stats.bulk_units == len(bench.unit_s)
    assert all(bench.out[seq.id] == alone(sequence(seq.id, 100, sampling(60))) for seq in seqs)
    assert not bench.engine.stats.preemptions, "and no online request lost its own"
    assert bench.engine.stats.slabs_lent == bench.engine.stats.slabs_used == 0


def test_a_late_bulk_sequence_fails_though_there_is_no_time_for_bulk_work() -> None:
    bench = BulkBench(num_slabs=100)
    late, other = (sequence(name, 50, sampling(40), tenancy=BULK) for name in ("late", "other"))
    late.deadline_s = 1.0
    for seq in (late, other):
        bench.bulk.add(seq, 0.0)
    for _ in range(8):
        assert bench.unit()
    bench.engine.add(sequence("online", 50, sampling(40)), bench.now_s)
    assert not bench.bulk.run_unit(bench.engine, bench.clock)
    bench.now_s = 2.0
    failures = [one.message for one in bench.bulk.run_unit(bench.engine, bench.clock)]
    assert [(failed.request, getattr(failed, "code", "")) for failed in failures] == [
        ("late", "deadline_exceeded")
    ]
    assert bench.engine.has_work and len(bench.bulk.scheduler) == 1
    bench.settle()
    assert not bench.holdings.used


def test_sequences_of_bulk_work_that_evict_leave_the_memory_for_it_to_online_ones() -> None:
    bench, some = BulkBench(num_slabs=60, max_evicting=3), KeepSpec(0.5)
    work = [sequence(f"b{i}", 100, sampling(200), tenancy=BULK, keep=some) for i in range(4)]
    for seq in work:
        bench.bulk.add(seq, 0.0)
    while len(bench.bulk.scheduler.running) < 3 or not all(
        seq.decoding for seq in bench.bulk.scheduler.running.values()
    ):
        bench.bulk.make_way(bench.engine)
        assert bench.unit()
    asked = [sequence(f"r{i}", 100, sampling(60), keep=some) for i in range(2)]
    for seq in asked:
        bench.engine.add(seq, bench.now_s)
    while len(bench.scheduler) or len(bench.bulk.scheduler):
        bench.bulk.make_way(bench.engine)
        assert len(bench.bulk.scheduler.running) <= 3 - len(bench.scheduler)
        if bench.engine.has_work:
            bench.online_step()
        bench.unit()
        assert len(bench.runner.given) <= 3
    assert all(bench.out[seq.id] == alone(seq) for seq in [*work, *asked])


class ContendedCore:
    """The core of the thread that runs units, of which it gets a `share`. Replaces the engine's clock of CPU time."""

    def __init__(self, bench: BulkBench) -> None:
        self._bench, self.share, self._had_s, self._seen_s = bench, 1.0, 0.0, 0.0
        bench.bulk._cpu_clock = self.cpu_clock

    def cpu_clock(self) -> float:
        now_s = self._bench.now_s
        self._had_s += self.share * (now_s - self._seen_s)
        self._seen_s = now_s
        return self._had_s

    def bulk_share(self, seconds: float, near: bool) -> float:
        """The share of so many seconds that units take; `near`: online requests come and go meanwhile."""
        bench = self._bench
        begun_s, before_s = bench.now_s, bench.bulk.unit_seconds
        while bench.now_s < begun_s + seconds:
            if near:
                bench.bulk.note_request(bench.now_s)
            if not bench.unit():
                assert bench.bulk.rests_until_s > bench.now_s
                bench.now_s += 1e-3
        return (bench.bulk.unit_seconds - before_s) / (bench.now_s - begun_s)


def test_bulk_work_rests_while_others_want_the_cores_and_online_requests_are_near() -> None:
    bench = BulkBench(num_slabs=100)
    core = ContendedCore(bench)
    for i in range(8):
        bench.add_bulk(f"b{i}", 100, 400)
    assert core.bulk_share(1.0, near=True) == pytest.approx(1.0)
    core.share = 0.7
    assert 0 < core.bulk_share(3.0, near=True) < 0.4, "it goes on slowly"
    core.share = 1.0
    core.bulk_share(0.3, near=True)
    assert core.bulk_share(0.5, near=True) > 0.9


def test_bulk_work_does_not_rest_while_no_online_request_is_near() -> None:
    bench = BulkBench(num_slabs=100)
    core = ContendedCore(bench)
    core.share = 0.3
    for i in range(8):
        bench.add_bulk(f"b{i}", 100, 400)
    assert core.bulk_share(1.0, near=False) == pytest.approx(1.0)
    assert core.bulk_share(1.0, near=True) < 0.5
    bench.now_s += MAX_REST_S
    assert core.bulk_share(NEAR_S, near=False) < 0.7, "the next one may follow soon"
    bench.now_s += MAX_REST_S
    assert core.bulk_share(1.0, near=False) == pytest.approx(1.0)


def test_canaries_are_no_requests_that_somebody_waits_for() -> None:
    bench = BulkBench(num_slabs=100)
    bench.add_bulk("b", 100, 400)
    for origin, is_alone in ((Tenancy(canary=True), True), (Tenancy(), False)):
        bench.engine.add(sequence("online", 4, sampling(3), tenancy=origin), bench.now_s)
        while len(bench.scheduler):
            bench.unit()
            bench.online_step()
        assert bench.bulk.budget.is_alone(bench.now_s) is is_alone
        assert bench.unit()
        del bench.out["online"]


def test_units_that_wait_for_a_core_are_not_planned_smaller_while_no_online_request_is_near() -> None:
    def rows_per_unit(share: float) -> int:
        bench = BulkBench(num_slabs=200, max_num_seqs=64)
        core = ContendedCore(bench)
        for i in range(30):
            bench.add_bulk(f"b{i}", 40, 300)
        core.share = share
        # Steps take longer by as much as they lack a core, and the same time of a core.
        bench.stretch = 1 / share
        core.bulk_share(40 * SLICE_S / share, near=False)
        done = bench.bulk.units, sum(map(len, bench.out.values()))
        core.bulk_share(60 * SLICE_S / share, near=False)
        return (sum(map(len, bench.out.values())) - done[1]) // (bench.bulk.units - done[0])

    assert rows_per_unit(0.25) == pytest.approx(rows_per_unit(1.0), rel=0.2)


def test_units_are_given_to_the_other_thread_only_while_no_online_request_is_near() -> None:
    class NotedUnits:
        ran = 0

        def run(self, unit: Callable[[], T]) -> T:
            self.ran += 1
            return unit()

    bench, below = BulkBench(num_slabs=100), NotedUnits()
    bench.bulk._unit_runner = below
    bench.add_bulk("b", 100, 400)
    for _ in range(5):
        assert bench.unit()
    assert below.ran == 5
    bench.bulk.note_request(bench.now_s)
    for _ in range(5):
        assert bench.unit()
    assert below.ran == 5 and bench.bulk.units == 10
    bench.now_s += NEAR_S
    assert bench.unit() and below.ran == 6


def test_statistics_of_the_online_engine_leave_bulk_work_out() -> None:
    bench = BulkBench(num_slabs=20)
    bench.add_bulk("b", 200, 40)
    for _ in range(20):
        assert bench.unit()
    stats = bench.engine.stats
    assert (stats.steps, stats.step_tokens, stats.running, stats.slabs_used) == (0, 0, 0, 0)
    assert stats.slabs_lent == bench.holdings.used > 0
    both = bench.bulk.complete_stats(stats)
    assert both.bulk_running == 1 and both.bulk_tokens >= 200 and both.bulk_seconds > 0


def test_a_unit_that_took_too_long_makes_the_next_ones_shorter() -> None:
    scheduler = BulkScheduler(EngineBench().scheduler.limits)
    scheduler.unit_s = SLICE_S
    for _ in range(100):
        scheduler.record_unit(SLICE_S / 2)
    grown = scheduler._planned_s
    scheduler.record_unit(2 * SLICE_S)
    assert scheduler._planned_s < grown <= SLICE_S
    for _ in range(100):
        scheduler.record_unit(2 * SLICE_S)
    assert scheduler._planned_s > 0


def test_the_lender_needs_no_tree() -> None:
    bench = BulkBench(caching=False)
    assert isinstance(bench.holdings, KvAllocator) and bench.holdings.tree is None
    assert KvAllocator(SlabLedger(2), PrefixTree()).lent == 0
