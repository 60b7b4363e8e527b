"""The engine's loop on fakes: every sequence gets its own tokens, one failure stays one failure, all is freed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diptych.messages import Failed
from diptych.request import Grammar, Tenancy
from engine.outputs import SequenceOutput
from engine.sequence import Sequence, SequenceRefused
from kvcache.allocator import KvAllocator
from kvcache.slab_ledger import SlabLedger
from tests.unit.engine.fakes import EngineBench, alone, following, sampling, sequence
from tests.unit.engine.loop_outputs import RecordingObserver, finish, outputs, written


def failures(emitted: list[SequenceOutput]) -> dict[str, str]:
    return {e.message.request: e.message.code for e in emitted if isinstance(e.message, Failed)}


@pytest.mark.parametrize("chunked", [True, False])
def test_batching_changes_no_token(chunked: bool) -> None:
    bench = EngineBench(num_slabs=20, max_num_seqs=4, max_num_batched_tokens=70, chunked_prefill=chunked)
    lengths = [1, 63, 64, 65, 127, 128, 129, 300, 2, 640]
    seqs = [sequence(f"r{i}", length, sampling(i)) for i, length in enumerate(lengths)]
    for seq in seqs:
        bench.engine.add(seq, 0.0)
    emitted = finish(bench)
    for seq in seqs:
        assert written(emitted, seq.id) == alone(seq)
        assert [o.finish for o in outputs(emitted, seq.id)][-1] == "length"
        assert all(o.finish is None for o in outputs(emitted, seq.id)[:-1])
    assert max(len(batch) for batch in bench.runner.batches) == 4
    assert bench.holdings.used == 0
    bench.holdings.check_books()


def test_a_stop_token_is_emitted_and_ends_the_sequence() -> None:
    bench = EngineBench()
    whole = alone(sequence("a", 10))
    seq = sequence("a", 10, sampling(8, stop_token_ids=(whole[3],)))
    bench.engine.add(seq, 0.0)
    emitted = finish(bench)
    assert written(emitted, "a") == whole[: whole.index(whole[3]) + 1]
    assert outputs(emitted, "a")[-1].finish == "stop"


def test_a_complete_grammar_ends_the_sequence() -> None:
    bench = EngineBench()
    bench.engine.add(sequence("a", 10, sampling(8, grammar=Grammar("lark", "5"))), 0.0)
    emitted = finish(bench)
    assert len(written(emitted, "a")) == 5 and outputs(emitted, "a")[-1].finish == "stop"


def test_the_models_length_ends_the_sequence() -> None:
    bench = EngineBench(max_model_len=100)
    for name, length in (("a", 90), ("b", 100)):
        bench.engine.add(sequence(name, length, sampling(50)), 0.0)
    emitted = finish(bench)
    assert len(written(emitted, "a")) == 10 and outputs(emitted, "a")[-1].finish == "length"
    assert len(written(emitted, "b")) == 1 and outputs(emitted, "b")[-1].finish == "length"


def test_scoring_writes_nothing() -> None:
    bench = EngineBench()
    bench.engine.add(sequence("a", 300, sampling(0, prompt_logprobs=0)), 0.0)
    bench.engine.add(sequence("b", 300, sampling(0)), 0.0)
    bench.engine.add(sequence("c", 200, sampling(2, prompt_logprobs=0, logprobs=0)), 0.0)
    emitted = finish(bench)
    for name, length, prompt in (("a", 0, 300), ("c", 2, 200)):
        first, *rest = outputs(emitted, name)
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        assert [p.logprob for p in first.prompt_logprobs[1:] if p] == [-float(i) for i in range(1, prompt)]
        assert all(output.prompt_logprobs is None for output in rest)
        assert len(written(emitted, name)) == length
    assert [output.tokens for output in outputs(emitted, "b")] == [[]]
    assert all(output.logprobs and len(output.logprobs) == 1 for output in outputs(emitted, "c"))
    assert all(outputs(emitted, name)[-1].finish == "length" for name in "abc")


def test_a_second_attempt_goes_on_where_the_first_was() -> None:
    whole = alone(sequence("a", 70, sampling(20)))
    bench = EngineBench()
    bench.engine.add(sequence("a", 70, sampling(20), output=whole[:12], epoch=2), 0.0)
    assert written(finish(bench), "a") == whole[12:]
    assert bench.holdings.used == 0


@pytest.mark.parametrize("earlier", [0, 5])
def test_a_held_sequence_leaves_with_its_slabs_and_goes_on_elsewhere(earlier: int) -> None:
    whole = alone(sequence("a", 130, sampling(20)))
    first, second = EngineBench(), EngineBench()
    first.engine.add(sequence("a", 130, sampling(20), hold_kv=True, output=whole[:earlier]), 0.0)
    (last,) = [emission for emission in finish(first) if emission.held]
    held = last.held
    assert held is not None and held.output == whole[: earlier + 1] and held.computed == 130 + earlier
    assert first.holdings.owners() == {"a#1": len(held.slabs)} == {"a#1": 3}  # room for the prompt alone

    slabs = second.holdings.allocate("a#1", 3)
    second.runner.kv.fetch(first.runner.kv, zip(held.slabs, slabs, strict=True))
    copy = sequence("a", 130, sampling(20), output=list(held.output), computed=held.computed, slabs=slabs)
    second.engine.adopt(copy, 0.0)
    emitted = finish(second)
    assert written(emitted, "a") == whole[earlier + 1 :]
    assert set(outputs(emitted, "a")[0].seconds) == {"decode_queue", "decode_first"}
    assert second.holdings.used == 0
    first.holdings.release("a#1")
    assert first.holdings.used == 0


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 130])
def test_a_first_token_that_is_left_to_another_engine_is_the_same(length: int) -> None:
    """The prompt's last token is computed again there; its score comes from here."""
    asked = sampling(20, prompt_logprobs=0, logprobs=0)
    whole = alone(sequence("a", length, asked))
    first, second = EngineBench(), EngineBench()
    first.engine.add(sequence("a", length, asked, hold_kv=True, defer_first=True), 0.0)
    emitted = finish(first)
    (last,) = [emission for emission in emitted if emission.held]
    held, (output,) = last.held, outputs(emitted, "a")
    assert held is not None and held.computed == length and held.output == output.tokens == []
    assert output.finish is None and len(output.prompt_logprobs or []) == length
    assert set(output.seconds) == {"queue", "prefill"}
    assert "last" not in {work.logits for batch in first.runner.batches for work in batch} or length == 1

    slabs = second.holdings.allocate("a#1", len(held.slabs))
    second.runner.kv.fetch(first.runner.kv, zip(held.slabs, slabs, strict=True))
    second.engine.adopt(sequence("a", length, asked, computed=length - 1, slabs=slabs), 0.0)
    emitted = finish(second)
    assert written(emitted, "a") == whole
    assert [len(work.tokens) for batch in second.runner.batches for work in batch] == [1] * 20
    assert all(one.prompt_logprobs is None for one in outputs(emitted, "a"))
    assert set(outputs(emitted, "a")[0].seconds) == {"decode_queue", "decode_first"}
    first.holdings.release("a#1")
    assert first.holdings.used == second.holdings.used == 0


@pytest.mark.parametrize("parked", [True, False])
def test_a_sequence_without_a_token_that_is_preempted_draws_the_same(parked: bool) -> None:
    bench = EngineBench()
    seq = sequence("a", 130, sampling(20, prompt_logprobs=0))
    slabs = bench.holdings.allocate(seq.key, 3)
    for place in range(130):
        bench.runner.kv[slabs[place // 64], place % 64] = seq.prompt[: place + 1]
    adopted = sequence("a", 130, seq.sampling, computed=129, slabs=slabs)
    bench.engine.adopt(adopted, 0.0)
    bench.engine._preempt_sequence(adopted.key, bench.clock)
    assert written(finish(bench), "a") == alone(seq) and bench.holdings.used == 0


def test_a_held_sequence_that_ends_with_its_first_token_is_not_held() -> None:
    bench = EngineBench()
    bench.engine.add(sequence("a", 10, sampling(1), hold_kv=True), 0.0)
    bench.engine.add(sequence("b", 10, sampling(0), hold_kv=True), 0.0)
    assert not any(emission.held for emission in finish(bench)) and bench.holdings.used == 0


def adopt_from_elsewhere(bench: EngineBench, name: str, origin: Tenancy | None = None) -> Sequence:
    """A sequence with a prompt of 5 tokens, adopted with its KV and its first token."""
    seq = sequence(name, 5, sampling(6))
    slabs = bench.holdings.allocate(seq.key, 1)
    for row in range(5):
        bench.runner.kv[slabs[0], row] = seq.prompt[: row + 1]
    fields = {
        "output": [following(seq.prompt)],
        "computed": 5,
        "slabs": slabs,
        "tenancy": origin or Tenancy(),
    }
    adopted = sequence(name, 5, sampling(6), **fields)
    bench.engine.adopt(adopted, 0.0)
    return adopted


def test_adopted_sequences_wait_for_a_seat() -> None:
    bench = EngineBench(max_num_seqs=2)
    seqs = [adopt_from_elsewhere(bench, f"r{i}") for i in range(5)]
    outputs = finish(bench)
    for seq in seqs:
        assert written(outputs, seq.id) == alone(sequence(seq.id, 5, sampling(6)))[1:]
    assert max(len(batch) for batch in bench.runner.batches) == 2
    assert bench.engine.stats.seat_pauses == 0


def test_a_sequence_that_pauses_for_another_is_counted_and_loses_no_token() -> None:
    bench = EngineBench(max_num_seqs=1)
    adopt_from_elsewhere(bench, "usual")
    outputs = bench.engine.step(bench.clock)
    assert bench.engine.stats.seat_pauses == 0
    adopt_from_elsewhere(bench, "urgent", Tenancy("", "", -1))
    outputs += finish(bench)
    assert bench.engine.stats.seat_pauses == 1
    for name in ("usual", "urgent"):
        assert written(outputs, name) == alone(sequence(name, 5, sampling(6)))[1:]


@pytest.mark.parametrize(
    "change",
    [{"computed": 4}, {"slabs": []}, {"output": []}, {"hold_kv": True}, {"output": [1] * 6, "computed": 10}],
    ids=["half computed", "no room", "no token", "held", "nothing left"],
)
def test_what_cannot_be_adopted_stays_with_the_caller(change: dict[str, object]) -> None:
    bench = EngineBench()
    slabs = bench.holdings.allocate("a#1", 1)
    fields: dict[str, object] = {"output": [1], "computed": 5, "slabs": slabs}
    with pytest.raises(ValueError, match="cannot be adopted"):
        bench.engine.adopt(sequence("a", 5, sampling(6), **(fields | change)), 0.0)
    assert bench.holdings.owners() == {"a#1": 1} and not bench.engine.has_work


def test_one_rows_failure_is_one_requests_failure() -> None:
    bench = EngineBench()
    good = [sequence(f"good{i}", 40 + i) for i in range(3)]
    victim = alone(good[0])[2]
    for seq in good:
        bench.engine.add(seq, 0.0)
    bench.engine.add(sequence("bad", 10, sampling(grammar=Grammar("lark", "bad"))), 0.0)
    bench.engine.add(sequence("push", 10, sampling(grammar=Grammar("lark", "push"))), 0.0)
    bench.engine.add(sequence("heavy", [1, 2, 99]), 0.0)
    bench.runner.poison = {99}
    bench.sampler.poison = {victim}
    emitted = finish(bench)
    unlucky = {seq.id: "internal_error" for seq in good if victim in alone(seq)}
    assert (
        failures(emitted)
        == {"bad": "invalid_grammar", "push": "invalid_grammar", "heavy": "out_of_memory"} | unlucky
    )
    assert "good0" in unlucky and len(unlucky) < 3
    for seq in good:
        if seq.id not in unlucky:
            assert written(emitted, seq.id) == alone(seq)
    assert bench.holdings.used == 0


def test_kv_of_one_that_failed_is_not_found_by_others() -> None:
    """Whatever spoilt its logits may lie in its KV: the next one with this prompt computes all of it."""
    bench = EngineBench()
    prompt = sequence("a", 150).prompt
    bench.sampler.poison = {alone(sequence("a", prompt))[0]}
    bench.engine.add(sequence("a", prompt), 0.0)
    assert failures(finish(bench)) == {"a": "internal_error"}
    bench.sampler.poison = set()
    again = sequence("b", prompt)
    bench.engine.add(again, 0.0)
    finish(bench)
    assert again.cached == 0 and again.output == alone(sequence("b", prompt))
    shared = sequence("c", prompt)
    bench.engine.add(shared, 0.0)
    finish(bench)
    assert shared.cached == 128


def test_one_that_its_own_sampling_fails_leaves_what_others_share() -> None:
    bench = EngineBench()
    victim, other = sequence("a", 200), sequence("b", 200)
    victim.root = other.root = b"root"
    other.prompt = list(victim.prompt)
    bench.sampler.unsound = {alone(victim)[0]}
    bench.engine.add(victim, 0.0)
    assert failures(finish(bench)) == {"a": "no_token_left"}
    bench.sampler.unsound = set()
    bench.engine.add(other, 0.0)
    assert outputs(finish(bench), "b")[0].cached_tokens == 192


def finish_of(bench: EngineBench) -> list[SequenceOutput]:
    """Step as long as there is work."""
    emitted: list[SequenceOutput] = []
    while bench.engine.has_work:
        emitted += bench.engine.step(bench.clock)
    return emitted


def slow(name: str, **rest: object) -> Sequence:
    """One whose grammar is being compiled."""
    return sequence(name, 70, sampling(8, grammar=Grammar("lark", "slow")), **rest)


def test_a_grammar_that_is_being_compiled_stops_nobody_else() -> None:
    bench = EngineBench(num_slabs=8, max_num_seqs=2)
    late = [slow(f"s{i}", tenancy=Tenancy("a")) for i in range(4)]
    for seq in late:
        bench.engine.add(seq, 0.0)
    assert finish_of(bench) == []  # it waits for them, and does not spin
    other = sequence("other", 70, tenancy=Tenancy("b"))
    bench.engine.add(other, 0.0)
    emitted: list[SequenceOutput] = []
    while not any(output.finish for output in outputs(emitted, "other")):
        assert bench.engine.has_work
        emitted += bench.engine.step(bench.clock)
    assert written(emitted, "other") == alone(other)
    assert not bench.holdings.used and not bench.scheduler.running  # they have taken neither seats nor memory
    bench.engine.abort("s0", 9)
    for seq in late[1:]:
        seq.matcher.ready = True
    emitted += finish(bench)
    for seq in late[1:]:
        assert written(emitted, seq.id) == alone(seq)
    assert not outputs(emitted, "s0")
    bench.holdings.check_books()


def test_one_that_was_handed_over_waits_for_its_grammar_without_a_seat() -> None:
    source, bench = EngineBench(), EngineBench(max_num_seqs=1)
    seq = slow("a", output=[], hold_kv=True)
    seq.matcher = SimpleNamespace(ready=True)
    source.engine.add(seq, 0.0)
    (first,) = [e for e in finish(source) if e.held]
    assert first.held is not None
    copy = slow("a", output=list(seq.output), computed=seq.computed)
    copy.slabs = bench.holdings.allocate(copy.key, len(seq.slabs))
    bench.runner.kv.fetch(source.runner.kv, zip(seq.slabs, copy.slabs, strict=True))
    bench.engine.adopt(copy, 0.0)
    assert not bench.engine.has_work
    other = sequence("other", 70)
    bench.engine.add(other, 0.0)
    emitted = [e for _ in range(40) for e in bench.engine.step(bench.clock)]
    assert written(emitted, "other") == alone(other) and not outputs(emitted, "a")
    copy.matcher.ready = True
    assert seq.output + written(finish(bench), "a") == alone(slow("a"))


def test_rows_with_slow_masks_alternate_beside_the_others() -> None:
    bench = EngineBench()
    heavy = [sequence(f"s{i}", 5, sampling(30)) for i in range(4)]
    quick = sequence("quick", 5, sampling(30))
    for seq in [*heavy, quick]:
        bench.engine.add(seq, 0.0)
    emitted = bench.engine.step(bench.clock)
    for seq in heavy:
        bench.sampler.rows[seq.key].cost_s = 0.02
    rounds = [bench.engine.step(bench.clock) for _ in range(8)]
    for emitted_now in rounds:
        names = [e.message.request for e in emitted_now]
        assert names.count("quick") == 1 and len(names) == 2  # one of the slow ones fits into a step
    assert [len(outputs([e for part in rounds for e in part], seq.id)) for seq in heavy] == [2, 2, 2, 2]
    emitted += [e for part in rounds for e in part] + finish(bench)
    for seq in [*heavy, quick]:
        assert written(emitted, seq.id) == alone(seq)  # and no token is another


def test_a_deadline_ends_a_sequence_before_more_is_done_for_it() -> None:
    bench = EngineBench(num_slabs=4)
    bench.engine.add(sequence("runs", 10, sampling(100), deadline_s=20.0), 0.0)
    bench.engine.add(sequence("waits", 200, deadline_s=9.0), 0.0)
    assert bench.engine.deadline_s == 9.0
    emitted = []
    while len(bench.scheduler):
        emitted += bench.engine.step(bench.clock)
    assert failures(emitted) == {"runs": "deadline_exceeded", "waits": "deadline_exceeded"}
    assert all(len(batch) == 1 for batch in bench.runner.batches)
    assert 0 < len(written(emitted, "runs")) < 20 and bench.holdings.used == 0


def test_abort_frees_this_epoch_and_older_ones_only() -> None:
    bench = EngineBench()
    for epoch in (1, 2, 3):
        bench.engine.add(sequence("a", 100, epoch=epoch), 0.0)
    bench.engine.add(sequence("b", 100), 0.0)
    bench.engine.step(bench.clock)
    assert [seq.epoch for seq in bench.engine.abort("a", 2)] == [1, 2]
    assert bench.engine.abort("a", 2) == []
    emitted = finish(bench)
    assert {(e.message.request, e.message.epoch) for e in emitted} == {("a", 3), ("b", 1)}
    assert written(emitted, "a") == alone(sequence("a", 100)) and bench.holdings.used == 0


def test_who_follows_held_sequences_hears_what_each_step_will_do() -> None:
    bench, follower = EngineBench(max_num_batched_tokens=100), RecordingObserver()
    bench.engine.kv_observer = follower
    bench.engine.add(sequence("a", 230, hold_kv=True), 0.0)
    emitted = finish(bench)
    bench.engine.add(sequence("b", 30, sampling(3)), 0.0)
    finish(bench)
    assert follower.parts == [("a", 0, 100), ("a", 100, 200), ("a", 200, 230)]
    assert follower.layers == [1, 2] * 3
    (held,) = [emission.held for emission in emitted if emission.held]
    assert follower.taken[:4] == held.slabs and len(follower.taken) == 5
    assert follower.gone == ["b#1"]  # "a" was handed over


def test_layers_of_a_failed_step_are_not_reported_again() -> None:
    bench, follower = EngineBench(), RecordingObserver()
    bench.engine.kv_observer = follower
    for name, prompt in (("bad", [1, 99]), ("good", [1, 2])):
        bench.engine.add(sequence(name, prompt, hold_kv=True), 0.0)
    bench.runner.poison = {99}
    emitted = finish(bench)
    assert failures(emitted) == {"bad": "out_of_memory"} and written(emitted, "good")
    assert follower.layers == [] and follower.gone == ["bad#1"]


def test_stages_meet_and_sum_to_the_whole() -> None:
    bench = EngineBench(max_num_seqs=1)
    for name in "ab":
        bench.engine.add(sequence(name, 200), 0.5)
    moments: dict[str, float] = {}
    emitted: list[SequenceOutput] = []
    while len(bench.scheduler):
        bench.now_s += 1.0
        for emission in bench.engine.step(lambda: bench.now_s):
            moments.setdefault(emission.message.request, bench.now_s)
            emitted.append(emission)
    for name in "ab":
        first, *rest = outputs(emitted, name)
        assert set(first.seconds) == {"queue", "prefill"} and not any(output.seconds for output in rest)
        assert sum(first.seconds.values()) == moments[name] - 0.5  # sums of halves are exact
    assert outputs(emitted, "b")[0].seconds["queue"] > outputs(emitted, "a")[0].seconds["queue"] + 5


def test_blocked_memory_is_not_work() -> None:
    bench = EngineBench(num_slabs=4)
    bench.holdings.allocate("lease", 2)
    bench.engine.add(sequence("a", 190), 0.0)
    blocked = bench.engine.has_work
    assert not blocked and bench.engine.step(bench.clock) == []
    bench.holdings.release("lease")
    assert written(finish(bench), "a") == alone(sequence("a", 190))


def test_one_that_cannot_grow_pauses_until_others_let_go() -> None:
    bench = EngineBench(num_slabs=4)
    seq = sequence("a", 60, sampling(100))
    bench.engine.add(seq, 0.0)
    bench.engine.step(bench.clock)
    bench.holdings.allocate("lease", 3)
    emitted = []
    while bench.engine.has_work:
        emitted += bench.engine.step(bench.clock)
    assert bench.engine.step(bench.clock) == [] and seq.computed == 64
    bench.holdings.release("lease")
    assert seq.output == alone(sequence("a", 60, sampling(100)))[: len(seq.output)]
    finish(bench)
    assert seq.output == alone(sequence("a", 60, sampling(100)))


def test_slabs_that_vanish_between_plan_and_start_leave_it_waiting() -> None:
    bench = EngineBench(num_slabs=4)
    bench.engine.add(sequence("a", 100), 0.0)
    with pytest.MonkeyPatch.context() as patch:
        bench.holdings.allocate("lease", 3)
        stale = bench.scheduler.schedule(KvAllocator(SlabLedger(4)))
        patch.setattr(bench.engine.table, "plan_step", lambda preempt: stale)
        assert bench.engine.step(bench.clock) == [] and len(bench.scheduler.waiting) == 1
    bench.holdings.release("lease")
    assert written(finish(bench), "a") == alone(sequence("a", 100))


def test_books() -> None:
    bench = EngineBench(num_slabs=10, max_num_seqs=2)
    for i in range(3):
        bench.engine.add(sequence(f"r{i}", 60), 0.0)
    bench.engine.step(bench.clock)
    stats = bench.engine.stats
    assert (stats.slabs_total, stats.slabs_used, stats.slabs_cached) == (10, 2, 0)
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 1, 60)
    assert (stats.steps, stats.step_tokens) == (1, 120)
    assert set(stats.step_parts) == {"schedule", "prepare", "run", "evict", "sample", "send"}
    assert all(stats.step_parts[part] > 0 for part in ("schedule", "prepare", "run", "sample"))
    bench.engine.record_send_time(2.0)
    stats = bench.engine.stats
    assert stats.step_parts["send"] == 2.0 and sum(stats.step_parts.values()) == stats.step_seconds


def test_what_a_runner_prepares_is_not_running() -> None:
    bench = EngineBench()
    bench.runner.prepare_seconds = 0.25  # type: ignore[attr-defined]
    bench.engine.add(sequence("a", 60, sampling(1)), 0.0)
    bench.engine.step(bench.clock)
    parts = bench.engine.stats.step_parts
    assert (parts["prepare"], parts["run"]) == (1.25, 0.75)


def test_refusals() -> None:
    bench = EngineBench(num_slabs=4, max_model_len=300, max_waiting=2, max_waiting_tokens=150)

    def code(seq: Sequence) -> str:
        with pytest.raises(SequenceRefused) as caught:
            bench.engine.add(seq, 0.0)
        return caught.value.code

    assert code(sequence("long", 301)) == code(sequence("empty", [])) == "internal_error"
    assert code(sequence("big", 200, sampling(57))) == "out_of_memory"
    bench.engine.add(sequence("a", 100), 0.0)
    assert code(sequence("tokens", 51)) == "overloaded"
    bench.engine.add(sequence("b", 1), 0.0)
    assert code(sequence("items", 1)) == "overloaded"
    with pytest.raises(ValueError, match="already here"):
        bench.engine.add(sequence("a", 100), 0.0)
    bench.engine.abort("a", 1)
    bench.engine.add(sequence("items", 1), 0.0)
    assert len(bench.scheduler) == 2
