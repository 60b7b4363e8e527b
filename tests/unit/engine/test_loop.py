"""The engine's loop on fakes: every sequence gets its own tokens, one failure stays one failure, all is freed."""

from __future__ import annotations

from collections.abc import Sequence as Keys

import pytest

from diptych.messages import Failed, Output
from diptych.request import Grammar
from engine.loop import Emission
from engine.scheduler import Refused, Sequence
from engine.seams import LayersDone
from kvcache.holdings import Holdings
from kvcache.slabs import Slabs
from tests.unit.engine.fakes import Bench, alone, following, sampling, sequence


def finish(bench: Bench, limit: int = 10_000) -> list[Emission]:
    """Step until nothing is left."""
    told: list[Emission] = []
    while len(bench.scheduler):
        assert bench.engine.has_work and limit, "stuck"
        told += bench.engine.step(bench.clock)
        limit -= 1
    return told


def outputs(told: list[Emission], name: str) -> list[Output]:
    return [e.message for e in told if isinstance(e.message, Output) and e.message.request == name]


def written(told: list[Emission], name: str) -> list[int]:
    return [token for output in outputs(told, name) for token in output.tokens]


def failures(told: list[Emission]) -> dict[str, str]:
    return {e.message.request: e.message.code for e in told if isinstance(e.message, Failed)}


@pytest.mark.parametrize("chunked", [True, False])
def test_batching_changes_no_token(chunked: bool) -> None:
    bench = Bench(num_slabs=20, max_num_seqs=4, max_num_batched_tokens=70, chunked_prefill=chunked)
    lengths = [1, 63, 64, 65, 127, 128, 129, 300, 2, 640]
    seqs = [sequence(f"r{i}", length, sampling(i)) for i, length in enumerate(lengths)]
    for seq in seqs:
        bench.engine.add(seq, 0.0)
    told = finish(bench)
    for seq in seqs:
        assert written(told, seq.id) == alone(seq)
        assert [o.finish for o in outputs(told, seq.id)][-1] == "length"
        assert all(o.finish is None for o in outputs(told, seq.id)[:-1])
    assert max(len(batch) for batch in bench.runner.batches) == 4
    assert bench.holdings.used == 0
    bench.holdings.check()


def test_a_stop_token_is_told_and_ends_the_sequence() -> None:
    bench = Bench()
    whole = alone(sequence("a", 10))
    seq = sequence("a", 10, sampling(8, stop_token_ids=(whole[3],)))
    bench.engine.add(seq, 0.0)
    told = finish(bench)
    assert written(told, "a") == whole[: whole.index(whole[3]) + 1]
    assert outputs(told, "a")[-1].finish == "stop"


def test_a_complete_grammar_ends_the_sequence() -> None:
    bench = Bench()
    bench.engine.add(sequence("a", 10, sampling(8, grammar=Grammar("lark", "5"))), 0.0)
    told = finish(bench)
    assert len(written(told, "a")) == 5 and outputs(told, "a")[-1].finish == "stop"


def test_the_models_length_ends_the_sequence() -> None:
    bench = Bench(max_model_len=100)
    for name, length in (("a", 90), ("b", 100)):
        bench.engine.add(sequence(name, length, sampling(50)), 0.0)
    told = finish(bench)
    assert len(written(told, "a")) == 10 and outputs(told, "a")[-1].finish == "length"
    assert len(written(told, "b")) == 1 and outputs(told, "b")[-1].finish == "length"


def test_scoring_writes_nothing() -> None:
    bench = Bench()
    bench.engine.add(sequence("a", 300, sampling(0, prompt_logprobs=0)), 0.0)
    bench.engine.add(sequence("b", 300, sampling(0)), 0.0)
    bench.engine.add(sequence("c", 200, sampling(2, prompt_logprobs=0, logprobs=0)), 0.0)
    told = finish(bench)
    for name, length, prompt in (("a", 0, 300), ("c", 2, 200)):
        first, *rest = outputs(told, name)
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        assert [p.logprob for p in first.prompt_logprobs[1:] if p] == [-float(i) for i in range(1, prompt)]
        assert all(output.prompt_logprobs is None for output in rest)
        assert len(written(told, name)) == length
    assert [output.tokens for output in outputs(told, "b")] == [[]]
    assert all(output.logprobs and len(output.logprobs) == 1 for output in outputs(told, "c"))
    assert all(outputs(told, name)[-1].finish == "length" for name in "abc")


def test_a_second_attempt_goes_on_where_the_first_was() -> None:
    whole = alone(sequence("a", 70, sampling(20)))
    bench = Bench()
    bench.engine.add(sequence("a", 70, sampling(20), output=whole[:12], epoch=2), 0.0)
    assert written(finish(bench), "a") == whole[12:]
    assert bench.holdings.used == 0


@pytest.mark.parametrize("earlier", [0, 5])
def test_a_held_sequence_leaves_with_its_slabs_and_goes_on_elsewhere(earlier: int) -> None:
    whole = alone(sequence("a", 130, sampling(20)))
    first, second = Bench(), Bench()
    first.engine.add(sequence("a", 130, sampling(20), hold=True, output=whole[:earlier]), 0.0)
    (last,) = [emission for emission in finish(first) if emission.held]
    held = last.held
    assert held is not None and held.output == whole[: earlier + 1] and held.computed == 130 + earlier
    assert first.holdings.owners() == {"a#1": len(held.slabs)} == {"a#1": 3}  # room for the prompt alone

    slabs = second.holdings.take("a#1", 3)
    second.runner.kv.fetch(first.runner.kv, zip(held.slabs, slabs, strict=True))
    copy = sequence("a", 130, sampling(20), output=list(held.output), computed=held.computed, slabs=slabs)
    second.engine.adopt(copy, 0.0)
    told = finish(second)
    assert written(told, "a") == whole[earlier + 1 :]
    assert set(outputs(told, "a")[0].seconds) == {"decode_queue", "decode_first"}
    assert second.holdings.used == 0
    first.holdings.end("a#1")
    assert first.holdings.used == 0


def test_a_held_sequence_that_ends_with_its_first_token_is_not_held() -> None:
    bench = Bench()
    bench.engine.add(sequence("a", 10, sampling(1), hold=True), 0.0)
    bench.engine.add(sequence("b", 10, sampling(0), hold=True), 0.0)
    assert not any(emission.held for emission in finish(bench)) and bench.holdings.used == 0


def test_adopted_sequences_wait_for_a_seat() -> None:
    bench = Bench(max_num_seqs=2)
    seqs = []
    for i in range(5):
        seq = sequence(f"r{i}", 5, sampling(6))
        first = following(seq.prompt)
        slabs = bench.holdings.take(seq.key, 1)
        for row in range(5):
            bench.runner.kv[slabs[0], row] = seq.prompt[: row + 1]
        seqs.append(sequence(f"r{i}", 5, sampling(6), output=[first], computed=5, slabs=slabs))
        bench.engine.adopt(seqs[-1], 0.0)
    told = finish(bench)
    for seq in seqs:
        assert written(told, seq.id) == alone(sequence(seq.id, 5, sampling(6)))[1:]
    assert max(len(batch) for batch in bench.runner.batches) == 2


@pytest.mark.parametrize(
    "change",
    [{"computed": 4}, {"slabs": []}, {"output": []}, {"hold": True}, {"output": [1] * 6, "computed": 10}],
    ids=["half computed", "no room", "no token", "held", "nothing left"],
)
def test_what_cannot_be_adopted_stays_with_the_caller(change: dict[str, object]) -> None:
    bench = Bench()
    slabs = bench.holdings.take("a#1", 1)
    fields: dict[str, object] = {"output": [1], "computed": 5, "slabs": slabs}
    with pytest.raises(ValueError, match="cannot be adopted"):
        bench.engine.adopt(sequence("a", 5, sampling(6), **(fields | change)), 0.0)
    assert bench.holdings.owners() == {"a#1": 1} and not bench.engine.has_work


def test_one_rows_failure_is_one_requests_failure() -> None:
    bench = Bench()
    good = [sequence(f"good{i}", 40 + i) for i in range(3)]
    victim = alone(good[0])[2]
    for seq in good:
        bench.engine.add(seq, 0.0)
    bench.engine.add(sequence("bad", 10, sampling(grammar=Grammar("lark", "bad"))), 0.0)
    bench.engine.add(sequence("push", 10, sampling(grammar=Grammar("lark", "push"))), 0.0)
    bench.engine.add(sequence("heavy", [1, 2, 99]), 0.0)
    bench.runner.poison = {99}
    bench.sampler.poison = {victim}
    told = finish(bench)
    unlucky = {seq.id: "internal_error" for seq in good if victim in alone(seq)}
    assert (
        failures(told)
        == {"bad": "invalid_grammar", "push": "invalid_grammar", "heavy": "out_of_memory"} | unlucky
    )
    assert "good0" in unlucky and len(unlucky) < 3
    for seq in good:
        if seq.id not in unlucky:
            assert written(told, seq.id) == alone(seq)
    assert bench.holdings.used == 0


def test_kv_of_one_that_failed_is_not_found_by_others() -> None:
    """Whatever spoilt its logits may lie in its KV: the next one with this prompt computes all of it."""
    bench = Bench()
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


def test_a_deadline_ends_a_sequence_before_more_is_done_for_it() -> None:
    bench = Bench(num_slabs=4)
    bench.engine.add(sequence("runs", 10, sampling(100), deadline_s=20.0), 0.0)
    bench.engine.add(sequence("waits", 200, deadline_s=9.0), 0.0)
    assert bench.engine.deadline_s == 9.0
    told = []
    while len(bench.scheduler):
        told += bench.engine.step(bench.clock)
    assert failures(told) == {"runs": "deadline_exceeded", "waits": "deadline_exceeded"}
    assert all(len(batch) == 1 for batch in bench.runner.batches)
    assert 0 < len(written(told, "runs")) < 20 and bench.holdings.used == 0


def test_abort_frees_this_epoch_and_older_ones_only() -> None:
    bench = Bench()
    for epoch in (1, 2, 3):
        bench.engine.add(sequence("a", 100, epoch=epoch), 0.0)
    bench.engine.add(sequence("b", 100), 0.0)
    bench.engine.step(bench.clock)
    assert [seq.epoch for seq in bench.engine.abort("a", 2)] == [1, 2]
    assert bench.engine.abort("a", 2) == []
    told = finish(bench)
    assert {(e.message.request, e.message.epoch) for e in told} == {("a", 3), ("b", 1)}
    assert written(told, "a") == alone(sequence("a", 100)) and bench.holdings.used == 0


class Follower:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.parts: list[tuple[str, int, int]] = []
        self.layers: list[int] = []
        self.gone: list[str] = []

    def took(self, slabs: Keys[int]) -> None:
        self.taken += slabs

    def begin(self, parts: Keys[tuple[Sequence, int]]) -> LayersDone | None:
        self.parts += [(seq.id, seq.computed, end) for seq, end in parts]
        return self.layers.append

    def dropped(self, key: str) -> None:
        self.gone.append(key)


def test_who_follows_held_sequences_hears_what_each_step_will_do() -> None:
    bench, follower = Bench(max_num_batched_tokens=100), Follower()
    bench.engine.follower = follower
    bench.engine.add(sequence("a", 230, hold=True), 0.0)
    told = finish(bench)
    bench.engine.add(sequence("b", 30, sampling(3)), 0.0)
    finish(bench)
    assert follower.parts == [("a", 0, 100), ("a", 100, 200), ("a", 200, 230)]
    assert follower.layers == [1, 2] * 3
    (held,) = [emission.held for emission in told if emission.held]
    assert follower.taken[:4] == held.slabs and len(follower.taken) == 5
    assert follower.gone == ["b#1"]  # "a" was handed over


def test_layers_of_a_step_that_failed_are_not_told_of_again() -> None:
    bench, follower = Bench(), Follower()
    bench.engine.follower = follower
    for name, prompt in (("bad", [1, 99]), ("good", [1, 2])):
        bench.engine.add(sequence(name, prompt, hold=True), 0.0)
    bench.runner.poison = {99}
    told = finish(bench)
    assert failures(told) == {"bad": "out_of_memory"} and written(told, "good")
    assert follower.layers == [] and follower.gone == ["bad#1"]


def test_stages_meet_and_sum_to_the_whole() -> None:
    bench = Bench(max_num_seqs=1)
    for name in "ab":
        bench.engine.add(sequence(name, 200), 0.5)
    moments: dict[str, float] = {}
    told: list[Emission] = []
    while len(bench.scheduler):
        bench.now_s += 1.0
        for emission in bench.engine.step(lambda: bench.now_s):
            moments.setdefault(emission.message.request, bench.now_s)
            told.append(emission)
    for name in "ab":
        first, *rest = outputs(told, name)
        assert set(first.seconds) == {"queue", "prefill"} and not any(output.seconds for output in rest)
        assert sum(first.seconds.values()) == moments[name] - 0.5  # sums of halves are exact
    assert outputs(told, "b")[0].seconds["queue"] > outputs(told, "a")[0].seconds["queue"] + 5


def test_blocked_memory_is_not_work() -> None:
    bench = Bench(num_slabs=4)
    bench.holdings.take("lease", 2)
    bench.engine.add(sequence("a", 190), 0.0)
    blocked = bench.engine.has_work
    assert not blocked and bench.engine.step(bench.clock) == []
    bench.holdings.end("lease")
    assert written(finish(bench), "a") == alone(sequence("a", 190))


def test_one_that_cannot_grow_pauses_until_others_let_go() -> None:
    bench = Bench(num_slabs=4)
    seq = sequence("a", 60, sampling(100))
    bench.engine.add(seq, 0.0)
    bench.engine.step(bench.clock)
    bench.holdings.take("lease", 3)
    told = []
    while bench.engine.has_work:
        told += bench.engine.step(bench.clock)
    assert bench.engine.step(bench.clock) == [] and seq.computed == 64
    bench.holdings.end("lease")
    assert seq.output == alone(sequence("a", 60, sampling(100)))[: len(seq.output)]
    finish(bench)
    assert seq.output == alone(sequence("a", 60, sampling(100)))


def test_slabs_that_vanish_between_plan_and_start_leave_it_waiting() -> None:
    bench = Bench(num_slabs=4)
    bench.engine.add(sequence("a", 100), 0.0)
    with pytest.MonkeyPatch.context() as patch:
        bench.holdings.take("lease", 3)
        patch.setattr(bench.engine, "_decide", lambda clock: bench.scheduler.schedule(Holdings(Slabs(4))))
        assert bench.engine.step(bench.clock) == [] and len(bench.scheduler.waiting) == 1
    bench.holdings.end("lease")
    assert written(finish(bench), "a") == alone(sequence("a", 100))


def test_books() -> None:
    bench = Bench(num_slabs=10, max_num_seqs=2)
    for i in range(3):
        bench.engine.add(sequence(f"r{i}", 60), 0.0)
    bench.engine.step(bench.clock)
    stats = bench.engine.stats
    assert (stats.slabs_total, stats.slabs_used, stats.slabs_cached) == (10, 2, 0)
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 1, 60)
    assert (stats.steps, stats.step_tokens) == (1, 120)
    assert set(stats.step_parts) == {"schedule", "prepare", "run", "sample", "send"}
    assert all(stats.step_parts[part] > 0 for part in ("schedule", "prepare", "run", "sample"))
    bench.engine.sent(2.0)
    stats = bench.engine.stats
    assert stats.step_parts["send"] == 2.0 and sum(stats.step_parts.values()) == stats.step_seconds


def test_what_a_runner_prepares_is_not_running() -> None:
    bench = Bench()
    bench.runner.prepare_seconds = 0.25  # type: ignore[attr-defined]
    bench.engine.add(sequence("a", 60, sampling(1)), 0.0)
    bench.engine.step(bench.clock)
    parts = bench.engine.stats.step_parts
    assert (parts["prepare"], parts["run"]) == (1.25, 0.75)


def test_refusals() -> None:
    bench = Bench(num_slabs=4, max_model_len=300, max_waiting=2, max_waiting_tokens=150)

    def code(seq: Sequence) -> str:
        with pytest.raises(Refused) as caught:
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
