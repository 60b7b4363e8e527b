"""Hand-offs through transfer buffers between two workers with devices, with copies as late as they may be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diptych.messages import Abort, Failed, Renew
from kvtransfer import buffered_links
from kvtransfer.buffered_links import PieceUploads
from kvtransfer.cooperative import CoopTask
from kvtransfer.layer_progress import COMPLETE_MARK
from prefill_worker import buffered_chunks, buffered_offers
from prefill_worker.buffered_offers import BufferedOffers
from tests.engine.workers.buffered_bench import (
    BufferedBench,
    RecordProperty,
    StillThread,
    ask_many,
    report_hand_offs,
)
from tests.engine.workers.worker_bench import VOCAB
from tests.support.late_copies import seeded_lateness


@pytest.fixture
def _still_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_chunks, "TaskThread", StillThread)


def storm(seed: int, waves: int, aborted: float = 0.0, **parts: Any) -> BufferedBench:
    """Waves of requests, of which a share is aborted at some moment, until nothing is held any more."""
    rng = random.Random(seed)
    bench = BufferedBench(
        caching=rng.random() < 0.7,
        lateness=seeded_lateness(seed, rng.choice([2, 20])),
        **(
            {"prefill": (rng.randint(12, 40), rng.randint(6, 16)), "decode": (40, rng.randint(1, 12))} | parts
        ),
    )
    for _ in range(waves):
        names = [name for name in ask_many(bench, rng, 6) if rng.random() < aborted]
        while names:
            for _ in range(rng.randrange(120)):
                bench.step(rng)
            bench.abort(names.pop())
        bench.settle(rng)
    return bench


@pytest.mark.usefixtures("_still_threads")
@pytest.mark.parametrize("seed", range(12))
def test_hand_offs_in_a_random_order(seed: int, record_property: RecordProperty) -> None:
    bench = storm(seed, waves=4)
    report_hand_offs(bench, record_property)
    assert {one.ended for one in bench.exchanges.values()} == {"length"} and bench.retries == 0
    bench.check_rest()


@pytest.mark.usefixtures("_still_threads")
@pytest.mark.parametrize("seed", range(100, 116))
def test_aborts_at_any_moment_leave_nothing_and_disturb_nobody(
    seed: int, record_property: RecordProperty
) -> None:
    bench = storm(seed, waves=4, aborted=0.5)
    report_hand_offs(bench, record_property)
    assert {one.ended for one in bench.exchanges.values()} <= {"length", "aborted"}
    bench.check_rest()


@pytest.mark.parametrize("late", [False, True], ids=["direct", "late"])
def test_hand_offs_with_threads(late: bool, record_property: RecordProperty) -> None:
    """With the product's threads, over real shared memory: every answer is right, and nothing is left."""
    rng, count = random.Random(5), 1000 if late else 200
    bench = BufferedBench(lateness=seeded_lateness(5, 4) if late else None, threads=True)
    try:
        for _ in range(count // 10):
            ask_many(bench, rng, 10)
            while not bench.is_resting:
                for half in (bench.prefill, bench.decode):
                    half.shell.run_once()
                bench.relay()
        if late:
            report_hand_offs(bench, record_property)
        assert sum(one.ended == "length" for one in bench.exchanges.values()) == count
        assert bench.retries == 0
        deferred = [one for one in bench.exchanges.values() if one.defers]
        assert deferred and not any(one.first for one in deferred), "decode workers drew their first tokens"
        bench.check_rest()
    finally:
        bench.courier.close()
        bench.prefill.role.close()


@pytest.mark.usefixtures("_still_threads")
def test_an_offer_that_waits_for_the_buffer_fails_when_its_time_is_up() -> None:
    """Even if the gateway says nothing: no wait is for ever."""
    bench = BufferedBench(prefill=(40, 7), caching=False)
    half = bench.prefill
    for name, remaining_s in (("a", 1e6), ("b", 30.0)):
        bench.ask(name, [place % VOCAB for place in range(300)], 3, stage=False)
        half.line.inbox.append(msgspec.structs.replace(half.line.inbox.pop(), remaining_s=remaining_s))
        for _ in range(60):
            half.shell.run_once()
            bench.offer_thread.creep(random.Random(0))
    for _ in range(4):
        bench.now_s += 7.4
        half.tell(Renew([("a", 0)]))
    assert (half.buffer.leased, half.buffer.used, half.holdings.num_held("b#0")) == (5, 7, 5)
    assert half.shell.max_wait_s == pytest.approx(0.4)
    bench.now_s += 0.5
    half.shell.run_once()
    failures = [(one.request, one.code) for one in half.line.said if isinstance(one, Failed)]
    assert failures == [("b", "deadline_exceeded")]
    assert half.holdings.used == 0 and half.buffer.used == half.buffer.leased == 5
    half.tell(Abort("a", 0))
    bench.exchanges.clear()
    half.shell.run_once()
    assert half.buffer.free == half.buffer.num_slabs


# ---- each wait, left out


def await_nothing(batch: object) -> CoopTask[None]:
    yield from ()


def settle_too_early(chunks: Any, chunk: Any) -> None:
    if not chunk.is_used and not chunk.payload:
        chunk.payload = b"not computed"
    SETTLE(chunks, chunk)


def free_too_early(uploads: PieceUploads) -> None:
    while uploads._running:
        _, slabs = uploads._running.popleft()
        uploads._buffer.count_copies(-len(slabs))
        uploads._buffer.give_back(slabs, buffered_links.PULL_OWNER)


UNFINISHED: list[PieceUploads] = []
SETTLE = buffered_chunks.BufferedChunks._settle


def finish_too_early(uploads: PieceUploads) -> CoopTask[None]:
    """The buffer's slabs are given back when the copies have ended, so only the wait before the end is missing."""
    UNFINISHED.append(uploads)
    yield from ()


def release_too_early(offers: BufferedOffers) -> None:
    for outgoing in offers._waiting():
        if outgoing.is_complete and not outgoing.released:
            outgoing.released = True
            offers._kv.release(outgoing.seq.key)
    for outgoing in [one for one in offers._leaving if one.is_copied]:
        offers._leaving.remove(outgoing)
        offers._kv.release(outgoing.seq.key)


def leave_too_early(offers: BufferedOffers) -> None:
    for outgoing in offers._waiting():
        if outgoing.is_complete and not outgoing.released and outgoing.is_copied:
            outgoing.released = True
            offers._kv.release(outgoing.seq.key)
    while offers._leaving:
        offers._kv.release(offers._leaving.pop().seq.key)


WAITS: dict[str, tuple[Any, str, Callable[..., Any], float]] = {
    "copy before hash": (buffered_chunks, "_await_copies", await_nothing, 0.0),
    "copy before device slabs are released": (BufferedOffers, "_release_copied", release_too_early, 0.0),
    "copy before slabs of an ended offer are released": (
        BufferedOffers,
        "_release_copied",
        leave_too_early,
        1.0,
    ),
    "copy and hash before a buffer slab is given back": (
        buffered_chunks.BufferedChunks,
        "_settle",
        settle_too_early,
        1.0,
    ),
    "upload before its buffer slab is given back": (PieceUploads, "free_uploaded", free_too_early, 0.0),
    "upload before the commit": (PieceUploads, "finish_uploads", finish_too_early, 0.0),
}


@pytest.mark.usefixtures("_still_threads")
@pytest.mark.parametrize("wait", WAITS)
def test_each_wait_is_needed(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one wait, an answer or a chunk is wrong, or a slab is given back or changes during a copy."""
    target, name, replacement, aborted = WAITS[wait]
    monkeypatch.setattr(target, name, replacement)
    for seed in range(20):
        rng = random.Random(seed)
        bench = BufferedBench(
            prefill=(20, 7), decode=(30, 4), caching=seed % 2 == 0, lateness=seeded_lateness(seed)
        )
        names = list(ask_many(bench, rng, 6))
        UNFINISHED.clear()
        for half in (bench.prefill, bench.decode):
            # Not found by what is held at rest, but by what is wrong.
            half.shell.books = half.holdings
        while not bench.is_resting:
            bench.step(rng)
            for uploads in UNFINISHED:
                uploads.free_uploaded()
            if names and rng.random() < aborted / 60:
                bench.abort(names.pop(rng.randrange(len(names))))
            if bench.faults or bench.retries:
                return
    pytest.fail("nothing was found")


@pytest.mark.usefixtures("_still_threads")
@pytest.mark.parametrize("waits", [True, False])
def test_the_wait_before_the_engine_drops_a_sequence_is_needed(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits:
        monkeypatch.setattr(buffered_offers, "_block_until_copied", lambda outgoing: None)
    bench = BufferedBench(caching=False, lateness=lambda: 10)
    bench.ask("a", [place % VOCAB for place in range(400)], 3)
    for _ in range(2):
        bench.prefill.shell.run_once()
    bench.abort("a")
    bench.prefill.shell.run_once()
    assert bool(bench.faults) is not waits
    bench.settle(random.Random(0))
    if waits:
        bench.check_rest()


def announce_too_early(offers: BufferedOffers) -> None:
    for outgoing in offers._outgoing.values():
        slabs = [chunk.slab for chunk in outgoing.chunks[outgoing.announced :]]
        if slabs and outgoing.seq.stage and offers._send_hint is not None:
            offers._send_hint(outgoing.seq, outgoing.announced, slabs, COMPLETE_MARK)
            outgoing.announced = len(outgoing.chunks)


@pytest.mark.usefixtures("_still_threads")
@pytest.mark.parametrize("waits", [True, False])
def test_the_wait_before_chunks_are_announced_is_needed(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it decode workers pull what is not there yet. The ticket's digests find that, so bytes are wasted."""
    if not waits:
        monkeypatch.setattr(BufferedOffers, "_announce_copied", announce_too_early)
    wasted = 0
    for seed in range(5):
        rng = random.Random(seed)
        bench = BufferedBench(lateness=seeded_lateness(seed))
        ask_many(bench, rng, 6)
        bench.settle(rng)
        wasted += bench.decode.role.wasted_bytes + bench.retries
        bench.check_rest()
    assert bool(wasted) is not waits
