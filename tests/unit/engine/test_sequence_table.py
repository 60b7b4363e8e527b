"""What a step changes of the sequences of an engine, with no model and no simulator around it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.request import Tenancy
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.sequence import EngineLimits, Sequence
from engine.sequence_table import AdmittedSequence, SequenceTable, first_output_seconds
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from tests.unit.engine.fakes import EngineBench, sampling, sequence


def make_table(num_slabs: int = 12, **limits: Any) -> SequenceTable:
    shape: dict[str, Any] = {"max_model_len": 400, "max_num_seqs": 4, "max_num_batched_tokens": 128} | limits
    return SequenceTable(
        Scheduler(EngineLimits(num_slabs, **shape)), KvAllocator(SlabLedger(num_slabs), PrefixTree())
    )


def preempt_all(table: SequenceTable) -> StepPlan:
    def preempt(key: str) -> None:
        table.preempt(key, parked=False)

    return table.plan_step(preempt)


def run_step(table: SequenceTable, now_s: float = 1.0) -> dict[str, str | None]:
    """One step that writes zeros; how each sequence that wrote has finished, "held" if it left with its slabs."""
    plan = preempt_all(table)
    for admission in table.take_slabs(plan)[0]:
        table.start(admission, now_s)
    work = table.select_work(plan)
    ran = [(seq, 1) for seq in work.decodes] + work.prefills
    table.record_steps(len(work.decodes), sum(count for _, count in work.prefills), [0.01])
    outcome: dict[str, str | None] = {}
    for seq, count in ran:
        table.advance([seq], count)
        if seq.wants_token:
            seq.output.append(0)
            finish = table.finish_reason(seq, stopped=False)
            outcome[seq.id] = "held" if table.settle_output(seq, finish) else finish
        elif seq.pending == 0:
            outcome[seq.id] = "length"
            table.settle_output(seq, "length")
    return outcome


def test_slabs_that_somebody_took_since_the_plan_leave_a_new_sequence_waiting_and_a_running_one_paused() -> (
    None
):
    table = make_table(num_slabs=4)
    table.scheduler.add(sequence("runs", 63, sampling(9)), 0.0)
    assert run_step(table) == {"runs": None} and run_step(table) == {"runs": None}
    table.scheduler.add(sequence("new", 100), 0.0)
    plan = preempt_all(table)
    table.allocator.arena_of("").allocate("somebody", 3)
    assert dict(plan.grow) == {"runs#1": 1, "new#1": 2}
    assert table.take_slabs(plan) == ([], [])
    assert table.allocator.arena_of("").num_held("new#1") == 0 and "new#1" in table.scheduler.waiting
    assert table.select_work(plan).decodes == [], "it has no slab for its next token"


def test_all_slabs_that_will_be_written_to_are_named() -> None:
    table = make_table()
    first = sequence("first", 128)
    table.scheduler.add(first, 0.0)
    run_step(table)
    again = sequence("again", list(first.prompt))
    table.scheduler.add(again, 0.0)
    admissions, taken = table.take_slabs(preempt_all(table))
    assert admissions == [AdmittedSequence(again, cached=1)], (
        "one token is left to be computed for its logits"
    )
    assert again.slabs[0] == first.slabs[0] and set(again.slabs[1:]) <= set(taken)
    assert first.slabs[0] not in taken


@pytest.mark.parametrize(("restored", "computed"), [(False, 64), (True, 100)])
def test_what_is_back_from_the_host_is_not_computed_again(restored: bool, computed: int) -> None:
    table = make_table()
    seq = sequence("a", 110, computed=0)
    table.scheduler.add(seq, 0.0)
    seq.computed = 100
    table.start(AdmittedSequence(seq, cached=1), 2.0, restored)
    assert seq.computed == computed and seq.key in table.scheduler.running


def test_the_first_output_says_where_the_time_went_and_only_the_first() -> None:
    table = make_table()
    local, fetched = sequence("local", 10), sequence("fetched", 64, output=[1], computed=64)
    table.scheduler.add(local, 1.0)
    fetched.slabs = table.allocator.arena_of("").allocate(fetched.key, 2)
    table.scheduler.adopt(fetched, 2.0)
    for admission in table.take_slabs(preempt_all(table))[0]:
        table.start(admission, 5.0)
    assert first_output_seconds(local, 7.0) == {"queue": 4.0, "prefill": 2.0}
    assert first_output_seconds(fetched, 7.0) == {"decode_queue": 3.0, "decode_first": 2.0}
    table.settle_output(fetched, None)
    assert first_output_seconds(fetched, 8.0) == {}


def test_why_an_output_is_complete() -> None:
    table = make_table(max_model_len=20)
    seq = sequence("a", 10, sampling(3), output=[1, 2])
    assert table.finish_reason(seq, stopped=False) is None
    assert table.finish_reason(seq, stopped=True) == "stop"
    seq.output.append(3)
    assert table.finish_reason(seq, stopped=True) == "stop", "an end token at the very end is one"
    assert table.finish_reason(seq, stopped=False) == "length"
    assert table.finish_reason(sequence("long", 20), stopped=False) == "length", "no room in the context"


def test_chunks_without_a_name_are_not_published() -> None:
    table = make_table()
    seq = sequence("a", 200, sampling(100), root=b"", keys=[b"one", b"two"])
    table.scheduler.add(seq, 0.0)
    while seq.computed < 200:
        run_step(table)
    assert seq.shared == 2 and table.allocator.arena_of("").count_cached(seq.keys) == 2


def test_a_decode_that_was_left_out_of_a_step_is_not_counted_as_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its grammar's mask takes long: step times and rates are learnt from the rows that ran."""
    bench = EngineBench()
    for name in "ab":
        bench.engine.add(sequence(name, 10, sampling(50)), 0.0)
    bench.engine.step(bench.clock)
    seen: list[tuple[int, int]] = []
    for row in bench.sampler.rows.values():
        row.cost_s = 0.02
    monkeypatch.setattr(
        bench.scheduler, "record_step", lambda rows, tokens, seconds: seen.append((rows, tokens))
    )
    bench.engine.add(sequence("c", 30), 0.0)
    bench.engine.step(bench.clock)
    assert seen == [(1, 30)] and len(bench.runner.batches[-1]) == 2


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([1, 63, 64, 65, 130, 200]),
        st.sampled_from([0, 1, 5, 150]),
        st.booleans(),
        st.sampled_from("abc"),
        st.integers(-1, 1),
    ),
    min_size=1,
    max_size=8,
)


@given(REQUESTS, st.integers(6, 12))
@settings(max_examples=60, deadline=None)
def test_every_sequence_ends_once_and_nothing_is_held(
    requests: list[tuple[int, int, bool, str, int]], num_slabs: int
) -> None:
    table = make_table(num_slabs)
    ends: dict[str, str] = {}
    live: dict[str, Sequence] = {}
    for number, (length, new, hold_kv, tenant, priority) in enumerate(requests):
        origin = Tenancy(tenant, "", priority)
        seq = sequence(f"r{number}", length, sampling(new), hold_kv=hold_kv, tenancy=origin)
        live[seq.id] = seq
        table.scheduler.add(seq, 0.0)
    for _ in range(3000):
        if not len(table.scheduler):
            break
        for name, end in run_step(table).items():
            if end is not None:
                assert name not in ends, "it has ended before"
                ends[name] = end
                if end == "held":
                    table.allocator.release(live[name].key)
        table.allocator.check_books()
        held = {seq.key: len(seq.slabs) for seq in table.scheduler.sequences() if seq.slabs}
        assert table.allocator.owners() == held
    assert set(ends) == set(live) and table.allocator.used == 0
    for name, seq in live.items():
        assert len(seq.output) == (
            min(1, seq.sampling.max_tokens) if seq.hold_kv else seq.sampling.max_tokens
        ), name
