"""Runs scenarios against real processes: `python -m tests.faults.run [NAME …] --out FOLDER`.

Each scenario gets a deployment of its own: gateway, toy workers, and a proxy between them. What a run leaves (request
log, logs of all parts, report) lies in the folder. The exit status is 1 when an invariant or a bound was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.faults import netns, proxy, report, village
from tests.faults.check import Verdict, check_answers, check_run, lives, read_log
from tests.faults.client import Answer, Client
from tests.faults.fleet import Fleet, Said, running
from tests.faults.inject import Fault, Kill, Unproven, fault, until
from tests.faults.load import Book, stream
from tests.faults.proxy import Line
from tests.faults.recovery import Strike, recoveries, waits
from tests.faults.rounds import REACH_S, Cell, Holding, Places, Round, Ways, play, summed
from tests.faults.scenario import Event, Scenario, all_of
from tests.faults.village import link_fault


@dataclass(slots=True)
class Result:
    """What a scenario came to. `figures` are named numbers for the report."""

    scenario: Scenario
    cells: list[Cell] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    figures: dict[str, float] = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # bounds and invariants
    seconds: float = 0.0
    skipped: str = ""  # why nothing was played


@dataclass(slots=True)
class Field:
    """A deployment with a proxy before the gateway's channel."""

    fleet: Fleet
    lines: Mapping[str, Line]
    folder: Path


@contextmanager
def deployed(scenario: Scenario) -> Iterator[Field]:
    """The scenario's deployment, ready, in a temporary folder (sockets need short paths)."""
    folder = Path(tempfile.mkdtemp(prefix="dpt"))
    lines: dict[str, Line] = {}
    try:
        if scenario.deployment.houses:
            with village.running(folder, scenario.deployment) as housed:
                yield Field(housed, lines, folder)
            return
        with proxy.running(folder) as wires:

            def through(worker: str, real: str) -> str:
                host, _, port = real.removeprefix("tcp://").partition(":")
                lines[worker] = wires.line(worker, host, int(port))
                return lines[worker].address

            with running(folder, scenario.deployment, through) as fleet:
                yield Field(fleet, lines, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(scenario: Scenario, keep: Path | None = None) -> Result:
    """Play one scenario; `keep` is where its logs are copied to."""
    began_s, result = time.monotonic(), Result(scenario)
    if scenario.deployment.houses and (why := netns.missing()):
        result.skipped = why
        return result
    with deployed(scenario) as ground:
        try:
            asyncio.run(PLAYS[scenario.kind](ground, scenario, result))
        except Unproven as error:
            result.broken.append(f"unproven: {error}")
        finally:
            if keep is not None:
                _keep(ground, keep / scenario.name)
    result.broken += result.verdict.broken
    result.broken += _bounds(result)
    result.seconds = time.monotonic() - began_s
    return result


def _keep(ground: Field, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ground.folder / "logs", folder)
    if ground.fleet.log.exists():
        shutil.copy(ground.fleet.log, folder / "requests.jsonl")


def _bounds(result: Result) -> list[str]:
    """Which of the scenario's bounds were not kept."""
    checks, told = result.scenario.checks, []
    limits = {
        "client_failures": checks.client_failures,
        "recovery_p95_s": checks.recovery_p95_s,
        "free_median_s": checks.free_median_s,
        "free_most_s": checks.free_most_s,
    }
    for name, limit in limits.items():
        if limit is not None and result.figures.get(name, 0.0) > limit:
            told.append(f"{name} is {result.figures[name]:.3f}, at most {limit} is allowed")
    if checks.success is not None and result.figures.get("success", 0.0) < checks.success:
        told.append(
            f"success is {result.figures.get('success', 0.0):.4f}, at least {checks.success} is wanted"
        )
    return told


# ---- what is played


async def phases(ground: Field, scenario: Scenario, result: Result) -> None:
    """Every event once per round, shared by requests that are held in all phases."""
    book, rounds = Book(scenario.seed), list[Round]()
    unexpected = 0
    for _ in range(scenario.rounds):
        for event in scenario.events:
            make = partial(_aimed, ground, event, summed(rounds))
            one = await play(ground.fleet, book, make, event.fault, scenario.phases, event.lasts_s)
            rounds.append(one)
            result.verdict.add(one.verdict)
            result.evidence.append(f"{event.fault} {one.target}: {one.evidence}")
            moved = one.verdict.retried
            result.figures[f"{event.fault}_moved"] = result.figures.get(f"{event.fault}_moved", 0) + moved
            if event.moves is not None and event.moves != bool(moved):
                result.broken.append(f"{event.fault} {one.target}: {moved} requests went another way")
            result.missed += [f"{event.fault} {event.target}: {phase}" for phase in one.missed]
            unexpected += one.verdict.failures if event.spares else 0
            await asyncio.to_thread(_mended, ground)
    result.cells = summed(rounds)
    result.figures["client_failures"] = unexpected
    result.figures["recovery_most_s"] = max(one.recovery_s for one in rounds)
    result.figures["rest_most_s"] = max(one.rest_s for one in rounds)


def _aimed(ground: Field, event: Event, before: list[Cell], places: Places, ways: Ways) -> Fault:
    """The event's fault, at the target where there is most to hit."""
    target, fleet = event.target, ground.fleet
    if target == "link":
        pairs = Counter(ways.values()).most_common(1)
        return link_fault(fleet, event.fault, pairs[0][0] if pairs else "prefill-0~decode-0")
    if target in ("prefill", "decode"):
        hit = {
            cell.phase for cell in before if cell.target == target and cell.fault == event.fault and cell.hit
        }

        def worth(name: str) -> tuple[int, int]:
            there = [phase for phase, worker in places.values() if worker == name]
            return len({*there} - hit), len(there)

        target = max((name for name in fleet.names if name.startswith(target)), key=worth)
    return fault(fleet, ground.lines, event.fault, target)


def _mended(ground: Field) -> None:
    """Wait until all workers are there and all ways are proven again."""
    fleet = ground.fleet
    fleet.until(lambda: len(fleet.status()["workers"]) == len(fleet.names) and fleet.ready())
    pairs = fleet.shape.prefill * fleet.shape.decode
    fleet.until(lambda: len(fleet.status()["links"]) == pairs and not fleet.held())


async def migrate(ground: Field, scenario: Scenario, result: Result) -> None:
    """Streams of mixed sampling; decode workers are killed, one after the other, until enough streams have moved."""
    book, client, load = Book(scenario.seed), Client(ground.fleet.port), scenario.load
    answers: list[Answer] = []
    ending = asyncio.Event()
    killing = asyncio.create_task(_kill_on(ground, scenario, answers, book, result, ending))
    make = lambda: book.ask(prompt=load.prompt, answer=load.answer)  # noqa: E731
    async for answer in stream(client, make, load.streams, ending.is_set):
        answers.append(answer)
    await killing
    await asyncio.to_thread(ground.fleet.until, lambda: not ground.fleet.held())
    result.verdict = check_run(book, answers, ground.fleet.log)
    result.figures |= _counted(result.verdict)


async def _kill_on(
    ground: Field,
    scenario: Scenario,
    answers: list[Answer],
    book: Book,
    result: Result,
    ending: asyncio.Event,
) -> None:
    ends_s, load = time.monotonic() + scenario.load.seconds, scenario.load
    try:
        for target in (event.target for _ in range(10_000) for event in scenario.events):
            await asyncio.sleep(load.pause_s)
            if time.monotonic() > ends_s or (load.migrated and _moved(ground, answers) >= load.migrated):
                return
            kill = Kill(ground.fleet, target)
            kill.strike()
            await asyncio.to_thread(kill.heal)
            result.evidence.append(kill.verify())
            await asyncio.to_thread(_all_there, ground)
    finally:
        ending.set()


def _all_there(ground: Field) -> None:
    fleet = ground.fleet
    pairs = fleet.shape.prefill * fleet.shape.decode
    fleet.until(lambda: len(fleet.status()["links"]) == pairs)


def _moved(ground: Field, answers: list[Answer]) -> int:
    """A cheap look at how many streams have moved so far."""
    text = ground.fleet.log.read_text("utf-8", "replace") if ground.fleet.log.exists() else ""
    return sum(
        '"retried"' in line and '"delivered":0' not in line.replace(" ", "") for line in text.splitlines()
    )


def _counted(verdict: Verdict) -> dict[str, float]:
    decided = verdict.asked - verdict.left
    return {
        "requests": verdict.asked,
        "client_failures": verdict.failures,
        "success": verdict.whole / max(1, decided),
        "migrated": verdict.migrated,
        "retried": verdict.retried,
    }


async def leave(ground: Field, scenario: Scenario, result: Result) -> None:
    """A client goes away in each phase, many times: how long until nobody holds anything of its request."""
    book, times = Book(scenario.seed), dict[str, list[float]]()
    for phase in scenario.phases:
        holding = Holding(ground.fleet, book)
        if phase == "waiting":
            await holding.plug()
        once = _leave_queue if phase == "waiting" else _leave_worker
        for _ in range(scenario.load.each):
            taken = await once(holding, phase, result)
            if taken is None:
                result.missed.append(phase)
                break
            times.setdefault(phase, []).append(taken)
        ground.fleet.control.go(*(ask.nonce for ask in holding.asks))
        result.verdict.add(check_answers(book, await holding.finish()))
    for phase, taken_s in times.items():
        result.figures[f"{phase}_median_s"] = statistics.median(taken_s)
        result.figures[f"{phase}_most_s"] = max(taken_s)
        result.cells.append(Cell("leave", "client", phase, requests=len(taken_s), hit=len(taken_s)))
    every = [one for each in times.values() for one in each]
    result.figures["free_median_s"] = statistics.median(every)
    result.figures["free_most_s"] = max(every)


async def _leave_worker(holding: Holding, phase: str, result: Result) -> float | None:
    """Seconds from the client's going to the last worker's rest; None if the phase is not reached."""
    control, ask, going = holding.fleet.control, holding.prepare(phase), asyncio.Event()
    asking = asyncio.create_task(holding.client.ask(ask, leave=going))

    def there(said: Said) -> bool:
        return ask.nonce in said.held and not all(resting for resting, _ in said.rest.values())

    reached = await asyncio.to_thread(control.wait, there, REACH_S)
    left_s = time.monotonic()
    going.set()
    control.go(ask.nonce)
    answer = await asking
    rested = await asyncio.to_thread(control.wait, lambda said: all(rest for rest, _ in said.rest.values()))
    with control.changed:
        free_s = max(at for _, at in control.said.rest.values())
    if not rested:
        held = holding.fleet.held()
        result.broken.append(f"I1 something is held for ever after the client left in {phase}: {held}")
    result.verdict.add(check_answers(holding.book, [answer]))
    return free_s - left_s if reached else None


async def _leave_queue(holding: Holding, phase: str, result: Result) -> float | None:
    """Seconds until the gateway has forgotten a request that waits in its queue; no worker has heard of it."""
    fleet, ask, going = holding.fleet, holding.prepare(phase), asyncio.Event()
    before = fleet.status()["sequences"]
    asking = asyncio.create_task(holding.client.ask(ask, leave=going))
    reached = await asyncio.to_thread(until, lambda: len(ask.prompt) in holding.tail.waiting(), REACH_S)
    left_s = time.monotonic()
    going.set()
    answer = await asking
    await asyncio.to_thread(until, lambda: fleet.status()["sequences"] <= before)
    result.verdict.add(check_answers(holding.book, [answer]))
    return time.monotonic() - left_s if reached else None


async def chaos(ground: Field, scenario: Scenario, result: Result) -> None:
    """Streams, and faults at random moments, one after the other."""
    book, client, load = Book(scenario.seed), Client(ground.fleet.port), scenario.load
    dice, answers, struck = random.Random(scenario.seed), list[Answer](), list[Strike]()
    ending = asyncio.Event()
    trouble = asyncio.create_task(_trouble(ground, scenario, dice, struck, result, ending))
    make = lambda: book.ask(prompt=load.prompt, answer=load.answer)  # noqa: E731
    async for answer in stream(client, make, load.streams, ending.is_set):
        answers.append(answer)
    await trouble
    await asyncio.to_thread(_mended, ground)
    result.verdict = check_run(book, answers, ground.fleet.log)
    result.figures |= _counted(result.verdict)
    pauses = sorted(recoveries(answers, struck, lives(read_log(ground.fleet.log))))
    silent = sorted(wait_s for _, _, wait_s in waits(answers, struck))
    result.figures["faults"] = len(struck)
    if pauses:
        result.figures["streams_hit"] = len(pauses)
        result.figures["recovery_median_s"] = statistics.median(pauses)
        result.figures["recovery_p95_s"] = pauses[int(0.95 * (len(pauses) - 1))]
        result.figures["silent"] = len(silent)  # whoever waited when a fault began, for whatever reason
        result.figures["silent_p95_s"] = silent[int(0.95 * (len(silent) - 1))]


async def _trouble(
    ground: Field,
    scenario: Scenario,
    dice: random.Random,
    struck: list[Strike],
    result: Result,
    ending: asyncio.Event,
) -> None:
    ends_s, healing = time.monotonic() + scenario.load.seconds, set[asyncio.Task[None]]()
    busy: set[str] = set()
    try:
        while True:
            await asyncio.sleep(dice.expovariate(1 / scenario.load.pause_s))
            if time.monotonic() > ends_s:
                break
            free = [event for event in scenario.events if event.target not in busy]
            if len(busy) >= len(ground.fleet.names) - 2 or not free:
                continue
            event = dice.choice(free)
            if {event.target.split("-")[0]} & {name.split("-")[0] for name in busy}:
                continue  # one worker of each role is always left
            busy.add(event.target)
            struck.append(Strike(time.monotonic(), event.target))
            healing.add(asyncio.create_task(_one(ground, event, result, busy)))
        await asyncio.gather(*healing)
    finally:
        ending.set()


async def _one(ground: Field, event: Event, result: Result, busy: set[str]) -> None:
    bad: Fault = fault(ground.fleet, ground.lines, event.fault, event.target)
    await asyncio.to_thread(bad.strike)
    await asyncio.sleep(event.lasts_s)
    await asyncio.to_thread(bad.heal)
    result.evidence.append(f"{event.fault} {event.target}: {bad.verify()}")
    await asyncio.to_thread(_all_there, ground)
    busy.discard(event.target)


PLAYS = {"phases": phases, "migrate": migrate, "leave": leave, "chaos": chaos}


def main() -> int:
    parser = argparse.ArgumentParser(description="Play fault scenarios and write a report.")
    parser.add_argument("names", nargs="*", help="scenarios; all if none is named")
    parser.add_argument("--out", type=Path, default=Path(".run/faults"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results = []
    for scenario in all_of():
        if not asked.names or scenario.name in asked.names:
            print(f"{scenario.name}: {scenario.about}", flush=True)
            results.append(run(scenario, asked.out))
            print(report.line(results[-1]), flush=True)
            (asked.out / "report.md").write_text(report.page(results), encoding="utf-8")
    print(report.page(results))
    return 1 if any(result.broken for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
