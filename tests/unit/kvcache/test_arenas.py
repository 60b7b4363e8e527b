"""Arenas: slab numbers of their own, books of their own, sums over all."""

from __future__ import annotations

import pytest

from diptych.errors import OutOfSlabs
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.prefix_tree import PrefixTree, chunk_keys, root_key
from kvcache.slab_ledger import SlabLedger
from kvcache.tiers.host import HostArenas, HostTier


def two_arenas(raw: int = 4, coded: int = 6) -> KvArenas:
    return KvArenas(
        {
            "raw": KvAllocator(SlabLedger(raw), PrefixTree()),
            "tq4.s0": KvAllocator(SlabLedger(coded, first=raw), PrefixTree()),
        }
    )


def test_a_number_says_in_which_arena_a_slab_is() -> None:
    arenas = two_arenas()
    assert arenas.arena_of("raw").allocate("a#0", 4) == [0, 1, 2, 3]
    assert arenas.arena_of("tq4.s0").allocate("b#0", 2) == [4, 5]
    with pytest.raises(OutOfSlabs):
        arenas.arena_of("raw").allocate("c#0", 1)
    assert (arenas.used, arenas.num_slabs, arenas.owners()) == (6, 10, {"a#0": 4, "b#0": 2})
    ledger = arenas.arena_of("tq4.s0").ledger
    assert ledger.owner_of(4) == "b#0" and ledger.owner_of(9) is None
    for slab in (3, 10):
        with pytest.raises(ValueError, match="no slab"):
            ledger.owner_of(slab)
    arenas.release("a#0")
    arenas.release("b#0")
    arenas.check_books()
    assert arenas.used == 0 and arenas.owners() == {}


def test_what_one_arena_caches_is_no_hit_in_the_other() -> None:
    arenas, keys = two_arenas(), chunk_keys(range(64), root_key("model", "", "tq4.s0"))
    coded = arenas.arena_of("tq4.s0")
    slabs = coded.allocate("a#0", 1)
    coded.publish("a#0", keys, slabs)
    assert [node.slab for node in arenas.shared_nodes("a#0")] == slabs and arenas.shared_nodes("b#0") == []
    assert coded.count_cached(keys) == 1 and arenas.arena_of("raw").count_cached(keys) == 0
    arenas.release("a#0")
    assert (arenas.cached, arenas.used) == (1, 0)
    coded.attach_prefix("b#0", keys)
    assert (arenas.prefix_queries, arenas.prefix_hits) == (64, 64)


def test_arenas_with_the_same_slab_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="numbers of their own"):
        KvArenas({"raw": KvAllocator(SlabLedger(4)), "tq4.s0": KvAllocator(SlabLedger(4, first=3))})
    with pytest.raises(ValueError, match="numbers of their own"):
        KvArenas({})
    with pytest.raises(KeyError):
        two_arenas().arena_of("int8.g32")


class Memory:
    """Slabs of `size` bytes, numbered from `first`."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size, self.data = first, size, bytearray(4 * size)

    def slab_bytes(self, slab: int) -> memoryview:
        at = (slab - self.first) * self.size
        assert 0 <= at < len(self.data)
        return memoryview(self.data)[at : at + self.size]


def test_each_class_has_its_own_host_tier() -> None:
    memories = {"raw": Memory(0, 16), "tq4.s0": Memory(4, 2)}
    host = HostArenas({name: HostTier([one], 40, one.first) for name, one in memories.items()})
    memories["tq4.s0"].slab_bytes(5)[:] = b"ab"
    assert host.arena_of("raw").put_slabs("a#0", [0, 1]) == 32 and not host.arena_of("raw").has_room(1)
    assert host.arena_of("tq4.s0").put_slabs("b#0", [5]) == 2
    host.arena_of("tq4.s0").restore_slabs("b#0", [7])
    assert bytes(memories["tq4.s0"].slab_bytes(7)) == b"ab"
    host.drop_slabs("a#0")
    assert host.arena_of("raw").used_bytes == 0
