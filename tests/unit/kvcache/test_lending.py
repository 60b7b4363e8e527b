"""Slabs that are lent: free to everybody else, taken back when they are wanted, and in the books at all times."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import OutOfSlabs
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.lending import MAX_LENT_SHARE, LentKv, lend_pool
from kvcache.prefix_tree import PrefixTree, chunk_keys, root_key
from kvcache.slab_ledger import SlabLedger

ROOT = root_key("model", "")


def keys_of(word: str) -> list[bytes]:
    return chunk_keys([ord(letter) for letter in word for _ in range(CHUNK_TOKENS)], ROOT)


def lending_pool(num_slabs: int = 10) -> tuple[KvAllocator, LentKv, list[str]]:
    """A pool, its lent side, and the bulk sequences there, the last of which gives back first."""
    pool, holders = KvAllocator(SlabLedger(num_slabs), PrefixTree()), list[str]()

    def reclaim(arena: str) -> bool:
        if holders:
            lent.release(holders.pop())
            return True
        return False

    lent = lend_pool(pool, reclaim)
    assert isinstance(lent, LentKv)
    return pool, lent, holders


def test_what_is_lent_counts_as_free_and_is_taken_back_only_when_nothing_else_is_left() -> None:
    pool, lent, holders = lending_pool()
    for name in ("b1", "b2"):
        lent.allocate(name, 2)
        holders.append(name)
    assert (pool.free, pool.lent, pool.used, lent.free) == (10, 4, 4, 1)
    pool.allocate("online", 6)
    assert holders == ["b1", "b2"] and (pool.free, pool.lent) == (4, 4)
    pool.allocate("online", 1)
    assert holders == ["b1"] and (pool.free, pool.lent) == (3, 2), "the one with the worst precedence"
    with pytest.raises(OutOfSlabs):
        pool.allocate("online", 4)
    assert holders == ["b1"], "nothing is taken back for a request that cannot be met"
    pool.allocate("online", 3)
    assert not holders and pool.free == 0
    pool.check_books()


def test_bulk_work_takes_at_most_its_share_and_nothing_back() -> None:
    pool, lent, _ = lending_pool(10)
    lent.allocate("one", 7)
    assert lent.free == 3, "a single sequence may need more than the share"
    lent.allocate("two", 1)
    assert lent.free == 0 and pool.free == 10 and lent.num_slabs * MAX_LENT_SHARE == 5
    with pytest.raises(OutOfSlabs):
        lent.allocate("two", 1)
    lent.release("one")
    pool.allocate("online", 8)
    with pytest.raises(OutOfSlabs):
        lent.allocate("three", 2)
    pool.check_books()


def test_a_chunk_that_an_ordinary_sequence_holds_too_is_not_lent() -> None:
    pool, lent, holders = lending_pool()
    slabs, keys = lent.allocate("bulk", 3), keys_of("ab")
    holders.append("bulk")
    lent.publish("bulk", keys, slabs)
    assert (pool.lent, pool.count_unheld(keys), lent.count_unheld(keys)) == (3, 2, 0)
    assert pool.attach_prefix("online", keys) == slabs[:2]
    assert (pool.lent, pool.free, pool.count_unheld(keys)) == (1, 8, 0)
    assert pool.count_freed_by(["online"]) == 2, "they are lent again when it ends"
    lent.release("bulk")
    assert (pool.lent, pool.free) == (0, 8)
    pool.release("online")
    assert pool.free == 10
    pool.check_books()


def test_each_arena_lends_by_itself() -> None:
    asked: list[str] = []

    def reclaim(arena: str) -> bool:
        asked.append(arena)
        lent.arena_of(arena).release("bulk")
        return True

    arenas = KvArenas({"raw": KvAllocator(SlabLedger(4)), "int4": KvAllocator(SlabLedger(4, 4))})
    lent = lend_pool(arenas, reclaim)
    lent.arena_of("int4").allocate("bulk", 4)
    assert (arenas.lent, arenas.arena_of("raw").lent) == (4, 0)
    arenas.arena_of("raw").allocate("online", 4)
    assert not asked
    arenas.arena_of("int4").allocate("online", 1)
    assert asked == ["int4"] and arenas.lent == 0
    arenas.check_books()


def test_chunks_of_bulk_work_are_evicted_before_the_prefixes_of_others() -> None:
    pool, lent, _ = lending_pool(8)

    def leave(side: KvAllocator, word: str) -> None:
        keys = keys_of(word)
        slabs = side.attach_prefix(word, keys)
        slabs += side.allocate(word, len(keys) - len(slabs))
        side.publish(word, keys, slabs)
        side.release(word)
        pool.check_books()

    leave(pool, "ab")
    leave(lent, "xyz")
    leave(lent, "ac")
    leave(pool, "xq")
    assert (pool.free, pool.cached) == (8, 7)
    pool.allocate("online", 1 + 3)
    kept = {word: pool.count_cached(keys_of(word)) for word in ("ab", "xyz", "ac", "xq")}
    assert kept == {"ab": 2, "xyz": 1, "ac": 1, "xq": 2}, "what an online request has used stays"
    pool.allocate("online", 4)
    assert not pool.cached
    pool.check_books()


@pytest.mark.parametrize("seed", range(4))
def test_the_books_hold_under_any_order_of_calls(seed: int) -> None:
    draw, (pool, lent, holders) = Random(seed), lending_pool(12)
    online, kinds, number = list[str](), Counter[str](), 0
    for _ in range(600):
        kind = draw.choice(["online", "bulk", "bulk", "end", "end bulk", "grow"])
        side, names = (lent, holders) if "bulk" in kind else (pool, online)
        try:
            if kind.startswith("end") and names:
                side.release(names.pop(draw.randrange(len(names))), keep=draw.random() < 0.8)
            elif kind == "grow" and online:
                pool.allocate(draw.choice(online), draw.randrange(1, 4))
            elif kind in ("online", "bulk"):
                number += 1
                name, keys = f"{kind}{number}", keys_of("".join(draw.choices("ab", k=draw.randrange(4))))
                slabs = side.attach_prefix(name, keys)
                names.append(name)
                slabs += side.allocate(name, len(keys) - len(slabs) + 1)
                side.publish(name, keys, slabs)
            kinds[kind] += 1
        except OutOfSlabs:
            kinds["refused"] += 1
            assert not (kind == "online" and pool.free > 4)
        pool.check_books()
        assert pool.free == pool.num_slabs - pool.used + pool.lent
    assert all(kinds[kind] > 20 for kind in ("online", "bulk", "refused", "grow"))
