"""Layer by layer out of a process that is still writing, over both transports, by the courier that the worker has."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from decode_worker.kv_fetcher import KvArrival, KvFetcher
from diptych.messages import Linked, Peer
from diptych.request import SamplingParams
from engine.sequence import Sequence as Request
from kvtransfer import ticket as tickets
from kvtransfer.digests import ChunkDigester
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffOutcome,
    ReserveSlabs,
    hand_off,
    perform_effects,
)
from kvtransfer.layer_progress import COMPLETE_MARK
from kvtransfer.ticket import StagingHint, Ticket
from tests.engine.transport.decode_side import TRANSPORTS, DecodeSide, wait_for_state
from tests.engine.transport.transport_source import KEY, LAYOUT, WORKER, RemoteSource, content

LONG_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def loopback() -> Iterator[None]:
    """UCX as between hosts: TCP, over the loopback device only."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}.items():
            patch.setenv(name, value)
        yield


class PullDriver:
    """The engine's thread of a decode worker: an own pool, a courier, and news from it."""

    def __init__(self, *transports: str, split: tuple[int, int] = (1, 1)) -> None:
        self.decoder = DecodeSide(*transports, split=split)
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.courier = KvFetcher(self.decoder.links, self.said.put, lambda: None)
        self.courier.open()

    def link(self, source: RemoteSource, name: str = WORKER) -> Linked:
        self.courier.link_worker(Peer(name, source.incarnation, source.endpoints))
        linked: Linked = self.said.get(timeout=LONG_S)
        return linked

    def depart(self, request: str, num_chunks: int, ticket: Ticket | None = None) -> KvArrival:
        """Reserve and let the courier begin; without a ticket it pulls ahead."""
        seq = Request(request, 1, [0] * (64 * num_chunks - 5), SamplingParams(max_tokens=1, seed=0), LONG_S)
        arrival = KvArrival(seq, seq.total, 0.0)
        if ticket is not None:
            self.present(arrival, ticket)
        arrival.handoff = hand_off(ticket, num_chunks, arrival.matches_chunk)
        take = self.decoder.pool.take_slabs
        arrival.effect = perform_effects(
            arrival.handoff, {ReserveSlabs: lambda effect: take(effect.num_slabs, request)}
        )
        self.courier.start_fetch(arrival)
        return arrival

    def present(self, arrival: KvArrival, ticket: Ticket) -> None:
        arrival.digester = ChunkDigester(KEY, ticket.context)
        arrival.ticket = ticket
        self.courier.wake_fetches()

    def hint(
        self, arrival: KvArrival, source: RemoteSource, start: int, slabs: Sequence[int], mark: int
    ) -> None:
        arrival.hints.append(
            StagingHint(arrival.seq.id, 1, WORKER, source.incarnation, start, tuple(slabs), mark)
        )
        self.courier.wake_fetches()

    def land(self) -> tuple[KvArrival, HandoffOutcome]:
        arrival = self.courier.landed.get(timeout=LONG_S)
        assert arrival.handoff is not None
        table: dict[type[Any], Callable[[Any], Any]] = {
            CommitSlabs: lambda effect: None,
            FreeSlabs: lambda effect: self.decoder.pool.give_back(list(effect.slabs), arrival.seq.id),
        }
        outcome = perform_effects(arrival.handoff, table, arrival.effect)
        assert isinstance(outcome, HandoffOutcome)
        return arrival, outcome

    def until(self, there: Callable[[], bool]) -> None:
        """Wait for a state that stays."""
        alarm = threading.Event()
        for _ in range(int(LONG_S / 0.005)):
            if there():
                return
            alarm.wait(0.005)
        raise AssertionError("it did not come")

    def has(self, slabs: list[int], layer: int, expected: list[bytes]) -> bool:
        size = LAYOUT.layer_bytes
        return [self.decoder.spread.read(slab)[layer * size :][:size] for slab in slabs] == expected

    def close(self) -> None:
        self.courier.close()


@pytest.fixture
def start() -> Iterator[Callable[[str], RemoteSource]]:
    """Starts source processes and ends them with the test."""
    started: list[RemoteSource] = []

    def one(transport: str) -> RemoteSource:
        started.append(RemoteSource(transport, 16))
        return started[-1]

    yield one
    for remote in started:
        remote.close()


@pytest.fixture(scope="module")
def living() -> Iterator[Callable[..., RemoteSource]]:
    """One source process for all tests that leave it alive, for each transport and split."""
    remotes: dict[tuple[str, tuple[int, int]], RemoteSource] = {}

    def one(transport: str, split: tuple[int, int] = (1, 1)) -> RemoteSource:
        if (transport, split) not in remotes:
            remotes[transport, split] = RemoteSource(transport, 16, split)
        return remotes[transport, split]

    yield one
    for remote in remotes.values():
        remote.close()


def truth(seed: int, slab: int, layer: int) -> bytes:
    return content(seed, slab)[layer * LAYOUT.layer_bytes : (layer + 1) * LAYOUT.layer_bytes]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("here, there", [((1, 1), (1, 1)), ((2, 1), (1, 2))])
def test_a_layer_is_here_before_the_next_is_computed(
    transport: str, here: tuple[int, int], there: tuple[int, int], living: Callable[..., RemoteSource]
) -> None:
    source, desk = living(transport, here), PullDriver(transport, split=there)
    assert desk.link(source).transport == transport
    slabs = [5, 2, 9]
    arrival = desk.depart("a", 3)
    desk.hint(arrival, source, 0, slabs, source("stage", slabs=slabs)["mark"])
    own = [0, 1, 2]
    for layer in range(LAYOUT.layers):
        source("compute", slabs=slabs, seed=4, first=layer, end=layer + 1)
        expected = [truth(4, slab, layer) for slab in slabs]
        desk.until(partial(desk.has, own, layer, expected))
    ticket = _promise(source, "a", slabs)
    desk.present(arrival, ticket)
    landed, outcome = desk.land()
    assert outcome.error is None and (outcome.num_pulled, outcome.num_wasted) == (3, 0)
    assert [desk.decoder.spread.read(slab) for slab in outcome.slabs] == [content(4, slab) for slab in slabs]
    assert landed.hidden_s > 0
    desk.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_whatever_was_copied_ahead_and_changed_is_pulled_again(
    transport: str, living: Callable[..., RemoteSource]
) -> None:
    source, desk = living(transport), PullDriver(transport)
    desk.link(source)
    slabs = [5, 2, 9]
    arrival = desk.depart("a", 3)
    desk.hint(arrival, source, 0, slabs, source("stage", slabs=slabs)["mark"])
    source("compute", slabs=slabs, seed=4, first=0, end=LAYOUT.layers)
    desk.until(lambda: desk.decoder.spread.read(2) == content(4, 9))
    source("compute", slabs=[2], seed=7, first=0, end=LAYOUT.layers)  # a liar: under the same mark
    desk.present(arrival, _promise(source, "a", slabs))
    _, outcome = desk.land()
    assert outcome.error is None and (outcome.num_pulled, outcome.num_wasted) == (3, 1)
    assert desk.decoder.spread.read(outcome.slabs[1]) == content(7, 2)
    desk.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slab_that_is_staged_for_another_is_not_copied(
    transport: str, living: Callable[..., RemoteSource]
) -> None:
    source, desk = living(transport), PullDriver(transport)
    desk.link(source)
    arrival = desk.depart("a", 2)
    mark = source("stage", slabs=[5, 6])["mark"]
    source("stage", slabs=[5])
    source("compute", slabs=[5, 6], seed=1, first=0, end=LAYOUT.layers)
    desk.hint(arrival, source, 0, [5, 6], mark)
    desk.until(lambda: desk.decoder.spread.read(1) == content(1, 6))
    assert not any(desk.decoder.spread.read(0))
    desk.hint(arrival, source, 0, [5], COMPLETE_MARK)
    desk.until(lambda: desk.decoder.spread.read(0) == content(1, 5))
    desk.present(arrival, _promise(source, "a", [5, 6]))
    assert desk.land()[1].num_wasted == 0
    desk.close()


def test_a_stalled_source_delays_nobody_else(start: Callable[[str], RemoteSource]) -> None:
    """Of two sources over NIXL one is stopped in the middle of its pull: the other's KV comes, and it is given up."""
    stuck, other, desk = start("nixl"), start("nixl"), PullDriver("nixl")
    desk.link(stuck)
    desk.link(other, "prefill-1")
    slabs = list(range(8))
    first = stuck.offer("a", 1, 64 * 8 - 5, slabs, 1)
    os.kill(stuck.pid, signal.SIGSTOP)
    wait_for_state(stuck.pid, "T")
    try:
        desk.depart("a", 8, first)
        for number in range(5):
            raw = other("offer", request=f"b{number}", epoch=1, tokens=64 - 5, slabs=[3], seed=number)[
                "ticket"
            ]
            ticket = tickets.decode_ticket(bytes.fromhex(raw), KEY)
            elsewhere = Ticket(ticket.context, "prefill-1", ticket.incarnation, ticket.chunks)
            desk.depart(f"b{number}", 1, elsewhere)
            arrival, outcome = desk.land()
            assert arrival.seq.id == f"b{number}" and outcome.error is None
        desk.decoder.stall(0.3)  # only now: it cannot have been given up before
        arrival, outcome = desk.land()
        assert arrival.seq.id == "a" and outcome.failure_code == "transfer_failed"
    finally:
        os.kill(stuck.pid, signal.SIGCONT)
    desk.close()


def _promise(source: RemoteSource, request: str, slabs: list[int]) -> Ticket:
    raw = source("promise", request=request, epoch=1, tokens=64 * len(slabs) - 5, slabs=slabs)["ticket"]
    return tickets.decode_ticket(bytes.fromhex(raw), KEY)


def test_closing_ends_what_would_wait_for_its_ticket_for_ever(living: Callable[..., RemoteSource]) -> None:
    source, desk = living("shm"), PullDriver("shm")
    desk.link(source)
    desk.depart("a", 2)
    desk.close()
    _, outcome = desk.land()
    assert outcome.failure_code == "aborted" and desk.decoder.pool.used == 0
