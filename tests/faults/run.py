"""Runs scenarios against real processes: `python -m tests.faults.run [NAME …] --out FOLDER`.

Each scenario gets a deployment of its own: gateway, toy workers, and a proxy between them. What a run leaves (request
log, logs of all parts, report) lies in the folder. The exit status is 1 when an invariant or a bound was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

from tests.faults import namespace_deployment, proxy, report
from tests.faults.bulk_backlog import BulkBacklog
from tests.faults.client import ClientAnswer, StreamingClient
from tests.faults.fault_deployment import FaultDeployment, ToyReports, running_deployment
from tests.faults.fault_rounds import (
    REACH_S,
    FaultCell,
    FaultRound,
    HeldAt,
    HeldRequests,
    PairOf,
    play_round,
    sum_cells,
)
from tests.faults.inject import FaultUnproven, InjectedFault, KillFault, holds_in_time, make_fault
from tests.faults.invariants import (
    RunSummary,
    check_answers,
    check_run,
    histories_by_request,
    read_log,
)
from tests.faults.namespace_deployment import make_link_fault
from tests.faults.proxy import ProxyLine
from tests.faults.recovery import FaultStrike, recovery_waits, stream_waits
from tests.faults.scenario import FaultEvent, Scenario, read_scenarios, with_bulk
from tests.faults.workload import RequestBook, keep_streaming
from tests.support import network_namespaces


@dataclass(slots=True)
class ScenarioResult:
    """What a scenario came to. `figures` are named numbers for the report."""

    scenario: Scenario
    cells: list[FaultCell] = field(default_factory=list)
    summary: RunSummary = field(default_factory=RunSummary)
    figures: dict[str, float] = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # bounds and invariants
    seconds: float = 0.0
    skipped: str = ""  # why nothing was played


@dataclass(slots=True)
class FaultField:
    """A deployment with a proxy before the gateway's channel."""

    fleet: FaultDeployment
    lines: Mapping[str, ProxyLine]
    folder: Path


@contextmanager
def deploy_scenario(scenario: Scenario) -> Iterator[FaultField]:
    """The scenario's deployment, ready, in a temporary folder (sockets need short paths)."""
    folder = Path(tempfile.mkdtemp(prefix="dpt"))
    lines: dict[str, ProxyLine] = {}
    try:
        if scenario.deployment.houses:
            with namespace_deployment.running_deployment(folder, scenario.deployment) as housed:
                yield FaultField(housed, lines, folder)
            return
        with proxy.running_proxy(folder) as wires:

            def through(worker: str, real: str) -> str:
                host, _, port = real.removeprefix("tcp://").partition(":")
                lines[worker] = wires.line(worker, host, int(port))
                return lines[worker].address

            with running_deployment(folder, scenario.deployment, through) as fleet:
                yield FaultField(fleet, lines, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_scenario(scenario: Scenario, keep: Path | None = None) -> ScenarioResult:
    """Play one scenario; `keep` is where its logs are copied to."""
    began_s, result = time.monotonic(), ScenarioResult(scenario)
    if scenario.deployment.houses and (why := network_namespaces.why_unavailable()):
        result.skipped = why
        return result
    with deploy_scenario(scenario) as ground:
        try:
            with _bulk_beside(ground, result):
                asyncio.run(SCENARIO_KINDS[scenario.kind](ground, scenario, result))
        except FaultUnproven as error:
            result.broken.append(f"unproven: {error}")
        finally:
            if keep is not None:
                _keep_logs(ground, keep / scenario.name)
    result.broken += result.summary.broken
    result.broken += _broken_bounds(result)
    result.seconds = time.monotonic() - began_s
    return result


@contextmanager
def _bulk_beside(ground: FaultField, result: ScenarioResult) -> Iterator[None]:
    """Batches beside what is played in the block, if the scenario wants them; their laws are checked at its end."""
    if not ground.fleet.shape.bulk_lines:
        yield
        return
    backlog = BulkBacklog(ground.fleet, result.scenario.seed)
    try:
        backlog.start()
        yield
        broken, figures = backlog.finish()
    finally:
        backlog.close()
    result.broken += broken
    result.figures |= figures


def _keep_logs(ground: FaultField, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ground.folder / "logs", folder)
    if ground.fleet.log.exists():
        shutil.copy(ground.fleet.log, folder / "requests.jsonl")


def _broken_bounds(result: ScenarioResult) -> list[str]:
    """Which of the scenario's bounds were not kept."""
    checks, broken = result.scenario.checks, []
    limits = {
        "client_failures": checks.client_failures,
        "recovery_p95_s": checks.recovery_p95_s,
        "free_median_s": checks.free_median_s,
        "free_most_s": checks.free_most_s,
    }
    for name, limit in limits.items():
        if limit is not None and result.figures.get(name, 0.0) > limit:
            broken.append(f"{name} is {result.figures[name]:.3f}, at most {limit} is allowed")
    wanted = {"success": checks.success, "migrated": checks.migrated}
    for name, least in wanted.items():
        if least is not None and result.figures.get(name, 0.0) < least:
            broken.append(f"{name} is {result.figures.get(name, 0.0):.4f}, at least {least} is wanted")
    return broken


# ---- what is played


async def play_phases(ground: FaultField, scenario: Scenario, result: ScenarioResult) -> None:
    """Every event once per round, shared by requests that are held in all phases."""
    book, rounds = RequestBook(scenario.seed, scenario.deployment.codec), list[FaultRound]()
    unexpected = 0
    for _ in range(scenario.rounds):
        for event in scenario.events:
            make = partial(_aim_fault, ground, event, sum_cells(rounds))
            one = await play_round(ground.fleet, book, make, event.fault, scenario.phases, event.lasts_s)
            rounds.append(one)
            result.summary.add(one.summary)
            result.evidence.append(f"{event.fault} {one.target}: {one.evidence}")
            moved = one.summary.retried
            result.figures[f"{event.fault}_moved"] = result.figures.get(f"{event.fault}_moved", 0) + moved
            if event.moves is not None and event.moves != bool(moved):
                result.broken.append(f"{event.fault} {one.target}: {moved} requests went another way")
            result.missed += [f"{event.fault} {event.target}: {phase}" for phase in one.missed]
            unexpected += one.summary.failures if event.spares else 0
            await asyncio.to_thread(_wait_until_mended, ground)
    result.cells = sum_cells(rounds)
    result.figures["client_failures"] = unexpected
    result.figures["recovery_most_s"] = max(one.recovery_s for one in rounds)
    result.figures["rest_most_s"] = max(one.rest_s for one in rounds)


def _aim_fault(
    ground: FaultField, event: FaultEvent, before: list[FaultCell], places: HeldAt, ways: PairOf
) -> InjectedFault:
    """The event's fault, at the target where there is most to hit."""
    target, fleet = event.target, ground.fleet
    if target == "link":
        pairs = Counter(ways.values()).most_common(1)
        return make_link_fault(fleet, event.fault, pairs[0][0] if pairs else "prefill-0~decode-0")
    if target in ("prefill", "decode"):
        hit = {
            cell.phase for cell in before if cell.target == target and cell.fault == event.fault and cell.hit
        }

        def worth(name: str) -> tuple[int, int]:
            there = [phase for phase, worker in places.values() if worker == name]
            return len({*there} - hit), len(there)

        target = max((name for name in fleet.names if name.startswith(target)), key=worth)
    return make_fault(fleet, ground.lines, event.fault, target)


def _wait_until_mended(ground: FaultField) -> None:
    """Wait until all workers are there and all ways are proven again."""
    fleet = ground.fleet
    fleet.until(lambda: len(fleet.status()["workers"]) == len(fleet.names) and fleet.ready())
    pairs = fleet.shape.prefill * fleet.shape.decode
    fleet.until(lambda: len(fleet.status()["links"]) == pairs and not fleet.held())


async def play_migrate(ground: FaultField, scenario: Scenario, result: ScenarioResult) -> None:
    """Streams of mixed sampling; decode workers are killed, one after the other, until enough streams have moved."""
    book, client, load = (
        RequestBook(scenario.seed, scenario.deployment.codec),
        StreamingClient(ground.fleet.port),
        scenario.load,
    )
    answers: list[ClientAnswer] = []
    ending = asyncio.Event()
    killing = asyncio.create_task(_kill_on(ground, scenario, result, ending))
    make = lambda: book.ask(prompt=load.prompt, answer=load.answer)  # noqa: E731
    async for answer in keep_streaming(client, make, load.streams, ending.is_set):
        answers.append(answer)
    await killing
    await asyncio.to_thread(ground.fleet.until, lambda: not ground.fleet.held())
    result.summary = check_run(book, answers, ground.fleet.log)
    result.figures |= _count_outcomes(result.summary)


async def _kill_on(
    ground: FaultField, scenario: Scenario, result: ScenarioResult, ending: asyncio.Event
) -> None:
    ends_s, load = time.monotonic() + scenario.load.seconds, scenario.load
    try:
        for target in (event.target for _ in range(10_000) for event in scenario.events):
            await asyncio.sleep(load.pause_s)
            if time.monotonic() > ends_s or (load.migrated and _count_moved(ground) >= load.migrated):
                return
            kill = KillFault(ground.fleet, target)
            kill.strike()
            await asyncio.to_thread(kill.heal)
            result.evidence.append(kill.verify())
            await asyncio.to_thread(_all_present, ground)
    finally:
        ending.set()


def _all_present(ground: FaultField) -> None:
    fleet = ground.fleet
    pairs = fleet.shape.prefill * fleet.shape.decode
    fleet.until(lambda: len(fleet.status()["links"]) == pairs)


def _count_moved(ground: FaultField) -> int:
    """A cheap look at how many streams have moved so far, however often each of them."""
    text = ground.fleet.log.read_text("utf-8", "replace") if ground.fleet.log.exists() else ""
    events = [json.loads(line) for line in text.splitlines()[:-1] if '"retried"' in line]
    return len({event["request"] for event in events if event["delivered"]})


def _count_outcomes(summary: RunSummary) -> dict[str, float]:
    decided = summary.asked - summary.left
    return {
        "requests": summary.asked,
        "client_failures": summary.failures,
        "success": summary.whole / max(1, decided),
        "migrated": summary.migrated,
        "retried": summary.retried,
    }


async def play_leave(ground: FaultField, scenario: Scenario, result: ScenarioResult) -> None:
    """A client goes away in each phase, many times: how long until nobody holds anything of its request."""
    book, times = RequestBook(scenario.seed, scenario.deployment.codec), dict[str, list[float]]()
    for phase in scenario.phases:
        holding = HeldRequests(ground.fleet, book)
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
        result.summary.add(check_answers(book, await holding.finish()))
    for phase, taken_s in times.items():
        result.figures[f"{phase}_median_s"] = statistics.median(taken_s)
        result.figures[f"{phase}_most_s"] = max(taken_s)
        result.cells.append(FaultCell("leave", "client", phase, requests=len(taken_s), hit=len(taken_s)))
    every = [one for each in times.values() for one in each]
    result.figures["free_median_s"] = statistics.median(every)
    result.figures["free_most_s"] = max(every)


async def _leave_worker(holding: HeldRequests, phase: str, result: ScenarioResult) -> float | None:
    """Seconds from the client's going to the last worker's rest; None if the phase is not reached."""
    control, ask, going = holding.fleet.control, holding.prepare(phase), asyncio.Event()
    asking = asyncio.create_task(holding.client.ask(ask, leave=going))

    def there(said: ToyReports) -> bool:
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
    result.summary.add(check_answers(holding.book, [answer]))
    return free_s - left_s if reached else None


async def _leave_queue(holding: HeldRequests, phase: str, result: ScenarioResult) -> float | None:
    """Seconds until the gateway has forgotten a request that waits in its queue; no worker has received it."""
    fleet, ask, going = holding.fleet, holding.prepare(phase), asyncio.Event()
    before = fleet.status()["sequences"]
    asking = asyncio.create_task(holding.client.ask(ask, leave=going))
    reached = await asyncio.to_thread(
        holds_in_time, lambda: len(ask.prompt) in holding.tail.waiting(), REACH_S
    )
    left_s = time.monotonic()
    going.set()
    answer = await asking
    await asyncio.to_thread(holds_in_time, lambda: fleet.status()["sequences"] <= before)
    result.summary.add(check_answers(holding.book, [answer]))
    return time.monotonic() - left_s if reached else None


async def play_chaos(ground: FaultField, scenario: Scenario, result: ScenarioResult) -> None:
    """Streams, and faults at random moments, one after the other."""
    book, client, load = (
        RequestBook(scenario.seed, scenario.deployment.codec),
        StreamingClient(ground.fleet.port),
        scenario.load,
    )
    dice, answers, struck = random.Random(scenario.seed), list[ClientAnswer](), list[FaultStrike]()
    ending = asyncio.Event()
    trouble = asyncio.create_task(_cause_trouble(ground, scenario, dice, struck, result, ending))
    make = lambda: book.ask(prompt=load.prompt, answer=load.answer)  # noqa: E731
    async for answer in keep_streaming(client, make, load.streams, ending.is_set):
        answers.append(answer)
    await trouble
    await asyncio.to_thread(_wait_until_mended, ground)
    result.summary = check_run(book, answers, ground.fleet.log)
    result.figures |= _count_outcomes(result.summary)
    pauses = sorted(recovery_waits(answers, struck, histories_by_request(read_log(ground.fleet.log))))
    silent = sorted(wait_s for _, _, wait_s in stream_waits(answers, struck))
    result.figures["faults"] = len(struck)
    if pauses:
        result.figures["streams_hit"] = len(pauses)
        result.figures["recovery_median_s"] = statistics.median(pauses)
        result.figures["recovery_p95_s"] = pauses[int(0.95 * (len(pauses) - 1))]
        result.figures["silent"] = len(silent)  # whoever waited when a fault began, for whatever reason
        result.figures["silent_p95_s"] = silent[int(0.95 * (len(silent) - 1))]


async def _cause_trouble(
    ground: FaultField,
    scenario: Scenario,
    dice: random.Random,
    struck: list[FaultStrike],
    result: ScenarioResult,
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
            struck.append(FaultStrike(time.monotonic(), event.target))
            healing.add(asyncio.create_task(_inject_one(ground, event, result, busy)))
        await asyncio.gather(*healing)
    finally:
        ending.set()


async def _inject_one(ground: FaultField, event: FaultEvent, result: ScenarioResult, busy: set[str]) -> None:
    bad: InjectedFault = make_fault(ground.fleet, ground.lines, event.fault, event.target)
    await asyncio.to_thread(bad.strike)
    await asyncio.sleep(event.lasts_s)
    await asyncio.to_thread(bad.heal)
    result.evidence.append(f"{event.fault} {event.target}: {bad.verify()}")
    await asyncio.to_thread(_all_present, ground)
    busy.discard(event.target)


SCENARIO_KINDS = {"phases": play_phases, "migrate": play_migrate, "leave": play_leave, "chaos": play_chaos}


def main() -> int:
    parser = argparse.ArgumentParser(description="Play fault scenarios and write a report.")
    parser.add_argument("names", nargs="*", help="scenarios; all if none is named")
    parser.add_argument(
        "--bulk-lines", type=int, help="lines of each batch that is kept open beside the requests"
    )
    parser.add_argument("--out", type=Path, default=Path(".run/faults"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results = []
    for scenario in read_scenarios():
        if not asked.names or scenario.name in asked.names:
            print(f"{scenario.name}: {scenario.about}", flush=True)
            if asked.bulk_lines is not None:
                scenario = with_bulk(scenario, asked.bulk_lines)
            results.append(run_scenario(scenario, asked.out))
            print(report.scenario_line(results[-1]), flush=True)
            (asked.out / "report.md").write_text(report.report_page(results), encoding="utf-8")
    print(report.report_page(results))
    return 1 if any(result.broken for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
