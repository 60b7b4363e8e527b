"""Slab ownership: `num_slabs` slabs, numbered from `first`, each free or owned by exactly one named owner.

Slabs are handed out last-in first-out, so that memory which is still in the processor's cache is used again first.
This module has no memory and no torch: `kvcache.pool.KvPool` adds the memory; the simulator and tests use it without.
Not safe to change from several threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from diptych.errors import OutOfSlabs


class SlabLedger:
    """Records the owner of each of `num_slabs` slabs. Their numbers begin at `first`.

    Raises:
        ValueError: `num_slabs` is not positive, or `first` is negative.
    """

    def __init__(self, num_slabs: int, first: int = 0) -> None:
        if num_slabs < 1 or first < 0:
            raise ValueError(f"a pool needs at least one slab, not {num_slabs}, numbered from 0, not {first}")
        self.num_slabs, self.first = num_slabs, first
        self._owner: dict[int, str | None] = dict.fromkeys(range(first, first + num_slabs))
        # Free slabs, as a stack; the first slab is on top at first.
        self._idle = list(range(first + num_slabs - 1, first - 1, -1))
        self._count: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """Slabs without an owner."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Slabs with an owner."""
        return self.num_slabs - len(self._idle)

    def owner_of(self, slab: int) -> str | None:
        """The owner of `slab`; None if it is idle. Raises ValueError if there is no such slab."""
        if slab not in self._owner:
            raise ValueError(f"there is no slab {slab} in a pool of {self.num_slabs}")
        return self._owner[slab]

    def count_by_owner(self) -> dict[str, int]:
        """Number of slabs by owner, without owners of 0."""
        return dict(self._count)

    def take_slabs(self, n: int, owner: str) -> list[int]:
        """Take `n` free slabs for `owner`. Their memory still has its old content.

        Raises:
            OutOfSlabs: fewer than `n` are free; none was taken.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} slabs")
        if n > len(self._idle):
            raise OutOfSlabs(
                f"the KV pool has {self.free} free slabs of {self.num_slabs}, and {n} were asked for",
                f"asked for by {owner}; {len(self._count)} owners hold {self.used}",
            )
        taken = [self._idle.pop() for _ in range(n)]
        for slab in taken:
            self._owner[slab] = owner
        if n:
            self._count[owner] += n
        return taken

    def give_back(self, slabs: Sequence[int], owner: str) -> None:
        """Return `slabs` of `owner` to the pool.

        Raises:
            ValueError: a slab is not owned by `owner`, or is listed twice; none was returned.
        """
        self._require_owner(slabs, owner)
        # In reverse, so that the next `take_slabs` gets the slabs in the same order.
        for slab in reversed(slabs):
            self._owner[slab] = None
            self._idle.append(slab)
        self._drop_count(owner, len(slabs))

    def change_owner(self, slabs: Sequence[int], owner: str, new_owner: str) -> None:
        """Pass `slabs` from `owner` to `new_owner`.

        Raises:
            ValueError: a slab is not owned by `owner`, or is listed twice; none was passed on.
        """
        self._require_owner(slabs, owner)
        for slab in slabs:
            self._owner[slab] = new_owner
        if slabs:
            self._drop_count(owner, len(slabs))
            self._count[new_owner] += len(slabs)

    def check_books(self) -> None:
        """Check that every slab is either free (listed once) or has one owner, and that the counts agree.

        Raises:
            AssertionError: an inconsistency; the text names the slabs or owners at fault.
        """
        idle = Counter(self._idle)
        twice = sorted(slab for slab, times in idle.items() if times > 1)
        if twice:
            raise AssertionError(f"slabs {twice} are in the free list more than once")
        both = sorted(slab for slab in idle if self._owner[slab] is not None)
        if both:
            raise AssertionError(f"slabs {both} are free and owned at the same time")
        lost = [slab for slab, owner in self._owner.items() if owner is None and slab not in idle]
        if lost:
            raise AssertionError(f"slabs {lost} are neither free nor owned")
        held = Counter(owner for owner in self._owner.values() if owner is not None)
        if held != self._count:
            raise AssertionError(f"owners hold {dict(held)}, but {dict(self._count)} are counted")

    def _require_owner(self, slabs: Sequence[int], owner: str) -> None:
        """Raises ValueError if a slab is listed twice or not owned by `owner`."""
        if len(set(slabs)) != len(slabs):
            raise ValueError(f"a slab is named twice in {list(slabs)}")
        wrong = [slab for slab in slabs if self._owner.get(slab) != owner]
        if wrong:
            raise ValueError(f"slabs {wrong} are not owned by {owner}")

    def _drop_count(self, owner: str, n: int) -> None:
        self._count[owner] -= n
        if self._count[owner] == 0:
            del self._count[owner]
