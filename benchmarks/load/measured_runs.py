"""Runs of `diptych bench`'s load generator against a deployment that is up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.slo import Slo
from planner.types import Job
from services.bench.load_generator import LoadGenerator, LoadRun, RunOptions
from services.bench.server import BenchServer, probe_server, wait_for_rest

TOUCHES, LONGEST_REST_S = 3, 20.0


@dataclass(frozen=True, slots=True)
class MetServer:
    """A deployment that is up, and how long its smallest request takes while it is at rest."""

    server: BenchServer
    calm_s: float


async def meet_server(url: str) -> MetServer:
    """Find out how to ask the server, and how long its smallest request takes. Raises as `probe_server`."""
    server = await probe_server(url, None, None, "completions")
    began_s = time.monotonic()
    for _ in range(TOUCHES):
        await server.send_smallest()
    return MetServer(server, max((time.monotonic() - began_s) / TOUCHES, 0.01))


async def run_jobs(met: MetServer, jobs: Sequence[Job], rate: float, seed: int) -> LoadRun:
    """Send `jobs` when they are due, as soon as the deployment is at rest."""
    rested = await wait_for_rest(met.server, met.calm_s, LONGEST_REST_S)
    run = LoadRun(rate, seed, len(jobs), 0.0, began_idle=rested)
    return await LoadGenerator(met.server, jobs, RunOptions(Slo()), run).run_load()
