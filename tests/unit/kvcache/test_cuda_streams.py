"""Which calls of CUDA copies and page-locking make, on a made-up `torch.cuda` that records them."""

from __future__ import annotations

import math
import mmap
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.errors import DeviceLost
from kvcache.device import page_lock, stream_copies
from kvcache.device.page_lock import PageLock, piece_bytes
from kvcache.device.pool import DevicePool
from kvcache.device.stream_copies import RingCopies, StreamCopies, open_stream_copies
from kvcache.device.streams import CudaStream
from kvcache.layout import KvLayout
from kvtransfer.shared_memory import SharedMemory

DEVICE = torch.device("cpu")
LAYOUT = KvLayout(2, 1, 16, "float32")


class MadeUpCuda:
    """Streams and events that only record, and a driver that page-locks ranges until `most_bytes` are locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_bytes: float = math.inf) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.locked: dict[int, int] = {}
        self.most_bytes, self.error = most_bytes, ""
        # As the driver does: the error of a call is raised by the next launch.
        self.stale_error = False
        self._streams = 0
        cuda, here = torch.cuda, self
        monkeypatch.setattr(cuda, "Stream", lambda device: here._open_stream())
        monkeypatch.setattr(cuda, "Event", lambda: here._open_event())
        monkeypatch.setattr(cuda, "default_stream", lambda device: "default")
        monkeypatch.setattr(cuda, "stream", self._use_stream)
        monkeypatch.setattr(cuda, "cudart", lambda: here)
        monkeypatch.setattr(torch, "empty", self._launch_fill)

    def _check(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def _open_stream(self) -> Any:
        name, self._streams = f"stream {self._streams}", self._streams + 1
        return SimpleNamespace(name=name, wait_stream=lambda other: self._record("wait", name, other))

    def _open_event(self) -> Any:
        return SimpleNamespace(
            record=lambda stream: self._record("record", stream.name),
            query=self._query,
            synchronize=lambda: self._record("synchronize"),
        )

    def _query(self) -> bool:
        self._record("query")
        return True

    @contextmanager
    def _use_stream(self, stream: Any) -> Any:
        self._record("enter", stream.name)
        yield
        self._record("leave", stream.name)

    def _record(self, *call: Any) -> None:
        self._check()
        self.calls.append(call)

    def _launch_fill(self, *shape: Any, **more: Any) -> Any:
        def fill(value: int) -> None:
            if self.stale_error:
                self.stale_error = False
                raise RuntimeError("CUDA error: the one before")

        return SimpleNamespace(fill_=fill)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0 and size > 0
        for begin, length in self.locked.items():
            first, last = begin // mmap.PAGESIZE, (begin + length - 1) // mmap.PAGESIZE
            assert (address + size - 1) // mmap.PAGESIZE < first or address // mmap.PAGESIZE > last, "twice"
        if sum(self.locked.values()) + size > self.most_bytes:
            self.stale_error = True
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


def test_a_stream_follows_the_default_stream_only_where_it_has_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = MadeUpCuda(monkeypatch)
    stream, tensors = CudaStream(DEVICE), torch.arange(8).reshape(2, 4)
    stream.add_copy(tensors[0], tensors[1])
    assert tensors[0].tolist() == [4, 5, 6, 7]
    stream.follow_launched()
    mark = stream.set_mark()
    assert cuda.calls == [
        ("enter", "stream 0"), ("leave", "stream 0"), ("wait", "stream 0", "default"), ("record", "stream 0")
    ]  # fmt: skip
    assert mark.is_reached()
    mark.wait_reached()
    assert [call[0] for call in cuda.calls[-2:]] == ["query", "synchronize"]


def test_an_error_of_the_device_is_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = MadeUpCuda(monkeypatch)
    stream = CudaStream(DEVICE)
    mark = stream.set_mark()
    cuda.error = "CUDA error: an illegal memory access was encountered"
    tensors = torch.zeros(2, 4)
    for call in (
        mark.is_reached,
        mark.wait_reached,
        stream.set_mark,
        stream.follow_launched,
        lambda: stream.add_copy(tensors[0], tensors[1]),
    ):
        with pytest.raises(DeviceLost, match="illegal memory access"):
            call()


@pytest.mark.parametrize("slab_bytes", [96, 4096, 5000, 1 << 20, (8 << 20) + 4096, (300 << 20) + 64])
def test_a_piece_has_whole_slabs_and_whole_pages(slab_bytes: int) -> None:
    size = piece_bytes(slab_bytes)
    assert size % slab_bytes == size % mmap.PAGESIZE == 0
    assert size <= page_lock.PIECE_BYTES or size == math.lcm(mmap.PAGESIZE, slab_bytes)


def open_copies(slabs: int) -> tuple[Any, SharedMemory, list[tuple[int, int]]]:
    """Copies for a buffer of so many slabs; with its memory, and what was reported."""
    memory, locked = SharedMemory(slabs * LAYOUT.chunk_bytes), list[tuple[int, int]]()
    pool = DevicePool(LAYOUT, 3, DEVICE)
    return open_stream_copies(pool, memory.view, lambda *done: locked.append(done)), memory, locked


def test_the_buffer_is_page_locked_in_pieces_and_unlocked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = MadeUpCuda(monkeypatch)
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 2 * LAYOUT.chunk_bytes)
    copies, memory, locked = open_copies(5)
    size = LAYOUT.chunk_bytes
    assert isinstance(copies, StreamCopies)
    assert sorted(cuda.locked.values()) == [size, 2 * size, 2 * size]
    assert locked == [(2 * size, 5 * size), (4 * size, 5 * size), (5 * size, 5 * size)]
    copies.close()
    assert not cuda.locked
    memory.close()


def test_where_it_cannot_be_page_locked_there_is_a_ring(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failed call's error does not come up later, as that of a step."""
    cuda = MadeUpCuda(monkeypatch, most_bytes=4 * LAYOUT.chunk_bytes)
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 2 * LAYOUT.chunk_bytes)
    ring = torch.zeros(2, LAYOUT.chunk_bytes, dtype=torch.uint8)
    monkeypatch.setattr(stream_copies, "allocate_ring", lambda slab_bytes: ring)
    copies, memory, _ = open_copies(5)
    assert isinstance(copies, RingCopies) and not cuda.locked and not cuda.stale_error
    assert "cannot be page-locked (error 2, after" in caplog.text
    copies.close()
    memory.close()


def test_memory_that_is_no_whole_slabs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUpCuda(monkeypatch)
    with pytest.raises(ValueError, match="no whole number of slabs"):
        open_stream_copies(DevicePool(LAYOUT, 1, DEVICE), memoryview(bytearray(100)))
    assert PageLock is page_lock.PageLock
