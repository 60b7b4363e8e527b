"""A prefill worker's transfer buffer: what leaves when, who waits for room, and what is given back at every end."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from decode_worker.kv_fetcher import KvArrival
from diptych.messages import Abort, Offer, Pulled, Release, Renew, Staged, Welcome
from diptych.request import Tenancy
from kvcache.device.copies import CopyBatch
from kvtransfer import ticket as tickets
from kvtransfer.cooperative import CoopTask
from kvtransfer.copy_hash import CopyHasher, Numbers
from kvtransfer.layer_progress import COMPLETE_MARK
from prefill_worker import buffered_chunks
from tests.engine.workers.buffered_bench import SLAB, BufferedBench, RecordProperty, StillThread, ask_many
from tests.engine.workers.worker_bench import KEY, LEASE_S, VOCAB, BenchWorker
from tests.support.late_copies import seeded_lateness
from tests.support.waiting import wait_for

PROMPT = [(7 * place) % VOCAB for place in range(300)]  # 5 chunks, 4 of them full; three steps
OTHER = [(11 * place + 1) % VOCAB for place in range(300)]
LONG = [(5 * place + 3) % VOCAB for place in range(400)]


@pytest.fixture(autouse=True)
def _still_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_chunks, "TaskThread", StillThread)


class Copied:
    """Which slabs of the device were copied to the buffer, in order."""

    def __init__(self, bench: BufferedBench) -> None:
        self.sources: list[int] = []
        self._to_host = bench.prefill.copies.to_host
        bench.prefill.copies.to_host = self.to_host  # type: ignore[method-assign]

    def to_host(self, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        self.sources += [source for source, _ in pairs]
        return self._to_host(pairs)


def said(half: BenchWorker, kind: type[Any], name: str) -> list[Any]:
    return [one for one in half.line.said if isinstance(one, kind) and one.request == name]


def prefill(bench: BufferedBench, name: str, prompt: list[int]) -> None:
    """Until the prefill worker has offered a prompt; nothing is fetched."""
    bench.ask(name, prompt, 3, stage=False)
    work(bench, lambda: bool(said(bench.prefill, Offer, name)))


def work(bench: BufferedBench, until: Any) -> None:
    """Rounds of the prefill worker and its thread."""
    for _ in range(3000):
        bench.prefill.shell.run_once()
        if until():
            return
        bench.offer_thread.creep(random.Random(0))
    raise AssertionError("it did not happen")


def offered_slabs(bench: BufferedBench, name: str) -> list[int]:
    ticket = tickets.decode_ticket(said(bench.prefill, Offer, name)[-1].ticket, KEY)
    return [chunk.slab for chunk in ticket.chunks]


# ---- what leaves, and when


def test_chunks_leave_step_by_step_and_a_lease_holds_nothing_on_the_device() -> None:
    bench = BufferedBench()
    copied = Copied(bench)
    bench.ask("a", PROMPT, 3)
    counts = []
    while not bench.offers.num_waiting:
        bench.prefill.shell.run_once()
        counts.append(len(copied.sources))
    assert counts == [2, 4, 5]
    work(bench, lambda: bool(said(bench.prefill, Offer, "a")))
    assert bench.prefill.holdings.used == 0 and bench.prefill.holdings.cached == 4
    stats = bench.prefill.latest.stats
    assert (stats.buffer_used, stats.buffer_leased, stats.leases, stats.slabs_used) == (5, 5, 1, 0)
    bench.settle(random.Random(0))
    assert (bench.prefill.buffer.cached, bench.prefill.buffer.used) == (4, 0)
    bench.check_rest()


def test_a_chunk_of_the_prefix_tree_leaves_once() -> None:
    bench = BufferedBench()
    copied = Copied(bench)
    prefill(bench, "a", PROMPT)
    prefill(bench, "b", PROMPT)  # while "a" is under lease
    assert len(copied.sources) == 5 + 1
    first, second = offered_slabs(bench, "a"), offered_slabs(bench, "b")
    assert first[:4] == second[:4] and first[4] != second[4]
    assert bench.prefill.buffer.leased == 6
    bench.settle(random.Random(0))
    prefill(bench, "c", PROMPT[:256] + OTHER)  # cached in the buffer
    assert offered_slabs(bench, "c")[:4] == first[:4] and len(copied.sources) == 6 + 5
    bench.settle(random.Random(0))
    bench.check_rest()


def test_without_a_prefix_tree_nothing_stays_in_the_buffer() -> None:
    bench = BufferedBench(caching=False)
    prefill(bench, "a", PROMPT)
    bench.settle(random.Random(0))
    assert bench.prefill.buffer.free == bench.prefill.buffer.num_slabs
    bench.check_rest()


def test_the_chunk_that_was_unused_for_longest_makes_room() -> None:
    bench = BufferedBench(prefill=(60, 12))
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        prefill(bench, name, prompt)
        bench.settle(random.Random(0))
    assert bench.prefill.buffer.cached == 8
    copied = Copied(bench)
    prefill(bench, "c", PROMPT)  # used again: now the chunks of "b" are older
    bench.settle(random.Random(0))
    prefill(bench, "d", LONG)  # 7 chunks, for which there are 4 free slabs
    bench.settle(random.Random(0))
    copied.sources.clear()
    prefill(bench, "e", PROMPT)
    assert len(copied.sources) == 1
    bench.settle(random.Random(0))
    bench.check_rest()


def test_a_chunk_that_the_device_forgets_is_not_offered_again() -> None:
    bench = BufferedBench()
    prefill(bench, "a", PROMPT)
    bench.settle(random.Random(0))
    assert bench.prefill.buffer.cached == 4
    bench.prefill.holdings.evict_cached()
    bench.prefill.shell.run_once()
    assert bench.prefill.buffer.cached == 0 and bench.prefill.buffer.free == bench.prefill.buffer.num_slabs
    bench.check_rest()


@pytest.mark.parametrize("release", [True, False])
def test_chunks_of_a_failed_transfer_are_copied_again(release: bool) -> None:
    """They may be what was wrong. A `Release` says that the KV has arrived."""
    bench = BufferedBench()
    copied = Copied(bench)
    prefill(bench, "a", PROMPT)
    bench.prefill.tell(Release("a", 0) if release else Abort("a", 0))
    bench.exchanges["a"].ended = "aborted"
    assert bench.prefill.buffer.cached == (4 if release else 0)
    prefill(bench, "b", PROMPT)
    assert len(copied.sources) == 5 + (1 if release else 5)
    bench.settle(random.Random(0))
    bench.check_rest()


# ---- announcements


def test_chunks_are_announced_when_they_are_in_the_buffer() -> None:
    bench = BufferedBench(lateness=lambda: None)
    late = bench.prefill.late
    assert late is not None
    bench.ask("a", PROMPT, 3)
    for _ in range(3):
        bench.prefill.shell.run_once()
    assert said(bench.prefill, Staged, "a") == [] and late.in_flight == 3
    late.release()
    bench.prefill.shell.run_once()
    (hint,) = [tickets.decode_hint(one.hint, KEY) for one in said(bench.prefill, Staged, "a")]
    assert (hint.start, hint.mark, len(hint.slabs)) == (0, COMPLETE_MARK, 5)
    for source, slab in zip(bench.exchanges, hint.slabs, strict=False):
        assert source == "a" and bench.prefill.buffer.pool.arena_at(slab)
    bench.lateness = None
    for half in (bench.prefill, bench.decode):
        assert half.late is not None
        half.late._lateness = lambda: 0
    bench.settle(random.Random(0))
    assert list(hint.slabs) == offered_slabs(bench, "a")
    bench.check_rest()


def test_decode_workers_pull_most_before_the_ticket() -> None:
    bench = BufferedBench()
    bench.ask("a", PROMPT, 3)
    moved: list[int] = []
    pull = bench.links.pull_task

    def note(ticket: Any, pairs: Any, stop: Any = None) -> CoopTask[list[bytes]]:
        moved.append(len(pairs))
        return pull(ticket, pairs, stop)

    bench.links.pull_task = note  # type: ignore[method-assign]
    while not said(bench.prefill, Offer, "a"):
        bench.prefill.shell.run_once()
        bench.relay()
        bench.decode.shell.run_once()
        bench.courier.creep()
        bench.offer_thread.creep(random.Random(0))
    bench.settle(random.Random(0))
    (pulled,) = said(bench.decode, Pulled, "a")
    assert sum(moved) <= 1 and pulled.num_bytes == 5 * SLAB
    bench.check_rest()


def test_what_is_not_to_be_staged_is_not_announced() -> None:
    bench = BufferedBench()
    prefill(bench, "a", PROMPT)
    assert said(bench.prefill, Staged, "a") == []
    bench.settle(random.Random(0))


# ---- a full buffer


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("device_slabs", [16, 60])
def test_a_buffer_for_two_requests_serves_any_number(seed: int, device_slabs: int) -> None:
    """Nothing fails, no lease holds slabs of the device, and the buffer is never exceeded."""
    rng = random.Random(seed)
    bench = BufferedBench(
        prefill=(device_slabs, 12), decode=(80, 4), lateness=seeded_lateness(seed), caching=seed % 2 == 0
    )
    ask_many(bench, rng, 32)
    leases = bench.prefill.role.ledger
    peak = 0
    while not bench.is_resting:
        bench.step(rng)
        peak = max(peak, bench.prefill.buffer.used)
        assert not any(bench.prefill.holdings.num_held(f"{one.request}#{one.epoch}") for one in leases)
    assert {one.ended for one in bench.exchanges.values()} == {"length"} and bench.retries == 0
    assert 6 < peak <= bench.prefill.buffer.num_slabs
    bench.check_rest()


def test_an_offer_takes_the_room_of_prompts_that_are_still_in_prefill() -> None:
    """Else they would wait for each other: for the buffer, and for the device."""
    bench = BufferedBench(prefill=(24, 7), caching=False)
    bench.ask("b", LONG, 3, stage=False, tenancy=Tenancy(priority=1))
    for _ in range(2):
        bench.prefill.shell.run_once()
        bench.offer_thread.close()
    assert bench.prefill.buffer.used == 4
    bench.ask("a", PROMPT, 3, stage=False)  # it comes first, and needs five of seven slabs
    while not bench.offers.num_waiting:
        bench.prefill.shell.run_once()
    assert {seq.id for seq in bench.prefill.engine.sequences()} == {"b"}
    assert bench.offers._outgoing["b#0"].chunks == [] and bench.prefill.latest.stats.offers_waiting == 1
    work(bench, lambda: bool(said(bench.prefill, Offer, "a")))
    assert said(bench.prefill, Offer, "b") == []
    bench.settle(random.Random(0))
    assert bench.faults == [] and {one.ended for one in bench.exchanges.values()} == {"length"}
    bench.check_rest()


def test_copies_of_a_prompt_that_lost_its_room_end_before_its_slabs_are_free() -> None:
    bench = BufferedBench(prefill=(24, 7), caching=False, lateness=lambda: 40)
    bench.ask("b", LONG, 3, stage=False, tenancy=Tenancy(priority=1))
    for _ in range(2):
        bench.prefill.shell.run_once()
    bench.ask("a", PROMPT, 3, stage=False)
    while not bench.offers.num_waiting:
        bench.prefill.shell.run_once()
    lost = bench.offers._outgoing["b#0"]
    assert lost.chunks == []
    bench.abort("b")
    bench.prefill.shell.run_once()
    assert bench.prefill.holdings.num_held("b#0") == 0 and bench.faults == []
    bench.settle(random.Random(0))
    bench.check_rest()


def test_offers_are_served_in_the_order_in_which_they_were_begun() -> None:
    bench = BufferedBench(prefill=(60, 5), caching=False)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        bench.ask(name, PROMPT, 3, stage=False)
    bench.settle(random.Random(1))
    assert [one.request for one in bench.prefill.line.said if isinstance(one, Offer)] == names
    bench.check_rest()


def test_a_prompt_that_never_fits_fails_alone() -> None:
    bench = BufferedBench(prefill=(40, 6))
    bench.ask("long", LONG, 3)
    bench.ask("a", PROMPT, 3)
    bench.settle(random.Random(0))
    assert (bench.exchanges["long"].ended, bench.exchanges["a"].ended) == ("internal_error", "length")
    bench.check_rest()


# ---- ends


def test_a_lease_that_is_not_renewed_ends_and_frees_the_buffer() -> None:
    bench = BufferedBench()
    prefill(bench, "a", PROMPT)
    bench.now_s += 0.9 * LEASE_S
    bench.prefill.tell(Renew([("a", 0)]))
    bench.now_s += 0.9 * LEASE_S
    bench.prefill.shell.run_once()
    assert bench.prefill.buffer.leased == 5
    bench.now_s += LEASE_S
    bench.prefill.shell.run_once()
    assert bench.prefill.latest.stats.leases_expired == 1
    bench.exchanges["a"].ended = "aborted"
    bench.check_rest()


@pytest.mark.parametrize("message", [Abort, Release])
@pytest.mark.parametrize("steps", range(12))
def test_an_offer_that_waits_can_end(steps: int, message: Any) -> None:
    """At each moment between the first step and the lease, with copies under way."""
    bench = BufferedBench(prefill=(40, 5), lateness=lambda: 4)
    bench.ask("a", PROMPT, 3, stage=False)
    bench.ask("b", OTHER, 3, stage=False)
    while not bench.offers.num_waiting:
        bench.prefill.shell.run_once()
    for _ in range(steps):
        bench.prefill.shell.run_once()
        bench.offer_thread.creep(random.Random(0))
    for name in "ab":
        bench.exchanges[name].ended = "aborted"
        bench.prefill.line.inbox += [message(name, 0), Abort(name, 0)]
    bench.settle(random.Random(steps))
    bench.check_rest()


@pytest.mark.parametrize("steps", [1, 4, 9, 20, 60, 150, 400])
def test_a_lost_gateway_frees_everything_in_every_phase(steps: int) -> None:
    rng = random.Random(steps)
    bench = BufferedBench(prefill=(30, 7), decode=(40, 3), lateness=seeded_lateness(steps))
    names = ask_many(bench, rng, 8)
    for _ in range(steps):
        bench.step(rng)
    for half in (bench.prefill, bench.decode):
        half.line.inbox.append(Welcome("another", 0.25, 10.0))
    for name in names:
        bench.exchanges[name].ended = bench.exchanges[name].ended or "aborted"
    bench.settle(rng)
    bench.check_rest()


@pytest.mark.parametrize("steps", [3, 12, 60, 200])
def test_a_role_that_ends_leaves_the_buffer_empty(steps: int) -> None:
    """As for a change of roles: the pool keeps its cached chunks, and the buffer is the next role's."""
    rng = random.Random(steps)
    bench = BufferedBench(prefill=(30, 9), lateness=seeded_lateness(steps))
    ask_many(bench, rng, 6)
    for _ in range(steps):
        bench.step(rng)
    half = bench.prefill
    half.shell.start_drain()
    bench.now_s += 100.0
    half.shell.run_until_drained()
    half.role.close()
    half.shell.check_settled()
    assert half.engine.kv_observer is None
    assert half.buffer.free == half.buffer.num_slabs and half.buffer.copying == 0
    assert half.late is not None and half.late.in_flight == 0
    half.late.check_faults()


def test_an_error_of_the_device_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with the product's thread
    bench = BufferedBench()

    class LostBatch:
        def is_done(self) -> bool:
            raise KeyboardInterrupt("the device is lost")

    bench.prefill.copies.to_host = lambda pairs: LostBatch()  # type: ignore[method-assign]
    bench.ask("a", PROMPT, 3, stage=False)
    with pytest.raises(KeyboardInterrupt, match="the device is lost"):
        wait_for(lambda: bench.prefill.shell.run_once(), timeout_s=20, pause_s=0.001)


# ---- flipped bytes


def test_bytes_that_flip_in_the_source_s_buffer_are_found() -> None:
    rng, flipped = random.Random(7), 0
    bench = BufferedBench(caching=False, lateness=seeded_lateness(7))
    ledger = bench.prefill.role.ledger
    for _ in range(6):
        for name in ask_many(bench, rng, 3):
            bench.exchanges[name].stage = False
        spoilt: set[str] = set()
        while not bench.is_resting:
            bench.step(rng)
            for lease in ledger:
                attempt = f"{lease.request}#{lease.epoch}"
                arrived = {a.seq.id for a in bench.courier.under_way}
                if lease.epoch == 0 and attempt not in spoilt and lease.request not in arrived:
                    spoilt.add(attempt)
                    at = rng.choice(lease.slabs) * SLAB + rng.randrange(SLAB)
                    bench.prefill.buffer.memory.view[at] ^= 1 << rng.randrange(8)
        flipped += len(spoilt)
    assert 0 < bench.retries <= flipped
    assert {one.ended for one in bench.exchanges.values()} == {"length"}
    bench.check_rest()


def test_bytes_that_flip_on_their_way_into_the_own_buffer_are_found(
    monkeypatch: pytest.MonkeyPatch, record_property: RecordProperty
) -> None:
    rng = random.Random(8)
    count, flips, found = 0, 0, 0

    copy_slab = CopyHasher.copy_slab

    def spoil(
        hasher: CopyHasher, moves: Numbers, size: int, sources: Numbers, far: int, targets: Numbers, own: int
    ) -> None:
        nonlocal count, flips
        count += 1
        if count % 9 == 0:
            # The source cannot be written here.
            ((first, stride),) = sources.tolist()
            read = bytearray(ctypes.string_at(first + far * stride, stride))
            _, at, _, _, num_bytes = moves[rng.randrange(len(moves))].tolist()
            read[at + rng.randrange(num_bytes)] ^= 1
            flips += 1
            here = np.frombuffer(read, np.uint8).ctypes.data - far * stride
            sources = np.array([(here, stride)], np.int64)
        copy_slab(hasher, moves, size, sources, far, targets, own)

    matches = KvArrival.matches_chunk

    def count_found(arrival: KvArrival, index: int, payload: bytes, promised: bytes) -> bool:
        nonlocal found
        answer = matches(arrival, index, payload, promised)
        found += not answer
        return answer

    monkeypatch.setattr(KvArrival, "matches_chunk", count_found)
    monkeypatch.setattr(CopyHasher, "copy_slab", spoil)
    bench = BufferedBench(lateness=seeded_lateness(8))
    for _ in range(6):
        ask_many(bench, rng, 3)
        bench.settle(rng)
    record_property("copy_flips", flips)
    record_property("copy_flips_found", found)
    assert found == flips > 0 and bench.retries + bench.decode.role.wasted_bytes > 0
    assert {one.ended for one in bench.exchanges.values()} == {"length"}
    bench.check_rest()
