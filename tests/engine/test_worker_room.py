"""Room at the decode worker for requests without a ticket yet: they keep neither others nor themselves from it."""

from __future__ import annotations

import pytest

from diptych.errors import StaleTicket
from diptych.messages import Abort, Release
from kvtransfer.turns import AT_ONCE, Turns
from tests.engine.test_worker_early import LONGEST, Way, finish
from tests.engine.test_worker_roles import OTHER, PROMPT, admit, offered
from tests.engine.worker_bench import Bench


def test_one_that_fails_while_it_gives_its_room_back_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlinked(ticket: object, pairs: object, stop: object) -> Turns[list[bytes]]:
        yield AT_ONCE
        raise StaleTicket("no link to this life of it")

    bench = Bench(decode_slabs=8)
    way = Way(bench, "a", LONGEST)
    way.admit()
    way.read()
    admit(bench, "b", offered(bench, "b"))
    way.fetch()  # too late to be stopped, and its source is not linked any more
    with monkeypatch.context() as patch:
        patch.setattr(bench.links, "pulling", unlinked)
        bench.courier.land()
    bench.decode.shell.turn()
    assert bench.decode.ended("a") == ["stale_ticket"]
    bench.prefill.tell(Abort("a", 0), Release("b", 0))
    finish(bench)


def test_one_without_a_ticket_gives_its_room_to_one_that_writes() -> None:
    """Who writes waits for nobody's prompt to be read, even if its answer becomes longer than was thought."""
    bench = Bench(decode_slabs=9)
    bench.decode.engine.scheduler.ratio.value = 0.0
    prompt = PROMPT[:40]
    admit(bench, "b", offered(bench, "b", prompt, 300), prompt, 300)
    bench.courier.land()
    bench.decode.shell.turn()
    way = Way(bench, "a", LONGEST)
    way.admit()
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a"]
    bench.decode.work()
    assert bench.courier.under_way[0].stop.is_set()
    bench.courier.land()
    bench.decode.work()
    assert bench.decode.ended("b") == ["length"]
    bench.prefill.tell(Release("b", 0))
    way.read()
    way.fetch()
    finish(bench, way)


def test_one_without_a_ticket_waits_until_there_is_room_for_its_first_token_too() -> None:
    bench = Bench(decode_slabs=8)
    other = Way(bench, "b", LONGEST[:350])
    other.admit()
    bench.decode.tell(Abort("b", 0))
    assert bench.decode.holdings.free == 2  # until the pull has stopped
    way = Way(bench, "a", LONGEST[:128])
    way.admit()
    assert bench.decode.ended("a") == []
    bench.courier.land()
    bench.prefill.tell(Abort("b", 0))
    bench.decode.shell.turn()
    way.read()
    way.fetch()
    finish(bench, way)


def test_nobody_who_writes_loses_memory_to_one_without_a_ticket() -> None:
    bench = Bench(decode_slabs=11)
    bench.decode.engine.scheduler.ratio.value = 0.0
    prompts = {"b": PROMPT[:40], "c": OTHER[:40]}
    for name, prompt in prompts.items():
        admit(bench, name, offered(bench, name, prompt, 130), prompt, 130)
        bench.courier.land()
        bench.decode.shell.turn()
    way = Way(bench, "a", LONGEST)
    way.admit()
    for _ in range(40):  # slabs are left for one of them only
        bench.decode.shell.turn()
    assert [(arrival.seq.id, arrival.stop.is_set()) for arrival in bench.courier.under_way] == [("a", True)]
    bench.courier.land()
    bench.decode.work()
    assert bench.decode.ended("b") == bench.decode.ended("c") == ["length"]
    assert not bench.decode.stats.preemptions
    bench.prefill.tell(Release("b", 0), Release("c", 0))
    way.read()
    way.fetch()
    finish(bench, way)
