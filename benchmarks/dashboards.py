"""Whether dashboards show what clients got: a real Prometheus beside a real deployment, under load, then under faults.

    python -m benchmarks.dashboards [--json] [--seconds 40] [--good 120] [--pictures docs/img]

One deployment of the embedded model with SLOs and a replanner that only advises. It gets half of what it can serve for
`--good` seconds, then five times as much for `--seconds`; then its decode worker is killed under load, and kept
down, and after that its prefill worker. Two workers without a model then play what real ones guard against: KV that is
held at rest, and KV that arrives corrupt.

    queries_wrong       queries of dashboards, rules and alerts that Prometheus does not take
    queries_unknown     names in them that neither the gateway nor a rule has
    queries_data        share of the dashboards' queries that have data after the load
    queries_empty       queries without data at any time until after the faults, by name in `empty`
    stages_gap          sum of the stages over the mean TTFT, less 1, from what Prometheus stored
    attainment_gap      points between attainment in Prometheus and what the client counted, the largest of both loads
    alerts_missed       of the faults (`alerts`): those without their own alert in its wait and two evaluations
    alerts_false        alerts that fired while service was good

Rules are evaluated every second, so that a run is short; thresholds, windows and waits are those that are written.
`--pictures` draws every row of the dashboards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import ServedDeployment, serving_deployment
from benchmarks.overload import Load, Seen, total
from benchmarks.watching.broken_workers import alert_delays
from benchmarks.watching.dashboard_queries import check_queries, panel_queries, rule_queries
from benchmarks.watching.prometheus_server import PrometheusServer, scraping
from benchmarks.watching.row_pictures import draw_rows

WAIT_S, SLO_TTFT_S, TARGET = 2.0, 1.0, 0.9
STEP_S, CLIENTS = 8.0, (4, 8, 16)
FACTOR, HALF = 5.0, 0.5
EVALUATION_S = 1.0
# What a busy machine may need to notice a fault, beside an alert's wait.
PATIENCE_S = 30.0
# The wait of the alert on a dead pool, the longest time that a fault lasts, and requests after it.
DEAD_WAIT_S, MAX_FAULT_S, RECOVERY_S = 30.0, 120.0, 10.0


class Watched:
    """A deployment, its load, and the Prometheus that watches it."""

    def __init__(self, deployment: ServedDeployment, server: PrometheusServer, seed: int) -> None:
        self.deployment, self.server, self.load = deployment, server, Load(deployment, seed)
        self.with_data: set[str] = set()

    async def ask_queries(self) -> None:
        """Ask all queries of the dashboards once, and remember which have data."""
        report = await asyncio.to_thread(
            check_queries, self.server, self.page(), panel_queries(), panel_queries()
        )
        self.with_data |= panel_queries().keys() - set(report.empty)

    def page(self) -> str:
        """The deployment's metrics."""
        return httpx.get(f"{self.deployment.url}/metrics", timeout=60).raise_for_status().text

    def judged(self) -> tuple[float, float]:
        """Sequences that met their SLOs, and all that were judged, as Prometheus stored them of a deployment at rest.

        Raises TimeoutError if Prometheus does not get there: it has not scraped the latest figures.
        """
        self.deployment.rest()
        total_of_all, deadline_s = "diptych:slo_requests_total", time.monotonic() + PATIENCE_S
        exposed = self.deployment.metric(total_of_all)
        while time.monotonic() < deadline_s:
            stored = self.server.value(f"sum({total_of_all})")
            if stored is not None and stored >= exposed:
                both = f'{total_of_all}{{objective="all"'
                met = self.server.value(f'sum({both}, met="true"}})') or 0.0
                return met, self.server.value(f"sum({both}}})") or 0.0
            time.sleep(EVALUATION_S / 2)
        raise TimeoutError("Prometheus does not store what the gateway exposes")

    async def attainment(self, rate: float, seconds: float) -> tuple[float, float]:
        """Attainment of this load as the client counted it, and in Prometheus."""
        met, every = await asyncio.to_thread(self.judged)
        seen = await self.load.storm(rate, seconds)
        await self.ask_queries()
        met_after, every_after = await asyncio.to_thread(self.judged)
        return count_attainment(seen), (met_after - met) / max(1.0, every_after - every)


def count_attainment(seen: Seen) -> float:
    """The share of all requests whose answer was whole and began in time, as clients saw it."""
    good = sum(ttft_s <= SLO_TTFT_S for ttft_s, _ in seen.whole)
    return good / max(1, total(seen))


async def peak_rate(load: Load) -> float:
    """Answers per second of the best number of clients."""
    await load.steady(CLIENTS[0], STEP_S / 2)
    return max([await load.steady(clients, STEP_S) for clients in CLIENTS])


def first_token_sums(server: PrometheusServer) -> tuple[float, float]:
    """Seconds to the first token of all sequences: the sum of their stages, and the whole."""
    names = ("diptych:ttft_stage_seconds_sum", "vllm:time_to_first_token_seconds_sum")
    stages, whole = (server.value(f"sum({name})") or 1.0 for name in names)
    return stages, whole


async def await_alert(server: PrometheusServer, alert: str, limit_s: float) -> float | None:
    """Seconds until an alert fires; None if it does not within `limit_s`."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < limit_s:
        if alert in await asyncio.to_thread(server.firing):
            return time.monotonic() - begun_s
        await asyncio.sleep(EVALUATION_S / 2)
    return None


async def keep_dead(watched: Watched, role: str, rate: float) -> None:
    """Kill every worker of a role whenever one comes up, until cancelled, while requests come."""

    async def kill() -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError, ProcessLookupError):
                state = await asyncio.to_thread(watched.deployment.get, "/status")
                for worker in state["workers"]:
                    if worker["role"] == role:
                        os.kill(int(worker["pid"]), signal.SIGKILL)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kill())
        tasks.create_task(watched.load.storm(rate, MAX_FAULT_S))


async def dead_pool(watched: Watched, role: str, rate: float) -> float | None:
    """Seconds until a pool that stays dead raises its alert, with service restored at the end."""
    doing = asyncio.create_task(keep_dead(watched, role, rate))
    after = await await_alert(watched.server, "DiptychPoolDead", DEAD_WAIT_S + 2 * EVALUATION_S + PATIENCE_S)
    await watched.ask_queries()
    doing.cancel()
    await asyncio.gather(doing, return_exceptions=True)
    await asyncio.to_thread(watched.deployment.wait_ready)
    await watched.load.storm(rate, RECOVERY_S)
    await watched.ask_queries()
    return after


async def play(watched: Watched, peak: float, options: argparse.Namespace) -> dict[str, Any]:
    """Good service, overload, faults."""
    server, begun_s = watched.server, time.time()
    good = await watched.attainment(HALF * peak, options.good)
    false_alerts = await asyncio.to_thread(
        server.query, 'max by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1h]))'
    )
    storm = asyncio.create_task(watched.attainment(FACTOR * peak, options.seconds))
    alerts = {"overload": await await_alert(server, "DiptychBurnFast", options.seconds + PATIENCE_S)}
    overload = await storm
    data_share = len(watched.with_data) / len(panel_queries())
    for role in ("decode", "prefill"):
        alerts[f"dead {role} pool"] = await dead_pool(watched, role, 0.2 * peak)
    alerts |= await asyncio.to_thread(alert_delays, EVALUATION_S, PATIENCE_S)
    stages, whole = await asyncio.to_thread(first_token_sums, server)
    report = check_queries(server, watched.page(), panel_queries() | rule_queries(TARGET))
    empty = sorted(panel_queries().keys() - watched.with_data)
    result: dict[str, Any] = {
        "queries": report.total,
        "queries_wrong": len(report.wrong),
        "queries_unknown": len(report.unknown),
        "queries_data": round(data_share, 3),
        "queries_empty": len(empty),
        "stages_gap": round(stages / whole - 1, 5),
        "attainment_gap": round(100 * max(abs(counted - stored) for counted, stored in (good, overload)), 2),
        "alerts_missed": sum(after is None for after in alerts.values()),
        "alerts_false": len(false_alerts),
        "attainment": {"half": good, "overload": overload},
        "alerts": alerts,
        "empty": empty,
        "false": sorted(one["metric"]["alertname"] for one in false_alerts),
        "wrong": report.wrong + report.unknown,
    }
    if options.pictures is not None:
        drawn = await asyncio.to_thread(draw_rows, server, options.pictures, begun_s, time.time())
        result["pictures"] = [str(path) for path in drawn]
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--seconds", type=float, default=40.0, help="of overload")
    parser.add_argument(
        "--good", type=float, default=120.0, help="seconds of good service; 1800 for half an hour"
    )
    parser.add_argument("--pictures", type=Path, help="draw the rows into this folder (PNG)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    flags = ("--prefill", "1", "--decode", "1", "--kv-cache-memory-bytes", "256MiB")
    replan = ("--replan", "--replan-mode", "advise", "--replan-window-s", "20s")
    # The client here measures first tokens only, so the other SLO is one that is always met.
    slo = ("--slo-ttft-ms", str(SLO_TTFT_S * 1e3), "--slo-tpot-ms", "60000", "--slo-target", str(TARGET))
    with serving_deployment(*flags, *replan, *slo, "--max-queue-wait-s", str(WAIT_S)) as deployment:
        deployment.wait_ready()
        # What came before the first scrape is no increase: the search for the peak is not part of what is watched.
        peak = uvloop.run(peak_rate(Load(deployment, options.seed)))
        evaluation = f"{EVALUATION_S:g}s"
        with scraping(f"127.0.0.1:{deployment.port}", evaluation=evaluation, slo_target=TARGET) as server:
            report = uvloop.run(play(Watched(deployment, server, options.seed), peak, options))
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
