"""The arenas of a worker that holds KV of several classes: for each class a pool, its books and its prefix tree.

    raw:0.5,nuq4-1%      arena "raw": slabs 0 .. 99      arena "nuq4-1%...": slabs 100 .. 455

Slabs of different classes have different sizes, so no arena lends slabs to another one. Slab numbers are unique within
the worker: a number alone says in which arena a slab is. A worker with one class needs none of this: its `KvAllocator`
is its only arena.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixNode


class KvArenas:
    """The allocator of each class; the first one is the default class. A sequence holds slabs of one class only.

    Raises:
        ValueError: there is no class, or two arenas have slabs of the same number.
    """

    def __init__(self, arenas: Mapping[str, KvAllocator]) -> None:
        self.arenas = dict(arenas)
        ends = sorted((one.ledger.first, one.ledger.first + one.ledger.num_slabs) for one in arenas.values())
        if not ends or any(end > start for (_, end), (start, _) in zip(ends, ends[1:], strict=False)):
            raise ValueError(f"arenas need slab numbers of their own: {ends}")

    def arena_of(self, kv_class: str) -> KvAllocator:
        """The allocator for KV of a class. Raises KeyError if the worker does not have it."""
        return self.arenas[kv_class]

    @property
    def num_slabs(self) -> int:
        """All slabs of all classes, free or not."""
        return sum(one.num_slabs for one in self.arenas.values())

    @property
    def used(self) -> int:
        """Slabs held by at least one sequence; 0 at rest."""
        return sum(one.used for one in self.arenas.values())

    @property
    def cached(self) -> int:
        """Slabs of the prefix trees that no sequence holds."""
        return sum(one.cached for one in self.arenas.values())

    @property
    def lent(self) -> int:
        """Slabs that only sequences hold which give them back at once (`kvcache.lending`)."""
        return sum(one.lent for one in self.arenas.values())

    @property
    def used_by_class(self) -> dict[str, int]:
        """`used` of each class, without lent slabs."""
        return {name: one.used - one.lent for name, one in self.arenas.items()}

    @property
    def cached_by_class(self) -> dict[str, int]:
        """`cached` of each class."""
        return {name: one.cached for name, one in self.arenas.items()}

    @property
    def prefix_queries(self) -> int:
        """Tokens that were looked up in the prefix trees."""
        return sum(one.prefix_queries for one in self.arenas.values())

    @property
    def prefix_hits(self) -> int:
        """Tokens of these that were found."""
        return sum(one.prefix_hits for one in self.arenas.values())

    def release(self, key: str, keep: bool = True) -> None:
        """Release every slab that sequence `key` holds, in whichever arena (`KvAllocator.release`). Idempotent."""
        for one in self.arenas.values():
            one.release(key, keep)

    def shared_nodes(self, key: str) -> list[PrefixNode]:
        """The chunks of a prefix tree that sequence `key` holds, in token order. Do not change the list."""
        return next((nodes for one in self.arenas.values() if (nodes := one.shared_nodes(key))), [])

    def owners(self) -> dict[str, int]:
        """Number of slabs by holder, without holders of 0. A shared slab counts once for each of its holders."""
        held: Counter[str] = Counter()
        for one in self.arenas.values():
            held.update(one.owners())
        return dict(held)

    def check_books(self) -> None:
        """Check the accounts of every arena. Raises AssertionError (`KvAllocator.check_books`)."""
        for one in self.arenas.values():
            one.check_books()
