"""Hand-offs between workers whose copies run on streams, directly or through a ring, as late as these may."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from diptych.errors import DeviceLost
from kvcache.device.copies import view_slabs
from kvcache.device.pool import DevicePool
from kvcache.device.stream_copies import RING_SLABS, RingCopies, StreamCopies
from prefill_worker import buffered_chunks
from tests.engine.workers import buffered_bench
from tests.engine.workers.buffered_bench import BufferedBench, StillThread, ask_many
from tests.support.late_streams import DeviceQueue, LateStream

OpenBench = Callable[[str], tuple[BufferedBench, list[LateStream]]]


@pytest.fixture
def open_bench(monkeypatch: pytest.MonkeyPatch) -> OpenBench:
    """Opens a bench with copies of a kind; with the streams of both workers."""

    def make(kind: str) -> tuple[BufferedBench, list[LateStream]]:
        streams: list[LateStream] = []

        def open_stream() -> LateStream:
            streams.append(LateStream(DeviceQueue(), polls=7))
            return streams[-1]

        def open_copies(pool: DevicePool, memory: memoryview) -> StreamCopies | RingCopies:
            host = view_slabs(memory, pool.layout.chunk_bytes)
            if kind == "stream":
                return StreamCopies(pool.slab_bytes, host, open_stream, lambda: None)
            return RingCopies(pool.slab_bytes, host, open_stream, allocate)

        monkeypatch.setattr(buffered_chunks, "TaskThread", StillThread)
        monkeypatch.setattr(buffered_bench, "DirectCopies", open_copies)
        return BufferedBench(), streams

    return make


def allocate(slab_bytes: int) -> torch.Tensor:
    """The ring."""
    return torch.empty(RING_SLABS, slab_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["stream", "ring"])
def test_hand_offs_are_right_and_leave_nothing(open_bench: OpenBench, kind: str) -> None:
    bench, streams = open_bench(kind)
    rng = random.Random(11)
    names = ask_many(bench, rng, 25)
    for name in rng.sample(names, 5):
        for _ in range(rng.randint(0, 60)):
            bench.step(rng)
        bench.abort(name)
    bench.settle(rng)
    bench.check_rest()
    assert sum(one.made for one in streams) == sum(one.added for one in streams) > 50
    for half in (bench.prefill, bench.decode):
        half.copies.close()


@pytest.mark.parametrize("kind", ["stream", "ring"])
@pytest.mark.parametrize("lost", [0, 3], ids=["prefill", "decode"])
def test_a_lost_device_ends_the_worker_and_fails_no_request(
    open_bench: OpenBench, kind: str, lost: int
) -> None:
    """Stream 0 leaves the prefill worker's device, stream 3 enters that of the decode worker."""
    bench, streams = open_bench(kind)
    ask_many(bench, random.Random(12), 5)
    streams[lost].error = DeviceLost("CUDA error: unspecified launch failure")
    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        bench.settle(random.Random(12))
    bench.relay()
    assert len(bench.open_names) + sum(one.ended == "length" for one in bench.exchanges.values()) == 5
