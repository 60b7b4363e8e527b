"""The loop that steers a deployment: what it hears, what it does with decisions, and what it does when things fail."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import Any, cast

import httpx
import msgspec
import pytest

from diptych.errors import DiptychError, StartError
from planner.replan.attainment_cache import FleetSize
from planner.replan.change_detection import TrafficShift
from planner.replan.decide import (
    FleetAction,
    FleetDecision,
    FleetOption,
    FleetWorker,
    Flip,
    ReplanPolicy,
    Start,
    Stop,
)
from planner.replan.replanner import Replanner
from planner.replan.traffic_windows import LengthMix
from services.gateway.metrics.traffic_feed import (
    ARRIVED,
    ENDED,
    FAILED,
    REFUSED,
    ReplanReport,
    TrafficEvent,
    TrafficEvents,
)
from services.replan.driver import GatewayClient, ReplanDriver, StoppableEvaluator
from services.replan.roster import Roster

TARGET = FleetSize(1, 2)


class Scripted:
    """A replanner that notes what it hears, and decides what the test says."""

    def __init__(self) -> None:
        self.policy, self.alarms = ReplanPolicy(budget=4, bucket_s=1.0), list[TrafficShift]()
        self.events: list[tuple[Any, ...]] = []
        self.ticks: list[float] = []
        self.workers: tuple[FleetWorker, ...] = ()
        self.next: tuple[FleetAction, ...] = ()
        self.broken: OSError | None = None

    def arrived(self, at_s: float, prompt: int) -> None:
        self.events.append(("arrived", at_s, prompt))

    def ended(self, at_s: float, prompt: int, output: int, good: bool = False, cached: int = 0) -> None:
        self.events.append(("ended", at_s, prompt, output, good, cached))

    def failed(self, at_s: float, worker: str, why: str) -> None:
        self.events.append(("failed", worker, why))

    def tick(self, now_s: float, workers: tuple[FleetWorker, ...]) -> FleetDecision:
        if self.broken is not None:
            raise self.broken
        self.ticks.append(now_s)
        self.workers = workers
        actions, self.next = self.next, ()
        trigger = "shift: rate 1 → 2 since 3 s" if actions else ""
        return FleetDecision(
            now_s, trigger, TARGET, TARGET, actions, "a reason", (FleetOption(TARGET, 0.97, 1.0),)
        )


class World:
    """A gateway with workers and a plant for them; each notes what it is asked for."""

    def __init__(self, act: bool = True) -> None:
        self.events: list[TrafficEvent] = []
        self.workers = {
            "prefill-0": ("prefill", "up"),
            "decode-0": ("decode", "up"),
            "decode-1": ("decode", "up"),
        }
        self.incarnations: dict[str, str] = {}
        self.linked = set(self.workers)
        self.asked: list[tuple[str, Any]] = []
        self.report: ReplanReport = ReplanReport()
        self.refuses, self.away, self.full = False, False, False
        self.retired: list[str] = []
        self.states: dict[str, str] = dict.fromkeys(self.workers, "ready")
        self.pools = (1, 2)
        self.said: list[str] = []
        self.now_s = 100.0
        self.script = Scripted()
        self.roster = Roster(True, 30.0, 100.0, 5.0)
        for name, (role, _) in self.workers.items():
            self.roster.add_found(name, role)
        gateway = GatewayClient("http://gateway", "admin", "client", httpx.MockTransport(self.answer))
        self.steering = ReplanDriver(
            cast(Replanner, self.script), gateway, self, self.roster,
            act=act, every_s=0.0, say=self.said.append, clock=lambda: self.now_s,
        )  # fmt: skip

    @property
    def started_roles(self) -> dict[str, str]:
        return {name: role for name, (role, _) in self.workers.items()}

    async def start_worker(self, role: str) -> str:
        if self.full:
            raise StartError("no room for another decode worker", "3 of 3 devices are held")
        self.states["new"] = "starting"
        return "new"

    async def remove_worker(self, name: str) -> None:
        self.retired.append(name)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("refused")
        key = request.headers["authorization"]
        if request.url.path == "/status":
            assert key == "Bearer client"
            return httpx.Response(200, json=self.status())
        assert key == "Bearer admin"
        if request.url.path == "/admin/replan":
            self.report = msgspec.json.decode(request.content, type=ReplanReport)
            events, self.events = self.events, []
            return httpx.Response(200, content=msgspec.json.encode(TrafficEvents("boot", 5, 0, events)))
        self.asked.append(
            (request.url.path.removeprefix("/admin/workers/"), msgspec.json.decode(request.content))
        )
        return httpx.Response(409, text="the last of its role") if self.refuses else httpx.Response(202)

    def status(self) -> dict[str, Any]:
        stats = {"running": 1, "waiting": 2}
        workers = [
            {
                "worker": name,
                "role": role,
                "state": state,
                "incarnation": self.incarnations.get(name, "a"),
                "stats": stats,
            }
            for name, (role, state) in self.workers.items()
        ]
        links = [{"source": name, "target": name} for name in self.linked]
        return {"split": True, "links": links, "workers": workers}

    async def rounds(self, *actions: FleetAction, seconds: float = 1.0) -> None:
        self.script.next = actions
        self.now_s += seconds
        await self.steering.run_round()

    def roles(self) -> dict[str, str]:
        return {worker.name: f"{worker.role} {worker.state}" for worker in self.roster.workers()}


def steered(*, act: bool = True) -> Callable[[Callable[[World], Any]], Callable[[], None]]:
    """A test that is a coroutine in a world that has been looked at once."""

    def decorate(test: Callable[[World], Any]) -> Callable[[], None]:
        async def all() -> None:
            world = World(act)
            await world.rounds()
            world.said.clear()
            await test(world)

        def run() -> None:
            asyncio.run(all())

        run.__doc__ = test.__doc__
        return run

    return decorate


@steered()
async def test_traffic_is_reported_bucket_by_bucket_and_time_stands_still_without_a_gateway(
    world: World,
) -> None:
    world.events = [
        (101.5, ARRIVED, 100, 0, False, 0),
        (102.5, ENDED, 100, 20, True, 60),
        (103.2, FAILED, 50, 0, False, 0),
        (103.3, REFUSED, 0, 0, False, 0),
    ]
    await world.rounds(seconds=3.0)
    events = world.script.events
    assert [what for what, *_ in events] == ["arrived", "ended", "ended", "arrived", "ended"]
    assert events[0] == ("arrived", 1.5, 100) and events[1] == ("ended", 2.5, 100, 20, True, 60)
    assert events[2][2:] == (50, 2, False, 0), "a failed one has wanted a usual answer"
    assert world.script.ticks == [1.0, 2.0, 3.0, 4.0]
    world.away = True
    await world.rounds(seconds=500.0)
    world.away = False
    await world.rounds(seconds=1.0)
    assert world.script.ticks == [1.0, 2.0, 3.0, 4.0, 5.0]


@steered()
async def test_a_flip_is_ordered_followed_and_reported(world: World) -> None:
    await world.rounds(Flip("decode-1", "prefill"))
    assert world.asked == [("decode-1/turn", {"role": "prefill"})]
    assert world.roles()["decode-1"] == "prefill turning" and "a reason" in world.said[0]
    world.workers["decode-1"] = ("prefill", "up")
    await world.rounds()
    assert world.roles()["decode-1"] == "prefill ready" and "flip of decode-1 is done" in world.said[-1]
    await world.rounds()
    report = world.report
    assert report.actions == {"flip": {"done": 1}} and report.decisions == {"shift": 1}
    assert (report.boot, report.after, report.pools) == ("boot", 5, (1, 2))
    assert report.target == {"prefill": 1, "decode": 2, "both": 0} and report.attainment == 0.97
    assert report.reason.startswith("a reason (shift")


@steered()
async def test_an_order_that_is_refused_is_known_to_the_replanner(world: World) -> None:
    world.refuses = True
    await world.rounds(Flip("decode-1", "prefill"), Stop("decode-0"))
    assert [one[1] for one in world.script.events] == ["decode-1", "decode-0"]
    assert set(world.roles().values()) == {"prefill ready", "decode ready"}
    await world.rounds()
    assert world.report.actions == {"flip": {"failed": 1}, "stop": {"failed": 1}}


@steered()
async def test_a_flip_that_leads_nowhere_is_rolled_back(world: World) -> None:
    await world.rounds(Flip("decode-1", "prefill"))
    world.workers["decode-1"], world.linked = ("prefill", "up"), {"prefill-0", "decode-0"}
    await world.rounds()
    await world.rounds(seconds=6.0)
    assert world.asked[-1] == ("decode-1/turn", {"role": "decode", "force": True})
    assert world.script.events[-1][:2] == ("failed", "decode-1")
    world.workers["decode-1"], world.linked = ("decode", "up"), set(world.workers)
    await world.rounds()
    assert world.roles()["decode-1"] == "decode ready"
    await world.rounds()
    assert world.report.actions == {"flip": {"rolled_back": 1}}


@steered()
async def test_workers_are_started_and_stopped_and_their_places_given_back(world: World) -> None:
    await world.rounds(Start("decode", 1))
    assert world.roles()["new"] == "decode starting"
    world.workers["new"], world.linked = ("decode", "up"), world.linked | {"new"}
    await world.rounds(Stop("decode-0"))
    assert world.roles()["new"] == "decode ready" and world.roles()["decode-0"] == "decode draining"
    assert world.asked == [("decode-0/drain", {})]
    world.states["decode-0"] = "retired"
    del world.workers["decode-0"]
    await world.rounds()
    assert world.retired == ["decode-0"] and "decode-0" not in world.roles()
    world.full = True
    await world.rounds(Start("decode", 1))
    assert any("no room" in line for line in world.said)
    await world.rounds()
    assert world.report.actions == {"start": {"done": 1, "failed": 1}, "stop": {"done": 1}}


@steered()
async def test_a_worker_that_cannot_start_is_given_up(world: World) -> None:
    await world.rounds(Start("decode", 1))
    world.states["new"] = "failed"
    await world.rounds()
    assert world.retired == ["new"] and world.script.events[-1][:2] == ("failed", "new")
    await world.rounds(Start("decode", 1))
    await world.rounds(Stop("new"))
    assert world.retired == ["new", "new"] and world.asked == [], "nobody waits for one that has not served"


@steered(act=False)
async def test_who_only_advises_changes_nothing(world: World) -> None:
    for _ in range(2):
        await world.rounds(Flip("decode-1", "prefill"))
    assert world.asked == [] and world.roles()["decode-1"] == "decode ready"
    assert len(world.said) == 1 and world.said[0].startswith("replan advises")
    await world.rounds()
    assert world.report.actions == {"flip": {"advised": 2}} and world.report.pools is None


@steered()
async def test_a_journal_that_cannot_be_written_ends_the_replanner_only(world: World) -> None:
    world.script.broken = OSError(errno.ENOSPC, "No space left on device")
    world.now_s += 1.0
    await asyncio.wait_for(world.steering.run_rounds(), 30)
    assert world.said == [
        "replan: ended, as its journal cannot be written (No space left on device); serving goes on"
    ]


@steered()
async def test_a_replanner_that_fails_is_reported_and_ends_alone(world: World) -> None:
    world.script.next = (Flip("nobody", "prefill"),)
    world.now_s += 1.0
    await asyncio.wait_for(world.steering.run_rounds(), 30)
    assert "replan: ended, as it failed (KeyError" in world.said[-1]


def test_nobody_waits_for_a_simulation_when_all_stops() -> None:
    class SlowEvaluator:
        def describe(self) -> dict[str, Any]:
            return {"what": "a test"}

        def attainment(self, fleet: FleetSize, mix: LengthMix, rate: float, cv: float) -> float:
            return 0.5

    evaluator = StoppableEvaluator(SlowEvaluator())
    assert (
        evaluator.describe() == {"what": "a test"}
        and evaluator.attainment(TARGET, LengthMix(()), 1.0, 1.0) == 0.5
    )
    assert isinstance(evaluator.stop, threading.Event)
    evaluator.stop.set()
    with pytest.raises(DiptychError):
        evaluator.attainment(TARGET, LengthMix(()), 1.0, 1.0)
