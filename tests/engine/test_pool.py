"""The slab pool's memory: zero-copy, also over memory that is not its own."""

from __future__ import annotations

from multiprocessing import shared_memory

import pytest
import torch

from kvcache.layout import KvLayout
from kvcache.pool import KvPool

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_slab_bytes_are_the_tensor(dtype: str) -> None:
    pool = KvPool(KvLayout(1, 2, 4, dtype), 3)
    pool.data[1] = 1.5
    expected = torch.full(
        (pool.layout.chunk_bytes // pool.layout.itemsize,), 1.5, dtype=getattr(torch, dtype)
    )
    assert torch.equal(torch.frombuffer(bytearray(pool.slab_bytes(1)), dtype=expected.dtype), expected)
    pool.slab_bytes(2)[:] = bytes(pool.slab_bytes(1))
    assert torch.equal(pool.data[2], pool.data[1])
    assert not pool.data[0].any()
    with pytest.raises(ValueError, match="no slab 3"):
        pool.slab_bytes(3)


def test_pool_over_shared_memory_is_not_a_copy() -> None:
    shared = shared_memory.SharedMemory(create=True, size=4 * LAYOUT.chunk_bytes)
    try:
        assert shared.buf is not None
        view = shared.buf[: 3 * LAYOUT.chunk_bytes]
        pool = KvPool(LAYOUT, 3, view)
        pool.data[2, 1, 0, 1, 63, 3] = 7.0
        assert bytes(view[-2 * 64 * 4 * 4 - 4 :][:4]) == torch.tensor([7.0]).numpy().tobytes()
        view[:4] = torch.tensor([3.0]).numpy().tobytes()
        assert pool.data.flatten()[0] == 3.0
        pool.memory.release()
        del pool
        view.release()
    finally:
        shared.close()
        shared.unlink()


@pytest.mark.parametrize(
    "memory", [memoryview(bytes(2 * LAYOUT.chunk_bytes)), memoryview(bytearray(2 * LAYOUT.chunk_bytes - 1))]
)
def test_unfit_memory_is_refused(memory: memoryview) -> None:
    with pytest.raises(ValueError, match="writable contiguous"):
        KvPool(LAYOUT, 2, memory)
