"""One fault shared by requests that are held in all phases: bring each to its door, strike, let all go, and see.

ask, phase after phase ──▶ all at their doors ──▶ strike ──▶ go ──▶ heal ──▶ answers, verify, rest, check
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.faults.client import ClientAnswer, ClientRequest, StreamingClient
from tests.faults.fault_deployment import FaultDeployment
from tests.faults.inject import InjectedFault
from tests.faults.invariants import LogTail, RunSummary, check_run
from tests.faults.workload import RequestBook

# Later phases first: who waits at an early door may keep others from coming past it.
PHASE_ORDER = (
    "last", "decoding", "pulled", "staged", "pulling", "offered", "reading", "queued", "read", "waiting",
)  # fmt: skip
TWO_SIDED = ("staged", "offered", "pulling")  # the phases in which a request hangs on both of its workers
REACH_S, LINGER_S = 8.0, 0.5
# Requests that fill a prefill worker's share of the queue, so that more have to wait in the gateway's.
CROWD_SIZE = 30

HeldAt = Mapping[int, tuple[str, str]]  # by nonce: the phase, and the worker that holds it there
PairOf = Mapping[str, str]  # by id of a request: the pair of its workers


@dataclass(slots=True)
class FaultCell:
    """One fault at one target while requests were in one phase."""

    fault: str
    target: str
    phase: str
    requests: int = 0
    hit: int = 0  # of them at the very worker or link
    failures: int = 0
    broken: int = 0


@dataclass(slots=True)
class FaultRound:
    """What one shared fault came to."""

    fault: str
    target: str
    evidence: str = ""
    cells: list[FaultCell] = field(default_factory=list)
    summary: RunSummary = field(default_factory=RunSummary)
    recovery_s: float = 0.0  # until the last of those that were held had its answer
    rest_s: float = 0.0  # until nothing was held any more
    missed: list[str] = field(default_factory=list)  # phases that could not be reached


class HeldRequests:
    """Requests brought to their doors in one deployment."""

    def __init__(self, fleet: FaultDeployment, book: RequestBook) -> None:
        self.fleet, self.book, self.client = fleet, book, StreamingClient(fleet.port)
        self.tail = LogTail(fleet.log)
        self.tasks: dict[int, asyncio.Task[ClientAnswer]] = {}
        self.asks: list[ClientRequest] = []

    def prepare(self, phase: str) -> ClientRequest:
        """A request that comes through `phase`."""
        step = self.fleet.shape.step_tokens
        long = phase in ("reading", "staged")
        prompt = (step + 20, step + 60) if long else (1000, 1100) if phase == "waiting" else (70, 200)
        plain = phase in ("last", "waiting", "decoding")  # those have to be as long as they may
        return self.book.ask(phase, prompt, answer=24, kind="seeded" if plain else "")

    def ask(self, phase: str) -> ClientRequest:
        ask = self.prepare(phase)
        self.asks.append(ask)
        self.tasks[ask.nonce] = asyncio.create_task(self.client.ask(ask))
        return ask

    async def bring(self, phases: Mapping[str, int]) -> list[str]:
        """So many requests to each phase; returns the phases that were not reached by all of theirs."""
        missed = []
        for phase in (phase for phase in PHASE_ORDER if phases.get(phase)):
            if phase == "waiting":
                reached = await self._crowd(phases[phase])
            else:
                reached = await self._reach([self.ask(phase).nonce for _ in range(phases[phase])])
            if not reached:
                missed.append(phase)
        return missed

    async def _reach(self, nonces: list[int]) -> bool:
        """Until all are at their doors, or one is and the others make no haste: they may stand behind it."""
        control, known = self.fleet.control, set(nonces)
        for patience_s in (REACH_S, *[LINGER_S] * len(nonces)):
            with control.changed:
                before = len(known & control.said.held.keys())
            more = lambda said, seen=before: len(known & said.held.keys()) > seen  # noqa: E731
            if before == len(known) or not await asyncio.to_thread(control.wait, more, patience_s):
                return before > 0
        return True

    async def _crowd(self, count: int) -> bool:
        """Ask for so much that some have to wait in the gateway's queue; those that do not are simply going on."""
        before = self.tail.waiting()
        for _ in range(CROWD_SIZE):
            self.ask("waiting")
            await asyncio.sleep(0.02)
            if len(self.tail.waiting()) - len(before) >= count:
                return True
        return False

    async def plug(self) -> None:
        """Fill the prefill workers' share of the queue with requests that are held there: more wait at the gateway."""
        before = len(self.tail.waiting())
        for _ in range(CROWD_SIZE):
            nonce = self.ask("queued").nonce
            held = lambda said, nonce=nonce: nonce in said.held  # noqa: E731
            if (
                not await asyncio.to_thread(self.fleet.control.wait, held, 1.0)
                and len(self.tail.waiting()) > before
            ):
                return

    def places(self) -> dict[int, tuple[str, str]]:
        """Of each request that is held: its phase, and the worker that holds it."""
        waiting = self.tail.waiting()
        with self.fleet.control.changed:
            held = {ask.nonce: self.fleet.control.said.held.get(ask.nonce) for ask in self.asks}
        places = {nonce: place for nonce, place in held.items() if place is not None}
        for ask in self.asks:
            if ask.phase == "waiting" and len(ask.prompt) in waiting:
                places[ask.nonce] = ("waiting", "gateway")
        return places

    def ways(self) -> dict[str, str]:
        """Of each request that was sent to a pair of workers: which, as "prefill-0~decode-1"."""
        found = {}
        for life in self.tail.read().values():
            began = life.of("begin")
            if began and not life.of("end") and not life.events[0].get("canary") and began[-1]["prefill"]:
                way = f"{began[-1]['prefill']}~{began[-1]['decode']}"
                found[life.request.rsplit(".", 1)[0]] = way
        return found

    async def finish(self) -> list[ClientAnswer]:
        return list(await asyncio.gather(*self.tasks.values()))


async def play_round(
    fleet: FaultDeployment,
    book: RequestBook,
    make: Callable[[HeldAt, PairOf], InjectedFault],
    name: str,
    phases: Mapping[str, int],
    lasts_s: float,
) -> FaultRound:
    """Hold, strike, let go, heal, check. Raises Unproven if the fault cannot be seen to have happened.

    `make` is given where everybody is, so that the fault can go where there is most to hit.
    """
    holding = HeldRequests(fleet, book)
    missed = await holding.bring(phases)
    places, ways = holding.places(), holding.ways()
    fault = make(places, ways)
    result = FaultRound(name, fault.target, missed=missed)
    await asyncio.to_thread(fault.strike)
    struck_s = time.monotonic()
    fleet.control.go(*(ask.nonce for ask in holding.asks))
    healing = asyncio.create_task(_heal_fault(fault, lasts_s))
    answers = await holding.finish()
    result.recovery_s = max(answer.ended_s for answer in answers) - struck_s
    await healing
    result.evidence = fault.verify()
    result.rest_s = await asyncio.to_thread(fleet.until, lambda: not fleet.held())
    result.summary = check_run(book, answers, fleet.log, cut=fleet.parts["gateway"].status().restarts > 0)
    result.cells = _count_cells(result, places, ways, answers, book)
    return result


async def _heal_fault(fault: InjectedFault, lasts_s: float) -> None:
    await asyncio.sleep(lasts_s)
    await asyncio.to_thread(fault.heal)


def _count_cells(
    result: FaultRound, places: HeldAt, ways: PairOf, answers: list[ClientAnswer], book: RequestBook
) -> list[FaultCell]:
    by_phase: dict[str, FaultCell] = {}
    for answer in answers:
        place = places.get(answer.ask.nonce)
        if place is None:
            continue
        phase, worker = place
        link = "~" in result.target
        role = "link" if link else result.target.split("-")[0]
        cell = by_phase.setdefault(phase, FaultCell(result.fault, role, phase))
        cell.requests += 1
        way = ways.get(answer.id, "")
        both = way.split("~") if phase in TWO_SIDED else []
        cell.hit += result.target in ("gateway", worker, way, *both)
        cell.failures += not answer.whole
        cell.broken += bool(book.wrong(answer))
    return [by_phase[phase] for phase in PHASE_ORDER if phase in by_phase]


def sum_cells(rounds: list[FaultRound]) -> list[FaultCell]:
    """The cells of all rounds, those of the same fault, target and phase added up."""
    total: dict[tuple[str, str, str], FaultCell] = {}
    for cell in (cell for one in rounds for cell in one.cells):
        whole = total.setdefault(
            (cell.fault, cell.target, cell.phase), FaultCell(cell.fault, cell.target, cell.phase)
        )
        whole.requests += cell.requests
        whole.hit += cell.hit
        whole.failures += cell.failures
        whole.broken += cell.broken
    return list(total.values())
