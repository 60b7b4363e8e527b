"""Copies slabs between a pool on a device and host memory.

    to_host    device slab ──▶ host slab       begins when the device has done all that was launched before
    to_device  host slab ──▶ device slab       work that is launched after the batch is done sees the new content

A copy may run while the caller goes on. Until its batch is done, nobody may write to its sources, and nobody may read
or write its targets: neither slab may change its owner. Slabs have numbers of their own on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvcache.device.pool import DevicePool


class CopyBatch(Protocol):
    """Copies that were started together."""

    def is_done(self) -> bool:
        """Whether all of them have ended. Never waits; once True, always True. Any thread may ask.

        Raises DeviceLost if the device failed.
        """


class SlabCopies(Protocol):
    """Starts copies of whole slabs. `pairs` are (source slab, target slab); no target may occur twice.

    Any thread may call it. Its methods raise DeviceLost if the device failed; if they raise anything else, no copy has
    begun.
    """

    def to_host(self, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        """Copy slabs of the device's pool to slabs in host memory."""

    def to_device(self, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        """Copy slabs in host memory to slabs of the device's pool."""

    def close(self) -> None:
        """Wait for all copies. None may be started afterwards."""


class DoneBatch:
    """A batch whose copies had ended before it was returned."""

    def is_done(self) -> bool:
        """True."""
        return True


class DirectCopies:
    """Copies at once, for a pool whose tensor is in host memory itself.

    Args:
        pool: the device's pool.
        memory: the host's slabs, one after the other: writable, a multiple of `pool.layout.chunk_bytes` bytes.

    Raises:
        ValueError: `memory` is not whole slabs.
    """

    def __init__(self, pool: DevicePool, memory: memoryview) -> None:
        self._device, self._host = pool.slab_bytes, view_slabs(memory, pool.layout.chunk_bytes)

    def to_host(self, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        """See `SlabCopies.to_host`."""
        for source, target in pairs:
            self._host[target] = self._device[source]
        return DoneBatch()

    def to_device(self, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        """See `SlabCopies.to_device`."""
        for source, target in pairs:
            self._device[target] = self._host[source]
        return DoneBatch()

    def close(self) -> None:
        """Nothing: no copy runs."""


def view_slabs(memory: memoryview, slab_bytes: int) -> torch.Tensor:
    """Host memory as uint8 `[slabs, slab_bytes]`, without a copy. Raises ValueError if it is not whole slabs."""
    if memory.nbytes % slab_bytes or not memory.nbytes:
        raise ValueError(f"{memory.nbytes} bytes are no whole number of slabs of {slab_bytes}")
    return torch.frombuffer(memory, dtype=torch.uint8).view(-1, slab_bytes)
