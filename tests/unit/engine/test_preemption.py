"""Memory taken away and given back: who loses it, how, and that its answer is none the worse."""

from __future__ import annotations

import pytest

from diptych.chunks import CHUNK_TOKENS
from diptych.request import Grammar, Tenancy
from engine.outputs import SequenceOutput
from engine.scheduling.new_token_ratio import MeasuredRate, NewTokenRatio
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from kvcache.tiers.host import HostTier
from tests.unit.engine.fakes import EngineBench, FixedRate, alone, sampling, sequence
from tests.unit.engine.loop_outputs import finish, outputs, written

EAGER = NewTokenRatio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now


def crowd(bench: EngineBench, number: int = 3, **rest: object) -> list[Sequence]:
    bench.scheduler.ratio = EAGER
    seqs = [sequence(f"r{i}", 100, sampling(100), **rest) for i in range(number)]
    for seq in seqs:
        bench.engine.add(seq, 0.0)
    return seqs


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("parks", [True, False])
def test_all_end_as_if_alone_though_memory_is_short(caching: bool, parks: bool) -> None:
    bench = EngineBench(6, caching, swap=20)
    bench.engine.copy_rate = FixedRate(1e15 if parks else 1e-15)
    seqs = crowd(bench)
    emitted = finish(bench)
    for seq in seqs:
        assert written(emitted, seq.id) == alone(sequence(seq.id, 100, sampling(100)))
        assert [bool(output.seconds) for output in outputs(emitted, seq.id)] == [True] + [False] * 99
    ways = bench.engine.stats.preemptions
    assert set(ways) == {"park" if parks else "recompute"} and 1 <= sum(ways.values()) <= 6
    assert bench.holdings.used == bench.host.used_bytes == 0
    if parks:  # nothing was computed twice
        assert bench.engine.stats.step_tokens == 3 * 199


def test_the_latest_of_the_worst_priority_makes_room() -> None:
    book = Scheduler(EngineLimits(1000, 4096, 8, 1000))
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        book.add(sequence(name, 64, sampling(100), tenancy=Tenancy(priority=priority)), 0.0)
        book.start(f"{name}#1", 0.0)
    for seq in book.running.values():
        seq.slabs, seq.computed, seq.output = [0], 64, [1]
    order = []
    while len(book.running) > 1:
        key = book.schedule(KvAllocator(SlabLedger(1)) if len(book.running) == 1 else _Empty()).preempted
        assert key is not None
        book.preempt(key, parked=False)
        order.append(key)
    assert order == ["c#1", "a#1", "d#1"]
    assert book.schedule(_Empty()).preempted is None and not book.ready(_Empty())
    assert [seq.key for seq in book.waiting.values()] == order
    assert book.schedule(KvAllocator(SlabLedger(100))).admitted == ("d#1", "a#1", "c#1")


class _Empty(KvAllocator):
    """No slab is to be had."""

    def __init__(self) -> None:
        super().__init__(SlabLedger(1))
        self.allocate("others", 1)


def test_what_was_shared_is_found_again_and_not_computed_twice() -> None:
    bench = EngineBench(20)
    (seq,) = crowd(bench, 1)
    while seq.computed < 130:
        bench.engine.step(bench.clock)
    bench.engine._preempt_sequence(seq.key, bench.clock)
    assert bench.holdings.used == 0 and bench.holdings.cached == 2 and bench.scheduler.waiting_tokens == 131
    before = bench.engine.stats.step_tokens
    emitted = finish(bench)
    assert bench.engine.stats.step_tokens - before == 3 + 68  # 128 of 131 were known
    assert seq.output == alone(sequence("r0", 100, sampling(100)))
    assert seq.cached == 0 and len(emitted) == 69


def test_expected_growth_keeps_preemptions_rare() -> None:
    """Twelve who all write all they may: few are admitted too soon, and they do not run out in lockstep."""
    counts = []
    for ratio in (NewTokenRatio(), EAGER):
        bench = EngineBench(20, max_num_seqs=12, max_num_batched_tokens=256)
        bench.scheduler.ratio = ratio
        for i in range(12):
            bench.engine.add(sequence(f"r{i}", 20, sampling(240)), 0.0)
        emitted = finish(bench)
        assert all(len(written(emitted, f"r{i}")) == 240 for i in range(12))
        counts.append(sum(bench.engine.stats.preemptions.values()))
    assert counts[0] <= 6 and counts[0] < counts[1] / 2, counts


def test_a_grammar_and_its_place_survive() -> None:
    bench = EngineBench(6)
    bench.scheduler.ratio = EAGER
    for i in range(3):
        asked = sampling(100, grammar=Grammar("lark", "90"))
        bench.engine.add(sequence(f"r{i}", 100, asked), 0.0)
    emitted = finish(bench)
    assert bench.engine.stats.preemptions
    assert all(len(written(emitted, f"r{i}")) == 90 for i in range(3))


def test_abort_and_deadline_forget_what_is_parked() -> None:
    bench = EngineBench(6, swap=20)
    bench.engine.copy_rate = FixedRate(1e15)
    crowd(bench)
    while len(bench.host) == 0:
        bench.engine.step(bench.clock)
    assert bench.host.used_bytes > 0
    for i in range(3):
        bench.engine.abort(f"r{i}", 1)
    assert bench.host.used_bytes == bench.holdings.used == 0 and len(bench.scheduler) == 0


def test_nobody_is_parked_beyond_the_host_tiers_bound() -> None:
    bench = EngineBench(6, swap=1)
    bench.engine.copy_rate = FixedRate(1e15)
    crowd(bench)
    finish(bench)
    assert set(bench.engine.stats.preemptions) == {"recompute"}


def test_a_machine_without_memory_to_park_in_computes_again() -> None:
    """The tier was promised more than there is: nobody fails of it, the worker least of all."""
    bench = EngineBench(6, swap=20)
    bench.engine.copy_rate = FixedRate(1e15)

    def exhausted(slab: int) -> memoryview:
        raise MemoryError("the host has no more")

    bench.runner.kv.slab_bytes = exhausted  # type: ignore[method-assign]
    seqs = crowd(bench)
    emitted = finish(bench)
    for seq in seqs:
        assert written(emitted, seq.id) == alone(sequence(seq.id, 100, sampling(100)))
    assert set(bench.engine.stats.preemptions) == {"recompute"}
    assert bench.holdings.used == bench.host.used_bytes == 0


# ---- what comes from elsewhere


def arrival(name: str, tokens: int, new: int, **rest: object) -> Sequence:
    """One whose prompt was read elsewhere."""
    return sequence(name, tokens, sampling(new), output=[1], computed=tokens, **rest)


def test_admission_of_adopted_ones_counts_what_everybody_will_take() -> None:
    book, stock = Scheduler(EngineLimits(100, 4096)), KvAllocator(SlabLedger(10))
    book.ratio = NewTokenRatio(0.5)
    first = arrival("a", 127, 512)  # 2 slabs now, 6 in the end as reckoned
    assert book.admits(first, stock) and not book.admits(arrival("b", 65, 1), _Empty())
    first.slabs = stock.allocate(first.key, 2)
    second = arrival("c", 127, 255)  # 2 now, 4 in the end
    assert book.admits(second, stock, [first])
    stock.allocate("others", 1)
    assert not book.admits(second, stock, [first])  # 7 are free, 4 of them expected to be taken
    book.adopt(first, 0.0)
    assert not book.admits(second, stock)
    stock.release("others")
    assert book.admits(second, stock)
    stock.release(first.key)


def test_one_alone_is_admitted_whatever_it_may_grow_to() -> None:
    book, stock = Scheduler(EngineLimits(10, 4096)), KvAllocator(SlabLedger(3))
    book.ratio = NewTokenRatio(1.0)
    assert book.admits(arrival("a", 190, 400), stock)
    assert not book.admits(arrival("a", 193, 400), stock)


def test_those_preempted_come_back_before_others_arrive() -> None:
    bench = EngineBench(30)
    (seq,) = crowd(bench, 1)
    bench.engine.step(bench.clock)
    assert bench.engine.admits(arrival("a", 10, 10))
    bench.engine._preempt_sequence(seq.key, bench.clock)
    assert not bench.engine.admits(arrival("a", 10, 10))
    bench.engine.step(bench.clock)
    assert bench.engine.admits(arrival("a", 10, 10))


def test_one_who_is_more_urgent_does_not_wait_for_those_preempted() -> None:
    bench = EngineBench(30)
    (seq,) = crowd(bench, 1, tenancy=Tenancy(priority=1))
    bench.engine.step(bench.clock)
    bench.engine._preempt_sequence(seq.key, bench.clock)
    assert not bench.engine.admits(arrival("a", 10, 10, tenancy=Tenancy(priority=2)))
    assert not bench.engine.admits(arrival("a", 10, 10, tenancy=Tenancy(priority=1)))
    assert bench.engine.admits(arrival("a", 10, 10, tenancy=Tenancy(priority=0)))


def test_what_is_known_here_costs_an_arrival_nothing_if_it_is_held() -> None:
    tree = PrefixTree()
    stock, book = KvAllocator(SlabLedger(4), tree), Scheduler(EngineLimits(4, 4096))
    seq = arrival("a", 200, 2)
    slabs = stock.allocate("reader", 3)
    stock.publish("reader", seq.update_keys(), slabs)
    assert book.admits(seq, stock)  # 3 held, 1 free
    stock.allocate("other", 1)
    assert not book.admits(seq, stock)
    stock.release("reader")
    assert not book.admits(seq, stock)  # its 3 are among the free now, and it needs a fourth
    stock.release("other")
    assert book.admits(seq, stock)


def test_an_adopted_one_grows_step_by_step_and_can_be_preempted() -> None:
    bench = EngineBench(4)
    bench.scheduler.ratio = EAGER
    seqs = []
    for name in "ab":
        seq = sequence(name, 100, sampling(100), output=[alone(sequence(name, 100))[0]], computed=100)
        seq.slabs = bench.holdings.allocate(seq.key, 2)
        for position, slab in [(p, seq.slabs[p // CHUNK_TOKENS]) for p in range(100)]:
            bench.runner.kv[slab, position % CHUNK_TOKENS] = seq.prompt[: position + 1]
        bench.engine.adopt(seq, 0.0)
        seqs.append(seq)
    emitted: list[SequenceOutput] = finish(bench)
    for seq in seqs:
        assert written(emitted, seq.id) == alone(sequence(seq.id, 100, sampling(100)))[1:]
        assert set(outputs(emitted, seq.id)[0].seconds) == {"decode_queue", "decode_first"}
    assert bench.engine.stats.preemptions == {"recompute": 1}


# ---- the tier itself


class _Bytes:
    def __init__(self, size: int) -> None:
        self.size, self.memory = size, bytearray(8 * size)

    def slab_bytes(self, slab: int) -> memoryview:
        return memoryview(self.memory)[slab * self.size : (slab + 1) * self.size]


def test_the_host_tier_keeps_every_ranks_bytes_within_its_bound() -> None:
    pools = [_Bytes(10), _Bytes(6)]
    for pool in pools:
        pool.memory[:] = bytes(i % 251 for i in range(len(pool.memory)))
    before = [bytes(pool.memory) for pool in pools]
    tier = HostTier(pools, 5 * 16 + 15)
    assert tier.put_slabs("a", [1, 2, 3]) == 48 and tier.has_room(2) and not tier.has_room(3)
    with pytest.raises(ValueError, match="do not fit"):
        tier.put_slabs("b", [4, 5, 6])
    with pytest.raises(ValueError, match="already"):
        tier.put_slabs("a", [4])
    for pool in pools:
        pool.memory[:] = bytes(len(pool.memory))
    assert tier.restore_slabs("a", [7, 5, 6, 0], start=1) == 32 and tier.used_bytes == 0
    for pool, old in zip(pools, before, strict=True):
        assert bytes(pool.slab_bytes(5)) == old[2 * pool.size : 3 * pool.size]
        assert bytes(pool.slab_bytes(6)) == old[3 * pool.size : 4 * pool.size]
        assert not any(pool.slab_bytes(7)) and not any(pool.slab_bytes(0))
    tier.drop_slabs("a")
    tier.put_slabs("c", [1])
    tier.drop_slabs("c")
    assert tier.used_bytes == 0 == len(tier)
    with pytest.raises(KeyError):
        tier.restore_slabs("c", [1])


@pytest.mark.parametrize("parks", [True, False])
def test_an_arrival_of_a_better_priority_takes_memory_from_worse_ones_that_run(parks: bool) -> None:
    bench = EngineBench(6, caching=False, swap=20)
    bench.engine.copy_rate = FixedRate(1e15 if parks else 1e-15)
    worse = crowd(bench, tenancy=Tenancy(priority=1))
    emitted = [e for _ in range(9) for e in bench.engine.step(bench.clock)]
    assert bench.holdings.free == 0 and len(bench.scheduler.running) == 3
    urgent = sequence("urgent", 100, sampling(20), tenancy=Tenancy(priority=0))
    bench.engine.add(urgent, 9.0)
    emitted += bench.engine.step(bench.clock)
    assert set(bench.scheduler.running) == {"r0#1", "r1#1", "urgent#1"}  # the latest of the worst made room
    assert bench.engine.stats.preemptions == {"park" if parks else "recompute": 1}
    emitted += finish(bench)
    for seq in [*worse, urgent]:
        assert written(emitted, seq.id) == alone(seq)
    assert bench.holdings.used == 0


def test_equals_and_betters_keep_their_memory() -> None:
    bench = EngineBench(6, caching=False)
    crowd(bench, 2, tenancy=Tenancy(priority=0))
    crowd(bench, 0)
    for _ in range(4):
        bench.engine.step(bench.clock)
    late = sequence("late", 300, sampling(9), tenancy=Tenancy(priority=0))
    bench.engine.add(late, 9.0)
    bench.engine.step(bench.clock)
    assert set(bench.scheduler.running) == {"r0#1", "r1#1"}


def test_nobody_is_preempted_where_that_would_not_be_enough() -> None:
    bench = EngineBench(6, caching=False)
    bench.scheduler.ratio = EAGER
    bench.engine.add(sequence("better", 250, sampling(6), tenancy=Tenancy(priority=0)), 0.0)
    bench.engine.add(sequence("worse", 60, sampling(99), tenancy=Tenancy(priority=2)), 0.0)
    while not all(seq.decoding for seq in bench.scheduler.running.values()) or not bench.scheduler.running:
        bench.engine.step(bench.clock)
    bench.engine.add(sequence("urgent", 250, sampling(9), tenancy=Tenancy(priority=1)), 9.0)
    bench.engine.step(bench.clock)
    assert set(bench.scheduler.running) == {"better#1", "worse#1"} and not bench.engine.stats.preemptions


def test_shared_slabs_are_freed_once_and_only_by_all_who_hold_them() -> None:
    bench = EngineBench(15, max_num_seqs=8)
    bench.scheduler.ratio = EAGER
    prompt = sequence("x", 256).prompt
    worse = [sequence(f"w{i}", [*prompt, i], sampling(50), tenancy=Tenancy(priority=1)) for i in range(4)]
    for seq in worse:
        seq.root = b"root"
        bench.engine.add(seq, 0.0)
    while not all(seq.decoding for seq in worse):
        bench.engine.step(bench.clock)
    assert bench.holdings.used == 4 + 4
    keys = [seq.key for seq in worse]
    assert bench.holdings.count_freed_by(keys) == 8 and bench.holdings.count_freed_by(keys[:2]) == 2
    large = sequence("large", 15 * 64 - 20, sampling(5), tenancy=Tenancy(priority=0))
    bench.holdings.allocate("others", bench.holdings.free)
    before = bench.engine.stats.preemptions
    bench.engine.add(large, 0.0)  # it needs 15 slabs, and could get 8
    bench.engine.step(bench.clock)
    assert bench.engine.stats.preemptions == before and len(bench.scheduler.running) == 4
    bench.holdings.release("others")


def pair(bench: EngineBench) -> tuple[Sequence, Sequence]:
    """Two that share their first two chunks; both run, and each has three chunks."""
    bench.scheduler.ratio = EAGER
    bench.engine.copy_rate = FixedRate(1e15)
    first, second = sequence("first", 140, sampling(80)), sequence("second", 140, sampling(80))
    second.prompt = [*first.prompt[:128], *second.prompt[128:]]
    for seq in (first, second):
        seq.root = b"root"
        bench.engine.add(seq, 0.0)
    while not (first.decoding and second.decoding):
        bench.engine.step(bench.clock)
    return first, second


def test_chunks_that_others_hold_are_neither_parked_nor_priced() -> None:
    bench = EngineBench(20, swap=20)
    first, second = pair(bench)
    assert bench.holdings.count_shared(second.key) == 2
    bench.engine._preempt_sequence(second.key, bench.clock)
    assert second.parked and second.parked_from == 2
    assert bench.host.used_bytes == bench.host.slab_bytes  # its third chunk alone
    before = bench.engine.stats.step_tokens
    emitted = finish(bench)
    assert [o.tokens[0] for o in outputs(emitted, "second")] == alone(second)[
        -len(outputs(emitted, "second")) :
    ]
    assert bench.engine.stats.step_tokens - before == len(outputs(emitted, "first")) + len(
        outputs(emitted, "second")
    )
    assert bench.holdings.used == bench.host.used_bytes == 0


def test_what_was_parked_without_its_beginning_is_computed_again_when_that_is_gone() -> None:
    bench = EngineBench(20, swap=20)
    first, second = pair(bench)
    written_before = list(second.output)
    bench.engine._preempt_sequence(second.key, bench.clock)
    bench.engine.abort("first", 9)
    bench.holdings.evict_cached()  # the shared chunks are evicted
    emitted = finish(bench)
    assert written_before + written(emitted, "second") == alone(
        sequence("second", second.prompt, sampling(80))
    )
    assert bench.holdings.used == bench.host.used_bytes == 0
    assert (
        max(sum(len(work.tokens) for work in batch) for batch in bench.runner.batches) <= 128
    )  # within the budget


def test_rows_that_decode_are_not_prompt_tokens_read() -> None:
    bench = EngineBench(40, max_num_batched_tokens=100)
    bench.engine.add(sequence("a", 10, sampling(30)), 0.0)
    bench.engine.step(bench.clock)
    seen: list[float] = []

    class Listening(MeasuredRate):
        def add_sample(self, amount: float, seconds: float) -> None:
            seen.append(amount)

    bench.engine.prefill_rate = Listening(1.0)
    bench.engine.add(sequence("b", 60, sampling(5)), 0.0)
    finish(bench)
    assert seen == [60]
