"""A large cluster on paper: 1,024 devices and a million requests, served by the product's own decisions on one core.

    python -m benchmarks.scale [--json] [--requests 1000000] [--cells 16] [--load 0.7] [--law]

Each cell is a gateway of its own with 3 prefill and 5 decode instances of Llama-3.1-70B on 8 H100 each, 64
devices, and a front gives each request to the cell that has least to do. Costs are analytic
(`planner.costs.profile.analytic_profile`). Lengths are like ShareGPT's
(`planner.workload.workload.synthetic_workload`), and requests come at `--load` of what the prefill instances
can read. They are drawn as they come and counted as they end, so nothing grows with their number; each tenth
of the way the resident memory and the time are noted.

    seconds, requests_per_s     processor time of the whole run, and requests over it
    steps_per_plan              engine steps for which one plan stood
    tenth_s                     processor time of each tenth of the requests
    rss_mb                      resident memory after each tenth of the requests
    rss_growth                  memory at the end over that after the first tenth
    attainment, ttft_p90_s …    how the requests fared, in simulated time

`--law` runs a tenth of the requests on 1, 2, 4, 8 and 16 cells, and on 16 cells a fifth to all of that tenth, each in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import benchmarks.script_path  # noqa: F401
from diptych.slo import Slo
from planner.attainment import AttainmentCounter
from planner.costs.profile import analytic_profile
from planner.sim.exact.deployment import SimDeployment, build_deployment
from planner.sim.exact.simulate import ExactSimulation
from planner.types import (
    DECODE,
    PREFILL,
    InstancePool,
    JobResult,
    LinkSpec,
    Parallelism,
    Placement,
    StepBatch,
)
from planner.workload.workload import synthetic_workload

MODEL, DEVICE, WORKLOAD = "Llama-3.1-70B", "H100", "sharegpt"
READERS, WRITERS, TENSOR = 3, 5, 8
STEP_TOKENS = 2048
LINK = LinkSpec(50e9, 20e-6)  # 400 Gbit/s for each instance
SLO = Slo(ttft_s=0.5, tpot_s=0.05)
MEGA = 1 << 20


def cell() -> Placement:
    """One gateway's instances."""
    return Placement(
        (
            InstancePool(PREFILL, Parallelism(TENSOR), READERS),
            InstancePool(DECODE, Parallelism(TENSOR), WRITERS),
        )
    )


def cluster(cells: int) -> SimDeployment:
    """So many cells."""
    profile = analytic_profile(MODEL, DEVICE)
    options: dict[str, Any] = {"link": LINK, "hop_s": 2e-4, "gateway_s": 1e-3}
    return build_deployment(cell(), profile, cells=cells, max_num_batched_tokens=STEP_TOKENS, **options)


def rate(cells: int, load: float) -> float:
    """Requests per second that take `load` of the prefill instances' time, if they are prefilled in full steps."""
    cost = analytic_profile(MODEL, DEVICE).cost(Parallelism(TENSOR))
    prompt, _ = synthetic_workload(WORKLOAD).mean()
    batch = StepBatch(STEP_TOKENS, STEP_TOKENS * prompt)
    return load * cells * READERS * STEP_TOKENS / cost.stage_s(batch) / prompt


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEGA


@dataclass(slots=True)
class Meter:
    """Counts requests as they end, and looks at memory and time each tenth of the way to `requests`."""

    requests: int
    tally: AttainmentCounter = field(default_factory=lambda: AttainmentCounter({"": SLO}))
    ended: int = 0
    rss_mb: list[float] = field(default_factory=list)
    tenth_s: list[float] = field(default_factory=list)
    looked_s: float = field(default_factory=time.process_time)

    def add(self, served: JobResult) -> None:
        """One more has ended."""
        self.tally.add(served)
        self.ended += 1
        if self.ended * 10 // self.requests > (self.ended - 1) * 10 // self.requests:
            self.rss_mb.append(round(resident(), 1))
            before_s, self.looked_s = self.looked_s, time.process_time()
            self.tenth_s.append(round(self.looked_s - before_s, 2))


def measure(requests: int, cells: int, load: float, seed: int = 1) -> dict[str, Any]:
    """One run."""
    meter, asked = Meter(requests), rate(cells, load)
    simulation = ExactSimulation(cluster(cells), meter.add)
    began_s = time.process_time()
    simulation.run(islice(synthetic_workload(WORKLOAD).stream(asked, seed), requests))
    seconds = time.process_time() - began_s
    workers = [worker for gate in simulation.gateways for worker in gate.workers.values()]
    engines = [engine for worker in workers for engine in worker.engines]
    steps = sum(engine.table.counters.steps for engine in engines)
    return {
        "requests": requests,
        "devices": cells * cell().devices,
        "instances": len(workers),
        "requests_per_simulated_s": round(asked, 1),
        "simulated_s": round(simulation.events.now_s, 1),
        "seconds": round(seconds, 2),
        "requests_per_s": round(requests / seconds, 1),
        "steps": steps,
        "steps_per_plan": round(steps / sum(engine.table.counters.plans for engine in engines), 2),
        "tenth_s": meter.tenth_s,
        "rss_mb": meter.rss_mb,
        "rss_growth": round(meter.rss_mb[-1] / meter.rss_mb[0], 3),
        "attainment": round(meter.tally.attainment(), 4),
        "failed": meter.tally.failed,
        "ttft_p50_s": round(meter.tally.quantile("ttft", 0.5), 4),
        "ttft_p90_s": round(meter.tally.quantile("ttft", 0.9), 4),
        "tpot_p90_s": round(meter.tally.quantile("tpot", 0.9), 5),
    }


def law(requests: int, load: float) -> list[dict[str, Any]]:
    """How time and memory grow with the cluster, and with the number of requests: each in a process of its own."""
    sizes = [(requests, cells) for cells in (1, 2, 4, 8, 16)]
    sizes += [(requests * part // 5, 16) for part in (1, 2, 3, 4)]
    names = "requests", "devices", "seconds", "requests_per_s"
    rows = []
    for number, cells in sizes:
        options = "--json", "--requests", str(number), "--cells", str(cells), "--load", str(load)
        command = [sys.executable, "-m", "benchmarks.scale", *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row = json.loads(done.stdout)
        rows.append({name: row[name] for name in names} | {"rss_mb": row["rss_mb"][-1]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--cells", type=int, default=16)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--law", action="store_true")
    given = parser.parse_args()
    if given.law:
        report: dict[str, Any] = {"law": law(given.requests // 10, given.load)}
    else:
        report = measure(given.requests, given.cells, given.load)
    print(json.dumps(report) if given.json else json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
