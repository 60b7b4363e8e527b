"""How fast a batch goes on while other programs use the machine, and how soon it ends when it is cancelled.

    python -m benchmarks.bulk_shared [--json] [--short] [--rounds 3] [--lines 60] [--answer 200] [--cancels 8]
                                     [--colocated 1]

One deployment of the embedded model, with a data directory. Beside no, one and two processes that compute all the
time, at nice 0 and 19, the same number of requests is answered as a batch and, all at once, over HTTP; the two change
places from round to round, and so do the conditions. No request over HTTP is there while a batch is timed, nor in the
`FIRST_AFTER_S` before.

    batch_share_quiet    tokens per second of a batch / those of the same requests over HTTP, beside nothing
    batch_share_nice19   the same beside one and two processes at nice 19; the lower one
    batch_share_nice0    the same beside one and two processes at nice 0; the lower one
    first_ttft_ms        time to the first token of a request that comes while a batch runs, the first one for a while:
                         the median of all conditions, and the longest; `alone_ttft_ms`: without a batch
    cancel_p99_s         from a batch's cancellation until it is cancelled and no worker has any of its lines

A batch is timed from its creation until it is completed. One that takes longer than `LIMIT_S` is cancelled, and what
its lines have got by then counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.interference import percentile
from benchmarks.load.busy import busy_processes
from benchmarks.load.deployment import ServedDeployment, StampedStream, pool_flags, serving_deployment
from benchmarks.load.prompts import PromptTokens
from benchmarks.load.short_form import add_short_form

PROMPT_TOKENS = 64
LIMIT_S, POLL_S, SLOW_POLL_S = 40.0, 0.02, 0.05
# The answer of a batch that is cancelled has so many tokens, so that it does not end before.
LONG_ANSWER = 1500
# A request comes so long after the beginning of a batch, and after the last other request.
FIRST_AFTER_S = 6.0
BULK_TOKENS, BULK_OPEN = "diptych:bulk_tokens_total", "diptych:bulk_sequences_open"


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The programs beside the deployment: how many, and at which nice level."""

    count: int = 0
    nice: int = 0

    @property
    def name(self) -> str:
        """Its name among the figures."""
        return f"nice{self.nice}_x{self.count}" if self.count else "quiet"


CONDITIONS = (Neighbours(), Neighbours(1, 19), Neighbours(1, 0), Neighbours(2, 19), Neighbours(2, 0))


@dataclass(slots=True)
class ConditionTimes:
    """What was measured beside the same neighbours: one entry per round, or per cancelled batch."""

    batch_rates: list[float] = field(default_factory=list)
    online_rates: list[float] = field(default_factory=list)
    first_ttft_s: list[float] = field(default_factory=list)
    alone_ttft_s: list[float] = field(default_factory=list)
    cancel_s: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Tokens per second of a batch over those of the same requests over HTTP."""
        return median(self.batch_rates) / median(self.online_rates)


class SharedBench:
    """The deployment, and what is sent to it."""

    def __init__(self, deployment: ServedDeployment, lines: int, answer: int) -> None:
        self.deployment, self.lines, self.answer = deployment, lines, answer
        self.prompts = PromptTokens(deployment)
        self.model = str(deployment.get("/v1/models")["data"][0]["id"])
        self.http = httpx.Client(base_url=deployment.url, timeout=120)
        # When the last request over HTTP ended, on the monotonic clock.
        self.online_s = time.monotonic()

    def make_body(self, answer: int) -> dict[str, Any]:
        """A request with a prompt that no worker has cached."""
        body = {"model": self.model, "prompt": self.prompts.take(PROMPT_TOKENS), "max_tokens": answer}
        return body | {"temperature": 0, "ignore_eos": True}

    def start_batch(self, answer: int) -> str:
        """Upload a file, and start its batch; returns the batch's id. The upload is not timed."""
        rows = (
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": self.make_body(answer)}
            for number in range(self.lines)
        )  # fmt: skip
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        upload = self.http.post(
            "/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}
        )
        order = {"input_file_id": upload.raise_for_status().json()["id"], "endpoint": "/v1/completions"}
        batch = self.http.post("/v1/batches", json=order | {"completion_window": "24h"})
        return str(batch.raise_for_status().json()["id"])

    def bulk_metric(self, name: str) -> float:
        """The sum of a metric's samples. It does not make a client of its own, as `ServedDeployment` does."""
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", name + "{"))
        )

    def batch_status(self, batch: str) -> str:
        """The status of a batch."""
        return str(self.http.get(f"/v1/batches/{batch}").raise_for_status().json()["status"])

    def time_batch(self) -> float:
        """Tokens per second of a batch, which begins `FIRST_AFTER_S` after the last request over HTTP."""
        time.sleep(max(0.0, self.online_s + FIRST_AFTER_S - time.monotonic()))
        before = self.bulk_metric(BULK_TOKENS)
        batch, begun_s = self.start_batch(self.answer), time.monotonic()
        while (status := self.batch_status(batch)) != "completed":
            assert status in ("validating", "in_progress", "finalizing"), status
            if time.monotonic() > begun_s + LIMIT_S:
                done = self.bulk_metric(BULK_TOKENS) - before - self.lines * PROMPT_TOKENS
                seconds = time.monotonic() - begun_s
                self.time_cancel(batch)
                return max(1.0, done) / seconds
            time.sleep(SLOW_POLL_S)
        return self.lines * self.answer / (time.monotonic() - begun_s)

    def time_cancel(self, batch: str) -> float:
        """Cancel a batch; returns the seconds until nothing of it is left."""
        begun_s = time.monotonic()
        self.http.post(f"/v1/batches/{batch}/cancel").raise_for_status()
        while self.batch_status(batch) != "cancelled" or self.bulk_metric(BULK_OPEN):
            time.sleep(POLL_S)
        return time.monotonic() - begun_s

    def wait_running(self) -> None:
        """Wait until lines of a batch run."""
        while not self.bulk_metric(BULK_OPEN):
            time.sleep(POLL_S)

    async def time_online(self) -> float:
        """Tokens per second of as many requests over HTTP."""
        bodies = [self.make_body(self.answer) for _ in range(self.lines)]
        async with httpx.AsyncClient(
            base_url=self.deployment.url, timeout=300, limits=httpx.Limits()
        ) as http:
            begun_s = time.monotonic()
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        self.online_s = time.monotonic()
        used = [one.raise_for_status().json()["usage"]["completion_tokens"] for one in answers]
        return float(sum(used)) / (self.online_s - begun_s)

    async def time_first_token(self) -> float:
        """Seconds to the first token of one request."""
        sent_s = time.monotonic()
        stream = await StampedStream.open(self.deployment.port, **self.make_body(16))
        await stream.done()
        await stream.leave()
        self.online_s = time.monotonic()
        return stream.stamps_s[0] - sent_s


def measure_condition(bench: SharedBench, times: ConditionTimes, batch_first: bool, cancels: int) -> None:
    """One round beside the neighbours that are there."""
    if batch_first:
        times.batch_rates.append(bench.time_batch())
        times.online_rates.append(uvloop.run(bench.time_online()))
    else:
        times.online_rates.append(uvloop.run(bench.time_online()))
        times.batch_rates.append(bench.time_batch())
    times.alone_ttft_s.append(uvloop.run(bench.time_first_token()))
    draw = random.Random(len(times.cancel_s))
    for number in range(cancels):
        batch = bench.start_batch(LONG_ANSWER)
        bench.wait_running()
        if number == 0:
            time.sleep(FIRST_AFTER_S)
            times.first_ttft_s.append(uvloop.run(bench.time_first_token()))
        else:
            time.sleep(draw.uniform(0.0, 1.0))
        times.cancel_s.append(bench.time_cancel(batch))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the deployment and measure."""
    found: dict[Neighbours, ConditionTimes] = defaultdict(ConditionTimes)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        flags = (*pool_flags(options.colocated), "--data-dir", folder)
        with serving_deployment(*flags) as deployment:
            deployment.wait_ready()
            bench = SharedBench(deployment, options.lines, options.answer)
            for _ in range(2):
                uvloop.run(bench.time_online())
                bench.time_batch()
            names = options.conditions or [one.name for one in CONDITIONS]
            conditions = [one for one in CONDITIONS if one.name in names]
            for number in range(options.rounds):
                for beside in conditions[number % len(conditions) :] + conditions[: number % len(conditions)]:
                    with busy_processes(beside.count, beside.nice):
                        time.sleep(0.5)
                        measure_condition(bench, found[beside], number % 2 == 0, options.cancels)
            bench.http.close()
    return summarize(found)


def summarize(found: dict[Neighbours, ConditionTimes]) -> dict[str, Any]:
    """The figures."""
    figures: dict[str, Any] = {}
    for name, own in (
        ("quiet", [one for one in found if not one.count]),
        ("nice19", [one for one in found if one.count and one.nice == 19]),
        ("nice0", [one for one in found if one.count and one.nice == 0]),
    ):
        if own:
            figures[f"batch_share_{name}"] = round(min(found[one].share for one in own), 3)
    first = [seconds for times in found.values() for seconds in times.first_ttft_s]
    if first:
        figures["first_ttft_ms"] = [round(1000 * median(first), 1), round(1000 * max(first), 1)]
        alone = [seconds for times in found.values() for seconds in times.alone_ttft_s]
        figures["alone_ttft_ms"] = [round(1000 * median(alone), 1), round(1000 * max(alone), 1)]
        cancels = [seconds for times in found.values() for seconds in times.cancel_s]
        figures["cancel_p99_s"] = round(percentile(cancels, 99), 3)
        figures["cancels"] = len(cancels)
    for one, times in found.items():
        figures[one.name] = {
            "share": round(times.share, 3),
            "batch_tokens_per_s": [round(rate) for rate in times.batch_rates],
            "online_tokens_per_s": [round(rate) for rate in times.online_rates],
            "first_ttft_ms": [round(1000 * seconds, 1) for seconds in times.first_ttft_s],
            "alone_ttft_ms": [round(1000 * seconds, 1) for seconds in times.alone_ttft_s],
        }
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=60)
    parser.add_argument("--answer", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--cancels", type=int, default=8, help="cancelled batches per condition and round")
    parser.add_argument("--colocated", type=int, default=0, help="workers that do both; 0: one of each kind")
    parser.add_argument("--conditions", nargs="+", choices=[one.name for one in CONDITIONS], help="all")
    add_short_form(parser, rounds=1, answer=100)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(options) | {"colocated": options.colocated, "load_average": round(load, 1)}
    print(json.dumps(found) if options.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
