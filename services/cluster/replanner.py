"""`diptych serve --replan`: feeds a `planner.replan.Replanner` with the gateway's traffic, and does what it decides.

    gateway ── POST /admin/replan, GET /status ─▶ Steering ─▶ Replanner ─▶ Flip ─▶ POST /admin/workers/…/turn
                                                     │                     Stop ─▶ POST /admin/workers/…/drain
    supervisors ── statuses ────────────────────────┘                     Start ─▶ a placement group, and a worker in it

It runs in the process of `diptych serve`, where Ray is. Requests depend on none of it: while the gateway is away, time
stands still here; without Ray roles still change; and if the journal cannot be written the replanner ends, and serving
goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import quote

import httpx
import msgspec

from diptych.errors import DiptychError, StartError
from planner.decide import Action, Decision, Flip, Start, Stop, Worker
from planner.known import Fleet
from planner.replan import Replanner
from planner.terms import BOTH, DECODE
from planner.windows import Mix
from services.cluster.crew import DONE, FAILED, FLIP, GONE, START, STOP, UNDO, Crew, Outcome, Seen
from services.gateway.traffic import ARRIVED, ENDED, Heard, Told
from services.gateway.traffic import FAILED as NOT_ANSWERED

ADVISED, ROLLED_BACK = "advised", "rolled_back"
NICE = 10  # of the thread that simulates: workers come first
SMOOTH = 0.05  # of the mean lengths that stand in for what is not known of failed requests
ANSWER_S = 10.0

log = logging.getLogger(__name__)


class Plant(Protocol):
    """What starts and ends workers: `services.cluster.deployment.Deployment`."""

    @property
    def states(self) -> Mapping[str, str]: ...

    @property
    def pools(self) -> tuple[int, int]: ...

    def grow(self, role: str) -> str: ...

    async def retire(self, name: str) -> None: ...


class Gateway:
    """The gateway's routes that the replanner needs."""

    def __init__(self, url: str, admin_key: str, api_key: str | None, transport: Any = None) -> None:
        self._admin = {"Authorization": f"Bearer {admin_key}"}
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=ANSWER_S,
            trust_env=False,
            transport=transport,
        )

    async def meet(self, told: Told) -> Heard:
        """Raises httpx.HTTPError: nobody is there."""
        body = msgspec.json.encode(told)
        answer = await self._client.post("/admin/replan", content=body, headers=self._admin)
        return msgspec.json.decode(answer.raise_for_status().content, type=Heard)

    async def seen(self) -> list[Seen]:
        """The workers that are up. Raises httpx.HTTPError: nobody is there."""
        state: dict[str, Any] = (await self._client.get("/status")).raise_for_status().json()
        linked = {link[end] for link in state["links"] for end in ("source", "target")}
        return [
            Seen(
                one["worker"],
                one["role"],
                one["state"],
                one["incarnation"],
                not state["split"] or one["worker"] in linked,
                one["stats"]["running"] + one["stats"]["waiting"],
            )
            for one in state["workers"]
        ]

    async def order(self, worker: str, verb: str, **body: Any) -> str:
        """Turn or drain a worker; returns why it was refused, "" if it was not. Raises httpx.HTTPError."""
        path = f"/admin/workers/{quote(worker, safe='')}/{verb}"
        answer = await self._client.post(path, json=body, headers=self._admin)
        return "" if answer.is_success else f"the gateway refused: {answer.status_code} {answer.text[:200]}"

    async def close(self) -> None:
        await self._client.aclose()


class Steering:
    """One round every `every_s`: hear, look, decide, act (or, without `act`, only say). `say` tells a person."""

    def __init__(
        self,
        replanner: Replanner,
        gateway: Gateway,
        plant: Plant,
        crew: Crew,
        *,
        act: bool,
        every_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replanner, self._gateway, self._plant, self._crew = replanner, gateway, plant, crew
        self._act, self._every_s, self._say, self._clock = act, every_s, say, clock
        self._boot, self._after = "", 0
        self._began_s = self._round_s = clock()
        self._away_s = 0.0  # the gateway was, and time stood still
        self._ticks = 0  # buckets that have ended
        self._prompt, self._output = 1.0, 1.0  # usual lengths
        self._decisions, self._alarms = Counter[str](), Counter[str]()
        self._actions: dict[str, Counter[str]] = {FLIP: Counter(), START: Counter(), STOP: Counter()}
        self._target: Fleet | None = None
        self._expected: float | None = None
        self._advised = ""
        self._thread = ThreadPoolExecutor(1, "replan", initializer=_give_way)

    async def run(self) -> None:
        """Until cancelled, or something is wrong with the replanner: that is told, and serving goes on."""
        try:
            while True:
                await self.round()
                await asyncio.sleep(self._every_s)
        except OSError as error:
            self._say(f"replan: ended, as its journal cannot be written ({error.strerror}); serving goes on")
        except Exception as error:
            log.exception("the replanner failed")
            self._say(f"replan: ended, as it failed ({type(error).__name__}: {error}); serving goes on")
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
            await self._gateway.close()

    async def round(self) -> Decision | None:
        """Hear, decide, act; the decision, if there was one. Raises OSError: the journal cannot be written."""
        before_s, self._round_s = self._round_s, self._clock()
        try:
            heard = await self._gateway.meet(self._told())
            seen = await self._gateway.seen()
        except (httpx.HTTPError, msgspec.MsgspecError, KeyError) as error:
            log.info("the replanner hears nothing from the gateway: %s", error)
            self._away_s += self._round_s - before_s
            return None
        self._boot, self._after = heard.boot, heard.after
        now_s = self._now_s
        outcomes = self._crew.look(seen, self._plant.states, now_s)
        failed = [one for one in outcomes if one.outcome in (FAILED, UNDO)]
        think = asyncio.get_running_loop().run_in_executor(
            self._thread, self._think, now_s, heard, self._crew.workers(), failed
        )
        for outcome in outcomes:
            await self._over(outcome)
        decision = await think
        if decision is not None:
            await self._do(decision)
        return decision

    @property
    def _now_s(self) -> float:
        return self._round_s - self._began_s - self._away_s

    # --- in the thread ---

    def _think(
        self, now_s: float, heard: Heard, workers: tuple[Worker, ...], failed: list[Outcome]
    ) -> Decision | None:
        """Bucket by bucket, also if several have ended since the last round; the last decision, if there is one."""
        offset_s = self._round_s - now_s
        for one in failed:
            self._replanner.failed(now_s, one.worker, one.why)
        decision = None
        for event in heard.events:
            at_s = min(event[0] - offset_s, now_s)
            decision = self._until(at_s, workers) or decision
            self._hear(at_s, *event[1:])
        return self._until(now_s, workers) or decision

    def _until(self, at_s: float, workers: tuple[Worker, ...]) -> Decision | None:
        """Close the buckets that end by then, each with a look at it."""
        replanner, found = self._replanner, None
        while (self._ticks + 1) * replanner.policy.bucket_s <= at_s:
            self._ticks += 1
            before = replanner.alarms[-1:]
            decision = replanner.tick(self._ticks * replanner.policy.bucket_s, workers)
            if (latest := replanner.alarms[-1:]) != before:
                self._alarms[latest[0].what] += 1
            found = decision if decision.trigger else found
        return found

    def _hear(self, now_s: float, what: str, prompt: int, output: int, good: bool, cached: int) -> None:
        """A failed request is taken to have wanted a usual answer, one refused unread to have been a usual one."""
        replanner = self._replanner
        if what == ARRIVED:
            self._prompt += SMOOTH * (prompt - self._prompt)
            replanner.arrived(now_s, prompt)
        elif what == ENDED:
            self._output += SMOOTH * (output - self._output)
            replanner.ended(now_s, prompt, output, good=good, cached=cached)
        elif what == NOT_ANSWERED:
            replanner.ended(now_s, prompt, max(1, round(self._output)), good=False)
        else:
            usual = max(1, round(self._prompt))
            replanner.arrived(now_s, usual)
            replanner.ended(now_s, usual, max(1, round(self._output)), good=False)

    # --- acting ---

    async def _do(self, decision: Decision) -> None:
        self._decisions[decision.trigger.partition(":")[0]] += 1
        self._target = decision.target
        chosen = [option for option in decision.options if option.fleet == decision.target]
        self._expected = chosen[0].attainment if chosen else self._expected
        if not decision.actions:
            return
        told = f"{decision.reason} ({decision.trigger})"
        if not self._act:
            for action in decision.actions:
                self._count(_name(action), ADVISED)
            if str(decision.target) != self._advised:
                self._advised = str(decision.target)
                self._say(f"replan advises {told}")
            return
        self._say(f"replan: {told}")
        for action in decision.actions:
            await self._begin(action)

    async def _begin(self, action: Action) -> None:
        now_s = self._now_s
        match action:
            case Flip(worker, role):
                if await self._ordered(FLIP, worker, "turn", role=role):
                    self._crew.flipped(worker, role, now_s)
            case Stop(worker) if self._crew.starting(worker):
                self._crew.stopped(worker, now_s)
                await self._plant.retire(worker)
                await self._over(Outcome(worker, STOP, DONE))
            case Stop(worker):
                if await self._ordered(STOP, worker, "drain"):
                    self._crew.stopped(worker, now_s)
            case Start(role, count):
                for _ in range(count):
                    self._start(DECODE if role == BOTH else role, now_s)

    async def _ordered(self, action: str, worker: str, verb: str, **body: Any) -> bool:
        try:
            why = await self._gateway.order(worker, verb, **body)
        except httpx.HTTPError as error:
            why = f"the gateway is away: {error}"
        if why:
            await self._fail(Outcome(worker, action, FAILED, why))
        return not why

    def _start(self, role: str, now_s: float) -> None:
        try:
            name = self._plant.grow(role)
        except StartError as error:
            self._count(START, FAILED)
            self._say(f"replan: {error.what}: {error.why}")
        else:
            self._crew.joined(name, role, now_s)

    async def _over(self, outcome: Outcome) -> None:
        """An order has come to an end."""
        if outcome.outcome == GONE:
            await self._plant.retire(outcome.worker)
        elif outcome.outcome == UNDO:
            await self._undo(outcome)
        elif outcome.outcome == FAILED:
            self._count(outcome.action, FAILED)
            self._say(f"replan: {outcome.action} of {outcome.worker} failed: {outcome.why}")
        else:
            self._count(outcome.action, DONE)
            self._say(f"replan: {outcome.action} of {outcome.worker} is done")

    async def _fail(self, outcome: Outcome) -> None:
        """An order was not taken: nothing has changed, and the replanner is to know."""
        loop, now_s = asyncio.get_running_loop(), self._now_s
        await loop.run_in_executor(self._thread, self._replanner.failed, now_s, outcome.worker, outcome.why)
        await self._over(outcome)

    async def _undo(self, outcome: Outcome) -> None:
        """A flip came to nothing: back to where the worker was."""
        self._say(f"replan: {outcome.worker} turns back to {outcome.role}: {outcome.why}")
        self._count(FLIP, ROLLED_BACK)
        if await self._ordered(FLIP, outcome.worker, "turn", role=outcome.role, force=True):
            self._crew.flipped(outcome.worker, outcome.role, self._now_s, UNDO)

    def _count(self, action: str, outcome: str) -> None:
        if action in self._actions:
            self._actions[action][outcome] += 1

    def _told(self) -> Told:
        target = self._target
        return Told(
            boot=self._boot,
            after=self._after,
            pools=self._plant.pools if self._act else None,
            decisions=dict(self._decisions),
            alarms=dict(self._alarms),
            actions={action: dict(outcomes) for action, outcomes in self._actions.items() if outcomes},
            target=msgspec.structs.asdict(target) if target else {},
            attainment=self._expected,
        )


class Stoppable:
    """A judge that gives up when the deployment stops, so that nobody waits for a simulation."""

    def __init__(self, judge: Any) -> None:
        self._judge = judge
        self.stop = threading.Event()

    def describe(self) -> dict[str, Any]:
        told: dict[str, Any] = self._judge.describe()
        return told

    def attainment(self, fleet: Fleet, mix: Mix, rate: float, cv: float) -> float:
        """Raises DiptychError once it is to stop."""
        if self.stop.is_set():
            raise DiptychError("the deployment stops")
        return float(self._judge.attainment(fleet, mix, rate, cv))


def _name(action: Action) -> str:
    match action:
        case Flip():
            return FLIP
        case Start():
            return START
        case Stop():
            return STOP


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
