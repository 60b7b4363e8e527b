"""KV moves between workers that are split into ranks differently: shared memory of one process, and both transports."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import TransferError
from kvcache.layout import KvLayout, split_layout
from kvtransfer.digests import HASH_FUNCTIONS
from kvtransfer.handoff import HandoffAborted
from kvtransfer.resharding import ShardedPool, unsharded_pool
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.transports import shm
from kvtransfer.transports.links import TransportLinks
from tests.engine.transport.decode_side import NUM_SLABS, TRANSPORTS, DecodeSide
from tests.engine.transport.transport_source import (
    LAYOUT,
    WORKER,
    RemoteSource,
    SpreadChunks,
    content,
)


@pytest.fixture(scope="module", autouse=True)
def loopback() -> Iterator[None]:
    """UCX as between hosts: TCP, over the loopback device only."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}.items():
            patch.setenv(name, value)
        yield


SPLIT_LAYOUT = KvLayout(layers=5, kv_heads=4, head_dim=2, dtype="float32")
SPLITS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3)]
RANDOM = np.random.default_rng(3)


class SplitPullers:
    """A puller for every pair of splits over shared memory of this process, made once."""

    def __init__(self) -> None:
        self.sources, self.owns = {}, {}
        for split in SPLITS:
            held = split_layout(SPLIT_LAYOUT, *split)
            sizes = [NUM_SLABS * SPLIT_LAYOUT.shard_layout(shard).chunk_bytes for shard in held]
            memories = [(shard, SharedMemory(size)) for shard, size in zip(held, sizes, strict=True)]
            self.sources[split] = memories
            self.owns[split] = [
                (shard, memoryview(bytearray(size))) for shard, size in zip(held, sizes, strict=True)
            ]

    def puller(self, here: tuple[int, int], there: tuple[int, int]) -> shm.ShmPuller:
        puller = shm.ShmPuller(ShardedPool(SPLIT_LAYOUT, self.owns[there]))
        puller.link("p", "i", shm.ShmSource(self.sources[here], "p").endpoint())
        return puller


@pytest.fixture(scope="module")
def lanes() -> Iterator[SplitPullers]:
    made = SplitPullers()
    yield made
    for memory in (memory for memories in made.sources.values() for _, memory in memories):
        memory.close()


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    here=st.sampled_from(SPLITS),
    there=st.sampled_from(SPLITS),
    slabs=st.lists(st.integers(0, NUM_SLABS - 1), min_size=1, max_size=4, unique=True),
    shift=st.integers(0, NUM_SLABS - 1),
)
def test_kv_moves_between_any_two_splits(
    lanes: SplitPullers, here: tuple[int, int], there: tuple[int, int], slabs: list[int], shift: int
) -> None:
    """Every byte where the unsplit chunk has it, no byte anywhere else, and the hash is that of the whole chunk."""
    far = SpreadChunks(SPLIT_LAYOUT, [(shard, memory.view) for shard, memory in lanes.sources[here]])
    own = SpreadChunks(SPLIT_LAYOUT, lanes.owns[there])
    chunks = [RANDOM.bytes(SPLIT_LAYOUT.chunk_bytes) for _ in slabs]
    for slab, chunk in zip(slabs, chunks, strict=True):
        far.write(slab, chunk)
    before = [own.read(slab) for slab in range(NUM_SLABS)]
    targets = [(slab + shift) % NUM_SLABS for slab in slabs]
    puller = lanes.puller(here, there)
    payloads = puller.pull("p", "i", list(zip(slabs, targets, strict=True)))
    assert payloads == [HASH_FUNCTIONS["xxh3"](chunk) for chunk in chunks]
    for target, chunk in zip(targets, chunks, strict=True):
        before[target] = chunk
    assert [own.read(slab) for slab in range(NUM_SLABS)] == before


def test_the_pull_runs_stage_by_stage(lanes: SplitPullers) -> None:
    """Stopped after the first of three stages of two slabs, exactly that stage has arrived."""
    far = SpreadChunks(SPLIT_LAYOUT, [(shard, memory.view) for shard, memory in lanes.sources[2, 1]])
    for slab in range(2):
        far.write(slab, RANDOM.bytes(SPLIT_LAYOUT.chunk_bytes))
    stages = lanes.owns[1, 3]
    for _, memory in stages:
        memory[:] = bytes(len(memory))
    asked = iter([False, False, True])
    with pytest.raises(HandoffAborted):
        lanes.puller((2, 1), (1, 3)).pull("p", "i", [(0, 0), (1, 1)], lambda: next(asked))
    own, first = SpreadChunks(SPLIT_LAYOUT, stages), 2 * SPLIT_LAYOUT.layer_bytes
    for slab in range(2):
        assert own.read(slab) == far.read(slab)[:first] + bytes(SPLIT_LAYOUT.chunk_bytes - first)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("here, there", [((2, 1), (1, 2)), ((1, 2), (2, 2))])
def test_slabs_arrive_from_another_process_that_is_split_otherwise(
    transport: str, here: tuple[int, int], there: tuple[int, int]
) -> None:
    source, decoder = RemoteSource(transport, NUM_SLABS, here), DecodeSide(transport, split=there)
    try:
        decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
        ticket = source.offer("a", 1, 64 * 3 - 5, [9, 2, 11], 1)
        outcome = decoder.fetch(ticket)
        assert outcome.error is None
        for slab, own in zip([9, 2, 11], outcome.slabs, strict=False):
            assert decoder.spread.read(own) == content(1, slab)
        with pytest.raises(HandoffAborted):
            decoder.links.pull_slabs(ticket, [(0, 0)], lambda: True)
    finally:
        decoder.links.close()
        source.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_of_another_layout_is_not_linked(transport: str) -> None:
    """Fingerprints that differ are never paired; this is what happens if they are."""
    other = KvLayout(LAYOUT.layers, 2 * LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.dtype)
    links = TransportLinks([transport], unsharded_pool(other, memoryview(bytearray(other.chunk_bytes))))
    source = RemoteSource(transport, NUM_SLABS)
    try:
        with pytest.raises(TransferError, match="no transport"):
            links.link_worker(WORKER, "i", source.endpoints)
    finally:
        links.close()
        source.close()


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 2)])
def test_large_slabs_are_copied_and_hashed_in_pieces(split: tuple[int, int]) -> None:
    layout = KvLayout(layers=6, kv_heads=4, head_dim=128, dtype="float32")
    chunk = RANDOM.bytes(layout.chunk_bytes)
    assert layout.chunk_bytes % shm.PIECE_BYTES == 0 and layout.chunk_bytes > 2 * shm.PIECE_BYTES
    memory = SharedMemory(layout.chunk_bytes)
    memory.view[:] = chunk
    held = [
        (one, memoryview(bytearray(layout.shard_layout(one).chunk_bytes)))
        for one in split_layout(layout, *split)
    ]
    puller = shm.ShmPuller(ShardedPool(layout, held))
    puller.link("p", "i", shm.ShmSource([(split_layout(layout, 1, 1)[0], memory)], "p").endpoint())
    assert puller.pull("p", "i", [(0, 0)]) == [HASH_FUNCTIONS["xxh3"](chunk)]
    assert SpreadChunks(layout, held).read(0) == chunk
    memory.close()
