"""Both transports between real processes: bytes arrive, links follow a worker's lives, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from diptych.errors import ConfigError, OutOfSlabs, StaleTicket, TransferError
from kvcache.layout import split_layout
from kvtransfer import copy_hash
from kvtransfer.digests import HASH_FUNCTIONS, ChunkDigester
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffAborted,
    HandoffOutcome,
    PullChunks,
    ReserveSlabs,
    hand_off,
    perform_effects,
)
from kvtransfer.resharding import unsharded_pool
from kvtransfer.shared_memory import SharedMemory, SharedMemoryAddress, attach_memory
from kvtransfer.stream_copy import LINE_BYTES, copy_bytes, copy_bytes_at
from kvtransfer.transports import nixl, shm
from kvtransfer.transports.links import TransportLinks, open_sources
from tests.engine.transport.decode_side import NUM_SLABS, TRANSPORTS, DecodeSide, wait_for_state
from tests.engine.transport.transport_source import (
    KEY,
    LAYOUT,
    SLAB_BYTES,
    WORKER,
    RemoteSource,
    content,
)


@pytest.fixture(scope="module", autouse=True)
def loopback() -> Iterator[None]:
    """UCX as between hosts: TCP, over the loopback device only."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def living() -> Iterator[Callable[[str], RemoteSource]]:
    """One source process per transport for all tests that leave it alive."""
    remotes: dict[str, RemoteSource] = {}

    def one(transport: str) -> RemoteSource:
        if transport not in remotes:
            remotes[transport] = RemoteSource(transport, NUM_SLABS)
        return remotes[transport]

    yield one
    for remote in remotes.values():
        remote.close()


@pytest.fixture
def start() -> Iterator[Callable[[str], RemoteSource]]:
    """Starts source processes and ends them with the test."""
    started: list[RemoteSource] = []

    def one(transport: str) -> RemoteSource:
        started.append(RemoteSource(transport, NUM_SLABS))
        return started[-1]

    yield one
    for remote in started:
        remote.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_slabs_arrive_wherever_they_lay(transport: str, living: Callable[[str], RemoteSource]) -> None:
    source, decoder = living(transport), DecodeSide(transport)
    route = decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
    assert route.transport == transport and route.gb_per_s > 0 and route.latency_us > 0
    for seed, slabs in enumerate([[3], [9, 2, 11], list(range(14, -1, -1))]):
        ticket = source.offer(f"r{seed}", seed, 64 * len(slabs) - 5, slabs, seed)
        outcome = decoder.fetch(ticket)
        assert outcome.error is None and outcome.num_pulled == len(slabs)
        for slab, own in zip(slabs, outcome.slabs, strict=False):
            assert decoder.spread.read(own) == content(seed, slab)
        decoder.finish(ticket)
    assert decoder.pool.used == 0
    decoder.links.close()


def test_a_link_has_loaded_the_kernels_of_its_pulls(
    living: Callable[[str], RemoteSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, decoder, ran = living("shm"), DecodeSide("shm"), set[str]()

    def run(name: str, kernel: Callable[..., None], *args: Any) -> None:
        ran.add(name)
        kernel(*args)

    for name in ("_run_moves", "_end_hash"):
        monkeypatch.setattr(copy_hash, name, partial(run, name, getattr(copy_hash, name)))
    decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
    assert ran == {"_run_moves", "_end_hash"}
    decoder.links.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_new_life_replaces_the_old_one(transport: str, start: Callable[[str], RemoteSource]) -> None:
    first, decoder = start(transport), DecodeSide(transport)
    decoder.links.link_worker(WORKER, first.incarnation, first.endpoints)
    old = first.offer("a", 1, 100, [1, 2], 1)
    first.close()
    second = start(transport)
    decoder.links.link_worker(WORKER, second.incarnation, second.endpoints)
    assert decoder.fetch(old).failure_code == "stale_ticket"
    assert decoder.fetch(second.offer("a", 2, 100, [1, 2], 2)).error is None
    decoder.links.unlink_worker(WORKER, first.incarnation)  # late news of the first life's end
    assert decoder.links.route_to(WORKER) is not None
    decoder.links.unlink_worker(WORKER, second.incarnation)
    assert decoder.fetch(second.offer("b", 1, 64, [4], 3)).failure_code == "stale_ticket"
    decoder.links.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_slabs_that_do_not_exist_are_refused(transport: str, living: Callable[[str], RemoteSource]) -> None:
    source, decoder = living(transport), DecodeSide(transport)
    decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
    ticket = source.offer("a", 1, 64, [0], 1)
    for pair in [(NUM_SLABS, 0), (0, NUM_SLABS), (-1, 0), (0, -1)]:
        with pytest.raises(TransferError, match="exist"):
            decoder.links.pull_slabs(ticket, [pair])
    with pytest.raises(HandoffAborted):
        decoder.links.pull_slabs(ticket, [(0, 0)], lambda: True)
    assert len(decoder.links.pull_slabs(ticket, [(0, 0)], lambda: False)) == 1
    decoder.links.close()


def test_nixl_tells_of_a_dead_source(start: Callable[[str], RemoteSource]) -> None:
    source, decoder = start("nixl"), DecodeSide("nixl")
    decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
    ticket = source.offer("a", 1, 128, [1, 2], 1)
    os.kill(source.pid, signal.SIGKILL)
    source.process.wait()
    decoder.stall(2.0)
    assert decoder.fetch(ticket).failure_code == "transfer_failed"
    assert decoder.pool.used == 0
    with pytest.raises(TransferError, match="no transport"):
        decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
    decoder.links.close()


def test_nixl_gives_up_a_stalled_read_and_nothing_arrives_late(start: Callable[[str], RemoteSource]) -> None:
    """A stopped source that continues after its read was given up must not write into slabs that others own by then."""
    source = start("nixl")
    own = memoryview(bytearray(NUM_SLABS * SLAB_BYTES))
    puller = nixl.NixlPuller(unsharded_pool(LAYOUT, own), stall_s=60.0)
    puller.link(WORKER, source.incarnation, source.endpoints["nixl"])
    source.offer("a", 1, 64 * NUM_SLABS, list(range(NUM_SLABS)), 1)
    pairs = [(slab, slab) for slab in range(NUM_SLABS)]
    os.kill(source.pid, signal.SIGSTOP)
    wait_for_state(source.pid, "T")
    puller._stall_s = 0.3  # only here: whatever else takes longer than that, on a busy machine, is no stall
    try:
        with pytest.raises(TransferError, match="stalled"):
            puller.pull(WORKER, source.incarnation, pairs)
        own[:] = bytes(len(own))
    finally:
        os.kill(source.pid, signal.SIGCONT)
        puller._stall_s = 60.0
    again = start("nixl")
    again.offer("a", 2, 64, [3], 2)
    puller.link(WORKER, again.incarnation, again.endpoints["nixl"])
    for _ in range(50):  # whatever still comes in would be taken in by these reads
        assert puller.pull(WORKER, again.incarnation, [(3, 0)]) == [HASH_FUNCTIONS["xxh3"](content(2, 3))]
        time.sleep(0.005)
    assert not any(own[SLAB_BYTES:]), "a read that was given up wrote into our memory"
    puller.close()


def test_shm_is_only_between_processes_that_share_memory(living: Callable[[str], RemoteSource]) -> None:
    source = living("shm")
    decoder = DecodeSide("shm", "nixl")
    with pytest.raises(TransferError, match="no transport") as caught:
        decoder.links.link_worker(WORKER, "i", {"nixl": b"rubbish"})
    assert "shm" in caught.value.why and "nixl" in caught.value.why
    with pytest.raises(TransferError):
        decoder.links.link_worker(WORKER, "i", {"shm": b"\x00rubbish"})
    assert decoder.links.link_worker(WORKER, source.incarnation, source.endpoints).transport == "shm"
    decoder.links.close()


@pytest.mark.parametrize("field", ["host", "pid", "fd", "num_bytes", "nonce"])
def test_shared_memory_must_be_exactly_what_was_announced(field: str) -> None:
    """Also after the number of a process, or of its descriptor, has come to mean another."""
    memory, other = SharedMemory(1000), SharedMemory(1000)
    address = memory.address()
    attach_memory(address)
    wrong: dict[str, Any] = {
        "host": "elsewhere",
        "pid": os.getppid(),
        "fd": other.fd,
        "num_bytes": 999,
        "nonce": other.nonce,
    }
    changed = {name: getattr(address, name) for name in address.__struct_fields__} | {field: wrong[field]}
    with pytest.raises(OSError):
        attach_memory(SharedMemoryAddress(**changed))
    for one in (memory, other):
        one.close()
        one.close()
    with pytest.raises(OSError):
        attach_memory(address)


def test_shared_memory_is_read_only_and_cannot_be_cut_away() -> None:
    memory = SharedMemory(5000)
    view = attach_memory(memory.address())
    memory.view[4999] = 7
    assert view[4999] == 7 and view.readonly and len(view) == 5000
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, 10)
    memory.close()
    assert view[4999] == 7


def test_shm_falls_back_to_nixl_between_hosts(living: Callable[[str], RemoteSource]) -> None:
    source, decoder = living("nixl"), DecodeSide("shm", "nixl")
    memory = SharedMemory(SLAB_BYTES)
    here = memory.address()
    elsewhere = SharedMemoryAddress("another host", here.pid, here.fd, here.num_bytes, here.nonce)
    parts = [(split_layout(LAYOUT, 1, 1)[0], elsewhere)]
    endpoints = {"shm": msgspec.msgpack.encode(parts), **source.endpoints}
    assert decoder.links.link_worker(WORKER, source.incarnation, endpoints).transport == "nixl"
    memory.close()
    decoder.links.close()


def test_unknown_transports_are_named() -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        TransportLinks(["shm", "pigeon"], unsharded_pool(LAYOUT, memoryview(bytearray(SLAB_BYTES))))
    with pytest.raises(ConfigError, match="pigeon"):
        open_sources(["pigeon"], [(split_layout(LAYOUT, 1, 1)[0], SharedMemory(64))], "p")


@pytest.mark.parametrize("size", [0, 1, LINE_BYTES, LINE_BYTES + 1, 10 * LINE_BYTES, 4096 + 32, 1 << 20])
@pytest.mark.parametrize("shift", [0, 4, 16])
def test_copying_copies(size: int, shift: int) -> None:
    source = np.frombuffer(np.random.default_rng(size).bytes(size + 64), np.uint8)[shift : shift + size]
    target = np.full(size + 128, 9, np.uint8)
    copy_bytes(target[64 - shift : 64 - shift + size], source)
    assert (target[64 - shift : 64 - shift + size] == source).all()
    assert (target[: 64 - shift] == 9).all() and (target[64 - shift + size :] == 9).all()
    with pytest.raises(ValueError):
        copy_bytes(target, source)


def test_the_hash_is_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is verified is what will be decoded, not what the source still has."""

    def careless(target: int, source: int, num_bytes: int) -> None:
        copy_bytes_at(target, source, num_bytes)
        own[17] ^= 1

    memory, own = SharedMemory(SLAB_BYTES), memoryview(bytearray(SLAB_BYTES))
    puller = shm.ShmPuller(unsharded_pool(LAYOUT, own), "blake3")
    puller.link("p", "i", shm.ShmSource([(split_layout(LAYOUT, 1, 1)[0], memory)], "p").endpoint())
    honest = puller.pull("p", "i", [(0, 0)])
    assert honest == [HASH_FUNCTIONS["blake3"](memory.view)] and own == memory.view
    monkeypatch.setattr(shm, "copy_bytes_at", careless)
    assert puller.pull("p", "i", [(0, 0)]) == [HASH_FUNCTIONS["blake3"](own)] != honest
    memory.close()


@pytest.mark.parametrize("work", ["copy", *sorted(HASH_FUNCTIONS)])
def test_other_threads_run_meanwhile(work: str) -> None:
    """Copying and hashing give the interpreter away; with that long a switch interval nothing else takes it away."""
    size = 64 << 20
    data, target = np.ones(size, np.uint8), np.frombuffer(SharedMemory(size).view, np.uint8)
    assert target.ctypes.data % LINE_BYTES == 0  # else it is numpy that copies

    def rounds_meanwhile() -> int:
        """Rounds that this thread makes while another one works."""
        over, rounds = threading.Event(), 0
        seen: list[int] = []

        def busy() -> None:
            seen.append(rounds)
            if work == "copy":
                copy_bytes(target, data)
            else:
                HASH_FUNCTIONS[work](data.data)
            seen.append(rounds)
            over.set()

        thread = threading.Thread(target=busy)
        thread.start()
        while not over.is_set():
            rounds += 1
            time.sleep(0)
        thread.join()
        return seen[1] - seen[0]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        # On a busy machine this thread may get no core for as long as the work lasts. If the work kept the interpreter,
        # it would never make a round.
        assert any(rounds_meanwhile() for _ in range(200))
    finally:
        sys.setswitchinterval(interval)


def test_two_threads_hand_the_conversation_over(living: Callable[[str], RemoteSource]) -> None:
    """As in the decode worker: the pool is only touched by this thread, the pull happens on another."""
    source, decoder = living("shm"), DecodeSide("shm")
    decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
    for aborted in (False, True):
        ticket = source.offer("a", int(aborted), 64, [5], 1)
        steps = hand_off(ticket, 2, ChunkDigester(KEY, ticket.context).matches_chunk)
        reached = perform_effects(
            steps, {ReserveSlabs: lambda effect: decoder.pool.take_slabs(effect.num_slabs, "a")}
        )
        assert isinstance(reached, PullChunks)
        back: list[Any] = []

        def pull(steps: Any = steps, reached: Any = reached, back: list[Any] = back) -> None:
            back.append(
                perform_effects(
                    steps, {PullChunks: lambda e: decoder.links.pull_slabs(e.ticket, e.pairs)}, reached
                )
            )

        thread = threading.Thread(target=pull)
        thread.start()
        thread.join()
        assert isinstance(back[0], CommitSlabs)
        table: dict[type[Any], Callable[[Any], Any]] = {
            CommitSlabs: lambda effect: None,
            FreeSlabs: lambda effect: decoder.pool.give_back(list(effect.slabs), "a"),
        }
        outcome = perform_effects(steps, table, back[0], HandoffAborted("client gone") if aborted else None)
        assert isinstance(outcome, HandoffOutcome) and outcome.failure_code == ("aborted" if aborted else "")
        if not aborted:
            decoder.pool.give_back(list(outcome.slabs), "a")
    assert decoder.pool.used == 0
    decoder.links.close()


def test_no_room_moves_no_byte(living: Callable[[str], RemoteSource]) -> None:
    source, decoder = living("shm"), DecodeSide("shm")
    decoder.links.link_worker(WORKER, source.incarnation, source.endpoints)
    outcome = decoder.fetch(source.offer("a", 1, 64, [5], 1), extra=NUM_SLABS)
    assert isinstance(outcome.error, OutOfSlabs)
    assert not any(any(memory) for memory in decoder.memories)
    decoder.links.unlink_worker(WORKER)
    with pytest.raises(StaleTicket):
        decoder.links.pull_slabs(source.offer("b", 1, 64, [6], 1), [])
    decoder.links.close()
