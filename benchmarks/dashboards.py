"""Whether dashboards show what clients got: a real Prometheus beside a real deployment, under load, then under faults.

    python -m benchmarks.dashboards [--json] [--seconds 40] [--good 120] [--slo-ttft-ms 1000] [--slo-tpot-ms 500]
                                    [--wait 2] [--factor 5] [--pictures docs/img] [--only-good SHARE]

One deployment of the embedded model with SLOs and a replanner that acts: one prefill and two decode workers, whose
roles it may change. `diptych bench` sends half of what it can serve for `--good` seconds, then `--factor` times as much
as it can serve for `--seconds`, then long prompts, for which another prefill worker takes over. What steps cost in the
replanner's eyes is made up, and follows from the peak, so that its decisions do not depend on this machine. Then the
decode workers are killed under load, and kept down, and after that the prefill workers. Two workers without a model at
last play what real ones guard against: KV that is held at rest, and KV that arrives corrupt.

    queries_wrong       queries of dashboards, rules and alerts that Prometheus does not take
    queries_unknown     names in them that neither the gateway nor a rule has
    queries_data        share of the dashboards' queries that have data after the load
    queries_empty       queries without data at any time until after the faults, by name in `empty`
    stages_gap          sum of the stages over the mean TTFT, less 1, from what Prometheus stored
    attainment_gap      points between attainment in Prometheus and what `diptych bench` counted, the larger of half
                        load and overload (Prometheus has some requests more, with which bench asks what is served)
    alerts_missed       of the faults (`alerts`): those without their own alert in its wait and two evaluations
    alerts_false        alerts that fired while service was good
    replan_actions      what the replanner did, by action and outcome

Rules are evaluated every second, so that a run is short; thresholds, windows and waits are those that are written.
`--pictures` draws every row of the dashboards. `--only-good SHARE` ends after good service, at this share of the peak
instead of half: with `--good 1800`, half an hour that must alert nobody, and that a busy machine can serve well too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import ServedDeployment, serving_deployment
from benchmarks.overload import Load
from benchmarks.watching.broken_workers import alert_delays
from benchmarks.watching.row_pictures import draw_rows
from planner.costs.model import find_model
from planner.costs.profile import CostProfile
from planner.costs.profile_file import save_profile
from planner.costs.step import StepCost
from planner.hardware import find_device
from planner.types import Parallelism
from tests.support.bench_runs import CHAT, DOCUMENTS, answers_per_s, run_bench
from tests.support.dashboard_queries import check_queries, panel_queries, rule_queries
from tests.support.prometheus_server import PrometheusServer, scraping

TARGET = 0.9
CLIENTS, NUM_REQUESTS = (4, 8, 16, 32), 200
HALF = 0.5
# In the replanner's eyes a prefill worker is busy all the time at the peak, so a second one is needed for as many
# requests with prompts of `DOCUMENTS`, at a share of the peak that leaves it idle with those of `CHAT`.
CHAT_PROMPT, DOCUMENTS_SHARE = 95, 0.3
DECODE_COST = (0.001, 0.0, 0.0001)
WINDOW_S = 10.0
ACTIONS = "diptych:replan_actions_total"
EVALUATION_S = 1.0
# What a busy machine may need to notice a fault, beside an alert's wait.
PATIENCE_S = 30.0
# The window of the alert on a dead pool, the longest time that a fault lasts, and requests after it.
DEAD_WAIT_S, MAX_FAULT_S, RECOVERY_S = 30.0, 120.0, 10.0


class Watched:
    """A deployment, its load, and the Prometheus that watches it."""

    def __init__(
        self, deployment: ServedDeployment, server: PrometheusServer, slos: tuple[str, ...], seed: int
    ) -> None:
        """`slos` are the flags that both `diptych serve` and `diptych bench` have for them."""
        self.deployment, self.server, self.load = deployment, server, Load(deployment, seed)
        self._slos = slos
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

    def count_met(self) -> tuple[float, float]:
        """Sequences that met their SLOs, and all that have SLOs, as Prometheus stored them of a deployment at rest.

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
        """Attainment of this load as `diptych bench` counted it, and in Prometheus."""
        met, every = await asyncio.to_thread(self.count_met)
        figures = await self.bench(CHAT, rate, seconds)
        await self.ask_queries()
        met_after, every_after = await asyncio.to_thread(self.count_met)
        return float(figures["attainment"]), (met_after - met) / max(1.0, every_after - every)

    async def bench(self, lengths: tuple[str, ...], rate: float, seconds: float) -> dict[str, Any]:
        """What `diptych bench` reports of a load."""
        load = ("--rate", f"{rate:.3f}", "--duration", f"{seconds:g}")
        return await run_bench(self.deployment.url, *lengths, *load, *self._slos)


async def peak_rate(url: str) -> float:
    """Answers per second of the best number of clients."""
    await answers_per_s(url, CLIENTS[0], NUM_REQUESTS)
    return max([await answers_per_s(url, clients, NUM_REQUESTS) for clients in CLIENTS])


def save_costs(peak: float, path: Path) -> None:
    """Write the profile that the replanner believes: at the peak, one prefill worker is always busy."""
    cost = StepCost(prefill=(0.0, 1 / (peak * CHAT_PROMPT), 0.0), decode=(DECODE_COST,))
    model, device = find_model("embedded"), find_device("cpu")
    save_profile(CostProfile(model, device, {Parallelism(): cost}, source="made up"), path)


def first_token_sums(server: PrometheusServer) -> tuple[float, float]:
    """Seconds to the first token of all sequences: the sum of their stages, and the whole."""
    names = ("diptych:ttft_stage_seconds_sum", "vllm:time_to_first_token_seconds_sum")
    stages, whole = (server.value(f"sum({name})") or 1.0 for name in names)
    return stages, whole


async def await_alert(
    server: PrometheusServer, chosen: str, limit_s: float, fires: bool = True
) -> float | None:
    """Seconds until one of the alerts with these labels fires, or until none does; None after `limit_s`."""
    begun_s, expr = time.monotonic(), f'ALERTS{{alertstate="firing", {chosen}}}'
    while time.monotonic() - begun_s < limit_s:
        if bool(await asyncio.to_thread(server.query, expr)) is fires:
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
    alert, limit_s = (
        f'alertname="DiptychPoolDead", role="{role}"',
        DEAD_WAIT_S + 2 * EVALUATION_S + PATIENCE_S,
    )
    await await_alert(watched.server, alert, limit_s, fires=False)
    doing = asyncio.create_task(keep_dead(watched, role, rate))
    after = await await_alert(watched.server, alert, limit_s)
    await watched.ask_queries()
    doing.cancel()
    await asyncio.gather(doing, return_exceptions=True)
    await asyncio.to_thread(watched.deployment.wait_ready)
    await watched.load.storm(rate, RECOVERY_S)
    await watched.ask_queries()
    return after


async def switch_roles(watched: Watched, peak: float) -> dict[str, float]:
    """Send long prompts until the replanner has acted, for `MAX_FAULT_S` at most. Returns its actions so far."""
    doing = asyncio.create_task(watched.bench(DOCUMENTS, DOCUMENTS_SHARE * peak, MAX_FAULT_S))
    done = f'sum({ACTIONS}{{outcome="done"}})'
    while not doing.done() and not await asyncio.to_thread(watched.server.value, done):
        await asyncio.sleep(EVALUATION_S)
    await asyncio.sleep(WINDOW_S)
    await watched.ask_queries()
    doing.cancel()
    await asyncio.gather(doing, return_exceptions=True)
    await asyncio.to_thread(watched.deployment.wait_ready)
    found = await asyncio.to_thread(watched.server.query, f"{ACTIONS} > 0")
    return {f"{one['metric']['action']} {one['metric']['outcome']}": float(one["value"][1]) for one in found}


async def serve_well(watched: Watched, rate: float, seconds: float) -> tuple[tuple[float, float], list[str]]:
    """Attainment of a load that can be served, as of `Watched.attainment`, and the alerts that it raised."""
    good = await watched.attainment(rate, seconds)
    raised = await asyncio.to_thread(
        watched.server.query, 'max by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1h]))'
    )
    return good, sorted(one["metric"]["alertname"] for one in raised)


async def play_good(watched: Watched, peak: float, options: argparse.Namespace) -> dict[str, Any]:
    """Good service alone."""
    (counted, stored), raised = await serve_well(watched, options.only_good * peak, options.good)
    return {
        "attainment_gap": round(100 * abs(counted - stored), 2),
        "alerts_false": len(raised),
        "attainment": {"good": (counted, stored)},
        "false": raised,
    }


async def play(watched: Watched, peak: float, options: argparse.Namespace) -> dict[str, Any]:
    """Good service, overload, faults."""
    server, begun_s = watched.server, time.time()
    good, raised = await serve_well(watched, HALF * peak, options.good)
    storm = asyncio.create_task(watched.attainment(options.factor * peak, options.seconds))
    alerts = {
        "overload": await await_alert(server, 'alertname="DiptychBurnFast"', options.seconds + PATIENCE_S)
    }
    overload = await storm
    data_share = len(watched.with_data) / len(panel_queries())
    actions = await switch_roles(watched, peak)
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
        "alerts_false": len(raised),
        "attainment": {"half": good, "overload": overload},
        "alerts": alerts,
        "replan_actions": actions,
        "empty": empty,
        "false": raised,
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
    parser.add_argument("--only-good", type=float, metavar="SHARE", help="good service alone, at this share")
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=500.0)
    parser.add_argument("--factor", type=float, default=5.0, help="overload over what can be served")
    parser.add_argument("--wait", type=float, default=2.0, help="--max-queue-wait-s of the deployment")
    parser.add_argument("--pictures", type=Path, help="draw the rows into this folder (PNG)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diptych-watched-") as folder:
        report = measure(options, Path(folder) / "profile.json")
    print(json.dumps(report, indent=None if options.json else 2))


def measure(options: argparse.Namespace, profile: Path) -> dict[str, Any]:
    """Find the peak of one deployment, and watch another of the same kind. The costs are written to `profile`."""
    pools = ("--prefill", "1", "--decode", "2", "--kv-cache-memory-bytes", "256MiB")
    slos = ("--slo-ttft-ms", f"{options.slo_ttft_ms:g}", "--slo-tpot-ms", f"{options.slo_tpot_ms:g}")
    flags = (*pools, *slos, "--slo-target", str(TARGET), "--max-queue-wait-s", f"{options.wait:g}")
    with serving_deployment(*flags) as deployment:
        deployment.wait_ready()
        peak = uvloop.run(peak_rate(deployment.url))
    save_costs(peak, profile)
    replan = ("--replan", "--replan-profile", str(profile), "--replan-window-s", f"{WINDOW_S:g}s")
    with serving_deployment(*flags, *replan) as deployment:
        deployment.wait_ready()
        # What came before the first scrape is no increase: warming up is not part of what is watched.
        uvloop.run(answers_per_s(deployment.url, CLIENTS[0], NUM_REQUESTS))
        evaluation = f"{EVALUATION_S:g}s"
        with scraping(f"127.0.0.1:{deployment.port}", evaluation=evaluation, slo_target=TARGET) as server:
            watched = Watched(deployment, server, slos, options.seed)
            playing = play if options.only_good is None else play_good
            return uvloop.run(playing(watched, peak, options))


if __name__ == "__main__":
    main()
