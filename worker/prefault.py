"""Touches a pool's memory before its slabs are handed out, so that requests do not pay for page faults.

The first write to each new page costs a page fault: 2.5 µs per 4 KiB were measured, and hand-offs and prompts ran at
1 GB/s until every slab had been used once. A thread of the lowest priority touches the pages while the worker is idle,
in the order in which slabs are handed out. Slabs that it has not reached yet can be used as usual.

The memory was announced as used at the start; it is only taken sooner. Several workers may have counted on the same
free memory, so the thread stops when less than `MIN_FREE_BYTES` would be left.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from engine.model.memory_plan import available_memory
from kvtransfer.shared_memory import SharedMemory

LOWEST_PRIORITY = 19
# Bytes per call, which take about 0.1 ms. Memory calls of other threads may have to wait until the call has ended.
MAX_CALL_BYTES = 128 << 10
# Seconds between checks while the worker is busy.
BUSY_POLL_S = 0.05
# The free memory is checked again after this many bytes.
CHECK_EVERY_BYTES = 64 << 20
# Bytes of free memory that must remain.
MIN_FREE_BYTES = 2 << 30

log = logging.getLogger(__name__)


class PoolPrefault:
    """Touches the pages of `memories`, one after the other, in a thread of its own, from `start` until `stop`."""

    def __init__(
        self,
        memories: Sequence[SharedMemory],
        available: Callable[[], int] = available_memory,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`available` returns the bytes that the system, or this control group, can still give; `busy` pauses the
        thread.

        Create this object before the calling thread is pinned to a core: the new thread takes over the cores of now.
        """
        self._memories, self._available, self._busy = memories, available, busy
        self._cores = os.sched_getaffinity(0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._prefault_all, name="populate", daemon=True)

    def start(self) -> None:
        """Start the thread. Later calls do nothing."""
        if self._thread.ident is None and not self._stopping.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Stop after the current piece, and wait for the thread to end."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _prefault_all(self) -> None:
        """The thread: touch all pools at the lowest priority, on the cores of the process's start."""
        # Applies to this thread alone.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        os.sched_setaffinity(0, self._cores)
        try:
            for memory in self._memories:
                if not self._prefault_memory(memory):
                    return
        except OSError as error:
            log.info("the pool's pages are allocated at first use: %s", error)

    def _prefault_memory(self, memory: SharedMemory) -> bool:
        """Touch one pool's pages. False if it had to stop early, because of `stop` or for lack of memory."""
        for start in range(0, memory.num_bytes, MAX_CALL_BYTES):
            while self._busy() and not self._stopping.wait(BUSY_POLL_S):
                pass
            if self._stopping.is_set():
                return False
            if start % CHECK_EVERY_BYTES == 0 and self._available() < MIN_FREE_BYTES + CHECK_EVERY_BYTES:
                log.info("stopped after %d bytes of the pool: free memory is short", start)
                return False
            memory.populate_pages(start, min(MAX_CALL_BYTES, memory.num_bytes - start))
        return True
