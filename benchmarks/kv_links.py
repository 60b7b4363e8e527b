"""What coded KV gains on slow links: from first to second token, and goodput, per codec and rate of the link.

    python -m benchmarks.kv_links [--json] [--codecs raw fp16 int8 nuq4-1% nuq3-1%.keep0.95 auto]
                                  [--mbit 20 200 1000] [--tokens 1024] [--idle 5] [--requests 12]
                                  [--seconds 20] [--width 0.05] [--seeds 1] [--slo-ttft-ms 5000] [--slo-second-ms 5000]

For each codec one prefill and one decode worker of the embedded model, each in a network namespace of its own. KV goes
by NIXL over TCP through a pair of interfaces that `tc` shapes to the rate, both ways; the channel to the gateway is not
shaped. All deployments run at the same time, and are measured in turn. Prompts share nothing; answers have two tokens.
`nuq3-1%.keep0.95` is the codec with `--kv-keep 0.95`: heads drop KV at the end of the prompt, before it is moved.

    second_token_s     median seconds from the first to the second token, one request at a time
    goodput            requests per second: the largest rate at which 90 % of the requests have their first token within
                       `--slo-ttft-ms` and the second one within `--slo-second-ms` of the first, as `diptych bench
                       --search` finds it, with runs of at least `--requests` requests and `--seconds` seconds,
                       in steps of `--width` times the rate of one request after the other
    cable_bytes_per_token    bytes that went over the cable, headers included, over the tokens of the prompts
    over_raw, over_fp16      goodput of each other codec but `auto` / that of raw and of fp16
    auto_over_best           goodput of `auto`, which chooses between raw and nuq4-1%, / that of the best other codec
    worst_over_raw     the smallest goodput of a codec / that of raw, over links that raw does not fill: rates at which
                       raw's KV of a prompt takes less than half of a prefill

Needs root and the tools `ip`, `bridge` and `tc`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.shaped_link import ShapedDeployment, shaped_deployments, split_column
from diptych.chunks import AUTO_CLASS
from diptych.slo import Slo
from planner.types import Job
from planner.workload.workload import Workload
from services.bench.load_generator import LoadGenerator, LoadRun, RunOptions
from services.bench.rate_search import BenchLoad, GoodputSearch, RateStudy
from services.bench.server import BenchServer, probe_server
from tests.support.network_namespaces import running_bridge, why_unavailable

Figures = dict[str, Any]

CODECS = ["raw", "fp16", "int8", "nuq4-1%", "nuq3-1%.keep0.95", AUTO_CLASS]
TIMEOUT_S = 120.0
# A link counts as not binding if it takes less than this share of a prefill to move its KV as raw.
FREE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class LongEnoughLoad(BenchLoad):
    """Runs of at least `requests` requests and `seconds` seconds: a short burst would fit into the SLOs at any rate."""

    def make_jobs(self, rate: float | None, seed: int) -> list[Job]:
        """The requests of one run at `rate`, from 0 s on."""
        assert rate is not None and self.requests is not None and self.seconds is not None
        return self.workload.sample(max(self.requests, round(self.seconds * rate)), rate, seed, self.cv)


def measure_idle(
    runner: asyncio.Runner, server: BenchServer, deployment: ShapedDeployment, options: argparse.Namespace
) -> Figures:
    """One request at a time: seconds of both tokens, and bytes on the cable."""
    jobs = [Job(0.0, options.tokens, 2)] * (options.idle + 1)
    before = deployment.moved_bytes()
    run = LoadRun(0.0, 0, len(jobs), 0.0)
    plan = RunOptions(Slo(), timeout_s=TIMEOUT_S, max_open=1)
    records = runner.run(LoadGenerator(server, jobs, plan, run).run_load()).records
    if failed := [one.error_text or one.result.failed for one in records if one.result.failed]:
        raise RuntimeError(f"{deployment.column}: {failed[0]}")
    moved = deployment.moved_bytes() - before
    # The first request opens connections.
    return {
        "second_token_s": round(statistics.median(one.result.tpot_s for one in records[1:]), 3),
        "request_s": round(run.wall_s / len(jobs), 3),
        "cable_bytes_per_token": round(moved / sum(one.prompt for one in records), 1),
    }


def measure_goodput(
    runner: asyncio.Runner, server: BenchServer, start: float, options: argparse.Namespace
) -> Figures:
    """The largest rate that meets the SLOs."""
    slo = Slo(options.slo_ttft_ms / 1e3, options.slo_second_ms / 1e3)
    workload = Workload.of([Job(0.0, options.tokens, 2)])
    load = LongEnoughLoad(workload, seconds=options.seconds, requests=options.requests)
    study = RateStudy(server, load, RunOptions(slo, timeout_s=TIMEOUT_S))
    runner.run(study.measure_idle_latency())
    search = GoodputSearch(
        lambda rate, seed: runner.run(study.measure_attainment(rate, seed)),
        slo.attainment,
        width=float(f"{options.width * start:.2g}"),
    )
    found = search.find_goodput(range(options.seeds), start, 1e3, study.run_size)
    return {
        "goodput": round(found.rate, 3),
        "goodputs": [round(rate, 3) for rate in found.rates],
        "runs": len(study.runs),
        "began_busy": sum(not run.began_idle for run in study.runs),
    }


def compare_codecs(links: dict[str, dict[str, Figures]], tokens: int) -> Figures:
    """Ratios of goodput by link, and the smallest over raw of the links that do not bind."""
    found: Figures = {"over_raw": {}, "over_fp16": {}, "auto_over_best": {}, "worst_over_raw": None}
    for name, codecs in links.items():
        fixed = {codec: one["goodput"] for codec, one in codecs.items() if codec != AUTO_CLASS}
        if AUTO_CLASS in codecs and max(fixed.values(), default=0):
            found["auto_over_best"][name] = round(codecs[AUTO_CLASS]["goodput"] / max(fixed.values()), 2)
        for base in ("raw", "fp16"):
            if fixed.get(base):
                found[f"over_{base}"][name] = {
                    codec: round(one / fixed[base], 2) for codec, one in fixed.items() if codec != base
                }
        if "raw" in codecs and codecs["raw"]["goodput"] and not _binds(float(name), codecs["raw"], tokens):
            worst = min(one["goodput"] / codecs["raw"]["goodput"] for one in codecs.values())
            found["worst_over_raw"] = round(min(worst, found["worst_over_raw"] or worst), 3)
    return found


def _binds(mbit_per_s: float, raw: Figures, tokens: int) -> bool:
    """Whether moving the KV of a prompt as raw takes a relevant part of its prefill."""
    moving_s = raw["cable_bytes_per_token"] * tokens * 8 / (mbit_per_s * 1e6)
    return bool(moving_s > FREE_SHARE * (raw["request_s"] - raw["second_token_s"]))


def check_column(text: str) -> str:
    """A codec, with a threshold of eviction or not. Raises ValueError if that is not above 0 and at most 1."""
    split_column(text)
    return text


def measure_links(options: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """All figures, by rate of the link and by codec."""
    links: dict[str, dict[str, Figures]] = {f"{rate:g}": {} for rate in options.mbit}
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        running_bridge() as net,
        shaped_deployments(net, options.codecs) as deployments,
    ):
        servers = [runner.run(probe_server(one.url, None, None, "completions")) for one in deployments]
        for name, codecs in links.items():
            for deployment, server in zip(deployments, servers, strict=True):
                deployment.shape_link(float(name))
                figures = measure_idle(runner, server, deployment, options)
                figures |= measure_goodput(runner, server, 1 / figures["request_s"], options)
                codecs[deployment.column] = figures
                print(
                    f"{name} Mbit/s, {deployment.column}: {json.dumps(figures)}", file=sys.stderr, flush=True
                )
        for server in servers:
            server.client.close_idle()
    return links


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--codecs", nargs="+", type=check_column, default=CODECS)
    parser.add_argument("--mbit", nargs="+", type=float, default=[20.0, 200.0, 1000.0])
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--idle", type=int, default=5, help="requests one at a time")
    parser.add_argument("--requests", type=int, default=12, help="of one run of the search, at least")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one run of the search, at least")
    parser.add_argument(
        "--width", type=float, default=0.05, help="step, as a share of the rate one at a time"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slo-ttft-ms", type=float, default=5000.0)
    parser.add_argument("--slo-second-ms", type=float, default=5000.0)
    options = parser.parse_args()
    if why := why_unavailable():
        parser.error(why)
    load = os.getloadavg()[0]
    links = measure_links(options)
    found = compare_codecs(links, options.tokens)
    found |= {"load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2), "mbit": links}
    print(json.dumps(found, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
