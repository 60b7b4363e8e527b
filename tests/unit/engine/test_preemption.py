"""Memory taken away and given back: who loses it, how, and that its answer is none the worse."""

from __future__ import annotations

import pytest

from diptych.request import Grammar, Origin
from engine.growth import Ratio
from engine.loop import Emission
from engine.scheduler import Limits, Scheduler, Sequence
from kvcache.holdings import Holdings
from kvcache.layout import CHUNK_TOKENS
from kvcache.prefix_tree import PrefixTree
from kvcache.slabs import Slabs
from kvcache.tiers.host import HostTier
from tests.unit.engine.fakes import Bench, Fixed, alone, sampling, sequence
from tests.unit.engine.test_loop import finish, outputs, written

EAGER = Ratio(0.0, 0.0, 0.0, 0.0)  # admits whatever fits now


def crowd(bench: Bench, number: int = 3, **rest: object) -> list[Sequence]:
    bench.scheduler.ratio = EAGER
    seqs = [sequence(f"r{i}", 100, sampling(100), **rest) for i in range(number)]
    for seq in seqs:
        bench.engine.add(seq, 0.0)
    return seqs


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("parks", [True, False])
def test_all_end_as_if_alone_though_memory_is_short(caching: bool, parks: bool) -> None:
    bench = Bench(6, caching, swap=20)
    bench.engine.copy_rate = Fixed(1e15 if parks else 1e-15)
    seqs = crowd(bench)
    told = finish(bench)
    for seq in seqs:
        assert written(told, seq.id) == alone(sequence(seq.id, 100, sampling(100)))
        assert [bool(output.seconds) for output in outputs(told, seq.id)] == [True] + [False] * 99
    ways = bench.engine.stats.preemptions
    assert set(ways) == {"park" if parks else "recompute"} and 1 <= sum(ways.values()) <= 6
    assert bench.holdings.used == bench.host.used_bytes == 0
    if parks:  # nothing was computed twice
        assert bench.engine.stats.step_tokens == 3 * 199


def test_the_latest_of_the_worst_priority_makes_room() -> None:
    book = Scheduler(Limits(1000, 4096, 8, 1000))
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        book.add(sequence(name, 64, sampling(100), origin=Origin(priority=priority)), 0.0)
        book.start(f"{name}#1", 0.0)
    for seq in book.running.values():
        seq.slabs, seq.computed, seq.output = [0], 64, [1]
    order = []
    while len(book.running) > 1:
        key = book.schedule(Holdings(Slabs(1)) if len(book.running) == 1 else _Empty()).preempted
        assert key is not None
        book.preempt(key, parked=False)
        order.append(key)
    assert order == ["c#1", "a#1", "d#1"]
    assert book.schedule(_Empty()).preempted is None and not book.ready(_Empty())
    assert [seq.key for seq in book.waiting.values()] == order
    assert book.schedule(Holdings(Slabs(100))).admitted == ("d#1", "a#1", "c#1")


class _Empty(Holdings):
    """No slab is to be had."""

    def __init__(self) -> None:
        super().__init__(Slabs(1))
        self.take("others", 1)


def test_what_was_shared_is_found_again_and_not_computed_twice() -> None:
    bench = Bench(20)
    (seq,) = crowd(bench, 1)
    while seq.computed < 130:
        bench.engine.step(bench.clock)
    bench.engine._preempt(seq.key, bench.clock)
    assert bench.holdings.used == 0 and bench.holdings.cached == 2 and bench.scheduler.waiting_tokens == 131
    before = bench.engine.stats.step_tokens
    told = finish(bench)
    assert bench.engine.stats.step_tokens - before == 3 + 68  # 128 of 131 were known
    assert seq.output == alone(sequence("r0", 100, sampling(100)))
    assert seq.cached == 0 and len(told) == 69


def test_expected_growth_keeps_preemptions_rare() -> None:
    """Twelve who all write all they may: few are admitted too soon, and they do not run out in lockstep."""
    counts = []
    for ratio in (Ratio(), EAGER):
        bench = Bench(20, max_num_seqs=12, max_num_batched_tokens=256)
        bench.scheduler.ratio = ratio
        for i in range(12):
            bench.engine.add(sequence(f"r{i}", 20, sampling(240)), 0.0)
        told = finish(bench)
        assert all(len(written(told, f"r{i}")) == 240 for i in range(12))
        counts.append(sum(bench.engine.stats.preemptions.values()))
    assert counts[0] <= 6 and counts[0] < counts[1] / 2, counts


def test_a_grammar_and_its_place_survive() -> None:
    bench = Bench(6)
    bench.scheduler.ratio = EAGER
    for i in range(3):
        asked = sampling(100, grammar=Grammar("lark", "90"))
        bench.engine.add(sequence(f"r{i}", 100, asked), 0.0)
    told = finish(bench)
    assert bench.engine.stats.preemptions
    assert all(len(written(told, f"r{i}")) == 90 for i in range(3))


def test_abort_and_deadline_forget_what_is_parked() -> None:
    bench = Bench(6, swap=20)
    bench.engine.copy_rate = Fixed(1e15)
    crowd(bench)
    while len(bench.host) == 0:
        bench.engine.step(bench.clock)
    assert bench.host.used_bytes > 0
    for i in range(3):
        bench.engine.abort(f"r{i}", 1)
    assert bench.host.used_bytes == bench.holdings.used == 0 and len(bench.scheduler) == 0


def test_nobody_is_parked_beyond_the_host_tiers_bound() -> None:
    bench = Bench(6, swap=1)
    bench.engine.copy_rate = Fixed(1e15)
    crowd(bench)
    finish(bench)
    assert set(bench.engine.stats.preemptions) == {"recompute"}


def test_a_machine_without_memory_to_park_in_computes_again() -> None:
    """The tier was promised more than there is: nobody fails of it, the worker least of all."""
    bench = Bench(6, swap=20)
    bench.engine.copy_rate = Fixed(1e15)

    def exhausted(slab: int) -> memoryview:
        raise MemoryError("the host has no more")

    bench.runner.kv.slab_bytes = exhausted  # type: ignore[method-assign]
    seqs = crowd(bench)
    told = finish(bench)
    for seq in seqs:
        assert written(told, seq.id) == alone(sequence(seq.id, 100, sampling(100)))
    assert set(bench.engine.stats.preemptions) == {"recompute"}
    assert bench.holdings.used == bench.host.used_bytes == 0


# ---- what comes from elsewhere


def arrival(name: str, tokens: int, new: int, **rest: object) -> Sequence:
    """One whose prompt was read elsewhere."""
    return sequence(name, tokens, sampling(new), output=[1], computed=tokens, **rest)


def test_admission_of_adopted_ones_counts_what_everybody_will_take() -> None:
    book, stock = Scheduler(Limits(100, 4096)), Holdings(Slabs(10))
    book.ratio = Ratio(0.5)
    first = arrival("a", 127, 512)  # 2 slabs now, 6 in the end as reckoned
    assert book.admits(first, stock) and not book.admits(arrival("b", 65, 1), _Empty())
    first.slabs = stock.take(first.key, 2)
    second = arrival("c", 127, 255)  # 2 now, 4 in the end
    assert book.admits(second, stock, [first])
    stock.take("others", 1)
    assert not book.admits(second, stock, [first])  # 7 are free, 4 of them expected to be taken
    book.adopt(first, 0.0)
    assert not book.admits(second, stock)
    stock.end("others")
    assert book.admits(second, stock)
    stock.end(first.key)


def test_one_alone_is_admitted_whatever_it_may_grow_to() -> None:
    book, stock = Scheduler(Limits(10, 4096)), Holdings(Slabs(3))
    book.ratio = Ratio(1.0)
    assert book.admits(arrival("a", 190, 400), stock)
    assert not book.admits(arrival("a", 193, 400), stock)


def test_those_preempted_come_back_before_others_arrive() -> None:
    bench = Bench(30)
    (seq,) = crowd(bench, 1)
    bench.engine.step(bench.clock)
    assert bench.engine.admits(arrival("a", 10, 10))
    bench.engine._preempt(seq.key, bench.clock)
    assert not bench.engine.admits(arrival("a", 10, 10))
    bench.engine.step(bench.clock)
    assert bench.engine.admits(arrival("a", 10, 10))


def test_one_who_is_more_urgent_does_not_wait_for_those_preempted() -> None:
    bench = Bench(30)
    (seq,) = crowd(bench, 1, origin=Origin(priority=1))
    bench.engine.step(bench.clock)
    bench.engine._preempt(seq.key, bench.clock)
    assert not bench.engine.admits(arrival("a", 10, 10, origin=Origin(priority=2)))
    assert not bench.engine.admits(arrival("a", 10, 10, origin=Origin(priority=1)))
    assert bench.engine.admits(arrival("a", 10, 10, origin=Origin(priority=0)))


def test_what_is_known_here_costs_an_arrival_nothing_if_it_is_held() -> None:
    tree = PrefixTree()
    stock, book = Holdings(Slabs(4), tree), Scheduler(Limits(4, 4096))
    seq = arrival("a", 200, 2)
    slabs = stock.take("reader", 3)
    stock.share("reader", seq.address(), slabs)
    assert book.admits(seq, stock)  # 3 held, 1 free
    stock.take("other", 1)
    assert not book.admits(seq, stock)
    stock.end("reader")
    assert not book.admits(seq, stock)  # its 3 are among the free now, and it needs a fourth
    stock.end("other")
    assert book.admits(seq, stock)


def test_an_adopted_one_grows_step_by_step_and_can_be_preempted() -> None:
    bench = Bench(4)
    bench.scheduler.ratio = EAGER
    seqs = []
    for name in "ab":
        seq = sequence(name, 100, sampling(100), output=[alone(sequence(name, 100))[0]], computed=100)
        seq.slabs = bench.holdings.take(seq.key, 2)
        for position, slab in [(p, seq.slabs[p // CHUNK_TOKENS]) for p in range(100)]:
            bench.runner.kv[slab, position % CHUNK_TOKENS] = seq.prompt[: position + 1]
        bench.engine.adopt(seq, 0.0)
        seqs.append(seq)
    told: list[Emission] = finish(bench)
    for seq in seqs:
        assert written(told, seq.id) == alone(sequence(seq.id, 100, sampling(100)))[1:]
        assert set(outputs(told, seq.id)[0].seconds) == {"decode_queue", "decode_first"}
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
    assert tier.put("a", [1, 2, 3]) == 48 and tier.fits(2) and not tier.fits(3)
    with pytest.raises(ValueError, match="do not fit"):
        tier.put("b", [4, 5, 6])
    with pytest.raises(ValueError, match="already"):
        tier.put("a", [4])
    for pool in pools:
        pool.memory[:] = bytes(len(pool.memory))
    assert tier.get("a", [7, 5, 6, 0], start=1) == 32 and tier.used_bytes == 0
    for pool, old in zip(pools, before, strict=True):
        assert bytes(pool.slab_bytes(5)) == old[2 * pool.size : 3 * pool.size]
        assert bytes(pool.slab_bytes(6)) == old[3 * pool.size : 4 * pool.size]
        assert not any(pool.slab_bytes(7)) and not any(pool.slab_bytes(0))
    tier.drop("a")
    tier.put("c", [1])
    tier.drop("c")
    assert tier.used_bytes == 0 == len(tier)
    with pytest.raises(KeyError):
        tier.get("c", [1])
