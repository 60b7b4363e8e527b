"""Planning with several KV classes: room, growth, preemption and queues are those of each class by itself."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.chunks import CHUNK_TOKENS
from diptych.request import Tenancy
from engine.scheduling.kv_admission import KvAdmission, Recall, RemoteKv, StartFetch, perform_departures
from engine.scheduling.new_token_ratio import NewTokenRatio
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence, SequenceRefused
from engine.sequence_table import SequenceTable
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.slab_ledger import SlabLedger
from tests.unit.engine.fakes import sampling, sequence

RAW, CODED = "raw", "tq4.s0"


class ClassBench:
    """A scheduler with two arenas; steps compute nothing, and sample the token 0."""

    def __init__(self, raw: int, coded: int, seats: int = 8, budget: int = 128) -> None:
        self.scheduler = Scheduler(
            EngineLimits(raw + coded, 4096, seats, budget, arena_slabs={RAW: raw, CODED: coded})
        )
        self.arenas = KvArenas(
            {RAW: KvAllocator(SlabLedger(raw)), CODED: KvAllocator(SlabLedger(coded, first=raw))}
        )
        self.table = SequenceTable(self.scheduler, self.arenas)
        self.preempted: list[str] = []

    def add(self, name: str, kv_class: str, prompt: int, new: int = 200, **fields: Any) -> Sequence:
        seq = sequence(name, [1] * prompt, sampling(new), **fields)
        seq.kv_class = kv_class
        self.scheduler.add(seq, 0.0)
        return seq

    def step(self) -> None:
        plan = self.table.plan_step(self._preempt)
        admissions, _ = self.table.take_slabs(plan)
        for one in admissions:
            self.table.start(one, 0.0)
        work = self.table.select_work(plan)
        for seq in work.decodes:
            self.table.advance([seq], 1)
        for seq, count in work.prefills:
            self.table.advance([seq], count)
        for seq in [*work.decodes, *[seq for seq, _ in work.prefills]]:
            if seq.wants_token:
                seq.output.append(0)
                self.table.settle_output(seq, self.table.finish_reason(seq, stopped=False))

    def _preempt(self, key: str) -> None:
        self.preempted.append(key)
        self.table.preempt(key, parked=False)

    def running(self) -> set[str]:
        return {seq.id for seq in self.scheduler.running.values()}


def test_a_full_arena_blocks_no_arrival_of_the_other() -> None:
    """The large one at the head waits for raw slabs, and so do raw ones behind it; coded ones start."""
    bench = ClassBench(raw=4, coded=8)
    bench.add("first", RAW, 3 * CHUNK_TOKENS - 10, new=50)
    bench.step()
    bench.step()
    bench.add("large", RAW, 4 * CHUNK_TOKENS - 1, new=1)
    bench.add("small", RAW, 10, new=1)
    bench.add("coded", CODED, 100, new=300)
    bench.step()
    assert bench.running() == {"first", "coded"} and not bench.preempted
    for _ in range(400):
        bench.step()
    assert len(bench.scheduler) == 0 and bench.arenas.used == 0


def test_who_outgrows_an_arena_is_preempted_there() -> None:
    bench = ClassBench(raw=4, coded=20)
    bench.scheduler.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now
    for name in ("a", "b"):
        bench.add(name, RAW, CHUNK_TOKENS - 4, new=150)
    coded = [bench.add(name, CODED, 40, new=400) for name in "xyz"]
    for _ in range(150):
        bench.step()
    assert bench.preempted and set(bench.preempted) == {"b#1"}, (
        "coded ones came last and would be the first to go"
    )
    assert all(len(seq.output) > 100 for seq in coded)


def test_a_better_priority_takes_memory_of_its_own_class_only() -> None:
    bench = ClassBench(raw=4, coded=4)
    for name, kv_class in (("r", RAW), ("c", CODED)):
        bench.add(name, kv_class, 3 * CHUNK_TOKENS - 10, new=5, tenancy=Tenancy(priority=1))
    for _ in range(6):
        bench.step()
        if bench.running() == {"r", "c"}:
            break
    bench.add("urgent", CODED, 3 * CHUNK_TOKENS, new=1, tenancy=Tenancy(priority=-1))
    bench.step()
    assert bench.preempted == ["c#1"]


def test_lines_of_one_tenant_are_served_by_age() -> None:
    """Neither class overtakes the other for ever: the older head comes first when the budget is short."""
    bench = ClassBench(raw=20, coded=20, seats=1, budget=64)
    order = [bench.add(f"s{i}", CODED if i % 2 else RAW, 60, new=1).id for i in range(8)]
    ended: list[str] = []
    for _ in range(12):
        before = {seq.id for seq in bench.scheduler.sequences()}
        bench.step()
        ended += sorted(before - {seq.id for seq in bench.scheduler.sequences()})
    assert ended == order


def test_a_stuck_arena_does_not_spin_and_does_not_stop_the_other() -> None:
    bench = ClassBench(raw=2, coded=4)
    bench.arenas.arena_of(RAW).allocate("a lease", 1)
    bench.add("stuck", RAW, CHUNK_TOKENS, new=60)
    for _ in range(5):
        bench.step()
    assert bench.running() == {"stuck"} and not bench.scheduler.ready(bench.arenas)
    bench.add("free", CODED, 10, new=3)
    assert bench.scheduler.ready(bench.arenas)
    for _ in range(5):
        bench.step()
    assert bench.running() == {"stuck"} and not bench.scheduler.ready(bench.arenas)
    bench.arenas.release("a lease")
    assert bench.scheduler.ready(bench.arenas)


@pytest.mark.parametrize(("kv_class", "most"), [(RAW, 4), (CODED, 8), ("int8.g32", 0)])
def test_what_fits_into_no_arena_is_refused(kv_class: str, most: int) -> None:
    bench = ClassBench(raw=4, coded=8)
    with pytest.raises(SequenceRefused, match=f"this worker has {most} in all") as caught:
        bench.add("large", kv_class, 9 * CHUNK_TOKENS)
    assert caught.value.code == "out_of_memory"


def test_fetches_of_a_class_do_not_wait_for_room_of_another() -> None:
    bench = ClassBench(raw=4, coded=8)
    admission = KvAdmission[RemoteKv](bench.scheduler, bench.arenas, lambda arrival: arrival)
    bench.arenas.arena_of(RAW).allocate("a lease", 3)
    for name, kv_class in (("r1", RAW), ("r2", RAW), ("c1", CODED), ("c2", CODED)):
        seq = sequence(name, 10 if name == "r2" else 100, sampling(20))
        seq.kv_class = kv_class
        admission.enqueue(RemoteKv(seq, seq.total, 0.0, ticket="there"))
    started: list[str] = []

    def perform(effect: object) -> bool | None:
        if isinstance(effect, StartFetch):
            seq = effect.arrival.seq
            started.append(seq.id)
            bench.arenas.arena_of(seq.kv_class).allocate(seq.key, effect.arrival.num_slabs)
            return None
        return False

    perform_departures(admission.departures(0.0), perform)
    assert started == ["c1", "c2"], "the small raw one does not overtake the large one of its class"


@pytest.mark.parametrize("seats", [8, 1])
def test_a_fetch_without_a_ticket_makes_room_while_the_other_class_runs(seats: int) -> None:
    """A raw prompt waits for the slabs of a raw fetch; that the coded one can go on is no reason to keep them.

    If it waits for a seat instead, the slabs would be of no use to it.
    """
    bench = ClassBench(raw=4, coded=8, seats=seats)
    admission = KvAdmission[RemoteKv](bench.scheduler, bench.arenas, lambda arrival: arrival)
    bench.add("coded", CODED, 100, new=300)
    bench.step()
    for name, kv_class in (("raw ahead", RAW), ("coded ahead", CODED)):
        seq = sequence(name, 100, sampling(20))
        seq.kv_class = kv_class
        admission.enqueue(RemoteKv(seq, seq.total, 0.0))
    recalled: list[str] = []

    def perform(effect: object) -> bool | None:
        if isinstance(effect, StartFetch):
            seq = effect.arrival.seq
            bench.arenas.arena_of(seq.kv_class).allocate(seq.key, effect.arrival.num_slabs)
        if isinstance(effect, Recall):
            recalled.append(effect.arrival.seq.id)
        return False

    perform_departures(admission.departures(0.0), perform)
    assert len(admission.moving) == 2
    bench.add("raw", RAW, 3 * CHUNK_TOKENS - 10, new=1)
    bench.step()
    assert bench.running() == {"coded"} and bench.scheduler.ready(bench.arenas)
    perform_departures(admission.departures(0.0), perform)
    assert recalled == (["raw ahead"] if seats > 1 else [])
