"""Room at the decode worker for requests without a ticket yet: they keep neither others nor themselves from it."""

from __future__ import annotations

import pytest

from diptych.errors import StaleTicket
from diptych.messages import Abort, Release
from diptych.request import Tenancy
from kvtransfer.cooperative import RUN_NOW, CoopTask
from tests.engine.workers.role_steps import LONG, OTHER, PROMPT, admit, offered
from tests.engine.workers.staged_request import LONGEST, StagedRequest, finish
from tests.engine.workers.worker_bench import WorkerBench


def test_a_failure_while_giving_room_back_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlinked(ticket: object, pairs: object, stop: object) -> CoopTask[list[bytes]]:
        yield RUN_NOW
        raise StaleTicket("no link to this life of it")

    bench = WorkerBench(decode_slabs=8)
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    way.read()
    admit(bench, "b", offered(bench, "b"))
    way.fetch()  # too late to be stopped, and its source is not linked any more
    with monkeypatch.context() as patch:
        patch.setattr(bench.links, "pull_task", unlinked)
        bench.courier.land()
    bench.decode.shell.run_once()
    assert bench.decode.ended("a") == ["stale_ticket"]
    bench.prefill.tell(Abort("a", 0), Release("b", 0))
    finish(bench)


def test_one_without_a_ticket_gives_its_room_to_one_that_writes() -> None:
    """Who writes waits for nobody's prompt to be read, even if its answer becomes longer than was thought."""
    bench = WorkerBench(decode_slabs=9)
    bench.decode.engine.scheduler.ratio.value = 0.0
    prompt = PROMPT[:40]
    admit(bench, "b", offered(bench, "b", prompt, 300), prompt, 300)
    bench.courier.land()
    bench.decode.shell.run_once()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    assert [arrival.seq.id for arrival in bench.courier.under_way] == ["a"]
    bench.decode.work()
    assert bench.courier.under_way[0].stopped
    bench.courier.land()
    bench.decode.work()
    assert bench.decode.ended("b") == ["length"]
    bench.prefill.tell(Release("b", 0))
    way.read()
    way.fetch()
    finish(bench, way)


def test_one_without_a_ticket_waits_until_there_is_room_for_its_first_token_too() -> None:
    bench = WorkerBench(decode_slabs=8)
    other = StagedRequest(bench, "b", LONGEST[:350])
    other.admit()
    bench.decode.tell(Abort("b", 0))
    assert bench.decode.holdings.free == 2  # until the pull has stopped
    way = StagedRequest(bench, "a", LONGEST[:128])
    way.admit()
    assert bench.decode.ended("a") == []
    bench.courier.land()
    bench.prefill.tell(Abort("b", 0))
    bench.decode.shell.run_once()
    way.read()
    way.fetch()
    finish(bench, way)


def test_nobody_who_writes_loses_memory_to_one_without_a_ticket() -> None:
    bench = WorkerBench(decode_slabs=11)
    bench.decode.engine.scheduler.ratio.value = 0.0
    prompts = {"b": PROMPT[:40], "c": OTHER[:40]}
    for name, prompt in prompts.items():
        admit(bench, name, offered(bench, name, prompt, 130), prompt, 130)
        bench.courier.land()
        bench.decode.shell.run_once()
    way = StagedRequest(bench, "a", LONGEST)
    way.admit()
    for _ in range(40):  # slabs are left for one of them only
        bench.decode.shell.run_once()
    assert [(arrival.seq.id, arrival.stopped) for arrival in bench.courier.under_way] == [("a", True)]
    bench.courier.land()
    bench.decode.work()
    assert bench.decode.ended("b") == bench.decode.ended("c") == ["length"]
    assert not bench.decode.stats.preemptions
    bench.prefill.tell(Release("b", 0), Release("c", 0))
    way.read()
    way.fetch()
    finish(bench, way)


def test_offered_kv_of_a_better_priority_takes_memory_from_an_answer_of_a_worse_one() -> None:
    bench = WorkerBench(decode_slabs=9)
    bench.decode.engine.scheduler.ratio.value = 0.0

    def begin(name: str, prompt: list[int], priority: int) -> None:
        ticket = offered(bench, name, prompt, 80)
        admit(bench, name, ticket, prompt, 80, origin=Tenancy(priority=priority))
        for _ in range(10):
            if bench.courier.under_way:
                bench.courier.land()
            bench.decode.shell.run_once()

    begin("worse", LONGEST, 1)
    bench.decode.holdings.allocate("others", bench.decode.holdings.free - 1)
    begin("equal", OTHER, 1)
    assert not bench.decode.stats.preemptions and len(bench.decode.engine.scheduler.running) == 1
    begin("better", LONG, 0)
    assert bench.decode.stats.preemptions == {"recompute": 1}
    assert set(bench.decode.engine.scheduler.running) == {"better#0"}
    bench.decode.holdings.release("others")
    for _ in range(300):
        if bench.courier.under_way:
            bench.courier.land()
        bench.decode.shell.run_once()
    for name in ("worse", "equal", "better"):
        assert bench.decode.ended(name) == ["length"]
        bench.prefill.tell(Release(name, 0))
    finish(bench)
