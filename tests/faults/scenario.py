"""Scenario files: what is deployed, what is asked, what happens to it, and what must hold. All is data (YAML).

name: kill                       seed: 1
deployment: {prefill: 2, decode: 2, …}             # tests.faults.fault_deployment.DeploymentShape
kind: phases | migrate | leave | chaos             # what is played, see tests.faults.run
phases: {queued: 3, reading: 3, …}                 # requests to be held in each
events: [{fault: kill, target: prefill-0, lasts_s: 0.5}, …]
load: {streams: 20, seconds: 180, answer: 60}
checks: {client_failures: 0, …}
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import yaml

from tests.faults.fault_deployment import DeploymentShape

SCENARIO_FOLDER = Path(__file__).parent / "scenarios"
KINDS = ("phases", "migrate", "leave", "chaos")


class FaultEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault, healed after `lasts_s`. `spares` is false if clients may see failures of it (a killed gateway).

    `target` "prefill" or "decode" is the worker of that pool where there is most to hit that was not hit before, "link"
    the way of KV between the two workers that have most requests in common. `moves`: must somebody go another way?
    """

    fault: str
    target: str
    lasts_s: float = 0.5
    spares: bool = True
    moves: bool | None = None


class StreamLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Streams at once; how long they are kept up; the longest answer; what has to be reached."""

    streams: int = 20
    seconds: float = 60.0
    answer: int = 60
    prompt: tuple[int, int] = (8, 300)
    migrated: int = 0
    each: int = 0
    pause_s: float = 5.0  # between faults, on average


class ScenarioChecks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds; None: reported only. Invariants are always checked."""

    client_failures: int | None = None
    success: float | None = None
    migrated: int | None = None  # at least so many streams that went on elsewhere, every token right
    recovery_p95_s: float | None = None
    free_median_s: float | None = None
    free_most_s: float | None = None


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario file."""

    name: str
    about: str
    kind: str
    seed: int
    deployment: DeploymentShape = DeploymentShape()
    rounds: int = 1
    phases: dict[str, int] = {}
    events: tuple[FaultEvent, ...] = ()
    load: StreamLoad = StreamLoad()
    checks: ScenarioChecks = ScenarioChecks()


def read_scenario(path: Path) -> Scenario:
    """One file. Raises ValueError if it is not a scenario."""
    scenario = msgspec.convert(yaml.safe_load(path.read_text("utf-8")), Scenario)
    if scenario.kind not in KINDS or scenario.name != path.stem:
        raise ValueError(f"{path.name}: no scenario {scenario.name!r} of kind {scenario.kind!r}")
    return scenario


def with_bulk(scenario: Scenario, lines: int) -> Scenario:
    """The same with batches of `lines` lines beside the requests; 0: without."""
    return msgspec.structs.replace(scenario, deployment=replace(scenario.deployment, bulk_lines=lines))


def read_scenarios(folder: Path = SCENARIO_FOLDER) -> list[Scenario]:
    """Every scenario there is, by name of its file."""
    return [read_scenario(path) for path in sorted(folder.glob("*.yaml"))]
