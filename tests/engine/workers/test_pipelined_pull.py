"""KV that is pulled while it is computed: the decode worker's side, on `worker_bench`'s byte model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.errors import TransferError
from diptych.messages import (
    Abort,
    Failed,
    Release,
    Staging,
    Welcome,
    WorkerStats,
)
from kvtransfer import ticket as tickets
from tests.engine.workers.role_steps import CHUNK_BYTES, LONG, OTHER, PROMPT, TOKENS, admit, offered, rest
from tests.engine.workers.staged_request import LONGEST, StagedRequest, finish
from tests.engine.workers.worker_bench import KEY, WorkerBench, alone


@pytest.mark.parametrize("caching", [True, False])
def test_chunks_are_pulled_while_later_ones_are_computed(caching: bool) -> None:
    bench = WorkerBench(caching=caching)
    way = StagedRequest(bench, "a", LONGEST)
    seen = []
    way.admit()
    for _ in range(4):
        way.step()
        bench.courier.creep()
        seen.append(len(bench.links.early))
    assert seen == [2, 4, 6, 7]
    assert bench.decode.stats.staging_bytes == 7 * CHUNK_BYTES
    way.fetch()
    bench.courier.land()
    bench.decode.work()
    assert way.written() == alone(LONGEST, TOKENS)
    (pulled,) = bench.decode.pulled("a")
    assert pulled.num_bytes == 7 * CHUNK_BYTES and len(bench.links.early) == 7
    assert pulled.seconds.keys() == {"reserve", "transfer", "verify", "hidden", "exposed"}
    assert bench.decode.role.wasted_bytes == 0  # type: ignore[attr-defined]
    finish(bench, way)


def test_without_any_hint_the_ticket_is_enough() -> None:
    bench = WorkerBench()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    bench.courier.creep()
    bench.prefill.work()
    way.fetch()
    assert bench.links.early == []
    finish(bench, way)
    assert bench.decode.pulled("a")[0].num_bytes == 7 * CHUNK_BYTES


def test_what_is_known_here_is_not_pulled_ahead() -> None:
    bench = WorkerBench()
    admit(bench, "first", offered(bench, "first"))
    bench.courier.land()
    bench.decode.work()
    bench.prefill.tell(Release("first", 0))
    way = StagedRequest(bench, "a", PROMPT[:128] + OTHER)
    way.admit()
    way.step()
    bench.courier.creep()
    way.read()
    way.fetch()
    finish(bench, way)
    assert bench.decode.pulled("a")[0].num_bytes == 3 * CHUNK_BYTES  # of 5 chunks


@pytest.mark.parametrize("again", [False, True])
def test_an_early_copy_that_does_not_match_costs_bytes_and_nothing_else(again: bool) -> None:
    bench = WorkerBench()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    way.step()

    def fault(source: int, target: int) -> None:
        bench.decode.pool.slab_bytes(target)[100] ^= 1

    bench.links.fault = fault
    bench.courier.creep()
    if not again:
        bench.links.fault = None
    way.read()
    way.fetch()
    if again:  # also what is pulled by the ticket is spoilt
        bench.courier.land()
        bench.decode.work()
        assert bench.decode.ended("a") == ["kv_corrupt"] and bench.decode.tokens("a") == []
        bench.prefill.tell(Abort("a", 0))
        rest(bench)
        return
    finish(bench, way)
    assert bench.decode.role.wasted_bytes == 2 * CHUNK_BYTES  # type: ignore[attr-defined]
    assert bench.decode.role.complete_stats(WorkerStats()).wasted_bytes == 2 * CHUNK_BYTES
    assert bench.decode.pulled("a")[0].num_bytes == 9 * CHUNK_BYTES
    assert bench.decode.stats.integrity_failures == 0


def test_a_source_that_fails_before_the_ticket_fails_nothing() -> None:
    bench = WorkerBench()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    way.step()

    def fault(source: int, target: int) -> None:
        raise TransferError("the cable", "was cut")

    bench.links.fault = fault
    bench.courier.creep()
    bench.links.fault = None
    way.read()
    way.fetch()
    finish(bench, way)


def test_an_abort_at_any_moment_leaves_nothing() -> None:
    for moment in range(7):
        bench = WorkerBench()
        way = StagedRequest(bench, "a", LONGEST)
        way.admit()
        for step in range(6):
            if step == moment:
                break
            (way.step if step < 4 else way.fetch if step == 4 else bench.courier.land)()
            bench.courier.creep() if step < 4 else None
        bench.decode.tell(Abort("a", 0))
        bench.prefill.tell(Abort("a", 0))
        while bench.courier.under_way:
            bench.courier.land()
        bench.decode.work()
        assert bench.decode.ended("a") == [], moment
        rest(bench)


def test_hints_and_tickets_for_what_is_over_are_dropped_and_counted() -> None:
    bench = WorkerBench()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    way.step()
    assert bench.decode.stats.late_messages == 0
    bench.decode.tell(Abort("a", 0))
    way.step()
    assert bench.decode.stats.late_messages == 1
    way.read()
    way.fetch()
    assert bench.decode.stats.late_messages == 4
    bench.courier.land()
    bench.prefill.tell(Abort("a", 0))
    rest(bench)


@pytest.mark.parametrize("hint", [b"", b"rubbish" * 9, "signed for another", "a ticket"])
def test_a_hint_that_is_not_what_it_should_be_changes_nothing(hint: bytes | str) -> None:
    bench = WorkerBench()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    if hint == "signed for another":
        hint = tickets.encode_hint(tickets.StagingHint("b", 0, "prefill-0", "life", 0, (1,), 1), KEY)
    elif hint == "a ticket":
        hint = offered(bench, "b", OTHER)
        bench.prefill.tell(Abort("b", 0))
    assert isinstance(hint, bytes)
    bench.decode.tell(Staging("a", 0, hint))
    bench.courier.creep()
    stats: WorkerStats = bench.decode.stats
    assert stats.late_messages + stats.integrity_failures == 1 and bench.links.early == []
    way.read()
    way.fetch()
    finish(bench, way)


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("wrong", ["ticket", "tokens", "length"])
def test_a_ticket_that_is_not_what_it_should_be_ends_the_attempt(moving: bool, wrong: str) -> None:
    bench = WorkerBench(decode_slabs=8 if moving else 9)
    if not moving:  # somebody has the room
        admit(bench, "b", offered(bench, "b"))
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    assert len(bench.courier.under_way) == 1
    way.read()
    other = StagedRequest(bench, "c", LONG)
    other.read()
    if wrong == "tokens":
        way.fetch(output=[1, 2])
    elif wrong == "length":
        way.fetch(ticket=bench.prefill.offers("c")[0].ticket)
    else:
        way.fetch(ticket=b"no ticket" * 10)
    while bench.courier.under_way:
        bench.courier.land()
    bench.decode.work()
    code = {"ticket": "transfer_failed", "tokens": "internal_error", "length": "stale_ticket"}[wrong]
    assert bench.decode.ended("a") == [code]
    bench.prefill.tell(*(Abort(name, 0) for name in "abc"))
    rest(bench)


def test_one_without_a_ticket_gives_its_room_to_one_that_has_one() -> None:
    """Else they could wait for each other: this one's prompt for memory that the other's offered KV takes up."""
    bench = WorkerBench(decode_slabs=8)
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    way.step()
    bench.courier.creep()
    assert bench.decode.pool.used == 7
    admit(bench, "b", offered(bench, "b"))
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a"]  # asked to stop
    bench.courier.land()
    bench.decode.shell.run_once()
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["b"]
    way.read()
    bench.courier.land()
    bench.decode.shell.run_once()
    assert bench.courier.under_way == []  # it waits for its ticket now
    bench.decode.work()
    way.fetch()
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a"]
    bench.prefill.tell(Release("b", 0))
    finish(bench, way)


def test_a_ticket_that_comes_while_the_room_is_being_given_back_is_served() -> None:
    bench = WorkerBench(decode_slabs=8)
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    way.read()
    bench.courier.creep()
    admit(bench, "b", offered(bench, "b"))
    way.fetch()
    bench.prefill.tell(Release("b", 0))
    finish(bench, way)
    assert bench.decode.ended("b") == ["length"]


def test_nobody_waits_for_chunks_of_one_without_a_ticket() -> None:
    bench = WorkerBench()
    way = StagedRequest(bench, "a", PROMPT)
    way.admit()
    admit(bench, "b", offered(bench, "b"))
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a", "b"]
    way.read()
    way.fetch()
    bench.prefill.tell(Release("b", 0))
    finish(bench, way)


def test_time_that_is_up_ends_one_without_a_ticket() -> None:
    bench = WorkerBench()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    bench.now_s += 61.0
    bench.decode.shell.run_once()
    bench.courier.land()
    bench.decode.shell.run_once()
    assert bench.decode.ended("a") == ["deadline_exceeded"]
    bench.prefill.work()
    bench.prefill.tell(Abort("a", 0))
    rest(bench)


ORDERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "admit", "step", "creep", "fetch", "land", "abort", "lose", "spoil", "wait"]
        ),
        st.sampled_from("abc"),
    ),
    max_size=60,
)
PROMPTS = {"a": LONGEST, "b": PROMPT, "c": PROMPT[:128] + OTHER}


@settings(max_examples=200, deadline=None)
@given(ORDERS, st.booleans(), st.integers(8, 20))
def test_any_order_of_events_ends_at_rest_and_no_wrong_token_is_ever_said(
    orders: list[tuple[str, str]], caching: bool, room: int
) -> None:
    bench = WorkerBench(prefill_slabs=10, decode_slabs=room, caching=caching)
    ways: dict[str, StagedRequest] = {}
    epoch = 0
    for kind, name in orders:
        way = ways.get(name)
        if kind == "begin":
            epoch += 1
            ways[name] = StagedRequest(bench, name, PROMPTS[name], epoch=epoch)
        elif way is not None and kind == "admit":
            way.admit()
        elif kind == "step":
            bench.prefill.shell.run_once()
            for one in ways.values():
                one.relay()
        elif kind == "creep":
            bench.courier.creep()
        elif way is not None and kind == "fetch":
            mine = [offer for offer in bench.prefill.offers(name) if offer.epoch == way.epoch]
            if mine:
                way.fetch(mine[-1].ticket)
        elif kind == "land" and bench.courier.under_way:
            first = bench.courier.under_way[0]
            if first.ticket is not None or first.stopped:
                bench.courier.land()
        elif way is not None and kind == "abort":
            bench.prefill.tell(Abort(name, way.epoch))
            bench.decode.tell(Abort(name, way.epoch))
        elif kind == "lose":
            bench.decode.tell(Welcome("again", 0.25, 10.0))
        elif kind == "wait":
            bench.now_s += 7.0
        bench.links.fault = _flip(bench) if kind == "spoil" else None
        for half in (bench.prefill, bench.decode):
            half.shell.run_once()
            half.holdings.check_books()
    bench.now_s += 61.0
    bench.decode.shell.run_once()
    while bench.courier.under_way:
        bench.courier.land()
        bench.decode.work()
    bench.prefill.work()
    rest(bench)
    for name, way in ways.items():
        for number in range(epoch + 1):
            written = bench.prefill.tokens(name, number) + bench.decode.tokens(name, number)
            assert written == alone(way.prompt, TOKENS)[: len(written)]


def _flip(bench: WorkerBench):  # type: ignore[no-untyped-def]
    def fault(source: int, target: int) -> None:
        bench.decode.pool.slab_bytes(target)[7] ^= 16

    return fault


def test_a_failure_is_reported_once() -> None:
    bench = WorkerBench()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    way.fetch(ticket=b"rubbish", output=[1])
    way.fetch(ticket=b"rubbish", output=[1])
    bench.courier.land()
    bench.decode.shell.run_once()
    assert len([message for message in bench.decode.line.said if isinstance(message, Failed)]) == 1
    bench.prefill.tell(Abort("a", 0))
    rest(bench)
