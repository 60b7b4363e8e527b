"""What the scheduler plans, step by step, and that planning changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.chunks import CHUNK_TOKENS
from diptych.request import Tenancy
from engine.scheduling.new_token_ratio import NewTokenRatio
from engine.scheduling.prefill_adder import MAX_SCORED_ROWS, PrefillChunk
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.sequence import EngineLimits, Sequence
from tests.unit.engine.fakes import sampling, sequence


def scheduler(num_slabs: int = 1000, seqs: int = 8, budget: int = 100, **rest: Any) -> Scheduler:
    return Scheduler(EngineLimits(num_slabs, 4096, seqs, budget, **rest))


class FakeAvailability:
    """Memory and known prefixes, as numbers. `known` chunks are there; those in `held` are held by others."""

    def __init__(self, free: int, known: Iterable[bytes] = (), held: Iterable[bytes] = ()) -> None:
        self.free, self.known, self.held = free, set(known), set(held)

    def arena_of(self, kv_class: str) -> FakeAvailability:
        return self

    def count_cached(self, keys: Seq[bytes]) -> int:
        return sum(1 for _ in takewhile(self.known.__contains__, keys))

    def count_unheld(self, keys: Seq[bytes]) -> int:
        return sum(key not in self.held for key in keys[: self.count_cached(keys)])

    def count_freed_by(self, holders: Seq[str]) -> int:
        """Nobody holds anything of it."""
        return 0


def advance(plan: StepPlan, book: Scheduler) -> None:
    """Do what an engine does with a plan, all sampled tokens being 0. Prefixes are not shared."""
    if plan.preempted:
        book.preempt(plan.preempted, parked=False)
        return
    for key in plan.admitted:
        book.start(key, 0.0)
    for key, count in plan.grow:
        book.running[key].slabs += range(count)
    for key, count in [(key, 1) for key in plan.decode] + [(part.key, part.count) for part in plan.prefill]:
        seq = book.running[key]
        seq.computed += count
        assert len(seq.slabs) * CHUNK_TOKENS >= seq.computed
        if seq.pending == 0:
            seq.output.append(0)
            if len(seq.output) >= seq.sampling.max_tokens:
                book.remove(key)


def counts(plan: StepPlan) -> dict[str, int]:
    return {part.key.split("#")[0]: part.count for part in plan.prefill}


def test_decodes_come_first_and_prefill_takes_the_rest() -> None:
    book, shelf = scheduler(), FakeAvailability(1000)
    for name, length in (("a", 3), ("b", 5), ("c", 250)):
        book.add(sequence(name, length, sampling(50)), 0.0)
    plan = book.schedule(shelf)
    assert plan.decode == () and counts(plan) == {"a": 3, "b": 5, "c": 25}
    advance(plan, book)
    plan = book.schedule(shelf)
    assert plan.decode == ("a#1", "b#1") and plan.prefill[0].start == 25
    assert counts(plan) == {"c": 98}
    advance(plan, book)
    assert counts(book.schedule(shelf)) == {"c": 98}


def test_shorter_prompts_pass_a_long_one_which_keeps_a_quarter() -> None:
    book, shelf = scheduler(), FakeAvailability(1000)
    for name, length in (("long", 1000), ("longer", 2000), ("s1", 50), ("s2", 45), ("s3", 20)):
        book.add(sequence(name, length), 0.0)
    plan = book.schedule(shelf)
    assert counts(plan) == {"s3": 20, "s2": 45, "s1": 10, "long": 25}
    advance(plan, book)
    plan = book.schedule(shelf)
    assert counts(plan) == {
        "s1": 40,
        "long": 24,
    }  # a quarter of what 2 decoding ones leave, since s1 is to end soon
    advance(plan, book)
    assert counts(book.schedule(shelf)) == {"long": 48}  # half, in case more come
    for _ in range(100):
        book.record_step(3, 48, 0.1)
    assert counts(book.schedule(shelf)) == {"long": 97}


def test_slabs_are_taken_as_sequences_grow() -> None:
    book, shelf = scheduler(), FakeAvailability(1000)
    book.add(sequence("a", 150, sampling(50)), 0.0)
    taken = []
    while len(book):
        plan = book.schedule(shelf)
        taken.append(dict(plan.grow).get("a#1", 0))
        advance(plan, book)
    assert taken[:2] == [2, 1] and sum(taken) == 4 and taken.index(1, 2) == 2 + (192 - 150)


def test_admission_is_in_order_of_arrival_and_never_beyond_slabs_or_seats() -> None:
    book = scheduler(seqs=3)
    for name, length in (("a", 10), ("big", 2000), ("b", 10)):
        book.add(sequence(name, length), 0.0)
    plan = book.schedule(FakeAvailability(5))
    assert plan.admitted == ("a#1",)  # b does not overtake what waits for memory
    advance(plan, book)
    assert book.schedule(FakeAvailability(4)).admitted == ()
    assert book.schedule(FakeAvailability(32)).admitted == ("big#1",)
    assert book.schedule(FakeAvailability(33)).admitted == ("big#1", "b#1")
    empty = scheduler()
    assert not empty.ready(FakeAvailability(5)) and book.ready(FakeAvailability(0))


def test_growth_of_those_who_run_is_set_aside() -> None:
    book = scheduler()
    book.ratio = NewTokenRatio(0.5)
    book.add(sequence("a", 64, sampling(640)), 0.0)
    book.add(sequence("b", 64, sampling(1)), 0.0)
    plan = book.schedule(FakeAvailability(6))
    assert plan.admitted == ("a#1",)  # 1 + 5 slabs expected, 1 more for b
    assert book.schedule(FakeAvailability(8)).admitted == ("a#1", "b#1")  # b may grow into a second one
    advance(plan, book)
    assert book.schedule(FakeAvailability(5)).admitted == ()  # a is expected to take 5 more
    book.ratio = NewTokenRatio(0.2)
    assert book.schedule(FakeAvailability(5)).admitted == ("b#1",)


def test_the_ratio_falls_slowly_and_jumps() -> None:
    book = scheduler()
    first = book.ratio.value
    for _ in range(10_000):
        book.record_step(0, 100, 1.0)
    assert book.ratio.value == first
    for _ in range(100):
        book.record_step(3, 0, 1.0)
    assert first * 0.8 < book.ratio.value < first
    book.add(sequence("a", 10), 0.0)
    advance(book.schedule(FakeAvailability(9)), book)
    book.preempt("a#1", parked=False)
    assert book.ratio.value > first
    for _ in range(10_000):
        book.record_step(3, 0, 1.0)
    assert 0 < book.ratio.value < first / 2


def test_room_is_for_all_growth_or_for_the_prompt_alone() -> None:
    limits = EngineLimits(1000, max_model_len=1000)
    assert limits.max_slabs(sequence("a", 64, sampling(64))) == 2
    assert limits.max_slabs(sequence("a", 64, sampling(65))) == 3
    assert limits.max_slabs(sequence("a", 64, sampling(0))) == 1
    assert limits.max_slabs(sequence("a", 900, sampling(10_000))) == 16
    assert limits.max_slabs(sequence("a", 64, sampling(500), hold_kv=True)) == 1
    assert limits.max_slabs(sequence("a", 64, sampling(500), hold_kv=True, output=[1])) == 2


def test_whole_prompts_without_chunks() -> None:
    book = scheduler(chunked_prefill=False)
    for name, length in (("a", 60), ("b", 50), ("c", 500), ("d", 10), ("e", 20)):
        book.add(sequence(name, length, sampling(50, prompt_logprobs=0)), 0.0)
    for expected in ({"a": 60}, {"b": 50}, {"c": 500}, {"d": 10, "e": 20}):
        plan = book.schedule(FakeAvailability(1000))
        assert counts(plan) == expected
        advance(plan, book)


def test_scored_prompts_come_in_short_chunks() -> None:
    book = scheduler(budget=1000)
    book.add(sequence("a", 600, sampling(prompt_logprobs=1)), 0.0)
    book.add(sequence("b", 600), 0.0)
    assert counts(book.schedule(FakeAvailability(1000))) == {"a": MAX_SCORED_ROWS, "b": 600}


def test_the_expired_are_named() -> None:
    book = scheduler(seqs=1)
    for name, deadline_s in (("a", 5.0), ("b", float("inf")), ("c", 5.0), ("d", 7.0)):
        book.add(sequence(name, 100, deadline_s=deadline_s), 0.0)
    advance(book.schedule(FakeAvailability(2)), book)
    assert book.deadline_s == 5.0 and book.expired_keys(4.9) == []
    assert book.expired_keys(5.0) == ["a#1", "c#1"]
    for key in book.expired_keys(5.0):
        book.remove(key)
    assert book.deadline_s == 7.0 and book.expired_keys(6.9) == []
    book.remove("d#1")
    assert book.expired_keys(1e9) == [] and [seq.id for seq in book.sequences()] == ["b"]


def test_limits_must_leave_every_sequence_a_token() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        EngineLimits(10, 100, max_num_seqs=65, max_num_batched_tokens=64)


def test_steps_that_only_read_are_filled_to_saturation() -> None:
    book, shelf = scheduler(budget=512, saturation_tokens=128), FakeAvailability(1000)
    for name, length in (("a", 50), ("b", 50), ("c", 50), ("long", 1000)):
        book.add(sequence(name, length, sampling(9), hold_kv=True), 0.0)
    spent = []
    while len(book):
        plan = book.schedule(shelf)
        spent.append(sum(part.count for part in plan.prefill))
        advance(plan, book)
        for key in [key for key, seq in book.running.items() if seq.output]:
            book.remove(key)
    assert spent[:2] == [128, 22 + 32] and set(spent[2:-1]) == {128} and sum(spent) == 1150


# ---- priority and fairness


def test_priority_comes_before_arrival() -> None:
    book = scheduler(seqs=2)
    for name, priority in (("a", 0), ("b", 1), ("c", -1)):
        book.add(sequence(name, 60, tenancy=Tenancy(priority=priority)), 0.0)
    assert book.schedule(FakeAvailability(100)).admitted == ("c#1", "a#1")


def test_tenants_alternate_whoever_came_first() -> None:
    book = scheduler(seqs=4)
    for i in range(6):
        book.add(sequence(f"many{i}", 20, tenancy=Tenancy("many")), 0.0)
    for i in range(2):
        book.add(sequence(f"few{i}", 20, tenancy=Tenancy("few")), 0.0)
    assert set(book.schedule(FakeAvailability(100)).admitted) == {"many0#1", "many1#1", "few0#1", "few1#1"}


# ---- the prefix tree


def test_what_is_known_is_neither_read_nor_taken() -> None:
    book, seq = scheduler(budget=1000), sequence("a", 200, sampling(8))
    book.add(seq, 0.0)
    shelf = FakeAvailability(10, seq.keys[:2], held=seq.keys[:1])
    plan = book.schedule(shelf)
    assert plan.prefill == (PrefillChunk("a#1", 128, 72),) and plan.grow == (("a#1", 2),)
    whole = sequence("b", 128, sampling(8))  # all of it is known, but a token must be run for its logits
    book.add(whole, 0.0)
    shelf.known |= set(whole.keys)
    assert PrefillChunk("b#1", 64, 64) in book.schedule(shelf).prefill


def test_cached_chunks_cost_the_memory_that_they_free() -> None:
    for held, enough in ((0, False), (1, True)):
        book, seq = scheduler(), sequence("a", 200, sampling(1))
        book.add(seq, 0.0)
        shelf = FakeAvailability(
            3, seq.keys[:2], held=seq.keys[:held]
        )  # 2 more are needed; unheld ones are among the free
        assert book.ready(shelf) == enough == bool(book.schedule(shelf).admitted)


def test_scored_prompts_are_run_in_full() -> None:
    book, seq = scheduler(), sequence("a", 90, sampling(8, prompt_logprobs=0))
    book.add(seq, 0.0)
    assert book.schedule(FakeAvailability(10, seq.keys)).prefill == (PrefillChunk("a#1", 0, 90),)


def test_nobody_computes_what_another_is_computing() -> None:
    book, shelf = scheduler(budget=64), FakeAvailability(100)
    prompt = sequence("common", 150).prompt
    seqs = [sequence(name, [*prompt, i], sampling(4)) for i, name in enumerate("abc")]
    other = sequence("other", 10)
    for seq in [*seqs, other]:
        book.add(seq, 0.0)
    plan = book.schedule(shelf)
    assert counts(plan) == {"a": 16, "other": 10}
    advance(plan, book)
    seen = []
    while len(book):
        shelf.known |= {key for seq in book.running.values() for key in seq.keys[: seq.computed // 64]}
        plan = book.schedule(shelf)
        seen += [part for part in plan.prefill if part.key in ("b#1", "c#1")]
        for part in plan.prefill:
            if part.key in plan.admitted and part.start:
                book.waiting[part.key].slabs = [0] * (part.start // 64)
                book.waiting[part.key].computed = part.start
        advance(plan, book)
    assert [(part.start, part.count) for part in seen] == [(128, 23), (128, 23)]


def test_one_that_is_served_sooner_does_not_wait_for_one_that_is_served_later() -> None:
    book, shelf = scheduler(budget=100), FakeAvailability(100)
    prompt = sequence("common", 1000).prompt
    book.add(sequence("low", prompt, tenancy=Tenancy(priority=1)), 0.0)
    advance(book.schedule(shelf), book)
    book.add(sequence("high", prompt), 0.0)
    book.add(sequence("lower", prompt, tenancy=Tenancy(priority=2)), 0.0)
    assert counts(book.schedule(shelf)) == {"high": 100}


# ---- seats


def handed_over(book: Scheduler, name: str, tenant: str = "", priority: int = 0) -> None:
    """One whose KV has come from elsewhere; it takes a seat as soon as it gets one."""
    seq = sequence(name, 100, sampling(50), output=[0], computed=100, tenancy=Tenancy(tenant, "", priority))
    seq.slabs = [0, 0]
    book.adopt(seq, 0.0)


def seated(book: Scheduler) -> list[str]:
    """Who runs, after a step for which there is memory."""
    advance(book.next_plan(FakeAvailability(1000)), book)
    return sorted(key.split("#")[0] for key in book.running)


def test_a_tenant_with_many_sequences_gives_seats_to_another() -> None:
    book = scheduler(seqs=4)
    for name in ("a1", "a2", "a3", "a4", "a5"):
        handed_over(book, name, "a")
    assert seated(book) == ["a1", "a2", "a3", "a4"]
    for name in ("b1", "b2", "b3"):
        handed_over(book, name, "b")
    outputs = {key: len(seq.output) for key, seq in book.running.items()}
    assert book.seat_pauses == 0
    assert seated(book) == ["a1", "a2", "b1", "b2"]  # half of the seats each, the earliest first
    assert book.seat_pauses == 2
    assert len(book.find("a4#1").slabs) == 2 and len(book.find("a4#1").output) == outputs["a4#1"]  # type: ignore[union-attr]
    for _ in range(5):
        assert seated(book) == ["a1", "a2", "b1", "b2"]  # nobody takes a seat back that is due to another
    book.remove("b1#1")
    assert seated(book) == ["a1", "a2", "b2", "b3"]
    book.remove("b2#1")
    book.remove("b3#1")
    assert seated(book) == ["a1", "a2", "a3", "a4"]


def test_a_tenant_alone_keeps_its_seats() -> None:
    book = scheduler(seqs=2)
    for name in ("a1", "a2", "a3"):
        handed_over(book, name, "a")
        advance(book.schedule(FakeAvailability(1000)), book)
    assert book.schedule(FakeAvailability(1000)).paused == () and sorted(book.running) == ["a1#1", "a2#1"]
    assert book.seat_pauses == 0


def test_a_better_priority_takes_a_seat() -> None:
    book = scheduler(seqs=2)
    for name in ("a1", "a2"):
        handed_over(book, name, "a")
    assert seated(book) == ["a1", "a2"]
    handed_over(book, "worse", "b", priority=5)
    handed_over(book, "better", "a", priority=-5)
    assert seated(book) == ["a1", "better"]
    book.remove("better#1")
    assert seated(book) == ["a1", "a2"]


def test_more_tenants_than_seats_still_have_one_each_alternately() -> None:
    book = scheduler(seqs=2)
    for name in ("a1", "a2", "b1", "c1"):
        handed_over(book, name, name[0])
    first = seated(book)
    assert len({name[0] for name in first}) == 2  # no tenant has two while another has none
    assert seated(book) == first


# ---- all of it


origins = st.builds(Tenancy, st.sampled_from("ab"), st.just(""), st.integers(0, 1))
arrivals = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 90), st.booleans(), st.integers(0, 3), origins),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(arrivals, st.integers(1, 5), st.integers(0, 60), st.integers(7, 20), st.booleans(), st.booleans())
def test_every_plan_keeps_the_limits_and_everything_ends(
    wanted: list[tuple[int, int, bool, int, Tenancy]],
    seqs: int,
    more: int,
    slabs: int,
    chunked: bool,
    eager: bool,
) -> None:
    book = scheduler(slabs, seqs, seqs + more, chunked_prefill=chunked)
    if eager:
        book.ratio = NewTokenRatio(0.0, 0.0, 0.0, 0.0)
    todo = [
        (delay, sequence(f"r{i}", length, sampling(new), hold_kv=hold_kv, tenancy=origin, root=b""))
        for i, (length, new, hold_kv, delay, origin) in enumerate(wanted)
    ]
    for _ in range(8000):
        for _, seq in [item for item in todo if item[0] <= 0]:
            book.add(seq, 0.0)
        todo = [(delay - 1, seq) for delay, seq in todo if delay > 0]
        if not todo and not len(book):
            return
        shelf = FakeAvailability(slabs - sum(len(seq.slabs) for seq in book.sequences()))
        before = snapshot(book)
        plan = book.schedule(shelf)
        assert plan == book.schedule(shelf) and snapshot(book) == before
        keep_limits(plan, book, shelf.free)
        assert plan.preempted or plan.decode or plan.prefill or not len(book)  # something moves in every step
        advance(plan, book)
        for key in [seq.key for seq in book.running.values() if seq.hold_kv and seq.output]:
            book.remove(key)
    raise AssertionError("something never ended")


def snapshot(book: Scheduler) -> list[object]:
    queues = [list(queue) for queue in (book.running, book.adopted, book.waiting)]
    return [
        *queues,
        *((seq.computed, seq.target, len(seq.output), list(seq.slabs)) for seq in book.sequences()),
    ]


def keep_limits(plan: StepPlan, book: Scheduler, free: int) -> None:
    limits = book.limits
    known = {seq.key: seq for seq in book.sequences()}
    if plan.preempted:
        assert plan == StepPlan(preempted=plan.preempted)
        assert known[plan.preempted].precedence > min(seq.precedence for seq in book.sequences())
        return
    new = set(plan.admitted)
    assert sum(n for _, n in plan.grow) <= free and len(book.running) + len(new) <= limits.max_num_seqs
    spent = len(plan.decode) + sum(part.count for part in plan.prefill)
    assert spent <= limits.max_num_batched_tokens or (not limits.chunked_prefill and len(plan.prefill) == 1)
    assert len({part.key for part in plan.prefill} | set(plan.decode)) == len(plan.prefill) + len(plan.decode)
    for part in plan.prefill:
        seq: Sequence = known[part.key]
        assert part.start == seq.computed and 0 < part.count <= seq.pending and not seq.decoding
        assert part.key in book.running or part.key in new
    assert new <= {part.key for part in plan.prefill}  # a sequence starts with work
    assert set(plan.decode) == {key for key, seq in book.running.items() if seq.decoding}


def test_torch_stays_out() -> None:
    code = "import sys, engine.scheduling.scheduler, engine.loop, engine.step_work; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
