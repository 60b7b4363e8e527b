"""The KV pool of a worker on a device: as `kvcache.pool.KvPool`, but the slabs are a tensor there.

Only the device's kernels, `kvcache.device.copies` and the host tier read and write the slabs. The host knows their
numbers and owners.
"""

from __future__ import annotations

import torch

from kvcache.layout import KvLayout
from kvcache.pool import slab_shape
from kvcache.slab_ledger import SlabLedger


class DevicePool(SlabLedger):
    """`num_slabs` slabs of `layout.chunk_bytes` each on `device`, numbered from 0 and filled with zeros.

    `data` is a tensor `[num_slabs, layers, kv_heads, 2, 64, head_dim]`; of coded pages it is uint8,
    `[num_slabs, layers, pages, page_bytes]`.

    Raises:
        ValueError: `num_slabs` is not positive.
        torch.OutOfMemoryError: the device has no room.
    """

    def __init__(self, layout: KvLayout, num_slabs: int, device: torch.device) -> None:
        super().__init__(num_slabs)
        shape, dtype = slab_shape(layout)
        self.layout = layout
        self.data = torch.zeros(num_slabs, *shape, dtype=dtype, device=device)

    @property
    def slab_bytes(self) -> torch.Tensor:
        """The bytes of all slabs, uint8 `[num_slabs, chunk_bytes]`: a view, not a copy."""
        return self.data.view(self.num_slabs, -1).view(torch.uint8)

    @property
    def slab_size(self) -> int:
        """Bytes of a slab."""
        return self.layout.chunk_bytes

    def read_slab(self, slab: int, target: memoryview) -> None:
        """Copy the bytes of `slab` to host memory, and wait: for preempted sequences (`kvcache.tiers.host`)."""
        torch.frombuffer(target, dtype=torch.uint8).copy_(self.slab_bytes[slab])

    def write_slab(self, slab: int, source: memoryview) -> None:
        """Copy host memory into `slab`, and wait."""
        self.slab_bytes[slab].copy_(torch.frombuffer(source, dtype=torch.uint8))
