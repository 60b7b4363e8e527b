"""Open loop: requests go when they are due, and what is late counts as late."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, cast

import pytest

from diptych.slo import Slo
from planner.types import Job
from services.bench.http_client import BenchClient
from services.bench.load_generator import GIVEN_UP, LoadGenerator, LoadRun, RunOptions
from services.bench.prompts import WORDS, Vocabulary
from services.bench.server import LENGTH_FIELDS, BenchServer
from services.bench.sse import StreamedAnswer, StreamUsage


class Server:
    """Stands in for a client: a first token after `first_s`, the others after `rest_s` in all. Prompts of some lengths
    fail; with `crowd`, none is answered before so many are open.
    """

    def __init__(
        self, first_s: float = 0.0, rest_s: float = 0.0, fails: tuple[int, ...] = (), crowd: int = 0
    ) -> None:
        self.first_s, self.rest_s, self.fails, self.crowd = first_s, rest_s, fails, crowd
        self.full = asyncio.Event()
        self.began_s: list[float] = []
        self.open = self.most = 0

    async def post_stream(self, route: str, body: bytes, timeout_s: float, answer: StreamedAnswer) -> None:
        self.began_s.append(time.monotonic())
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.most >= self.crowd:
                self.full.set()
            await self.full.wait()
            await asyncio.sleep(self.first_s)
            length = body.count(b" ") + 1
            if length in self.fails:
                return answer.record_failure("503 no_workers", "none")
            answer.stamps_s.append(time.monotonic())
            await asyncio.sleep(self.rest_s)
            answer.stamps_s.append(time.monotonic())
            answer.usage = StreamUsage(length, 5)
        finally:
            self.open -= 1

    def target(self) -> BenchServer:
        return BenchServer(
            cast(BenchClient, self), "m", "/v1/completions", LENGTH_FIELDS[0], Vocabulary(WORDS), None
        )


async def drive(server: Server, jobs: list[Job], plan: RunOptions) -> LoadRun:
    run = LoadRun(1.0, 0, len(jobs), plan.warmup_s)
    return await LoadGenerator(server.target(), jobs, plan, run).run_load()


def every(gap_s: float, count: int, prompt: int = 10) -> list[Job]:
    return [Job(number * gap_s, prompt, 5) for number in range(count)]


async def test_a_slow_server_does_not_slow_the_arrivals() -> None:
    server = Server(crowd=10)
    run = await drive(server, every(0.02, 10), RunOptions(Slo()))
    assert server.most == run.max_open == 10, "all are open before the first is answered"
    gaps_s = [late - early for early, late in zip(server.began_s, server.began_s[1:], strict=False)]
    assert sum(gaps_s) >= 0.17 and len(run.records) == run.num_sent == 10


async def test_times_are_of_the_answer_and_tpot_leaves_out_the_first_token() -> None:
    run = await drive(Server(0.05, 0.1), every(0.01, 3), RunOptions(Slo(math.inf, math.inf)))
    for one in run.records:
        assert one.result.ttft_s >= 0.05 and one.tokens == 5 and one.prompt == 10
        assert one.result.tpot_s >= 0.1 / 4 and one.result.tpot_s == pytest.approx(one.gaps_s[0] / 4)
        assert one.result.ended_s >= one.result.job.at_s + 0.15 - 0.001


async def test_waiting_for_room_counts_as_time_to_first_token() -> None:
    server = Server(first_s=0.1)
    run = await drive(server, every(0.0, 4), RunOptions(Slo(), max_open=1))
    assert server.most == 1
    ttft_s = sorted(one.result.ttft_s for one in run.records)
    assert all(took >= 0.1 * number - 0.01 for number, took in enumerate(ttft_s, 1))


async def test_the_warm_up_is_sent_and_not_counted() -> None:
    run = await drive(Server(), every(0.02, 10), RunOptions(Slo(), warmup_s=0.1))
    assert (len(run.records), len(run.counted_records), run.num_expected) == (10, 5, 5)
    assert run.count_attained(Slo()) == (5, 5)


async def test_failures_attain_nothing_and_the_rest_goes_on() -> None:
    jobs = every(0.01, 4) + every(0.01, 2, prompt=20)
    run = await drive(Server(fails=(20,)), jobs, RunOptions(Slo()))
    assert run.count_attained(Slo()) == (4, 6)
    assert [one.result.failed for one in run.records].count("503 no_workers") == 2


async def test_a_hopeless_run_is_given_up_while_nothing_is_answered() -> None:
    slo = Slo(0.05, math.inf, 0.9)
    run = await drive(Server(first_s=60.0), every(0.0, 20), RunOptions(slo, give_up_hopeless=True))
    kept, of = run.count_attained(slo)
    assert run.given_up and of == 20 and kept / of < 0.9 and run.num_jobs == 20
    assert {one.result.failed for one in run.records} == {GIVEN_UP}


async def test_a_run_that_can_still_attain_is_not_given_up() -> None:
    slo = Slo(math.inf, math.inf, 0.5)
    run = await drive(
        Server(first_s=0.01, fails=(20,)),
        every(0.0, 5) + every(0.0, 4, 20),
        RunOptions(slo, give_up_hopeless=True),
    )
    assert not run.given_up and run.count_attained(slo) == (5, 9)


async def test_a_stream_that_is_too_slow_is_lost_before_its_end() -> None:
    slo = Slo(10.0, 0.02, 0.9)
    run = await drive(Server(rest_s=60.0), every(0.0, 5), RunOptions(slo, give_up_hopeless=True))
    assert run.given_up


async def test_a_fault_of_our_own_is_raised() -> None:
    class Broken(Server):
        async def post_stream(
            self, route: str, body: bytes, timeout_s: float, answer: StreamedAnswer
        ) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await drive(Broken(), every(0.0, 3), RunOptions(Slo()))


async def test_watchers_hear_of_progress() -> None:
    reports: list[Any] = []
    run = LoadRun(1.0, 0, 3, 0.0)
    server = Server(first_s=0.3)
    await LoadGenerator(
        server.target(), every(0.0, 3), RunOptions(Slo()), run, lambda run, open: reports.append(open)
    ).run_load()
    assert reports and max(reports) == 3
