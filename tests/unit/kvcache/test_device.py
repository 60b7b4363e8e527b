"""A pool on a device, and the copies between its slabs and host memory, on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from kvcache.device.copies import DirectCopies, view_slabs
from kvcache.device.pool import DevicePool
from kvcache.layout import KvLayout
from kvcache.pool import KvPool

RAW = KvLayout(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16")
CODED = KvLayout(layers=2, kv_heads=2, head_dim=16, dtype="float32", codec="int8")


@pytest.mark.parametrize("layout", [RAW, CODED], ids=["raw", "coded"])
def test_slabs_are_as_those_of_a_pool_in_host_memory(layout: KvLayout) -> None:
    device, host = DevicePool(layout, 3, torch.device("cpu")), KvPool(layout, 3)
    assert (device.data.shape, device.data.dtype) == (host.data.shape, host.data.dtype)
    assert device.slab_bytes.shape == (3, layout.chunk_bytes)
    assert device.take_slabs(2, "a") == host.take_slabs(2, "a") == [0, 1]
    device.slab_bytes[2] = 7
    assert bool((device.data.view(torch.uint8)[2] == 7).all())


@pytest.mark.parametrize("layout", [RAW, CODED], ids=["raw", "coded"])
def test_copied_slabs_come_back_elsewhere(layout: KvLayout) -> None:
    pool, memory = DevicePool(layout, 4, torch.device("cpu")), memoryview(bytearray(3 * layout.chunk_bytes))
    copies = DirectCopies(pool, memory)
    first, second = torch.randint(0, 256, (2, layout.chunk_bytes), dtype=torch.uint8)
    pool.slab_bytes[3], pool.slab_bytes[0] = first, second
    assert copies.to_host([(3, 0), (0, 2)]).is_done()
    assert memory[: layout.chunk_bytes] == first.numpy().data
    assert copies.to_device([(2, 1), (0, 2)]).is_done()
    assert torch.equal(pool.slab_bytes, torch.stack([second, second, first, first]))


def test_memory_must_be_whole_slabs() -> None:
    with pytest.raises(ValueError, match="no whole number of slabs"):
        view_slabs(memoryview(bytearray(100)), 64)
    with pytest.raises(ValueError, match="no whole number of slabs"):
        view_slabs(memoryview(bytearray()), 64)
