"""What a full queue of bulk work costs online requests, and how much of the idle time it uses.

    python -m benchmarks.bulk_slo [--json] [--rounds 2] [--seconds 8] [--colocated 1] [--no-slo] [--levels 0.3 0.6 0.9]

One deployment of the embedded model. Goodput is measured first: the highest rate of Poisson arrivals at which 90 % of
the requests meet both SLOs, which are set from the times of a lightly loaded deployment. Then, at each share of it, the
same arrivals are sent with and without a batch of many lines beside them, and once more without one; the three take
turns, and change places from round to round. With `--no-slo` the deployment has no SLOs, so bulk work runs only when
nothing else is to be done.

    attainment_loss_points   percentage points fewer requests that meet both SLOs with bulk work than without
    noise_points             percentage points between the two without bulk work: the machine's own noise
    p99_gap_ratio            99th percentile of the time between two tokens, with / without
    ttft_ratio               median time to the first token, with / without
    soaked_share             bulk tokens per second / (those of bulk work alone x the share of time that decode workers
                             are idle without it)
    all_tokens_ratio         tokens per second of both / of online requests alone
    reclaim_p99_ms           from an online request that needs lent slabs until it has them, within one process, beside
                             units of `slice_ms`

Times in milliseconds are this machine's; ratios and points are what is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.bulk_reclaim import SLICE_S, reclaim_times_s
from benchmarks.interference import percentile
from benchmarks.load.deployment import ServedDeployment, StampedStream, pool_flags, serving_deployment
from benchmarks.load.prompts import PromptTokens

PROMPT_TOKENS, ANSWER_TOKENS = (64, 384), (16, 48)
BULK_PROMPT, BULK_ANSWER, BULK_LINES = 128, 64, 4000
TARGET = 0.9
# SLOs are these multiples of the times at a light load.
TTFT_FACTOR, TPOT_FACTOR = 8.0, 5.0
LIGHT_RATE, LIGHT_SECONDS, SEARCH_STEPS = 1.0, 6.0, 5
BULK_TOKENS = "diptych:bulk_tokens_total"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt, and when to send it, in seconds from the beginning."""

    at_s: float
    prompt: list[int]
    answer_tokens: int


@dataclass(slots=True)
class LoadRun:
    """What came of the arrivals of one run or more."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    asked: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    bulk_tokens: float = 0.0
    # Seconds in which decode workers computed online requests, per worker.
    busy_s: float = 0.0

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """The share of the requests that met both SLOs."""
        good = sum(
            first <= ttft_s and each <= tpot_s for first, each in zip(self.ttft_s, self.tpot_s, strict=True)
        )
        return good / max(1, self.asked)

    @property
    def idle_share(self) -> float:
        """The share of time in which decode workers did nothing for online requests."""
        return max(0.0, 1 - self.busy_s / self.seconds)

    @property
    def bulk_rate(self) -> float:
        """Tokens of bulk work per second, prompts included."""
        return self.bulk_tokens / self.seconds

    @property
    def token_rate(self) -> float:
        """New tokens of online requests per second."""
        return self.tokens / self.seconds


def draw_arrivals(prompts: PromptTokens, draw: random.Random, rate: float, seconds: float) -> list[Arrival]:
    """Poisson arrivals at `rate` per second."""
    found, at_s = [], 0.0
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        found.append(Arrival(at_s, prompts.take(draw.randint(*PROMPT_TOKENS)), draw.randint(*ANSWER_TOKENS)))
    return found


def served_model(deployment: ServedDeployment) -> str:
    """The name of the model."""
    return str(deployment.get("/v1/models")["data"][0]["id"])


def decode_stats(deployment: ServedDeployment) -> dict[str, float]:
    """The statistics of the decode workers, per worker."""
    pool = deployment.get("/status")["pools"]["decode"]
    return {"step_seconds": pool["step_seconds"] / max(1, pool["workers"])}


async def run_load(
    deployment: ServedDeployment, arrivals: list[Arrival], seconds: float, into: LoadRun
) -> None:
    """Send each request at its moment, whatever became of those before."""
    busy_s, bulk = decode_stats(deployment)["step_seconds"], deployment.metric(BULK_TOKENS)
    model, begun_s = served_model(deployment), time.monotonic()

    async def ask(arrival: Arrival) -> None:
        await asyncio.sleep(begun_s + arrival.at_s - time.monotonic())
        sent_s = time.monotonic()
        body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": arrival.answer_tokens}
        stream = await StampedStream.open(deployment.port, model=model, prompt=arrival.prompt, **body)
        try:
            await stream.done()
            stamps = stream.stamps_s
            gaps = [after - before for before, after in zip(stamps, stamps[1:], strict=False)]
            into.ttft_s.append(stamps[0] - sent_s)
            into.tpot_s.append((stamps[-1] - stamps[0]) / max(1, len(stamps) - 1))
            into.gaps_s += gaps
            into.tokens += len(stamps)
        except RuntimeError:
            into.failed += 1
        finally:
            await stream.leave()

    into.asked += len(arrivals)
    await asyncio.gather(*(ask(arrival) for arrival in arrivals))
    await asyncio.sleep(max(0.0, begun_s + seconds - time.monotonic()))
    elapsed_s = time.monotonic() - begun_s
    into.bulk_tokens += deployment.metric(BULK_TOKENS) - bulk
    # Statistics come with heartbeats.
    await asyncio.sleep(0.6)
    into.busy_s += decode_stats(deployment)["step_seconds"] - busy_s
    into.seconds += elapsed_s


class BatchQueue:
    """A file of many lines, of which a batch is started and cancelled again."""

    def __init__(self, deployment: ServedDeployment, prompts: PromptTokens) -> None:
        self._http = httpx.Client(base_url=deployment.url, timeout=120)
        body = {
            "model": served_model(deployment),
            "max_tokens": BULK_ANSWER,
            "temperature": 0,
            "ignore_eos": True,
        }
        texts = [prompts.take(BULK_PROMPT) for _ in range(200)]
        lines = (
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": body | {"prompt": texts[number % len(texts)]},
            }
            for number in range(BULK_LINES)
        )
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        upload = self._http.post(
            "/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}
        )
        self._file = upload.raise_for_status().json()["id"]

    @contextlib.contextmanager
    def running(self, deployment: ServedDeployment) -> Iterator[None]:
        """A batch runs, at its full rate, until the context is left."""
        order = {"input_file_id": self._file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = self._http.post("/v1/batches", json=order).raise_for_status().json()["id"]
        while not deployment.metric("diptych:bulk_sequences_open"):
            time.sleep(0.05)
        time.sleep(1.0)
        try:
            yield
        finally:
            self._http.post(f"/v1/batches/{batch}/cancel").raise_for_status()
            while deployment.metric("diptych:bulk_sequences_open"):
                time.sleep(0.05)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


async def find_goodput(
    deployment: ServedDeployment, prompts: PromptTokens, slo: tuple[float, float], seconds: float
) -> float:
    """The highest rate of requests per second with `TARGET` attainment, to about a tenth."""
    low, high, rate = 0.0, math.inf, 4.0
    for step in range(SEARCH_STEPS):
        run = LoadRun()
        await run_load(deployment, draw_arrivals(prompts, random.Random(step), rate, seconds), seconds, run)
        deployment.rest()
        if run.attainment(*slo) >= TARGET:
            low = rate
        else:
            high = rate
        rate = 2 * low if math.isinf(high) else (low + high) / 2
    return low or high / 4


async def compare(
    deployment: ServedDeployment, slo: tuple[float, float] | None, options: argparse.Namespace
) -> dict[str, Any]:
    """All levels, with and without bulk work."""
    prompts = PromptTokens(deployment)
    queue = BatchQueue(deployment, prompts)
    limits = slo or (math.inf, math.inf)
    goodput = options.goodput or await find_goodput(deployment, prompts, limits, options.seconds)
    with queue.running(deployment):
        alone = LoadRun()
        await run_load(deployment, [], options.seconds, alone)
    found: dict[str, Any] = {
        "goodput_rps": round(goodput, 2),
        "bulk_alone_tokens_per_s": round(alone.bulk_rate, 1),
    }
    for level in options.levels:
        runs = {"without": LoadRun(), "with": LoadRun(), "again": LoadRun()}
        for number in range(options.rounds):
            for mode in [*runs][number % 3 :] + [*runs][: number % 3]:
                # The same moments and lengths, but other tokens, which no worker has cached.
                draw = random.Random(100 + number)
                arrivals = draw_arrivals(prompts, draw, level * goodput, options.seconds)
                beside = queue.running(deployment) if mode == "with" else contextlib.nullcontext()
                with beside:
                    await run_load(deployment, arrivals, options.seconds, runs[mode])
                deployment.rest()
        found[f"level_{level:g}"] = summarize(runs, alone, limits)
    queue.close()
    return found


def summarize(runs: dict[str, LoadRun], alone: LoadRun, slo: tuple[float, float]) -> dict[str, Any]:
    """The figures of one level."""
    without, beside, again = runs["without"], runs["with"], runs["again"]
    unbothered = (without.attainment(*slo) + again.attainment(*slo)) / 2
    loss = 100 * (unbothered - beside.attainment(*slo))
    idle_rate = alone.bulk_rate * without.idle_share
    new_share = BULK_ANSWER / (BULK_PROMPT + BULK_ANSWER)
    return {
        "requests": without.asked,
        "failed": [without.failed, beside.failed],
        "attainment": [round(one.attainment(*slo), 4) for one in (without, again, beside)],
        "attainment_ttft": [round(one.attainment(slo[0], math.inf), 4) for one in (without, again, beside)],
        "attainment_loss_points": round(loss, 2),
        "noise_points": round(100 * abs(without.attainment(*slo) - again.attainment(*slo)), 2),
        "p99_gap_ratio": round(percentile(beside.gaps_s, 99) / percentile(without.gaps_s, 99), 3),
        "ttft_ratio": round(median(beside.ttft_s) / median(without.ttft_s), 3),
        "idle_share": round(without.idle_share, 3),
        "soaked_share": round(beside.bulk_rate / idle_rate, 3) if idle_rate else None,
        "all_tokens_ratio": round((beside.token_rate + new_share * beside.bulk_rate) / without.token_rate, 3),
    }


async def light_times(deployment: ServedDeployment) -> tuple[float, float]:
    """Median seconds to the first token, and per token, at a light load."""
    run, prompts = LoadRun(), PromptTokens(deployment)
    for count in (LoadRun(), run):
        arrivals = draw_arrivals(prompts, random.Random(7), LIGHT_RATE, LIGHT_SECONDS)
        await run_load(deployment, arrivals, LIGHT_SECONDS, count)
    return median(run.ttft_s), median(run.tpot_s)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start deployments one after the other, and measure."""
    flags = pool_flags(options.colocated)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        slo = None
        if not options.no_slo:
            with serving_deployment(*flags) as deployment:
                deployment.wait_ready()
                ttft_s, tpot_s = uvloop.run(light_times(deployment))
            slo = TTFT_FACTOR * ttft_s, TPOT_FACTOR * tpot_s
            flags += ("--slo-ttft-ms", f"{1000 * slo[0]:.0f}", "--slo-tpot-ms", f"{1000 * slo[1]:.0f}")
        with serving_deployment(*flags, "--data-dir", folder) as deployment:
            deployment.wait_ready()
            found = uvloop.run(compare(deployment, slo, options))
    reclaim_s = reclaim_times_s()
    return found | {
        "slo_ms": None if slo is None else [round(1000 * limit_s) for limit_s in slo],
        "slice_ms": 1000 * SLICE_S,
        "reclaim_p99_ms": round(1000 * percentile(reclaim_s, 99), 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each run")
    parser.add_argument(
        "--levels", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="shares of the goodput"
    )
    parser.add_argument("--colocated", type=int, default=0, help="workers that do both; 0: one of each kind")
    parser.add_argument("--no-slo", action="store_true", help="a deployment without SLOs; needs --goodput")
    parser.add_argument("--goodput", type=float, help="requests per second, instead of measuring them")
    options = parser.parse_args()
    if options.no_slo and options.goodput is None:
        parser.error("--no-slo needs --goodput")
    load = os.getloadavg()[0]
    found = measure(options) | {"colocated": options.colocated, "load_average": round(load, 1)}
    if options.json:
        print(json.dumps(found))
    else:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
