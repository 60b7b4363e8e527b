"""What the scheduler plans, step by step, and that planning changes nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import SCORED_ROWS, Limits, Plan, Scheduler, Sequence
from tests.unit.engine.fakes import sampling, sequence


def scheduler(num_slabs: int = 1000, seqs: int = 8, budget: int = 100, chunked: bool = True) -> Scheduler:
    return Scheduler(Limits(num_slabs, 4096, seqs, budget, chunked))


def advance(plan: Plan, book: Scheduler) -> None:
    """Do what an engine does with a plan, all sampled tokens being 0."""
    for key in plan.expired:
        book.remove(key)
    for key, need in plan.admitted:
        book.start(key, list(range(need)), 0.0)
    for key, count in [(key, 1) for key in plan.decode] + [(part.key, part.count) for part in plan.prefill]:
        seq = book.running[key]
        seq.computed += count
        if seq.pending == 0:
            seq.output.append(0)
            if len(seq.output) >= seq.sampling.max_tokens:
                book.remove(key)


def counts(plan: Plan) -> dict[str, int]:
    return {part.key.split("#")[0]: part.count for part in plan.prefill}


def test_decodes_come_first_and_prefill_takes_the_rest() -> None:
    book = scheduler()
    for name, length in (("a", 3), ("b", 5), ("c", 250)):
        book.add(sequence(name, length, sampling(50)), 0.0)
    plan = book.schedule(1000, 0.0)
    assert plan.decode == () and counts(plan) == {"a": 3, "b": 5, "c": 92}
    advance(plan, book)
    plan = book.schedule(1000, 0.0)
    assert plan.decode == ("a#1", "b#1") and plan.prefill[0].start == 92
    assert counts(plan) == {"c": 98}
    advance(plan, book)
    assert counts(book.schedule(1000, 0.0)) == {"c": 60}


def test_short_prompts_pass_a_long_one_with_half_the_budget() -> None:
    book = scheduler()
    for name, length in (("long", 1000), ("longer", 2000), ("s1", 30), ("s2", 25), ("s3", 20)):
        book.add(sequence(name, length), 0.0)
    plan = book.schedule(1000, 0.0)
    assert counts(plan) == {"long": 50, "s1": 30, "s3": 20}
    assert list(counts(plan)) == ["long", "s1", "s3"]
    advance(plan, book)
    assert counts(book.schedule(1000, 0.0)) == {"long": 73, "s2": 25}  # 2 decode


def test_those_passed_by_keep_their_slabs_and_seats() -> None:
    for slabs, seqs, passes in ((100, 3, True), (16 + 32, 3, False), (16 + 32 + 1, 3, True), (100, 2, False)):
        book = scheduler(seqs=seqs)
        for name, length in (("long", 1000), ("longer", 2000), ("s1", 30)):
            book.add(sequence(name, length), 0.0)
        assert ("s1" in counts(book.schedule(slabs, 0.0))) == passes


def test_admission_is_in_order_of_arrival_and_never_beyond_slabs_or_seats() -> None:
    book = scheduler(seqs=3)
    for name, length in (("a", 10), ("big", 2000), ("b", 10)):
        book.add(sequence(name, length), 0.0)
    plan = book.schedule(5, 0.0)
    assert plan.admitted == (("a#1", 1),)  # b does not overtake what waits for memory
    advance(plan, book)
    assert book.schedule(4, 0.0).admitted == ()
    assert book.schedule(32, 0.0).admitted == (("big#1", 32),)
    assert not scheduler().ready(5) and book.ready(0)


def test_room_is_for_all_growth_or_for_the_prompt_alone() -> None:
    limits = Limits(1000, max_model_len=1000)
    assert limits.room(sequence("a", 64, sampling(64))) == 2
    assert limits.room(sequence("a", 64, sampling(65))) == 3
    assert limits.room(sequence("a", 64, sampling(0))) == 1
    assert limits.room(sequence("a", 900, sampling(10_000))) == 16
    assert limits.room(sequence("a", 64, sampling(500), hold=True)) == 1
    assert limits.room(sequence("a", 64, sampling(500), hold=True, output=[1])) == 2


def test_whole_prompts_without_chunks() -> None:
    book = scheduler(chunked=False)
    for name, length in (("a", 60), ("b", 50), ("c", 500), ("d", 10), ("e", 20)):
        book.add(sequence(name, length, sampling(50, prompt_logprobs=0)), 0.0)
    for expected in ({"a": 60}, {"b": 50}, {"c": 500}, {"d": 10, "e": 20}):
        plan = book.schedule(1000, 0.0)
        assert counts(plan) == expected
        advance(plan, book)


def test_scored_prompts_come_in_short_chunks() -> None:
    book = scheduler(budget=1000)
    book.add(sequence("a", 600, sampling(prompt_logprobs=1)), 0.0)
    book.add(sequence("b", 600), 0.0)
    assert counts(book.schedule(1000, 0.0)) == {"a": SCORED_ROWS, "b": 600}


def test_the_expired_are_named_and_their_slabs_count_as_free() -> None:
    book = scheduler(seqs=1)
    book.add(sequence("a", 100, deadline_s=5.0), 0.0)
    advance(book.schedule(2, 0.0), book)
    book.add(sequence("b", 100), 0.0)
    book.add(sequence("c", 100, deadline_s=5.0), 0.0)
    plan = book.schedule(0, 5.0)
    assert plan.expired == ("a#1", "c#1") and plan.admitted == (("b#1", 2),) and plan.decode == ()


def test_limits_must_leave_every_sequence_a_token() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        Limits(10, 100, max_num_seqs=65, max_num_batched_tokens=64)


arrivals = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 40), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(arrivals, st.integers(1, 5), st.integers(0, 60), st.integers(6, 20), st.booleans())
def test_every_plan_keeps_the_limits_and_everything_ends(
    wanted: list[tuple[int, int, bool, int]], seqs: int, more: int, slabs: int, chunked: bool
) -> None:
    book = scheduler(slabs, seqs, seqs + more, chunked)
    todo = [
        (delay, sequence(f"r{i}", length, sampling(new), hold=hold))
        for i, (length, new, hold, delay) in enumerate(wanted)
    ]
    for _ in range(5000):
        for _, seq in [item for item in todo if item[0] <= 0]:
            book.add(seq, 0.0)
        todo = [(delay - 1, seq) for delay, seq in todo if delay > 0]
        if not todo and not len(book):
            return
        free = slabs - sum(len(seq.slabs) for seq in book.sequences())
        before = snapshot(book)
        plan = book.schedule(free, 0.0)
        assert plan == book.schedule(free, 0.0) and snapshot(book) == before
        keep_limits(plan, book, free)
        assert plan.decode or plan.prefill or not len(book)  # something moves in every step
        advance(plan, book)
        for key in [seq.key for seq in book.running.values() if seq.hold and seq.output]:
            book.remove(key)
    raise AssertionError("something never ended")


def snapshot(book: Scheduler) -> list[object]:
    queues = [list(queue) for queue in (book.running, book.adopted, book.waiting)]
    return [
        *queues,
        *((seq.computed, seq.target, len(seq.output), list(seq.slabs)) for seq in book.sequences()),
    ]


def keep_limits(plan: Plan, book: Scheduler, free: int) -> None:
    limits = book.limits
    known = {seq.key: seq for seq in book.sequences()}
    new = dict(plan.admitted)
    assert sum(new.values()) <= free and len(book.running) + len(new) <= limits.max_num_seqs
    spent = len(plan.decode) + sum(part.count for part in plan.prefill)
    assert spent <= limits.max_num_batched_tokens or (not limits.chunked_prefill and len(plan.prefill) == 1)
    assert len({part.key for part in plan.prefill} | set(plan.decode)) == len(plan.prefill) + len(plan.decode)
    for part in plan.prefill:
        seq: Sequence = known[part.key]
        assert part.start == seq.computed and 0 < part.count <= seq.pending and not seq.decoding
        assert part.key in book.running or part.key in new
    assert set(new) <= {part.key for part in plan.prefill}  # a sequence starts with work
    assert set(plan.decode) == {key for key, seq in book.running.items() if seq.decoding}


def test_torch_stays_out() -> None:
    code = "import sys, engine.scheduler, engine.loop, engine.work; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
