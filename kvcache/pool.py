"""The KV pool of a worker: fixed memory cut into slabs; `kvcache.slab_ledger` records the owner of each slab.

Only one thread may change owners. Other processes may map the memory too: then pass a writable view of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.layout import KvLayout
from kvcache.slab_ledger import SlabLedger


class KvPool(SlabLedger):
    """`num_slabs` slabs of `layout.chunk_bytes` each, numbered from `first`.

    `data` is a tensor `[num_slabs, layers, kv_heads, 2, 64, head_dim]` over `memory` (bytes, writable); of coded pages
    it is uint8, `[num_slabs, layers, pages, page_bytes]`.

    Raises:
        ValueError: `num_slabs` is not positive, or `memory` is read-only, not contiguous, or its size is not
            `num_slabs * layout.chunk_bytes` bytes.
    """

    def __init__(
        self, layout: KvLayout, num_slabs: int, memory: memoryview | None = None, first: int = 0
    ) -> None:
        super().__init__(num_slabs, first)
        size = num_slabs * layout.chunk_bytes
        if memory is None:
            memory = torch.zeros(size, dtype=torch.uint8).numpy().data
        if memory.readonly or not memory.c_contiguous or memory.nbytes != size:
            raise ValueError(
                f"pool memory must be {size} writable contiguous bytes, not {memory.nbytes}"
                f"{' read-only' if memory.readonly else ''}"
            )
        self.layout = layout
        self.memory = memory.cast("B")
        shape, dtype = slab_shape(layout)
        self.data = torch.frombuffer(self.memory, dtype=dtype).view(num_slabs, *shape)

    def slab_bytes(self, slab: int) -> memoryview:
        """The bytes of one slab: a writable view, not a copy. Raises ValueError if there is no such slab."""
        place, size = slab - self.first, self.layout.chunk_bytes
        if not 0 <= place < self.num_slabs:
            raise ValueError(f"there is no slab {slab} in a pool of {self.num_slabs}")
        return self.memory[place * size : (place + 1) * size]


def slab_shape(layout: KvLayout) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of the tensor of one slab."""
    if layout.codec:
        return (layout.layers, layout.pages_per_layer, layout.page_bytes), torch.uint8
    return layout.chunk_shape, getattr(torch, layout.dtype)


def find_pool(pools: Sequence[KvPool], slabs: Sequence[int]) -> int:
    """The index of the pool that slabs are in; of the first one if in none, whose bounds then refuse them."""
    if len(pools) == 1 or not slabs:
        return 0
    slab = min(slabs)
    return next((i for i, pool in enumerate(pools) if 0 <= slab - pool.first < pool.num_slabs), 0)
