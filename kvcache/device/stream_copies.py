"""Copies between a pool on a CUDA device and host memory, which run beside the device's computing.

    StreamCopies   page-locked host memory: one stream for each direction, one event for each batch
    RingCopies     other host memory: a thread for each direction moves slabs through a small page-locked ring

Slabs are copied whole, each by one call: they are megabytes, and thousands of small copies would fill a stream's queue
and block the host.

**Order.** A copy to the host begins when the device has done all that was launched before. A copy to the device does
not wait for that, or a step would delay it: steps end before `run` returns, and its targets are reserved for its
caller, so nothing that was launched reads or writes them. A step that is launched after `is_done` sees the new content.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from kvcache.device.copies import CopyBatch, view_slabs
from kvcache.device.page_lock import OnLocked, PageLock, report_nothing
from kvcache.device.pool import DevicePool
from kvcache.device.streams import CopyMark, CopyStream, CudaStream

# Slabs in the ring of each direction: while one is copied by the device, the host copies another one.
RING_SLABS = 4

# Source and target slab, by their numbers and by their bytes.
Pairs = Sequence[tuple[int, int]]
Moves = Sequence[tuple[torch.Tensor, torch.Tensor]]

log = logging.getLogger(__name__)


def open_stream_copies(
    pool: DevicePool, memory: memoryview, on_locked: OnLocked = report_nothing
) -> StreamCopies | RingCopies:
    """Copies between a pool on a CUDA device and `memory`, which begins with a page, by whatever the system allows.

    `memory` is as for `kvcache.device.copies.DirectCopies`. `on_locked` is called with how many of how many bytes are
    page-locked. Raises ValueError: `memory` is not whole slabs.
    """
    device, host = pool.data.device, view_slabs(memory, pool.layout.chunk_bytes)
    try:
        lock = PageLock(host, device, on_locked)
    except OSError as error:
        log.warning(
            "the transfer buffer cannot be page-locked (%s): KV is copied through a ring, which is slower",
            error,
        )
        return RingCopies(pool.slab_bytes, host, lambda: CudaStream(device), allocate_ring)
    return StreamCopies(pool.slab_bytes, host, lambda: CudaStream(device), lock.unlock_pages)


class StreamBatch:
    """Copies up to a place in a stream."""

    def __init__(self, mark: CopyMark) -> None:
        self._mark: CopyMark | None = mark

    def is_done(self) -> bool:
        """See `kvcache.device.copies.CopyBatch.is_done`."""
        # Two threads may ask at once, and one of them may have heard the end already.
        mark = self._mark
        if mark is None:
            return True
        if not mark.is_reached():
            return False
        self._mark = None
        return True


class StreamCopies:
    """`kvcache.device.copies.SlabCopies` with page-locked host memory.

    Args:
        device_slabs, host_slabs: uint8 `[slabs, slab_bytes]`.
        open_stream: makes a stream of the device.
        unlock: ends the page-locking.
    """

    def __init__(
        self,
        device_slabs: torch.Tensor,
        host_slabs: torch.Tensor,
        open_stream: Callable[[], CopyStream],
        unlock: Callable[[], None],
    ) -> None:
        self._device, self._host, self._unlock = device_slabs, host_slabs, unlock
        self._outgoing, self._incoming = open_stream(), open_stream()
        # The pool is filled with zeros before anything is copied to it.
        self._incoming.follow_launched()

    def to_host(self, pairs: Pairs) -> CopyBatch:
        """See `SlabCopies.to_host`."""
        moves = select_slabs(pairs, self._device, self._host)
        self._outgoing.follow_launched()
        return self._start(self._outgoing, moves)

    def to_device(self, pairs: Pairs) -> CopyBatch:
        """See `SlabCopies.to_device`."""
        return self._start(self._incoming, select_slabs(pairs, self._host, self._device))

    def close(self) -> None:
        """Wait for all copies, and end the page-locking."""
        for stream in (self._outgoing, self._incoming):
            stream.set_mark().wait_reached()
        self._unlock()

    def _start(self, stream: CopyStream, moves: Moves) -> CopyBatch:
        for source, target in moves:
            stream.add_copy(target, source)
        return StreamBatch(stream.set_mark())


def allocate_ring(slab_bytes: int) -> torch.Tensor:
    """Host memory for `RING_SLABS` slabs, page-locked if that is possible."""
    try:
        return torch.empty(RING_SLABS, slab_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning("no memory at all can be page-locked: %s", str(error).partition("\n")[0])
        return torch.empty(RING_SLABS, slab_bytes, dtype=torch.uint8)


class RingBatch:
    """Copies that a thread makes one after the other."""

    def __init__(self, moves: Moves) -> None:
        self.moves, self.has_ended = moves, False
        # What ended the copies early.
        self.error: BaseException | None = None

    def is_done(self) -> bool:
        """See `kvcache.device.copies.CopyBatch.is_done`."""
        if self.error is not None:
            raise self.error
        return self.has_ended


class RingCopies:
    """`kvcache.device.copies.SlabCopies` with host memory that cannot be page-locked.

    Args:
        device_slabs, host_slabs: uint8 `[slabs, slab_bytes]`.
        open_stream: makes a stream of the device.
        allocate: makes the memory of a ring, uint8 `[ring slabs, slab_bytes]`.
    """

    def __init__(
        self,
        device_slabs: torch.Tensor,
        host_slabs: torch.Tensor,
        open_stream: Callable[[], CopyStream],
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        self._device, self._host = device_slabs, host_slabs
        slab_bytes = host_slabs.shape[1]
        self._outgoing = OutgoingRing("copies to host", open_stream(), allocate(slab_bytes))
        self._incoming = IncomingRing("copies to device", open_stream(), allocate(slab_bytes))
        self._incoming.stream.follow_launched()

    def to_host(self, pairs: Pairs) -> CopyBatch:
        """See `SlabCopies.to_host`."""
        moves = select_slabs(pairs, self._device, self._host)
        self._outgoing.stream.follow_launched()
        return self._outgoing.add_batch(moves)

    def to_device(self, pairs: Pairs) -> CopyBatch:
        """See `SlabCopies.to_device`."""
        return self._incoming.add_batch(select_slabs(pairs, self._host, self._device))

    def close(self) -> None:
        """Wait for all copies, and end the threads."""
        self._outgoing.close()
        self._incoming.close()


class CopyRing(ABC):
    """The copies of one direction: a thread `name`, a stream, and slabs of `ring` between the two memories."""

    def __init__(self, name: str, stream: CopyStream, ring: torch.Tensor) -> None:
        self.stream, self._ring = stream, ring
        self._batches: SimpleQueue[RingBatch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_batches, name=name, daemon=True)
        self._thread.start()

    def add_batch(self, moves: Moves) -> RingBatch:
        """Let the thread make these copies, after what was added before."""
        batch = RingBatch(moves)
        self._batches.put(batch)
        return batch

    def close(self) -> None:
        """End the thread after all batches."""
        self._batches.put(None)
        self._thread.join()

    @abstractmethod
    def copy_all(self, moves: Moves) -> None:
        """Make these copies, and wait until they have ended."""

    def _run_batches(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self.copy_all(batch.moves)
            except BaseException as error:
                batch.error = error
            batch.has_ended = True


class OutgoingRing(CopyRing):
    """Copies from the device: it copies to the ring, then the host copies on."""

    def copy_all(self, moves: Moves) -> None:
        """See `CopyRing.copy_all`."""
        running: deque[tuple[CopyMark, torch.Tensor, torch.Tensor]] = deque()

        def finish_first() -> None:
            mark, place, target = running.popleft()
            mark.wait_reached()
            target.copy_(place)

        for number, (source, target) in enumerate(moves):
            if len(running) == len(self._ring):
                finish_first()
            place = self._ring[number % len(self._ring)]
            self.stream.add_copy(place, source)
            running.append((self.stream.set_mark(), place, target))
        while running:
            finish_first()


class IncomingRing(CopyRing):
    """Copies to the device: the host copies to the ring, then the device copies on."""

    def copy_all(self, moves: Moves) -> None:
        """See `CopyRing.copy_all`."""
        running: deque[CopyMark] = deque()
        for number, (source, target) in enumerate(moves):
            if len(running) == len(self._ring):
                running.popleft().wait_reached()
            place = self._ring[number % len(self._ring)]
            place.copy_(source)
            self.stream.add_copy(target, place)
            running.append(self.stream.set_mark())
        while running:
            running.popleft().wait_reached()


def select_slabs(pairs: Pairs, sources: torch.Tensor, targets: torch.Tensor) -> Moves:
    """The bytes of the slabs that are to be copied. Raises IndexError, before any copy has begun."""
    return [(sources[source], targets[target]) for source, target in pairs]
