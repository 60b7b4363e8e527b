"""A worker's loop with bulk work: what the gateway takes back is dropped at once, and who counts as online."""

from __future__ import annotations

import pytest

from diptych.messages import Abort, Generate
from diptych.request import BULK_PRIORITY, SamplingParams, Tenancy
from engine.bulk.budget import MAX_REST_S, BulkTime
from engine.bulk.engine import BulkEngine
from engine.loop import Engine
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineLimits, Sequence
from kvcache.allocator import KvAllocator
from kvcache.prefix_tree import PrefixTree
from kvcache.slab_ledger import SlabLedger
from tests.unit.engine.fakes import FakeRunner, FakeSampler
from tests.unit.worker.fake_role import FakeGatewayLink, FakeRole
from worker.loop import LatestStats, WorkerLoop, WorkOrder

BULK, CANARY = Tenancy("batch", "", BULK_PRIORITY), Tenancy(canary=True)
NUM_SLABS, LINES = 20, 3


class DecodingRole(FakeRole):
    """Hands orders to the engine, and holds nothing itself."""

    engine: Engine

    def begin_attempt(self, order: WorkOrder, seq: Sequence, now_s: float) -> None:
        self.engine.add(seq, now_s)


class BulkLoop:
    """A loop whose worker has begun some lines of a batch."""

    def __init__(self) -> None:
        self.link, self.role = FakeGatewayLink(), DecodingRole()
        self.holdings = KvAllocator(SlabLedger(NUM_SLABS), PrefixTree())
        limits = EngineLimits(num_slabs=NUM_SLABS, max_model_len=256)
        runner, sampler = FakeRunner(NUM_SLABS), FakeSampler()
        self.role.engine = Engine(runner, Scheduler(limits), self.holdings, sampler)
        self.bulk = BulkEngine(runner, limits, self.holdings, sampler, BulkTime(0.02))
        self.loop = WorkerLoop(
            self.link,
            self.role.engine,
            self.role,
            self.holdings,
            LatestStats(),
            clock=lambda: self.link.now_s,
            bulk=self.bulk,
        )
        self.run_round(*[order(f"line{number}", BULK) for number in range(LINES)])
        for _ in range(4):
            self.run_round()
        assert len(self.bulk.scheduler) == LINES and self.holdings.used

    def run_round(self, *messages: Generate | Abort) -> None:
        """One round, in which these messages are there."""
        self.link.orders.append([*messages])
        self.loop.run_once()


def order(request: str, origin: Tenancy) -> Generate:
    """A request for a long answer."""
    sampling = SamplingParams(max_tokens=100, seed=0)
    return Generate(request, 0, list(range(5, 45)), [], sampling, 60.0, origin)


ABORTS = [Abort(f"line{number}", 0) for number in range(LINES)]


def test_lines_that_are_taken_back_end_while_bulk_work_rests() -> None:
    bench = BulkLoop()
    bench.bulk.note_request(bench.link.now_s)
    bench.bulk.budget.record_unit(1.0, 0.9, bench.link.now_s)
    assert (
        bench.bulk.rests_until_s == bench.link.now_s + MAX_REST_S == bench.link.now_s + bench.loop.max_wait_s
    )
    units = bench.bulk.units
    bench.run_round(*ABORTS)
    assert not len(bench.bulk.scheduler) and not bench.holdings.used and bench.bulk.units == units


def test_lines_that_are_taken_back_end_while_there_is_no_time_for_them() -> None:
    bench = BulkLoop()
    bench.run_round(order("online", Tenancy()))
    units = bench.bulk.units
    bench.run_round(ABORTS[0])
    assert len(bench.bulk.scheduler) == LINES - 1 and bench.bulk.units == units
    bench.run_round(*ABORTS[1:])
    assert not len(bench.bulk.scheduler) and bench.bulk.units == units
    assert set(bench.holdings.owners()) == {"online#0"}


@pytest.mark.parametrize(("origin", "is_alone"), [(BULK, True), (CANARY, True), (Tenancy(), False)])
def test_only_requests_of_clients_are_online_requests(origin: Tenancy, is_alone: bool) -> None:
    bench = BulkLoop()
    bench.link.orders.append([order("another", origin), Abort("another", 0)])
    bench.loop.run_once()
    assert bench.bulk.budget.is_alone(bench.link.now_s) is is_alone
