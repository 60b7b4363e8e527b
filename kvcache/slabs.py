"""The books of a slab pool: `num_slabs` numbers, every one of them idle or owned by exactly one name.

Slabs are handed out last-in first-out, so that memory which is still in the processor's cache is used again first. No
memory and no torch here: `kvcache.pool.Pool` adds the memory, and the simulator and the tests need none. Not safe to
change from several threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from diptych.errors import OutOfBlocks


class Slabs:
    """Who owns which of `num_slabs` slabs.

    Raises:
        ValueError: `num_slabs` is not positive.
    """

    def __init__(self, num_slabs: int) -> None:
        if num_slabs < 1:
            raise ValueError(f"a pool needs at least one slab, not {num_slabs}")
        self.num_slabs = num_slabs
        self._owner: list[str | None] = [None] * num_slabs
        self._idle = list(range(num_slabs - 1, -1, -1))  # a stack; slab 0 is on top at first
        self._count: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """Slabs without an owner."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Slabs with an owner."""
        return self.num_slabs - len(self._idle)

    def owner(self, slab: int) -> str | None:
        """Who owns `slab`; None if it is idle. Raises ValueError if there is no such slab."""
        if not 0 <= slab < self.num_slabs:
            raise ValueError(f"there is no slab {slab} in a pool of {self.num_slabs}")
        return self._owner[slab]

    def owners(self) -> dict[str, int]:
        """Number of slabs by owner, owners of none left out."""
        return dict(self._count)

    def take(self, n: int, owner: str) -> list[int]:
        """`n` slabs, now owned by `owner`; their content is whatever was there before.

        Raises:
            OutOfBlocks: fewer than `n` are free; nothing was taken.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} slabs")
        if n > len(self._idle):
            raise OutOfBlocks(
                f"the KV pool has {self.free} free slabs of {self.num_slabs}, and {n} were asked for",
                f"asked for by {owner}; {len(self._count)} owners hold {self.used}",
            )
        taken = [self._idle.pop() for _ in range(n)]
        for slab in taken:
            self._owner[slab] = owner
        if n:
            self._count[owner] += n
        return taken

    def give(self, slabs: Sequence[int], owner: str) -> None:
        """Return `slabs` to the pool.

        Raises:
            ValueError: one of them is not owned by `owner`, or is named twice; nothing was returned.
        """
        self._require(slabs, owner)
        for slab in reversed(slabs):  # so that the next `take` finds them in the same order
            self._owner[slab] = None
            self._idle.append(slab)
        self._drop(owner, len(slabs))

    def move(self, slabs: Sequence[int], owner: str, new_owner: str) -> None:
        """Pass `slabs` from `owner` to `new_owner`.

        Raises:
            ValueError: one of them is not owned by `owner`, or is named twice; nothing was moved.
        """
        self._require(slabs, owner)
        for slab in slabs:
            self._owner[slab] = new_owner
        if slabs:
            self._drop(owner, len(slabs))
            self._count[new_owner] += len(slabs)

    def check(self) -> None:
        """Prove conservation: every slab is either idle, once, or has one owner, and the counts agree.

        Raises:
            AssertionError: they do not; the text names the slabs or owners at fault.
        """
        idle = Counter(self._idle)
        twice = sorted(slab for slab, times in idle.items() if times > 1)
        if twice:
            raise AssertionError(f"slabs {twice} are in the free list more than once")
        both = sorted(slab for slab in idle if self._owner[slab] is not None)
        if both:
            raise AssertionError(f"slabs {both} are free and owned at the same time")
        lost = [slab for slab, owner in enumerate(self._owner) if owner is None and slab not in idle]
        if lost:
            raise AssertionError(f"slabs {lost} are neither free nor owned")
        held = Counter(owner for owner in self._owner if owner is not None)
        if held != self._count:
            raise AssertionError(f"owners hold {dict(held)}, the books say {dict(self._count)}")

    def _require(self, slabs: Sequence[int], owner: str) -> None:
        if len(set(slabs)) != len(slabs):
            raise ValueError(f"a slab is named twice in {list(slabs)}")
        wrong = [slab for slab in slabs if not 0 <= slab < self.num_slabs or self._owner[slab] != owner]
        if wrong:
            raise ValueError(f"slabs {wrong} are not owned by {owner}")

    def _drop(self, owner: str, n: int) -> None:
        self._count[owner] -= n
        if self._count[owner] == 0:
            del self._count[owner]
