"""`diptych serve --replan`: feeds a `planner.replan.replanner.Replanner` with the gateway's traffic, and carries out
its decisions.

    gateway ── POST /admin/replan, GET /status ─▶ driver ─▶ Replanner ─▶ Flip ──▶ POST /admin/workers/…/turn
                                                    │                    Stop ──▶ POST /admin/workers/…/drain
    supervisors ── statuses ────────────────────────┘                    Start ─▶ a placement group, and a worker in it

The driver runs in the process of `diptych serve`, where Ray is. Requests never depend on it: while the gateway cannot
be reached, the replanner's clock stands still; without Ray, roles still change; and if the journal cannot be written,
the replanner ends and serving continues.
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
from planner.replan.attainment_cache import FleetSize
from planner.replan.decide import FleetAction, FleetDecision, FleetWorker, Flip, Start, Stop
from planner.replan.replanner import Replanner
from planner.replan.traffic_windows import LengthMix
from planner.types import BOTH, DECODE
from services.gateway.metrics.traffic_feed import ARRIVED, ENDED, MAX_REASON, ReplanReport, TrafficEvents
from services.gateway.metrics.traffic_feed import FAILED as NOT_ANSWERED
from services.gateway.tls.trust import trust_certificate
from services.replan.roster import (
    DONE,
    FAILED,
    FLIP,
    GONE,
    START,
    STOP,
    UNDO,
    ObservedWorker,
    OrderOutcome,
    Roster,
)

ADVISED, ROLLED_BACK = "advised", "rolled_back"
# The thread that simulates fleets has this niceness, so that workers get the CPU first.
EVALUATOR_NICENESS = 10
# Weight of a new length in the running mean that is used for failed requests.
LENGTH_SMOOTHING = 0.05
ANSWER_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class WorkerScaler(Protocol):
    """Starts and removes workers (implemented by `services.cluster.local_deployment.LocalDeployment`)."""

    @property
    def states(self) -> Mapping[str, str]:
        """The state of each worker's supervisor, by the worker's name."""

    @property
    def started_roles(self) -> Mapping[str, str]:
        """The role with which each worker was started, by the worker's name."""

    @property
    def pools(self) -> tuple[int, int]:
        """Number of workers that were started for the (prefill, decode) pool."""

    async def start_worker(self, role: str) -> str:
        """Start one more worker of this role; return its name. Raises StartError if that is not possible."""

    async def remove_worker(self, name: str) -> None:
        """Kill the worker `name` and release its devices. Idempotent."""


class GatewayClient:
    """Calls the gateway's routes that the replanner needs."""

    def __init__(
        self,
        url: str,
        admin_key: str,
        api_key: str | None,
        transport: Any = None,
        certfile: str | None = None,
    ) -> None:
        """`certfile` is the certificate of a gateway that speaks HTTPS. It may be renewed at any time."""
        self._admin = {"Authorization": f"Bearer {admin_key}"}
        self._url, self._api_key, self._transport, self._certfile = url, api_key, transport, certfile
        self._client = self._open_client()

    def _open_client(self) -> httpx.AsyncClient:
        """A client that trusts the certificate of now."""
        return httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else None,
            timeout=ANSWER_TIMEOUT_S,
            trust_env=False,
            transport=self._transport,
            verify=True if self._certfile is None else trust_certificate(self._certfile),
        )

    async def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer to a call. Raises httpx.HTTPError if the gateway cannot be reached."""
        try:
            return await self._client.request(method, path, **options)
        except httpx.ConnectError:
            # The next call trusts the certificate of then.
            if self._certfile is not None:
                await self._client.aclose()
                self._client = self._open_client()
            raise

    async def exchange_report(self, report: ReplanReport) -> TrafficEvents:
        """Send the replanner's metrics and get the traffic events since the last call.

        Raises httpx.HTTPError if the gateway cannot be reached.
        """
        body = msgspec.json.encode(report)
        answer = await self._call("POST", "/admin/replan", content=body, headers=self._admin)
        return msgspec.json.decode(answer.raise_for_status().content, type=TrafficEvents)

    async def list_workers(self) -> list[ObservedWorker]:
        """The workers that the gateway knows. Raises httpx.HTTPError if the gateway cannot be reached."""
        state: dict[str, Any] = (await self._call("GET", "/status")).raise_for_status().json()
        linked = {link[end] for link in state["links"] for end in ("source", "target")}
        return [
            ObservedWorker(
                one["worker"],
                one["role"],
                one["state"],
                one["incarnation"],
                not state["split"] or one["worker"] in linked,
                one["stats"]["running"] + one["stats"]["waiting"],
            )
            for one in state["workers"]
        ]

    async def post_order(self, worker: str, verb: str, **body: Any) -> str:
        """Order a worker to change its role ("turn") or to drain; return why the gateway refused, or "".

        Raises httpx.HTTPError if the gateway cannot be reached.
        """
        path = f"/admin/workers/{quote(worker, safe='')}/{verb}"
        answer = await self._call("POST", path, json=body, headers=self._admin)
        return "" if answer.is_success else f"the gateway refused: {answer.status_code} {answer.text[:200]}"

    async def close(self) -> None:
        """Close the HTTP connections."""
        await self._client.aclose()


class ReplanDriver:
    """Runs a round every `every_s` seconds: collect traffic, decide, act. `say` prints a line for the user.

    Without `act`, decisions are only printed as advice.
    """

    def __init__(
        self,
        replanner: Replanner,
        gateway: GatewayClient,
        scaler: WorkerScaler,
        roster: Roster,
        *,
        act: bool,
        every_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replanner, self._gateway, self._scaler, self._roster = replanner, gateway, scaler, roster
        self._act, self._every_s, self._print_line, self._clock = act, every_s, say, clock
        self._boot, self._events_after = "", 0
        self._began_s = self._round_s = clock()
        # Seconds in all without the gateway. The replanner's clock stood still for this time.
        self._away_s = 0.0
        # Number of buckets that have ended.
        self._ticks = 0
        # Running means of prompt and output lengths, in tokens.
        self._prompt, self._output = 1.0, 1.0
        self._decisions, self._alarms = Counter[str](), Counter[str]()
        self._actions: dict[str, Counter[str]] = {FLIP: Counter(), START: Counter(), STOP: Counter()}
        self._target: FleetSize | None = None
        self._expected: float | None = None
        self._advised = ""
        # What was decided last, and why.
        self._reason = ""
        self._thread = ThreadPoolExecutor(1, "replan", initializer=_lower_priority)

    async def run_rounds(self) -> None:
        """Run rounds until cancelled. If the replanner fails, the failure is printed and serving continues."""
        try:
            while True:
                await self.run_round()
                await asyncio.sleep(self._every_s)
        except OSError as error:
            self._print_line(
                f"replan: ended, as its journal cannot be written ({error.strerror}); serving goes on"
            )
        except Exception as error:
            log.exception("the replanner failed")
            self._print_line(
                f"replan: ended, as it failed ({type(error).__name__}: {error}); serving goes on"
            )
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
            await self._gateway.close()

    async def run_round(self) -> FleetDecision | None:
        """Collect traffic, decide and act; return the decision, if any. Raises OSError if the journal fails."""
        before_s, self._round_s = self._round_s, self._clock()
        try:
            traffic = await self._gateway.exchange_report(self._report())
            observed = await self._gateway.list_workers()
        except (httpx.HTTPError, msgspec.MsgspecError, KeyError) as error:
            log.info("the replanner cannot reach the gateway: %s", error)
            self._away_s += self._round_s - before_s
            return None
        self._boot, self._events_after = traffic.boot, traffic.after
        now_s = self._now_s
        outcomes = self._roster.update_workers(observed, self._scaler.states, now_s)
        failed = [one for one in outcomes if one.outcome in (FAILED, UNDO)]
        deciding = asyncio.get_running_loop().run_in_executor(
            self._thread, self._replay_events, now_s, traffic, self._roster.workers(), failed
        )
        for outcome in outcomes:
            await self._on_outcome(outcome)
        decision = await deciding
        if decision is not None:
            await self._carry_out(decision)
        return decision

    @property
    def _now_s(self) -> float:
        """The replanner's time: seconds since the start, without those in which the gateway was away."""
        return self._round_s - self._began_s - self._away_s

    # --- in the replanner's thread ---

    def _replay_events(
        self,
        now_s: float,
        traffic: TrafficEvents,
        workers: tuple[FleetWorker, ...],
        outcomes: list[OrderOutcome],
    ) -> FleetDecision | None:
        """Feed events to the replanner, closing buckets in between; return the last decision, if any."""
        # The machine's clock minus the replanner's clock, in seconds.
        offset_s = self._round_s - now_s
        for one in outcomes:
            self._replanner.failed(now_s, one.worker, one.why)
        decision = None
        for event in traffic.events:
            at_s = min(event[0] - offset_s, now_s)
            decision = self._close_buckets(at_s, workers) or decision
            self._record_event(at_s, *event[1:])
        return self._close_buckets(now_s, workers) or decision

    def _close_buckets(self, at_s: float, workers: tuple[FleetWorker, ...]) -> FleetDecision | None:
        """Close the buckets that have ended by `at_s`, one tick each; return the last decision, if any."""
        replanner, found = self._replanner, None
        while (self._ticks + 1) * replanner.policy.bucket_s <= at_s:
            self._ticks += 1
            # If this list changes, there is a new alarm, which is counted.
            before = replanner.alarms[-1:]
            decision = replanner.tick(self._ticks * replanner.policy.bucket_s, workers)
            if (latest := replanner.alarms[-1:]) != before:
                self._alarms[latest[0].what] += 1
            found = decision if decision.trigger else found
        return found

    def _record_event(
        self, now_s: float, what: str, prompt: int, output: int, good: bool, cached: int
    ) -> None:
        """Record an arrival or an end.

        Failed requests are counted with the mean output length. Requests refused before they were parsed are counted
        with mean lengths for both prompt and output.
        """
        replanner = self._replanner
        if what == ARRIVED:
            self._prompt += LENGTH_SMOOTHING * (prompt - self._prompt)
            replanner.arrived(now_s, prompt)
        elif what == ENDED:
            self._output += LENGTH_SMOOTHING * (output - self._output)
            replanner.ended(now_s, prompt, output, good=good, cached=cached)
        elif what == NOT_ANSWERED:
            replanner.ended(now_s, prompt, max(1, round(self._output)), good=False)
        else:
            usual = max(1, round(self._prompt))
            replanner.arrived(now_s, usual)
            replanner.ended(now_s, usual, max(1, round(self._output)), good=False)

    # --- actions ---

    async def _carry_out(self, decision: FleetDecision) -> None:
        """Carry out the actions of a decision, or print them as advice (each target once)."""
        self._decisions[decision.trigger.partition(":")[0]] += 1
        self._target = decision.target
        chosen = [option for option in decision.options if option.fleet == decision.target]
        self._expected = chosen[0].attainment if chosen else self._expected
        self._reason = f"{decision.reason} ({decision.trigger})"
        if not decision.actions:
            return
        if not self._act:
            for action in decision.actions:
                self._count_action(_action_name(action), ADVISED)
            if str(decision.target) != self._advised:
                self._advised = str(decision.target)
                self._print_line(f"replan advises {self._reason}")
            return
        self._print_line(f"replan: {self._reason}")
        for action in decision.actions:
            await self._begin_action(action)

    async def _begin_action(self, action: FleetAction) -> None:
        """Order one action and record it in the roster; a worker that has not served yet is stopped at once."""
        now_s = self._now_s
        match action:
            case Flip(worker, role):
                if await self._post_order(FLIP, worker, "turn", role=role):
                    self._roster.record_flip(worker, role, now_s)
            case Stop(worker) if self._roster.is_starting(worker):
                self._roster.record_stop(worker, now_s)
                await self._scaler.remove_worker(worker)
                await self._on_outcome(OrderOutcome(worker, STOP, DONE))
            case Stop(worker):
                if await self._post_order(STOP, worker, "drain"):
                    self._roster.record_stop(worker, now_s)
            case Start(role, count):
                for _ in range(count):
                    await self._start_worker(DECODE if role == BOTH else role, now_s)

    async def _post_order(self, action: str, worker: str, verb: str, **body: Any) -> bool:
        """Send an order to the gateway; False if it was refused or the gateway is away, which is recorded."""
        try:
            why = await self._gateway.post_order(worker, verb, **body)
        except httpx.HTTPError as error:
            why = f"the gateway cannot be reached: {error}"
        if why:
            await self._on_order_refused(OrderOutcome(worker, action, FAILED, why))
        return not why

    async def _start_worker(self, role: str, now_s: float) -> None:
        """Start a worker and add it to the roster; a failure is printed and counted."""
        try:
            name = await self._scaler.start_worker(role)
        except StartError as error:
            self._count_action(START, FAILED)
            self._print_line(f"replan: {error.what}: {error.why}")
        else:
            self._roster.add_started(name, role, now_s)

    async def _on_outcome(self, outcome: OrderOutcome) -> None:
        """React to the end of an order: remove the worker, undo its flip, or count and print the result."""
        if outcome.outcome == GONE:
            await self._scaler.remove_worker(outcome.worker)
        elif outcome.outcome == UNDO:
            await self._undo_flip(outcome)
        elif outcome.outcome == FAILED:
            self._count_action(outcome.action, FAILED)
            self._print_line(f"replan: {outcome.action} of {outcome.worker} failed: {outcome.why}")
        else:
            self._count_action(outcome.action, DONE)
            self._print_line(f"replan: {outcome.action} of {outcome.worker} is done")

    async def _on_order_refused(self, outcome: OrderOutcome) -> None:
        """Handle an order that was refused: the replanner must know that nothing has changed."""
        loop, now_s = asyncio.get_running_loop(), self._now_s
        await loop.run_in_executor(self._thread, self._replanner.failed, now_s, outcome.worker, outcome.why)
        await self._on_outcome(outcome)

    async def _undo_flip(self, outcome: OrderOutcome) -> None:
        """Order a worker whose flip did not succeed back to its former role."""
        self._print_line(f"replan: {outcome.worker} goes back to {outcome.role}: {outcome.why}")
        self._count_action(FLIP, ROLLED_BACK)
        if await self._post_order(FLIP, outcome.worker, "turn", role=outcome.role, force=True):
            self._roster.record_flip(outcome.worker, outcome.role, self._now_s, UNDO)

    def _count_action(self, action: str, outcome: str) -> None:
        """Count an action's outcome for the metrics."""
        if action in self._actions:
            self._actions[action][outcome] += 1

    def _report(self) -> ReplanReport:
        """The replanner's metrics for the gateway, and the position up to which events were received."""
        target = self._target
        return ReplanReport(
            boot=self._boot,
            after=self._events_after,
            pools=self._scaler.pools if self._act else None,
            decisions=dict(self._decisions),
            alarms=dict(self._alarms),
            actions={action: dict(outcomes) for action, outcomes in self._actions.items() if outcomes},
            target=msgspec.structs.asdict(target) if target else {},
            attainment=self._expected,
            reason=self._reason[:MAX_REASON],
        )


class StoppableEvaluator:
    """An evaluator that gives up when the deployment stops, so that the stop never waits for a simulation."""

    def __init__(self, evaluator: Any) -> None:
        self._evaluator = evaluator
        self.stop = threading.Event()

    def describe(self) -> dict[str, Any]:
        """The description of the wrapped evaluator."""
        description: dict[str, Any] = self._evaluator.describe()
        return description

    def attainment(self, fleet: FleetSize, mix: LengthMix, rate: float, cv: float) -> float:
        """The wrapped evaluator's attainment. Raises DiptychError if `stop` is set."""
        if self.stop.is_set():
            raise DiptychError("the deployment stops")
        return float(self._evaluator.attainment(fleet, mix, rate, cv))


def _action_name(action: FleetAction) -> str:
    match action:
        case Flip():
            return FLIP
        case Start():
            return START
        case Stop():
            return STOP


def _lower_priority() -> None:
    """Lower the priority of the calling thread, so that simulations do not slow down workers."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), EVALUATOR_NICENESS)
