"""Lends the slabs of a KV pool to bulk work: they count as free, and any other sequence takes them back at once.

    idle, cached ──LentKv.allocate──▶ lent ──KvAllocator.allocate of another sequence──▶ taken back

Both sides share one pool, one prefix tree and one table of sequences; chunks are shared between them. A chunk that an
ordinary sequence holds as well is not lent. Pure accounting, as `kvcache.allocator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from diptych.errors import OutOfSlabs
from kvcache.allocator import KvAllocator
from kvcache.arenas import KvArenas
from kvcache.prefix_tree import PrefixNode

# The most that is lent of a pool, as a share of it, unless a single sequence needs more: the rest keeps the prefixes
# that ordinary requests have left there.
MAX_LENT_SHARE = 0.5


class LentKv(KvAllocator):
    """The slabs of `lender` as bulk work sees them. What is taken here is lent, and never takes lent slabs back."""

    def __init__(self, lender: KvAllocator) -> None:
        super().__init__(lender.ledger, lender.tree)
        self._sequences, self.lent_slabs = lender._sequences, lender.lent_slabs
        self._lends = True

    @property
    def free(self) -> int:
        """Slabs that `allocate` can give now, within `MAX_LENT_SHARE`."""
        if len(self.lent_slabs.holders) <= 1:
            return self.unused
        return max(0, min(self.unused, int(MAX_LENT_SHARE * self.num_slabs) - self.lent))

    def count_unheld(self, keys: Sequence[bytes]) -> int:
        """How many of the chunks found by `attach_prefix` are unheld: attaching reduces `free` by this number."""
        return sum(not node.refs for node in self.tree.match_prefix(keys)) if self.tree is not None else 0

    def _take_back(self, n: int) -> None:
        """Lent slabs are not taken back for bulk work. Raises OutOfSlabs."""
        if n > self.unused:
            raise OutOfSlabs(f"{self.unused} slabs are unused, and {n} were asked for")

    def _count_keepers(self, node: PrefixNode) -> int:
        return node.refs


def lend_pool(lender: KvAllocator | KvArenas, reclaim: Callable[[str], bool]) -> KvAllocator | KvArenas:
    """The pool of a worker as bulk work sees it.

    `reclaim` lets one sequence give back what it was lent in the arena of a KV class ("" if there is only one arena);
    it returns False if there is none.
    """
    if not isinstance(lender, KvArenas):
        lender.lent_slabs.reclaim = partial(reclaim, "")
        return LentKv(lender)
    for name, arena in lender.arenas.items():
        arena.lent_slabs.reclaim = partial(reclaim, name)
    return KvArenas({name: LentKv(arena) for name, arena in lender.arenas.items()})
