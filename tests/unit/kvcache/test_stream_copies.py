"""Copies on streams, through page-locked memory or a ring: order, ends and errors, on streams that copy late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from diptych.errors import DeviceLost
from kvcache.device.copies import CopyBatch
from kvcache.device.stream_copies import RING_SLABS, RingCopies, StreamBatch, StreamCopies
from tests.support.late_streams import POISON, DeviceQueue, LateStream
from tests.support.waiting import wait_for

SLABS, SLAB = 24, 96
BOTH = pytest.mark.parametrize("kind", ["stream", "ring"])


class CopyBench:
    """Both memories, with bytes of their own in each slab, and the copies between them."""

    def __init__(self, kind: str, polls: int | None = 3, zeroed: bool = False, eager: bool = False) -> None:
        rng = torch.Generator().manual_seed(1)
        self.device, self.host = torch.randint(0, 255, (2, SLABS, SLAB), generator=rng, dtype=torch.uint8)
        self.queue, self.streams, self.unlocked = DeviceQueue(), list[LateStream](), 0
        if zeroed:
            # As the pool does when it is made.
            self.queue.launch(self.device.zero_)

        def open_stream() -> LateStream:
            self.streams.append(LateStream(self.queue, polls, eager))
            return self.streams[-1]

        def unlock() -> None:
            assert all(one.made == one.added for one in self.streams), "memory is unlocked while copies run"
            self.unlocked += 1

        def allocate(slab_bytes: int) -> torch.Tensor:
            return torch.empty(RING_SLABS, slab_bytes, dtype=torch.uint8)

        self.copies: StreamCopies | RingCopies = (
            StreamCopies(self.device, self.host, open_stream, unlock)
            if kind == "stream"
            else RingCopies(self.device, self.host, open_stream, allocate)
        )


@pytest.fixture
def bench() -> Iterator[Callable[..., CopyBench]]:
    """Makes benches, and closes them."""
    made: list[CopyBench] = []

    def make(kind: str, polls: int | None = 3, eager: bool = False) -> CopyBench:
        made.append(CopyBench(kind, polls, eager=eager))
        return made[-1]

    yield make
    for one in made:
        for stream in one.streams:
            stream.error = None
        one.copies.close()


def until_done(batch: CopyBatch) -> None:
    wait_for(batch.is_done, 60.0, 0.0001)
    assert batch.is_done(), "it has not ended again"


@BOTH
@pytest.mark.parametrize("eager", [False, True], ids=["late", "eager"])
@pytest.mark.parametrize("count", [1, RING_SLABS, RING_SLABS + 1, SLABS])
def test_slabs_arrive_and_no_other_slab_is_touched(
    bench: Callable[..., CopyBench], kind: str, count: int, eager: bool
) -> None:
    one, rng = bench(kind, eager=eager), random.Random(count)
    for name in ("to_host", "to_device"):
        source, target = (one.device, one.host) if name == "to_host" else (one.host, one.device)
        expected, was = target.clone(), source.clone()
        pairs = list(zip(rng.sample(range(SLABS), count), rng.sample(range(SLABS), count), strict=True))
        for begin, end in pairs:
            expected[end] = source[begin]
        until_done(getattr(one.copies, name)(pairs))
        assert torch.equal(target, expected) and torch.equal(source, was)


@BOTH
def test_a_batch_is_not_done_before_its_copies(bench: Callable[..., CopyBench], kind: str) -> None:
    one = bench(kind, polls=None)
    expected = one.device[:2].clone()
    batch = one.copies.to_host([(0, 5), (1, 6)])
    if kind == "stream":
        assert not any(batch.is_done() for _ in range(50))
        assert bool((one.host[5:7] == POISON).all()), "the target is being written"
        one.streams[0].make_copies(2)
    until_done(batch)
    assert torch.equal(one.host[5:7], expected)


@BOTH
def test_what_was_launched_before_is_copied(bench: Callable[..., CopyBench], kind: str) -> None:
    """A step that was launched and has not run yet writes the slab that is copied; a later one does not."""
    one = bench(kind)
    one.queue.launch(lambda: one.device[3].fill_(7))
    batch = one.copies.to_host([(3, 0)])
    one.queue.launch(lambda: one.device[3].fill_(8))
    until_done(batch)
    assert bool((one.host[0] == 7).all())


@BOTH
def test_copies_to_the_device_do_not_wait_for_a_step(bench: Callable[..., CopyBench], kind: str) -> None:
    one, ran = bench(kind), list[int]()
    one.queue.launch(lambda: ran.append(1))
    until_done(one.copies.to_device([(1, 2)]))
    assert torch.equal(one.device[2], one.host[1]) and not ran


@BOTH
def test_batches_end_in_any_order_that_they_are_asked_for(bench: Callable[..., CopyBench], kind: str) -> None:
    one, rng = bench(kind), random.Random(5)
    expected, device = one.device.clone(), one.device.clone()
    batches: list[tuple[CopyBatch, int]] = []
    for slab in range(SLABS // 2):
        expected[slab] = one.host[slab]
        batches.append((one.copies.to_device([(slab, slab)]), slab))
        batches.append((one.copies.to_host([(SLABS // 2 + slab, SLABS // 2 + slab)]), SLABS // 2 + slab))
    rng.shuffle(batches)
    for batch, slab in batches:
        until_done(batch)
        content = one.host[slab] if slab >= SLABS // 2 else one.device[slab]
        assert torch.equal(content, device[slab] if slab >= SLABS // 2 else expected[slab])


@BOTH
def test_the_pool_is_zeroed_before_anything_is_copied_to_it(kind: str) -> None:
    one = CopyBench(kind, zeroed=True)
    until_done(one.copies.to_device([(1, 2)]))
    one.queue.finish()
    assert torch.equal(one.device[2], one.host[1]) and not one.device[3].any()
    one.copies.close()


@BOTH
@pytest.mark.parametrize("name", ["to_host", "to_device"])
def test_close_waits_for_all_copies(kind: str, name: str) -> None:
    one = CopyBench(kind, polls=None)
    source, target = (one.device, one.host) if name == "to_host" else (one.host, one.device)
    expected = source.clone()
    batch = getattr(one.copies, name)([(slab, slab) for slab in range(SLABS)])
    one.copies.close()
    assert torch.equal(target, expected) and batch.is_done()
    assert one.unlocked == (1 if kind == "stream" else 0)


@BOTH
@pytest.mark.parametrize("name", ["to_host", "to_device"])
def test_a_lost_device_is_raised_by_each_batch(bench: Callable[..., CopyBench], kind: str, name: str) -> None:
    one = bench(kind)
    for stream in one.streams:
        stream.error = DeviceLost("CUDA error: an illegal memory access")
    batches = [getattr(one.copies, name)([(slab, slab)]) for slab in (1, 2)]
    for batch in batches:
        with pytest.raises(DeviceLost, match="illegal memory access"):
            deadline_s = time.monotonic() + 60
            while not batch.is_done() and time.monotonic() < deadline_s:
                time.sleep(0.0001)


def test_a_ring_that_does_not_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of many slabs, with each wait of the ring left out in turn, are wrong."""
    for name in ("to_host", "to_device"):
        one = CopyBench("ring", polls=None)
        for stream in one.streams:
            monkeypatch.setattr(stream, "set_mark", NoMark)
        source, target = (one.device, one.host) if name == "to_host" else (one.host, one.device)
        expected = source.clone()
        batch = getattr(one.copies, name)([(slab, slab) for slab in range(SLABS)])
        until_done(batch)
        one.streams[0].make_copies(one.streams[0].added)
        one.streams[1].make_copies(one.streams[1].added)
        assert not torch.equal(target, expected)
        one.copies.close()


@BOTH
def test_slabs_that_are_not_there_are_refused_before_any_copy(
    bench: Callable[..., CopyBench], kind: str
) -> None:
    one = bench(kind)
    host, device = one.host.clone(), one.device.clone()
    for call in (one.copies.to_host, one.copies.to_device):
        with pytest.raises(IndexError):
            call([(0, 1), (2, SLABS)])
    assert torch.equal(one.host, host) and torch.equal(one.device, device)


def test_two_threads_may_ask_at_once() -> None:
    """While one asks the device, the other one hears the end first."""

    class RacingMark(NoMark):
        def is_reached(self) -> bool:
            batch._mark = None
            return True

    batch = StreamBatch(RacingMark())
    assert batch.is_done() and batch.is_done()


class NoMark:
    """A mark that is always reached."""

    def is_reached(self) -> bool:
        return True

    def wait_reached(self) -> Any:
        return None
