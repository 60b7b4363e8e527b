"""Sequences whose heads drop KV: their slabs, their decision points, and what the runner is asked to remember."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.errors import CorruptChunk
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.messages import Failed, Output
from diptych.request import Tenancy
from engine.eviction.decision_points import DecisionPoints
from engine.protocols import EvictionOrder, EvictionReport
from engine.sequence import Sequence, SequenceRefused, num_chunks
from kvcache.eviction.kept_segments import KeptSegment
from tests.unit.engine.conservation import Conservation
from tests.unit.engine.fakes import EngineBench, FakeRunner, FixedRate, alone, sampling, sequence
from tests.unit.engine.loop_outputs import RecordingObserver

SOME, BEHIND = KeepSpec(0.5), KeepSpec(0.5, 64)
SEEDS = range(40)
INFINITY = float("inf")


def run_storm(seed: int) -> Counter[str]:
    """Random calls on two engines, most sequences evicting, until all is over; which decisions and loads there were."""
    rng, machine = Random(seed), Conservation()
    machine.rates(parks=seed % 2 == 0, second=False)
    machine.rates(parks=seed % 4 < 2, second=True)
    for _ in range(40):
        match rng.choice(["add", "add", "step", "step", "step", "hand over", "hand over", "abort", "poison"]):
            case "add":
                length, common = rng.choice([150, 130, 100, 64, 63, 5]), rng.choice([0, 64, 128])
                new, earlier = rng.choice([140, 100, 70, 2]), rng.choice([0, 0, 1, 30, 64, 66])
                origin = Tenancy(rng.choice("ab"), "", rng.choice([0, 0, -1, 1]))
                keep, hold_kv = rng.choice([SOME, BEHIND]), rng.random() < 0.6
                machine._add(length, common, 0, new, hold_kv, earlier, False, origin, INFINITY, keep)
            case "step":
                machine.step(rng.random() < 0.5, rng.choice([3, 12, 40]))
            case "hand over":
                machine.hand_over(rng.randrange(10))
            case "abort" if rng.random() < 0.3:
                machine.abort(rng.randrange(1, 20), rng.random() < 0.5)
            case "poison" if rng.random() < 0.1:
                machine.poison(rng.randrange(50), rng.random() < 0.5)
        machine.slabs_belong_to_the_living()
        machine.a_bag_has_the_slabs_that_its_map_needs()
        machine.the_first_among_the_best_is_never_preempted()
        machine.tokens_are_those_of_an_undisturbed_run()
    machine.teardown()
    machine.tokens_are_those_of_an_undisturbed_run()
    stats = [bench.engine.stats.preemptions for bench in (machine.first, machine.second)]
    calls = [bench.runner.calls for bench in (machine.first, machine.second)]
    return sum((Counter(one) for one in [*stats, *calls]), Counter[str]())


def test_evicted_sequences_write_what_undisturbed_ones_do() -> None:
    """Through preemption, parking, hand-over, aborts and failures; and all of these happened."""
    seen = Counter[str]()
    for seed in SEEDS:
        seen += run_storm(seed)
    print(seen)
    assert set(seen) == {"park", "recompute", "prompt", "answer", "restored", "adopted"}, seen


def run_until(bench: EngineBench, steps: int = 400) -> dict[str, list[int] | str]:
    """Steps until nothing is left, at most so many; the tokens of each request, or the code of its failure."""
    ended: dict[str, list[int] | str] = {}
    for _ in range(steps):
        for one in bench.engine.step(bench.clock):
            message = one.message
            if isinstance(message, Failed):
                ended[message.request] = message.code
                continue
            assert isinstance(message, Output)
            tokens = ended.setdefault(message.request, [])
            assert isinstance(tokens, list)
            tokens += message.tokens
        bench.holdings.check_books()
    return ended


def evicting(
    name: str, prompt: int | list[int], new: int = 150, keep: KeepSpec = SOME, **rest: object
) -> Sequence:
    return sequence(name, prompt, sampling(new), keep=keep, **rest)


def test_slabs_go_back_at_the_end_of_the_prompt_and_with_every_64th_token() -> None:
    bench = EngineBench(caching=False, max_num_batched_tokens=512)
    seq = evicting("one", 400)
    bench.engine.add(seq, 0.0)
    bench.engine.step(bench.clock)
    assert 0 < len(bench.runner.maps["one#1"]) < 400
    held = [bench.holdings.used]
    for _ in range(130):
        bench.engine.step(bench.clock)
        kept = len(bench.runner.maps[seq.key])
        assert len(seq.slabs) == bench.holdings.used == 1 + num_chunks(1 + kept)
        held.append(bench.holdings.used)
    assert max(held) < 7 and bench.runner.calls == {"prompt": 1, "answer": 2}
    assert run_until(bench) and seq.output == alone(seq)
    assert bench.holdings.used == 0 and not bench.runner.given


def test_its_prompt_is_shared_but_for_the_last_64_tokens_and_its_answer_is_not() -> None:
    bench = EngineBench(max_num_batched_tokens=512)
    first = evicting("one", 256)
    bench.engine.add(first, 0.0)
    run_until(bench)
    assert bench.holdings.cached == 4, "the prompt's chunks, and none of the answer's"
    again, plain = evicting("two", first.prompt), sequence("three", first.prompt, sampling(150))
    bench.engine.add(again, 0.0)
    run_until(bench)
    bench.engine.add(plain, 0.0)
    run_until(bench)
    assert (again.cached, plain.cached) == (192, 192)
    assert again.output == first.output == alone(first) != alone(plain) == plain.output


def test_a_boundary_keeps_whole_chunks_that_others_may_hold() -> None:
    bench = EngineBench(max_num_batched_tokens=512)
    seqs = [evicting(name, sequence("x", 200).prompt, keep=KeepSpec(0.5, 128)) for name in ("one", "two")]
    for seq in seqs:
        bench.engine.add(seq, 0.0)
        for _ in range(3):
            bench.engine.step(bench.clock)
    assert seqs[0].slabs[:2] == seqs[1].slabs[:2] and not set(seqs[0].slabs[2:]) & set(seqs[1].slabs[2:])
    assert seqs[0].shared == seqs[1].shared == 2
    run_until(bench)
    assert all(seq.output == alone(seq) for seq in seqs)


def test_delivered_tokens_are_read_again_in_blocks() -> None:
    """Each ends at a decision point, so the same is decided as when they were generated."""
    whole = alone(evicting("one", 100, 200))
    bench = EngineBench(max_num_batched_tokens=512)
    seq = evicting("one", 100, 200, output=whole[:150])
    bench.engine.add(seq, 0.0)
    for _ in range(4):
        bench.engine.step(bench.clock)
    assert [len(batch[0].tokens) for batch in bench.runner.batches] == [100, 64, 64, 22]
    run_until(bench)
    assert seq.output == whole


def test_without_chunked_prefill_blocks_are_still_cut() -> None:
    whole = alone(evicting("one", 100, 200))
    bench = EngineBench(max_num_batched_tokens=16, chunked_prefill=False, max_num_seqs=4)
    seq = evicting("one", 100, 200, output=whole[:150])
    bench.engine.add(seq, 0.0)
    run_until(bench)
    assert [len(batch[0].tokens) for batch in bench.runner.batches[:4]] == [100, 64, 64, 22]
    assert seq.output == whole


def test_too_few_slabs_for_a_bag_preempt_the_sequence_with_the_worst_precedence() -> None:
    """Never the best one: so something always ends."""
    bench = EngineBench(num_slabs=7, max_num_batched_tokens=512)
    seqs = [evicting(name, 190, 120) for name in ("one", "two")]
    bench.scheduler.ratio.value = bench.scheduler.ratio.lowest = 0.0
    bench.scheduler.ratio.jump = 0.0
    bench.holdings.allocate("a lease", 1)
    for seq in seqs:
        bench.engine.add(seq, 0.0)
    done = run_until(bench)
    assert [done[seq.id] for seq in seqs] == [alone(seq) for seq in seqs]
    bench.holdings.release("a lease")
    assert bench.holdings.used == 0 and not bench.runner.given


@pytest.mark.parametrize("parks", [True, False])
@pytest.mark.parametrize("prompts", [(100, 100), (100, 130), (100, 36), (128, 128)])
@pytest.mark.parametrize("second", [SOME, BEHIND, KEEP_ALL])
def test_the_best_sequence_is_not_the_one_that_pays_for_its_bag(
    prompts: tuple[int, int], second: KeepSpec, parks: bool
) -> None:
    """At the end of its prompt, and at the end of a block. The other one is parked, where that pays, and goes on."""
    if second.boundary > prompts[1]:
        second = SOME
    bench = EngineBench(swap=9, max_num_batched_tokens=512)
    bench.engine.copy_rate = FixedRate(1e12 if parks else 1e-12)
    has_room, asked = bench.engine.table.has_room_for_bag, list[str]()

    def refuse_twice(seq: Sequence, bag_slabs: int, segments: tuple[KeptSegment, ...] = ()) -> bool:
        asked.extend([seq.id] * (seq.id == "one"))
        return asked not in (["one"], ["one"] * 3) and has_room(seq, bag_slabs)

    bench.engine.table.has_room_for_bag = refuse_twice  # type: ignore[method-assign]
    seqs = [evicting("one", prompts[0], 90), evicting("two", prompts[1], 90, second)]
    for seq in seqs:
        bench.engine.add(seq, 0.0)
    bench.engine.step(bench.clock)
    assert list(bench.scheduler.running) == ["one#1"] and list(bench.scheduler.waiting) == ["two#1"]
    run_until(bench)
    assert len(asked) > 3 and [seq.output for seq in seqs] == [alone(seq) for seq in seqs]
    assert bench.engine.stats.preemptions == {"park" if parks else "recompute": 2}
    assert bench.holdings.used == bench.host.used_bytes == 0 and not bench.runner.given


@pytest.mark.parametrize("parks", [True, False])
def test_a_sequence_that_had_no_part_in_the_step_pays_with_all_its_tokens(parks: bool) -> None:
    """It waits for a seat, and its heads have decided all there is: none of its tokens is computed a second time."""
    bench = EngineBench(swap=9, max_num_batched_tokens=512)
    bench.engine.copy_rate = FixedRate(1e12 if parks else 1e-12)
    seqs = [evicting("one", 100, 90), evicting("two", 36, 90)]
    for seq in seqs:
        bench.engine.add(seq, 0.0)
    bench.engine.step(bench.clock)
    bench.scheduler.pause("two#1")
    seqs[1].matcher = SimpleNamespace(ready=False)
    has_room = bench.engine.table.has_room_for_bag
    bench.engine.table.has_room_for_bag = lambda *_: "two#1" in bench.scheduler.waiting  # type: ignore[method-assign]
    while "two#1" in bench.scheduler.adopted:
        assert seqs[1].computed == 36
        bench.engine.step(bench.clock)
    assert len(seqs[0].output) == 65 and seqs[1].computed == (36 if parks else 0)
    bench.engine.table.has_room_for_bag, seqs[1].matcher = has_room, None  # type: ignore[method-assign]
    run_until(bench)
    assert [seq.output for seq in seqs] == [alone(seq) for seq in seqs]
    assert bench.holdings.used == bench.host.used_bytes == 0 and not bench.runner.given


@pytest.mark.parametrize("parks", [True, False])
def test_a_sequence_alone_gives_way_to_slabs_that_others_than_sequences_hold(parks: bool) -> None:
    """A bag that keeps everything needs more slabs than its prompt did, and a lease has them."""
    bench = EngineBench(num_slabs=6, caching=False, swap=6)
    bench.engine.copy_rate = FixedRate(1e12 if parks else 1e-12)
    plan = bench.runner.plan_eviction

    def keeps_all(order: EvictionOrder) -> EvictionReport:
        return replace(plan(order), bag_slabs=3)

    bench.runner.plan_eviction = keeps_all  # type: ignore[method-assign]
    seq = evicting("one", 190, 3)
    bench.engine.add(seq, 0.0)
    bench.engine.step(bench.clock)
    bench.holdings.allocate("a lease", 3)
    bench.engine.step(bench.clock)
    assert bench.engine.stats.preemptions == {"park" if parks else "recompute": 1} and not seq.output
    assert bench.runner.given == ({seq.key} if parks else set())
    assert not bench.engine.has_work, "it does not try again and again"
    bench.runner.plan_eviction = plan  # type: ignore[method-assign]
    bench.holdings.release("a lease")
    run_until(bench)
    assert seq.output == alone(seq)


def test_a_runner_that_fails_at_a_decision_fails_that_sequence_alone() -> None:
    bench = EngineBench(max_num_batched_tokens=512)
    plan = bench.runner.plan_eviction

    def failing(order: EvictionOrder) -> EvictionReport:
        if order.key == "one#1":
            raise ValueError("a mass is not finite")
        return plan(order)

    bench.runner.plan_eviction = failing  # type: ignore[method-assign]
    seqs = [evicting("one", 100, 20), evicting("two", 100, 20), sequence("three", 100, sampling(20))]
    for seq in seqs:
        bench.engine.add(seq, 0.0)
    done = run_until(bench)
    assert done == {"one": "internal_error", "two": alone(seqs[1]), "three": alone(seqs[2])}
    assert bench.holdings.used == 0 and not bench.runner.given


def test_slabs_of_a_bag_are_announced_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a decode worker could copy a slab that changes, with a mark that says it does not."""
    bench, follower = EngineBench(), RecordingObserver()
    bench.engine.kv_observer = follower
    write, written = bench.runner.apply_eviction, list[int]()

    def watched(key: str, bag_slabs: list[int]) -> None:
        assert set(bag_slabs) <= set(follower.taken)
        follower.taken.clear()
        written.extend(bag_slabs)
        write(key, bag_slabs)

    monkeypatch.setattr(bench.runner, "apply_eviction", watched)
    bench.engine.add(seq := evicting("one", 100, 80), 0.0)
    assert run_until(bench) == {"one": alone(seq)}
    assert bench.runner.calls == {"prompt": 1, "answer": 1} and written


def test_a_sequence_that_ends_with_its_next_token_decides_nothing() -> None:
    bench = EngineBench(max_num_batched_tokens=512)
    for name, new in (("none", 0), ("one", 1), ("more", 65)):
        bench.engine.add(evicting(name, 100, new), 0.0)
    run_until(bench)
    assert bench.runner.calls == {"prompt": 1}


def test_a_worker_whose_runner_cannot_evict_refuses() -> None:
    bench = EngineBench()
    bench.engine.decisions = DecisionPoints(FakeRunner(1), bench.engine.table)
    with pytest.raises(SequenceRefused, match="cannot evict"):
        bench.engine.add(evicting("one", 5), 0.0)
    bench.engine.add(evicting("one", 5, keep=KEEP_ALL), 0.0)


def test_a_bag_without_a_map_is_not_adopted() -> None:
    """Its slabs stay the caller's, and the runner keeps nothing."""
    bench = EngineBench()
    seq = evicting("one", 100, output=[7], computed=100, kept_slabs=3)
    seq.slabs = bench.holdings.allocate(seq.key, 3)
    bench.runner.kv[seq.slabs[1], 0] = [5, 3]
    with pytest.raises(CorruptChunk, match="does not say what its heads kept") as caught:
        bench.engine.adopt(seq, 0.0)
    assert caught.value.why == "this is no bag"
    assert seq.key not in bench.scheduler and not bench.runner.given
    assert bench.holdings.num_held(seq.key) == 3
    right: dict[str, Any] = {"output": [7], "computed": 100, "kept_slabs": 3, "slabs": seq.slabs}
    for wrong in ({"kept_slabs": 0}, {"computed": 99}, {"kept_slabs": 4}, {"output": [7] * 65}):
        with pytest.raises(ValueError, match="cannot be adopted"):
            bench.engine.adopt(evicting("two", 100, **right | wrong), 0.0)


def test_a_bag_that_cannot_be_read_now_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the sequence stays in the engine, which its slabs would otherwise belong to after they were freed."""
    bench = EngineBench()
    seq = evicting("one", 100, output=[7], computed=100, kept_slabs=3)
    seq.slabs = bench.holdings.allocate(seq.key, 3)

    def load_kept(key: str, *_: object) -> None:
        bench.runner.given.add(key)
        raise MemoryError("no room")

    monkeypatch.setattr(bench.runner, "load_kept", load_kept)
    with pytest.raises(MemoryError, match="^no room$"):
        bench.engine.adopt(seq, 0.0)
    assert seq.key not in bench.scheduler and not bench.runner.given
    bench.holdings.release(seq.key)
    assert not bench.engine.has_work and run_until(bench, 1) == {} and bench.holdings.used == 0


def test_segments_do_not_raise_what_a_sequence_is_expected_to_need() -> None:
    """Their bag holds little but the newest tokens, so its share says nothing of what is kept of others."""
    whole = evicting("one", 6400, 3000, output=[1], computed=6400, kept_slabs=1 + 32)
    segments = tuple(KeptSegment(end, 2, bytes(16)) for end in range(6, 97, 6))
    cut = evicting("two", 6400, 3000, output=[1], computed=6400, kept_slabs=1 + 3, segments=segments)
    held = [seq.expected_slabs(6400) for seq in (whole, cut)]
    grown = [seq.expected_slabs(6400 + 2560) for seq in (whole, cut)]
    assert held == [33, 36] and [after - before for after, before in zip(grown, held, strict=True)] == [
        13,
        14,
    ]


@pytest.mark.parametrize(("tokens", "slabs"), [(99, 2), (100, 4), (230, 4), (292, 5), (356, 6)])
def test_what_an_evicted_sequence_is_expected_to_need(tokens: int, slabs: int) -> None:
    """Its bag has three slabs for four chunks, so of two more chunks it is expected to keep one and a half."""
    seq = evicting("one", 100, 400, output=[1] * 130, computed=228, kept_slabs=4)
    seq.slabs = list(range(4))
    assert (seq.slabs_for(230), seq.needed_slabs(1), seq.capacity) == (4, 0, 292)
    assert seq.expected_slabs(tokens) == slabs
    assert seq.expected_slabs(356, intact=False) == 8, "before a decision, everything may be kept"
    # A bag on its way from ranks that are smaller has more slabs than its tokens: they are needed all the same.
    seq.kept_slabs = 9
    assert seq.expected_slabs(230) == seq.expected_slabs(292) == seq.slabs_for(230) == 9


def test_parked_kv_that_is_of_no_use_is_computed_again_from_the_start() -> None:
    """All its tokens are prefilled before it decodes, also those that it had generated."""
    bench = EngineBench(swap=8, max_num_batched_tokens=64)
    shares = sequence("shares", 190, sampling(60))
    other = sequence("other", list(shares.prompt), sampling(60))
    for seq in (shares, other):
        bench.engine.add(seq, 0.0)
        for _ in range(10):
            bench.engine.step(bench.clock)
    bench.engine.copy_rate.value = 1e12
    bench.engine._preempt_sequence(shares.key, bench.clock)
    assert shares.parked and shares.parked_from and shares.total > 192
    bench.engine.abort("other", 1)
    bench.holdings.evict_cached()
    run_until(bench)
    assert shares.output == alone(shares)
