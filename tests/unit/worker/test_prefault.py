"""A pool's pages are there before its slabs are handed out, and never at the price of somebody else's memory."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvtransfer.shared_memory import PAGE_BYTES, SharedMemory
from worker.prefault import CHECK_EVERY_BYTES, MAX_CALL_BYTES, MIN_FREE_BYTES, PoolPrefault

SIZE = CHECK_EVERY_BYTES + 5 * MAX_CALL_BYTES + PAGE_BYTES + 3
PLENTY = 1 << 50


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with closing(SharedMemory(SIZE)) as memory:
        yield memory


def faults_of_writing(memory: SharedMemory) -> int:
    """Page faults of this thread while it writes one byte to each page."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, memory.num_bytes, PAGE_BYTES):
        memory.view[at] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def finished(populating: PoolPrefault) -> None:
    populating.start()
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()


def test_memory_that_was_not_populated_faults_at_every_page(memory: SharedMemory) -> None:
    assert faults_of_writing(memory) >= SIZE // PAGE_BYTES  # if this is not so, the next test shows nothing


def test_populated_memory_does_not_fault(memory: SharedMemory) -> None:
    memory.view[PAGE_BYTES] = 7
    finished(PoolPrefault([memory], lambda: PLENTY))
    assert memory.view[PAGE_BYTES] == 7
    assert faults_of_writing(memory) < SIZE // PAGE_BYTES // 100


def test_it_stops_where_too_little_would_be_left(memory: SharedMemory) -> None:
    left = iter([MIN_FREE_BYTES + CHECK_EVERY_BYTES, MIN_FREE_BYTES + CHECK_EVERY_BYTES - 1])
    finished(PoolPrefault([memory, memory], lambda: next(left)))
    missing = (SIZE - CHECK_EVERY_BYTES) // PAGE_BYTES
    assert missing <= faults_of_writing(memory) <= missing + SIZE // PAGE_BYTES // 100


def test_it_ends_when_asked_to_and_never_begins_afterwards(memory: SharedMemory) -> None:
    asked, go = threading.Event(), threading.Event()

    def available() -> int:
        asked.set()
        assert go.wait(60)
        return PLENTY

    populating = PoolPrefault([memory], available)
    populating.start()
    assert asked.wait(60)
    stopper = threading.Thread(target=populating.stop)
    stopper.start()
    go.set()
    stopper.join(60)
    assert not stopper.is_alive() and not [t for t in threading.enumerate() if t.name == "populate"]
    populating.start()
    never = PoolPrefault([memory], available)
    never.stop()
    never.start()
    assert not [t for t in threading.enumerate() if t.name == "populate"]


def test_no_piece_begins_while_the_worker_is_busy(memory: SharedMemory) -> None:
    asked, busy = threading.Semaphore(0), threading.Event()
    busy.set()

    def is_busy() -> bool:
        asked.release()
        return busy.is_set()

    populating = PoolPrefault([memory], lambda: PLENTY, is_busy)
    populating.start()
    assert asked.acquire(timeout=60) and asked.acquire(timeout=60)
    untouched = os.stat(memory.fd).st_blocks
    assert untouched * 512 <= 2 * PAGE_BYTES
    busy.clear()
    finished(populating)
    assert os.stat(memory.fd).st_blocks * 512 >= SIZE
    stopped = PoolPrefault([memory], lambda: PLENTY, lambda: True)
    stopped.start()
    stopped.stop()
    assert not [t for t in threading.enumerate() if t.name == "populate"]


def test_pages_that_cannot_be_had_are_no_error(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(start: int, num_bytes: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory, "populate_pages", refuse)
    with caplog.at_level("INFO"):
        finished(PoolPrefault([memory], lambda: PLENTY))
    assert "the pool's pages are allocated at first use" in caplog.text


def test_the_thread_has_the_lowest_priority_and_the_cores_from_before_pinning(memory: SharedMemory) -> None:
    seen: list[tuple[int, set[int]]] = []

    def available() -> int:
        seen.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getaffinity(0)))
        return PLENTY

    cores = os.sched_getaffinity(0)
    populating = PoolPrefault([memory], available)
    os.sched_setaffinity(0, {min(cores)})
    try:
        finished(populating)
    finally:
        os.sched_setaffinity(0, cores)
    assert seen[0] == (19, cores)
