"""Pulls through a transfer buffer to a device: real shared memory, and copies that happen as late as they may."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from diptych.errors import StaleTicket, TransferError
from kvcache.device.copies import DirectCopies, SlabCopies
from kvcache.device.pool import DevicePool
from kvcache.layout import KvLayout, Shard
from kvtransfer import buffered_links
from kvtransfer.buffered_links import MAX_PIECE_SLABS, BufferedLinks, PieceUploads
from kvtransfer.cooperative import CoopTask, run_to_end
from kvtransfer.digests import HASH_FUNCTIONS, STREAM_HASHERS
from kvtransfer.handoff import HandoffAborted
from kvtransfer.layer_progress import ENTRY_BYTES
from kvtransfer.pipelined_pull import LayerCopy, PipelinedPull
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.ticket import StagingHint
from kvtransfer.transfer_buffer import TransferBuffer
from kvtransfer.transports.links import TransportLinks
from kvtransfer.transports.shm import ShmSource
from tests.support.late_copies import LateCopies, Lateness, seeded_lateness

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")
SLAB, FAR_SLABS = LAYOUT.chunk_bytes, 40
HASH = HASH_FUNCTIONS["xxh3"]


@dataclass(frozen=True)
class Offered:
    """As much of a ticket as a pull reads."""

    worker: str = "prefill-0"
    incarnation: str = "life"


OFFERED: Any = Offered()


class BufferedSide:
    """A source in this process, and a decode side with a device and a buffer of so many slabs."""

    def __init__(self, buffer_slabs: int, lateness: Lateness | None = None, own_slabs: int = 80) -> None:
        self.far, shown = SharedMemory(FAR_SLABS * SLAB), SharedMemory(FAR_SLABS * ENTRY_BYTES)
        np.frombuffer(self.far.view, np.uint8)[:] = np.random.default_rng(1).integers(
            0, 255, FAR_SLABS * SLAB
        )
        whole = Shard((0, LAYOUT.layers), (0, LAYOUT.kv_heads))
        self.source = ShmSource([(whole, self.far)], "prefill-0", shown)
        self.pool = DevicePool(LAYOUT, own_slabs, torch.device("cpu"))
        self.buffer = TransferBuffer(LAYOUT, buffer_slabs * SLAB)
        memory = self.buffer.memory.view
        self.late = LateCopies(self.pool, memory, lateness, self.buffer._ledger) if lateness else None
        self.copies: SlabCopies = self.late or DirectCopies(self.pool, memory)
        self.inner = TransportLinks(["shm"], self.buffer.pool)
        self.links = BufferedLinks(self.inner, self.buffer, self.copies)
        for worker in ("prefill-0", "prefill-1"):
            run_to_end(self.links.link_task(worker, "life", {"shm": self.source.endpoint()}))

    def content(self, slab: int) -> bytes:
        return bytes(self.far.view[slab * SLAB : (slab + 1) * SLAB])

    def arrived(self, slab: int) -> bytes:
        return self.pool.slab_bytes[slab].numpy().tobytes()

    def check_rest(self) -> None:
        self.buffer.check_books()
        assert (self.buffer.used, self.buffer.copying, self.buffer.free) == (0, 0, self.buffer.num_slabs)
        if self.late is not None:
            assert self.late.in_flight == 0
            self.late.check_faults()


@dataclass
class Pull:
    """A pull of so many chunks to slabs that it takes and gives back as a worker does, unless it is committed."""

    side: BufferedSide
    name: str
    sources: Sequence[int]
    stop_after: int | None = None
    source: Any = OFFERED
    own: list[int] = field(default_factory=list)
    error: Exception | None = None
    steps: int = 0

    def run(self) -> CoopTask[None]:
        self.own = self.side.pool.take_slabs(len(self.sources), self.name)
        pairs = list(zip(self.sources, self.own, strict=True))
        try:
            payloads = yield from self.side.links.pull_task(self.source, pairs, self._stopped)
        except TransferError as error:
            self.error = error
        else:
            # Committed: from now on the engine reads the slabs.
            for (source, own), payload in zip(pairs, payloads, strict=True):
                assert payload == HASH(self.side.content(source))
                assert self.side.arrived(own) == self.side.content(source), (
                    f"{self.name}: slab {own} is wrong"
                )
        self.side.pool.give_back(self.own, self.name)

    def _stopped(self) -> bool:
        self.steps += 1
        return self.stop_after is not None and self.steps > self.stop_after


def drive(tasks: Sequence[CoopTask[None]], rng: random.Random, rounds: int = 200_000) -> None:
    """Run tasks side by side in a random order, as a thread might, to their ends."""
    open_ = list(tasks)
    for _ in range(rounds):
        if not open_:
            return
        task = rng.choice(open_)
        if next(task, None) is None:
            open_.remove(task)
    raise AssertionError(f"{len(open_)} tasks did not end")


def never_stop() -> bool:
    return False


def storm(side: BufferedSide, rng: random.Random, count: int, aborted: float = 0.0) -> list[Pull]:
    """`count` pulls at once, a share of which is stopped at some moment."""
    pulls = []
    for number in range(count):
        sources = rng.sample(range(FAR_SLABS), rng.randint(1, 5))
        stop_after = rng.randint(0, 12) if rng.random() < aborted else None
        pulls.append(Pull(side, f"request-{number}", sources, stop_after))
    drive([pull.run() for pull in pulls], rng)
    return pulls


@pytest.mark.parametrize("lateness", [None, seeded_lateness(1)], ids=["direct", "late"])
@pytest.mark.parametrize("buffer_slabs", [1, 2, 9, 64])
def test_chunks_arrive_on_the_device_through_any_buffer(buffer_slabs: int, lateness: Lateness | None) -> None:
    side = BufferedSide(buffer_slabs, lateness)
    pull = Pull(side, "a", range(FAR_SLABS))
    run_to_end(pull.run(), lambda pause_s: None)
    assert pull.error is None
    side.check_rest()


@pytest.mark.parametrize("seed", range(20))
def test_pulls_side_by_side_share_a_small_buffer(seed: int) -> None:
    rng = random.Random(seed)
    side = BufferedSide(rng.choice([1, 2, 3, 8]), seeded_lateness(seed))
    pulls = storm(side, rng, 12)
    assert [pull.error for pull in pulls] == [None] * 12
    side.check_rest()


@pytest.mark.parametrize("seed", range(30))
def test_stopped_pulls_leave_nothing_and_disturb_nobody(seed: int) -> None:
    rng = random.Random(seed)
    side = BufferedSide(rng.choice([1, 2, 3, 8]), seeded_lateness(seed))
    pulls = storm(side, rng, 12, aborted=0.5)
    for pull in pulls:
        assert isinstance(pull.error, HandoffAborted) if pull.error else pull.stop_after != 0
    side.check_rest()


def keep_nothing_busy(uploads: PieceUploads) -> None:
    """`free_uploaded` without its wait."""
    while uploads._running:
        _, slabs = uploads._running.popleft()
        uploads._buffer.count_copies(-len(slabs))
        uploads._buffer.give_back(slabs, buffered_links.PULL_OWNER)


def end_at_once(uploads: PieceUploads) -> CoopTask[None]:
    """`finish_uploads` without its wait; the slabs come back when the copies have ended, as they should."""
    yield from ()
    late: Any = uploads._copies
    for _, slabs in uploads._running:
        late.orphans = [*getattr(late, "orphans", []), slabs]


WAITS: dict[str, Callable[..., Any]] = {
    "free_uploaded": keep_nothing_busy,
    "finish_uploads": end_at_once,
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("aborted", [0.0, 1.0], ids=["committed", "stopped"])
def test_each_wait_is_needed(wait: str, aborted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one wait, what arrives is wrong, or a slab changes its owner during a copy."""
    monkeypatch.setattr(PieceUploads, wait, WAITS[wait])
    found = 0
    for seed in range(5):
        side = BufferedSide(3, seeded_lateness(seed))
        assert side.late is not None
        try:
            storm(side, random.Random(seed), 12, aborted)
        except AssertionError:
            found += 1
        else:
            found += bool(side.late.faults)
    assert found == 5


def test_waiting_pulls_get_pieces_in_the_order_in_which_they_asked() -> None:
    side = BufferedSide(1, seeded_lateness(0, 3))
    order: list[str] = []
    take = side.buffer.take_free
    tasks: dict[str, CoopTask[None]] = {}

    def note(count: int, owner: str) -> list[int]:
        slabs = take(count, owner)
        order.extend([current] * len(slabs))
        return slabs

    side.buffer.take_free = note  # type: ignore[method-assign]
    for name in "abc":
        tasks[name] = Pull(side, name, range(4)).run()
    while tasks:
        for current in list(tasks):
            if next(tasks[current], None) is None:
                del tasks[current]
    assert "".join(order) == "abc" * 4
    side.check_rest()


def test_a_piece_is_a_small_part_of_the_buffer() -> None:
    """So a source that stalls leaves most of it to the others."""
    for slabs, most in ((1, 1), (7, 1), (16, 4), (400, MAX_PIECE_SLABS)):
        side, taken = BufferedSide(slabs), list[int]()
        take = side.buffer.take_free

        def note(count: int, owner: str, take: Any = take, taken: list[int] = taken) -> list[int]:
            taken.append(count)
            result: list[int] = take(count, owner)
            return result

        side.buffer.take_free = note  # type: ignore[method-assign]
        run_to_end(Pull(side, "a", range(FAR_SLABS)).run())
        assert max(taken) == most


@pytest.mark.parametrize("buffer_slabs", [4, 8, 40])
def test_a_source_that_stalls_leaves_room_for_pulls_from_others(buffer_slabs: int) -> None:
    side, freed = BufferedSide(buffer_slabs, seeded_lateness(2, 3)), False
    honest = side.inner.pull_task

    def pull_or_stall(ticket: Any, pairs: Any, stop: Any = None) -> CoopTask[list[bytes]]:
        while ticket.worker == "prefill-0" and not freed:
            yield 0.1
        return (yield from honest(ticket, pairs, stop))

    side.inner.pull_task = pull_or_stall  # type: ignore[method-assign]
    stalled = [Pull(side, f"stalled-{number}", range(4)) for number in range(12)]
    tasks = [pull.run() for pull in stalled]
    for task in tasks * 3:
        next(task)
    assert side.buffer.free >= buffer_slabs // 2
    other = Pull(side, "other", range(8), source=Offered("prefill-1"))
    drive([other.run()], random.Random(0), rounds=1000)
    freed = True
    drive(tasks, random.Random(1))
    assert [pull.error for pull in (other, *stalled)] == [None] * 13
    side.check_rest()


def test_a_copy_that_cannot_begin_ends_its_pull_alone_and_holds_nothing() -> None:
    side = BufferedSide(8)
    begin, calls = side.copies.to_device, list[Any]()

    def begin_or_fail(pairs: Any) -> Any:
        calls.append(pairs)
        if len(calls) == 2:
            raise MemoryError("no page-locked memory")
        return begin(pairs)

    side.copies.to_device = begin_or_fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        run_to_end(Pull(side, "a", range(5)).run())
    side.check_rest()
    after = Pull(side, "b", range(5))
    run_to_end(after.run())
    assert after.error is None
    side.check_rest()


def test_a_failed_transfer_waits_for_its_copies_and_gives_everything_back() -> None:
    side = BufferedSide(8, seeded_lateness(3))
    pull = Pull(side, "a", [0, 1, 2, 3, FAR_SLABS])  # the last one does not exist
    run_to_end(pull.run(), lambda pause_s: None)
    assert isinstance(pull.error, TransferError) and "does not exist" in str(pull.error)
    side.check_rest()


def test_without_a_link_nothing_is_taken() -> None:
    side = BufferedSide(2)
    side.links.unlink_worker("prefill-0", "life")
    pull = Pull(side, "a", [0])
    run_to_end(pull.run())
    assert isinstance(pull.error, StaleTicket)
    with pytest.raises(StaleTicket):
        side.links.connection_to("prefill-0", "life")
    assert side.links.route_to("prefill-0") is None
    side.check_rest()


@pytest.mark.parametrize("buffer_slabs", [1, 2, 16])
def test_complete_chunks_are_pulled_ahead_of_the_ticket_and_others_are_not(buffer_slabs: int) -> None:
    side = BufferedSide(buffer_slabs, seeded_lateness(5))
    own = dict(enumerate(side.pool.take_slabs(6, "a")))
    early = PipelinedPull(own, side.links.hasher)
    early.add_hint(StagingHint("a", 0, "prefill-0", "life", 0, (7, 8, 9), 0))
    early.add_hint(StagingHint("a", 0, "prefill-0", "life", 3, (3, 4), 17))  # of a CPU worker: being computed
    connection = side.links.connection_to("prefill-0", "life")
    assert (connection.layers, connection.num_slabs) == (LAYOUT.layers, FAR_SLABS)
    assert run_to_end(early.copy_ready(connection, never_stop), lambda pause_s: None) == 0.0
    for place, far in enumerate((7, 8, 9)):
        assert side.arrived(own[place]) == side.content(far)
    assert not any(side.arrived(own[place]).strip(b"\0") for place in (3, 4, 5))

    ticket: Any = Offered()
    object.__setattr__(ticket, "chunks", [None] * 6)
    payloads = run_to_end(early.finish_with_ticket(connection, ticket, never_stop))
    assert payloads == {place: HASH(side.content(far)) for place, far in enumerate((7, 8, 9))}
    side.check_rest()


def test_parts_of_chunks_do_not_go_through_the_buffer() -> None:
    side = BufferedSide(2)
    part = LayerCopy(0, 0, 0, 1, STREAM_HASHERS["xxh3"]())
    with pytest.raises(ValueError, match="whole chunks"):
        run_to_end(side.links.connection_to("prefill-0", "life").copy_layers([part], never_stop))


def test_a_bit_that_flips_in_the_buffer_before_it_is_hashed_is_seen() -> None:
    """The hash is that of the buffer's slab, and what is there is what the device gets."""
    side = BufferedSide(1)
    inner: Any = side.inner
    honest = inner.pull_task

    def pull_spoilt(*args: Any) -> CoopTask[list[bytes]]:
        yield from honest(*args)
        memory = side.buffer.pool.memories[0]
        memory[100] ^= 1
        return [HASH(memory[:SLAB])]

    inner.pull_task = pull_spoilt
    (own,) = side.pool.take_slabs(1, "a")
    (payload,) = run_to_end(side.links.pull_task(OFFERED, [(5, own)]))
    assert payload == HASH(side.arrived(own)) != HASH(side.content(5))
