"""The transfer buffer's accounts: whole slabs, what counts as used, and threads that use them at once."""

from __future__ import annotations

import threading

import pytest

from kvcache.allocator import KvAllocator
from kvcache.layout import KvLayout
from kvcache.slab_ledger import SlabLedger
from kvtransfer.shared_memory import attach_memory
from kvtransfer.transfer_buffer import (
    CACHED_OWNER,
    LEASED_OWNER,
    BufferedBooks,
    TransferBuffer,
    min_buffer_bytes,
)

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32")
SLAB = LAYOUT.chunk_bytes


@pytest.mark.parametrize(("num_bytes", "slabs"), [(SLAB, 1), (2 * SLAB - 1, 1), (7 * SLAB + 5, 7)])
def test_a_buffer_is_whole_slabs(num_bytes: int, slabs: int) -> None:
    buffer = TransferBuffer(LAYOUT, num_bytes)
    assert (buffer.num_slabs, buffer.free, buffer.pool.num_slabs) == (slabs, slabs, slabs)
    assert buffer.memory.num_bytes == slabs * SLAB
    buffer.close()


def test_a_buffer_without_a_slab_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no slab"):
        TransferBuffer(LAYOUT, SLAB - 1)


@pytest.mark.parametrize(("tokens", "slabs"), [(1, 1), (64, 1), (65, 2), (2048, 32)])
def test_the_smallest_buffer_holds_one_request_of_full_length(tokens: int, slabs: int) -> None:
    assert min_buffer_bytes(LAYOUT, tokens) == slabs * SLAB


def test_the_memory_is_that_of_the_pool_that_others_map() -> None:
    buffer = TransferBuffer(LAYOUT, 3 * SLAB)
    seen = attach_memory(buffer.memory.address())
    buffer.pool.memories[0][SLAB : SLAB + 3] = b"abc"
    assert bytes(seen[SLAB : SLAB + 3]) == b"abc"
    buffer.close()


def test_cached_chunks_are_not_used() -> None:
    buffer = TransferBuffer(LAYOUT, 4 * SLAB)
    assert buffer.take_free(3, "offers") == [0, 1, 2] and buffer.take_free(3, "pulls") == [3]
    assert buffer.take_free(3, "pulls") == []
    buffer.change_owner([0], "offers", CACHED_OWNER)
    buffer.change_owner([1], "offers", LEASED_OWNER)
    assert (buffer.used, buffer.cached, buffer.leased, buffer.free) == (3, 1, 1, 0)
    assert buffer.owners() == {"offers": 1, LEASED_OWNER: 1, "pulls": 1}
    buffer.give_back([2], "offers")
    with pytest.raises(ValueError, match="not owned"):
        buffer.give_back([0], "offers")
    buffer.check_books()
    buffer.close()


def test_copies_belong_to_owned_slabs() -> None:
    buffer = TransferBuffer(LAYOUT, 2 * SLAB)
    buffer.take_free(1, "offers")
    buffer.count_copies(1)
    buffer.check_books()
    buffer.count_copies(1)
    with pytest.raises(AssertionError, match="2 copies run on 1"):
        buffer.check_books()
    buffer.count_copies(-3)
    with pytest.raises(AssertionError, match="-1 copies"):
        buffer.check_books()
    buffer.close()


def test_the_books_of_a_worker_are_those_of_pool_and_buffer() -> None:
    kv, buffer = KvAllocator(SlabLedger(4)), TransferBuffer(LAYOUT, 4 * SLAB)
    books = BufferedBooks(kv, buffer)
    assert (books.used, books.owners()) == (0, {})
    kv.allocate("a#0", 2)
    taken = buffer.take_free(3, "pulls")
    assert (books.used, books.owners()) == (5, {"a#0": 2, "buffer: pulls": 3})
    buffer.change_owner(taken[:1], "pulls", CACHED_OWNER)
    assert books.used == 4
    books.check_books()
    # A copy that never ends is not at rest, even if all slabs are cached or free.
    kv.release("a#0")
    buffer.change_owner(taken[1:], "pulls", CACHED_OWNER)
    assert books.used == 0
    buffer.count_copies(1)
    assert (books.used, books.owners()) == (1, {"copies": 1})
    buffer.count_copies(-1)
    buffer._ledger._idle.append(taken[1])
    with pytest.raises(AssertionError, match="free and owned"):
        books.check_books()
    buffer.close()


def test_threads_that_take_and_give_back_at_once_lose_no_slab() -> None:
    buffer, rounds = TransferBuffer(LAYOUT, 5 * SLAB), 2000
    failures: list[BaseException] = []

    def use(owner: str) -> None:
        try:
            for _ in range(rounds):
                slabs = buffer.take_free(2, owner)
                buffer.count_copies(len(slabs))
                buffer.count_copies(-len(slabs))
                buffer.give_back(slabs, owner)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        buffer.check_books()
        assert 0 <= buffer.used <= 5
    for thread in threads:
        thread.join()
    assert failures == [] and (buffer.used, buffer.free, buffer.copying) == (0, 5, 0)
    buffer.close()
