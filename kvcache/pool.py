"""The slab pool: fixed memory cut into chunks, and the books of who owns which (`kvcache.slabs`).

The books are not safe to change from several threads; the memory itself may be shared with other processes (pass a
writable view of it).
"""

from __future__ import annotations

import torch

from kvcache.layout import KVLayout
from kvcache.slabs import Slabs


class Pool(Slabs):
    """`num_slabs` slabs of `layout.chunk_bytes` each.

    `data` is `[num_slabs, layers, kv_heads, 2, 64, head_dim]`, a view of `memory` (bytes, writable).

    Raises:
        ValueError: `num_slabs` is not positive, or `memory` is read-only, not contiguous, or not of
            `num_slabs * layout.chunk_bytes` bytes.
    """

    def __init__(self, layout: KVLayout, num_slabs: int, memory: memoryview | None = None) -> None:
        super().__init__(num_slabs)
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
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.data = torch.frombuffer(self.memory, dtype=dtype).view(num_slabs, *layout.chunk_shape)

    def slab_bytes(self, slab: int) -> memoryview:
        """The bytes of one slab: a writable window, not a copy."""
        if not 0 <= slab < self.num_slabs:
            raise ValueError(f"there is no slab {slab} in a pool of {self.num_slabs}")
        size = self.layout.chunk_bytes
        return self.memory[slab * size : (slab + 1) * size]
