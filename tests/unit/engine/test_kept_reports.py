"""What a decision about a sequence's KV kept is in the first output after it, and in no other."""

from __future__ import annotations

from diptych.eviction_report import KeptReport
from diptych.eviction_spec import KeepSpec
from diptych.messages import Output
from engine.sequence import Sequence
from tests.unit.engine.fakes import EngineBench, sampling, sequence


def run_alone(seq: Sequence) -> list[KeptReport | None]:
    """The reports of all outputs of a sequence, in order."""
    bench = EngineBench(caching=False, max_num_batched_tokens=512)
    bench.engine.add(seq, 0.0)
    reports: list[KeptReport | None] = []
    while bench.engine.has_work:
        for one in bench.engine.step(bench.clock):
            assert isinstance(one.message, Output)
            reports.append(one.message.kept)
            if one.message.kept is not None:
                whole, held = -(-seq.computed // 64), len(seq.slabs)
                assert one.message.kept.freed_slabs == whole - held > 0
    return reports


def test_each_decision_is_reported_once_with_the_next_token() -> None:
    seq = sequence("one", 400, sampling(150), keep=KeepSpec(0.5))
    reports = run_alone(seq)
    assert [place for place, one in enumerate(reports) if one is not None] == [0, 64, 128]
    first = reports[0]
    assert first is not None and (first.all_rows, first.policies) == (400, {"some": 1})
    assert 0 < first.kept_rows < first.all_rows and first.pruned_rows == 400 - first.kept_rows


def test_a_prefill_worker_reports_with_the_token_that_it_hands_over() -> None:
    bench = EngineBench(caching=False, max_num_batched_tokens=512)
    seq = sequence("one", 400, sampling(150), keep=KeepSpec(0.5), hold_kv=True)
    bench.engine.add(seq, 0.0)
    [output] = bench.engine.step(bench.clock)
    assert isinstance(output.message, Output) and output.message.kept is not None and output.held is seq


def test_who_keeps_everything_reports_nothing() -> None:
    assert set(run_alone(sequence("one", 400, sampling(80)))) == {None}
    assert run_alone(sequence("one", 400, sampling(1), keep=KeepSpec(0.5))) == [None], "it ends at once"


def test_decisions_are_a_part_of_steps_and_make_room_for_themselves_beside_prompts() -> None:
    bench = EngineBench(caching=False, max_num_batched_tokens=512)
    seq = sequence("one", 400, sampling(150), keep=KeepSpec(0.5))
    bench.engine.add(seq, 0.0)
    bench.engine.step(bench.clock)
    first = bench.engine.stats.step_parts["evict"]
    pace, due = bench.scheduler.step_time, list[int]()
    assert first > 0 and pace.decision_s(400) == 0
    while bench.engine.has_work:
        due += [seq.computed + 1] if seq.decides_next else []
        bench.engine.step(bench.clock)
    stats = bench.engine.stats
    assert pace.decision_s(400) > 0
    assert due == [464, 528], "these are the tokens at which something is decided"
    assert stats.step_parts["evict"] > first and sum(stats.step_parts.values()) == stats.step_seconds
    plain = EngineBench(caching=False)
    plain.engine.add(sequence("one", 400, sampling(150)), 0.0)
    while plain.engine.has_work:
        plain.engine.step(plain.clock)
    assert plain.engine.stats.step_parts["evict"] == 0
