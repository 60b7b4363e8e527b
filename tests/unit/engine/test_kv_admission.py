"""Admission of KV that comes from elsewhere: nothing is lost or overbooked, order is kept, each request ends once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from diptych.eviction_spec import KeepSpec
from diptych.request import Tenancy
from engine.scheduling.kv_admission import (
    ABORTED,
    DepartureEffect,
    FetchEnd,
    KvAdmission,
    MakeRoom,
    Recall,
    RemoteKv,
    StartFetch,
    perform_departures,
)
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence, SequenceRefused
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from kvtransfer.handoff import HandoffAborted, HandoffOutcome
from tests.unit.engine.fakes import sampling, sequence

MODEL_LEN = 400
FAMILIES = [sequence(name, MODEL_LEN).prompt for name in ("one", "another")]
SEEN: Counter[str] = Counter()


class AdmissionBench:
    """An admission with a driver that pulls nothing: a test says what lands, and how."""

    def __init__(self, num_slabs: int = 12, max_waiting: int = 100) -> None:
        limits = EngineLimits(num_slabs, MODEL_LEN, max_num_seqs=4, max_waiting=max_waiting)
        self.scheduler = Scheduler(limits)
        self.allocator = KvAllocator(SlabLedger(num_slabs), PrefixTree())
        self.admission = KvAdmission[RemoteKv](self.scheduler, self.allocator, renewed)
        self.reserved: dict[str, list[int]] = {}
        self.departed: list[str] = []
        self.ends: dict[str, FetchEnd] = {}
        self.now_s = 0.0

    def offer(
        self,
        name: str,
        length: int,
        tenant: str = "a",
        priority: int = 0,
        ticket: bool = True,
        family: int | None = None,
        new: int = 8,
        deadline_s: float = float("inf"),
    ) -> RemoteKv:
        prompt = sequence(name, length).prompt if family is None else FAMILIES[family][:length]
        origin = Tenancy(tenant, "", priority)
        seq = sequence(name, prompt, sampling(new), tenancy=origin, deadline_s=deadline_s)
        arrival = RemoteKv(seq, length, self.now_s)
        if ticket:
            self.present(arrival)
        self.admission.enqueue(arrival)
        return arrival

    def present(self, arrival: RemoteKv) -> None:
        """Its ticket comes, with its first token."""
        arrival.ticket, arrival.seq.output = "ticket", [7]

    def depart(self) -> list[str]:
        """One pass; who has departed in it."""
        first = len(self.departed)
        perform_departures(self.admission.departures(self.now_s), self.perform)
        return self.departed[first:]

    def perform(self, effect: DepartureEffect[RemoteKv]) -> bool | None:
        match effect:
            case StartFetch(arrival, held):
                need = arrival.num_slabs - len(held)
                assert need <= self.allocator.free, "more is reserved than there is room"
                slabs = held + self.allocator.allocate(arrival.seq.key, need)
                self.reserved[arrival.seq.key] = slabs
                self.departed.append(arrival.seq.id)
            case Recall(arrival):
                assert arrival.ticket is None and arrival.stopped
                SEEN["recalled"] += 1
            case MakeRoom(seq):
                victim = self.scheduler.victim_for(seq, self.allocator)
                if victim is None:
                    return False
                SEEN["made room"] += 1
                self.scheduler.preempt(victim, False)
                self.allocator.release(victim)
                return True
        return None

    def land(self, arrival: RemoteKv, code: str = "") -> FetchEnd:
        """Its fetch is over: complete if it has a ticket and was not stopped, or in vain."""
        complete = arrival.ticket is not None and not code
        if self.admission.must_abort(arrival, complete):
            code = ABORTED
        slabs = self.reserved.pop(arrival.seq.key)
        if not code:
            self.admission.commit(arrival, slabs)
            self.scheduler.adopt(arrival.seq, self.now_s)
        end = self.admission.finish(arrival, code, "why")
        if end.status != "waiting":
            self.end(arrival, end)
        return end

    def end(self, arrival: RemoteKv, end: FetchEnd) -> None:
        assert arrival.seq.id not in self.ends, "it ends once"
        self.ends[arrival.seq.id] = end
        SEEN[end.status] += 1


def renewed(arrival: RemoteKv) -> RemoteKv:
    return RemoteKv(arrival.seq, arrival.num_tokens, arrival.arrived_s, arrival.ticket, recalled=True)


def test_the_code_of_a_stopped_fetch_is_the_protocols() -> None:
    assert HandoffOutcome(error=HandoffAborted("stopped")).failure_code == ABORTED


def test_the_most_urgent_departs_first_then_who_was_served_least_then_who_came_first() -> None:
    bench = AdmissionBench(num_slabs=40)
    bench.offer("first", 64, "a")
    bench.offer("second", 64, "a")
    bench.offer("other", 64, "b")
    bench.offer("urgent", 64, "a", priority=-1)
    bench.scheduler.token_counter.charge_tokens("a", 100)
    assert bench.depart() == ["urgent", "other", "first", "second"]


def test_the_next_is_not_overtaken_for_being_large() -> None:
    bench = AdmissionBench(num_slabs=8)
    small = bench.offer("here", 190)
    assert bench.depart() == ["here"]
    bench.offer("large", 380)
    bench.offer("small", 40)
    assert bench.depart() == []
    bench.land(small)
    bench.scheduler.remove(small.seq.key)
    bench.allocator.release(small.seq.key)
    assert bench.depart() == ["large", "small"]


def test_chunks_on_their_way_for_another_are_waited_for_and_shared() -> None:
    bench = AdmissionBench(num_slabs=20)
    first = bench.offer("first", 200, family=0)
    again = bench.offer("again", 200, family=0)
    bench.offer("else", 100, family=1)
    assert bench.depart() == ["first", "else"], "it keeps its place, and those behind it go on"
    bench.land(first)
    assert bench.depart() == ["again"]
    assert bench.reserved[again.seq.key][:3] == first.seq.slabs[:3]


class SlowRestores:
    """Restores of which a test says when they end."""

    has_tiers = True

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []

    def begin_pull(self, seq: Sequence, keys: list[bytes], now_s: float) -> None:
        self.asked.append(keys)
        seq.restore = SimpleNamespace(ready=False)


def test_one_whose_chunks_are_read_back_departs_afterwards_and_nobody_waits_for_it() -> None:
    bench, restores = AdmissionBench(num_slabs=20), SlowRestores()
    first = bench.offer("first", 200, family=0)
    bench.admission.begin_restore(first, restores, 0.0)
    assert restores.asked == [first.seq.keys[:3]]
    bench.offer("else", 100, family=1)
    assert bench.depart() == ["else"]
    first.seq.restore.ready = True
    assert bench.depart() == ["first"]


def test_what_another_fetch_brings_is_not_read_back() -> None:
    bench, restores = AdmissionBench(num_slabs=20), SlowRestores()
    bench.offer("first", 200, family=0)
    bench.depart()
    bench.admission.begin_restore(bench.offer("again", 200, family=0), restores, 0.0)
    assert not restores.asked


def test_one_that_drops_rows_reads_its_whole_chunks_back() -> None:
    bench, restores = AdmissionBench(num_slabs=20), SlowRestores()
    arrival = bench.offer("first", 300, ticket=False)
    arrival.seq.keep = KeepSpec(0.9, boundary=128)
    bench.admission.begin_restore(arrival, restores, 0.0)
    assert restores.asked == [arrival.seq.keys[:2]]


def test_nobody_waits_for_chunks_of_one_without_a_ticket() -> None:
    bench = AdmissionBench(num_slabs=20)
    bench.offer("first", 200, family=0, ticket=False)
    bench.offer("again", 200, family=0)
    assert bench.depart() == ["first", "again"]


def test_one_without_a_ticket_gives_its_room_to_one_with_a_ticket_and_waits_for_its_own() -> None:
    bench = AdmissionBench(num_slabs=8)
    early = bench.offer("early", 300, ticket=False)
    assert bench.depart() == ["early"]
    ready = bench.offer("ready", 300)
    assert bench.depart() == [] and early.stopped and early.recalled
    assert bench.land(early).status == "waiting"
    assert bench.depart() == ["ready"]
    bench.land(ready)
    bench.scheduler.remove(ready.seq.key)
    bench.allocator.release(ready.seq.key)
    assert bench.depart() == [], "without its ticket it would only be called back again"
    (waiting,) = bench.admission.waiting.values()
    bench.present(waiting)
    assert bench.depart() == ["early"]


def test_one_that_was_called_back_is_adopted_if_its_ticket_came_just_in_time() -> None:
    bench = AdmissionBench(num_slabs=8)
    early = bench.offer("early", 300, ticket=False)
    bench.depart()
    bench.offer("ready", 300)
    bench.depart()
    found = bench.admission.find_expecting("early", 1)
    assert found is early, "a ticket is still welcome"
    bench.present(early)
    assert bench.land(early).status == "adopted"


def test_those_that_decode_with_a_worse_priority_make_room_for_one_with_a_ticket() -> None:
    bench = AdmissionBench(num_slabs=8)
    idle = bench.offer("idle", 300, priority=1)
    bench.depart()
    bench.land(idle)
    bench.offer("early", 300, ticket=False)
    assert bench.depart() == [] and idle.seq.key in bench.scheduler.adopted
    bench.present(next(iter(bench.admission.waiting.values())))
    assert bench.depart() == ["early"] and idle.seq.key in bench.scheduler.waiting


@pytest.mark.parametrize(("failure", "status"), [(None, "dropped"), (("late", "too late"), "failed")])
def test_what_moves_ends_when_it_has_stopped_and_says_why_if_anybody_asks(
    failure: tuple[str, str] | None, status: str
) -> None:
    bench = AdmissionBench()
    arrival = bench.offer("a", 100)
    bench.depart()
    assert not bench.admission.withdraw(arrival, failure), "something still writes to its slabs"
    assert bench.allocator.used == arrival.num_slabs
    end = bench.land(arrival)
    assert (end.status, (end.code, end.message)) == (status, failure or ("", ""))
    assert bench.allocator.used == 0


def test_too_many_that_wait_and_what_can_never_fit_are_refused() -> None:
    bench = AdmissionBench(num_slabs=4, max_waiting=1)
    with pytest.raises(SequenceRefused) as refused:
        bench.offer("huge", 300)
    assert refused.value.code == "out_of_memory"
    bench.offer("a", 10)
    with pytest.raises(SequenceRefused) as refused:
        bench.offer("b", 10)
    assert refused.value.code == "overloaded"


class AdmissionMachine(RuleBasedStateMachine):
    """Requests come in all kinds, tickets come late or never, fetches land, fail, or are stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = AdmissionBench()
        self.offered: list[str] = []

    @rule(
        length=st.sampled_from([320, 200, 128, 127, 64, 10]),
        tenant=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        ticket=st.booleans(),
        family=st.sampled_from([0, 1, None]),
        new=st.sampled_from([60, 8]),
        patience=st.sampled_from([float("inf"), 5.0, 40.0]),
    )
    def offer(
        self,
        length: int,
        tenant: str,
        priority: int,
        ticket: bool,
        family: int | None,
        new: int,
        patience: float,
    ) -> None:
        name = f"r{len(self.offered)}"
        deadline_s = self.bench.now_s + patience
        self.bench.offer(name, length, tenant, priority, ticket, family, new, deadline_s)
        self.offered.append(name)

    @rule(which=st.integers(0, 30))
    def present(self, which: int) -> None:
        arrival = self.bench.admission.find_expecting(f"r{which}", 1)
        if arrival is not None:
            self.bench.present(arrival)

    @rule()
    def depart(self) -> None:
        """Whoever departs has overtaken nobody, but those that wait for chunks on their way."""
        bench, admission = self.bench, self.bench.admission
        perform = bench.perform

        def checked(effect: DepartureEffect[RemoteKv]) -> bool | None:
            if isinstance(effect, StartFetch):
                order = place_of(effect.arrival)
                ahead = [
                    one
                    for one in admission.waiting.values()
                    if (one.ticket is not None or not one.recalled) and place_of(one) < order
                ]
                moving = [one for one in admission.moving.values() if one.ticket is not None]
                coming = {key for one in moving if not one.stopped for key in one.coming}
                for one in ahead:
                    keys = one.full_keys
                    known = bench.allocator.count_cached(keys)
                    assert known < len(keys) and keys[known] in coming, "overtaken for no reason"
                    SEEN["passed by"] += 1
            return perform(effect)

        places = {key: number for number, key in enumerate(admission.waiting)}

        def place_of(arrival: RemoteKv) -> tuple[int, float, int]:
            tenant = arrival.seq.tenancy.tenant
            served = bench.scheduler.token_counter.served_tokens(tenant)
            return arrival.seq.tenancy.priority, served, places[arrival.seq.key]

        perform_departures(admission.departures(bench.now_s), checked)

    @rule(which=st.integers(0, 5), code=st.sampled_from(["", "", "", "transfer_failed"]))
    def land(self, which: int, code: str) -> None:
        moving = [
            one for one in self.bench.admission.moving.values() if one.ticket is not None or one.stopped
        ]
        if moving:
            self.bench.land(moving[which % len(moving)], code)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        for arrival in self.bench.admission.find_request(f"r{which}", 1):
            if self.bench.admission.withdraw(arrival):
                self.bench.end(arrival, FetchEnd("dropped"))

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        bench = self.bench
        bench.now_s += seconds
        for arrival in bench.admission.expired(bench.now_s):
            if bench.admission.withdraw(arrival, ("deadline_exceeded", "too late")):
                bench.end(arrival, FetchEnd("failed", "deadline_exceeded"))
        assert not bench.admission.expired(bench.now_s)

    @rule(which=st.integers(0, 5), tokens=st.integers(1, 500))
    def answer(self, which: int, tokens: int) -> None:
        """One that was adopted is served, and ends."""
        bench = self.bench
        if here := list(bench.scheduler.sequences()):
            seq = here[which % len(here)]
            bench.scheduler.token_counter.charge_tokens(seq.tenancy.tenant, tokens)
            bench.scheduler.remove(seq.key)
            bench.allocator.release(seq.key)

    @invariant()
    def only_what_moves_holds_room(self) -> None:
        bench, admission = self.bench, self.bench.admission
        bench.allocator.check_books()
        held = bench.allocator.owners()
        assert not held.keys() & admission.waiting.keys()
        for key, arrival in admission.moving.items():
            assert held[key] == arrival.num_slabs == len(bench.reserved[key])
        assert not admission.waiting.keys() & admission.moving.keys()
        tenants = Counter(one.seq.tenancy.tenant for one in (*admission.waiting.values(),))
        tenants.update(one.seq.tenancy.tenant for one in admission.moving.values())
        tenants.update(seq.tenancy.tenant for seq in bench.scheduler.sequences())
        assert bench.scheduler.token_counter._present == tenants

    def teardown(self) -> None:
        """When tickets come, fetches land and answers end, every request ends, and nothing is held."""
        bench, admission = self.bench, self.bench.admission
        for _ in range(300):
            for arrival in [*admission.waiting.values(), *admission.moving.values()]:
                if arrival.ticket is None and arrival.is_wanted:
                    bench.present(arrival)
            self.depart()
            for arrival in list(admission.moving.values()):
                bench.land(arrival)
            while len(bench.scheduler):
                self.answer(0, 10)
            if not len(admission):
                break
        assert set(bench.ends) == set(self.offered) and bench.allocator.used == 0


def test_whatever_happens_each_request_ends_once_and_nobody_is_overbooked() -> None:
    run_state_machine_as_test(
        AdmissionMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
    assert all(SEEN[kind] for kind in ("adopted", "dropped", "failed")), SEEN
