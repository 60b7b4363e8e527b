"""Divides a worker's KV pool among its KV classes, and says what would work where a class gets too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ModelError
from engine.model.memory_plan import AUTO_POOL_REQUESTS, MemoryPlan, format_bytes
from kvcache.layout import KvLayout

# Advice names shares in thousandths.
STEPS = 1000


@dataclass(frozen=True, slots=True)
class PoolShares:
    """The classes of a pool with their shares. `asked`: the user set the size of the pool."""

    plan: MemoryPlan
    layouts: Sequence[KvLayout]
    shares: Sequence[float]
    asked: bool

    def count_slabs(self, kv_bytes: int, max_model_len: int, shares: Sequence[float]) -> list[int] | None:
        """The slabs of each class in a pool of `kv_bytes`; None if one has too few for a request of full length."""
        counts = [
            int(kv_bytes * share) // layout.chunk_bytes
            for layout, share in zip(self.layouts, shares, strict=True)
        ]
        needs = [layout.num_chunks(max_model_len) for layout in self.layouts]
        return counts if all(count >= need for count, need in zip(counts, needs, strict=True)) else None

    @property
    def unit(self) -> int:
        """Pools have whole slabs of the class with the largest ones."""
        return max(layout.chunk_bytes for layout in self.layouts)

    @property
    def needs(self) -> list[int]:
        """Bytes of one request of full length in each class."""
        return [layout.num_chunks(self.plan.max_model_len) * layout.chunk_bytes for layout in self.layouts]

    def find_shares(self, kv_bytes: int) -> list[float] | None:
        """Shares of a pool of `kv_bytes` that work, close to those that were asked for; None: there are none."""
        least = [ceil(need / kv_bytes * STEPS) for need in self.needs]
        spare = STEPS - sum(least)
        if spare < 0:
            return None
        total = sum(self.shares)
        shares = [
            (low + floor(spare * share / total)) / STEPS
            for low, share in zip(least, self.shares, strict=True)
        ]
        return shares if self.count_slabs(kv_bytes, self.plan.max_model_len, shares) else None

    def find_pool(self) -> int | None:
        """The bytes of the smallest pool in which these shares work; None: it does not fit in memory."""
        size = max(need / share for need, share in zip(self.needs, self.shares, strict=True))
        num_bytes = ceil(size / self.unit) * self.unit
        # A share of so many bytes may be rounded down below a slab.
        while not self.count_slabs(num_bytes, self.plan.max_model_len, self.shares):
            num_bytes += self.unit
        return num_bytes if num_bytes <= self.plan.max_kv_bytes else None

    def find_length(self) -> int:
        """The longest requests, in tokens, with which these shares work; 0: there are none.

        A pool whose size nobody set becomes smaller with the requests (`engine.model.memory_plan.plan_memory`).
        """
        most = self.plan.kv_bytes if self.asked else self.plan.max_kv_bytes
        chunks = min(
            int(most * share) // layout.chunk_bytes
            for layout, share in zip(self.layouts, self.shares, strict=True)
        )
        chunks = min(chunks, self.layouts[0].num_chunks(self.plan.max_model_len))
        length = min(chunks * CHUNK_TOKENS, self.plan.max_model_len)
        if length < 1:
            return 0
        pool = most if self.asked else min(most, AUTO_POOL_REQUESTS * chunks * self.unit)
        pool = pool // self.unit * self.unit
        return length if self.count_slabs(pool, length, self.shares) else 0


def split_pool(
    name: str, plan: MemoryPlan, layouts: Sequence[KvLayout], shares: Sequence[float], *, asked: bool = True
) -> tuple[int, ...]:
    """The slabs of each KV class: its share of the pool of `plan`, in slabs of its layout.

    `asked` says whether the user set the size of the pool.

    Raises:
        ModelError: a share is too small for one request of full length.
    """
    if len(layouts) == 1:
        return (plan.num_slabs,)
    pool = PoolShares(plan, layouts, shares, asked)
    counts = pool.count_slabs(plan.kv_bytes, plan.max_model_len, shares)
    if counts is None:
        raise _too_small(name, pool)
    return tuple(counts)


def _too_small(name: str, pool: PoolShares) -> ModelError:
    """The error for the first class whose share is too small, with whatever would work."""
    plan, needs = pool.plan, pool.needs
    short = next(
        i
        for i, (share, layout) in enumerate(zip(pool.shares, pool.layouts, strict=True))
        if int(plan.kv_bytes * share) // layout.chunk_bytes * layout.chunk_bytes < needs[i]
    )
    layout, share = pool.layouts[short], pool.shares[short]
    return ModelError(
        f"the share of {layout.kv_class} in the KV pool of {name} is too small for one request",
        f"{share:.3g} of {format_bytes(plan.kv_bytes)} is {format_bytes(int(plan.kv_bytes * share))}; a request of"
        f" {plan.max_model_len} tokens takes {format_bytes(needs[short])}",
        _advise(pool),
    )


def _advise(pool: PoolShares) -> str:
    """What the user can do: other shares, a larger pool, or shorter requests, each only if it works."""
    ways = []
    size = pool.plan.kv_bytes
    if (shares := pool.find_shares(size)) is not None:
        ways.append(f"use --kv-cache-codec {_format_shares(pool, shares)}")
    if (larger := pool.find_pool()) is not None:
        ways.append(f"use --kv-cache-memory-bytes {larger}")
    if (
        not ways
        and (shares := pool.find_shares(size := pool.plan.max_kv_bytes // pool.unit * pool.unit)) is not None
    ):
        codecs = _format_shares(pool, shares)
        ways.append(f"use --kv-cache-memory-bytes {size} --kv-cache-codec {codecs}")
    if length := pool.find_length():
        ways.append(f"use --max-model-len {length} or less")
    return ", or ".join(ways) or "name fewer classes, or use a machine with more memory"


def _format_shares(pool: PoolShares, shares: Sequence[float]) -> str:
    return ",".join(
        f"{layout.kv_class}:{share:g}" for layout, share in zip(pool.layouts, shares, strict=True)
    )
