"""What a deployment does with five times the requests that it can serve.

    python -m benchmarks.overload [--json] [--seconds 60] [--factor 5] [--wait 2] [--colocated N]

One deployment of the embedded model, which refuses who would wait longer than `--wait` seconds for a first token. First
its capacity: clients that always have one request open each, more of them from step to step; the best rate is the peak.
Then requests at `--factor` times that rate, at random moments, whether others are answered or not, for `--seconds`.

    goodput_ratio      answers per second that began within twice `--wait` and came whole, over the peak
    refused_well       share of the refusals that are a 429 with Retry-After
    refusal_p99_ms     from sending a request to its refusal, on a connection of its own
    memory_ratio       resident memory of all its processes at rest afterwards, over that at rest before the overload;
                       KV pools, which are of fixed size and fill up with cached prefixes, are left out
    other_failures     answers that were neither whole nor refused

Times in milliseconds are this machine's, which also runs the clients; ratios are what is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.interference import percentile
from benchmarks.load.deployment import (
    ANSWER_S,
    ServedDeployment,
    StampedStream,
    pool_flags,
    serving_deployment,
)

CLIENTS = (4, 8, 16, 32)  # of the steps that look for the peak
STEP_S, SETTLE_S = 8.0, 3.0
ANSWER_TOKENS, PROMPT_WORDS = 16, 40
STATUS = re.compile(r"HTTP/1\.1 (\d{3})")
RETRY_AFTER = re.compile(r"^retry-after: (\d+)\r$", re.MULTILINE | re.IGNORECASE)


@dataclass(slots=True, eq=False)
class Timed(StampedStream):
    """A stream that also knows when it failed."""

    failed_s: float | None = None

    def data_received(self, data: bytes) -> None:
        StampedStream.data_received(self, data)
        if self.error and self.failed_s is None:
            self.failed_s = time.monotonic()


@dataclass(slots=True)
class Seen:
    """What became of requests: seconds to the first token and the moment of the end of whole answers; refusals by
    seconds, and how many of them were as they should be; other failures, by what was said.
    """

    whole: list[tuple[float, float]] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    refused_well: int = 0
    others: list[str] = field(default_factory=list)


class Load:
    """Clients of one deployment. Prompts are random words, so that hardly two begin alike."""

    def __init__(self, deployment: ServedDeployment, seed: int) -> None:
        self._deployment, self._chance = deployment, random.Random(seed)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["".join(self._chance.choices(letters, k=4)) for _ in range(2000)]

    def prompt(self) -> str:
        return " ".join(self._chance.choices(self._words, k=PROMPT_WORDS))

    async def ask(self, seen: Seen) -> None:
        """One request, to its end."""
        begun_s = time.monotonic()
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": self.prompt(),
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        stream = cast(Timed, await Timed.open(self._deployment.port, **body))
        try:
            await stream.done()
        except (RuntimeError, TimeoutError) as error:
            self._failed(stream, error, begun_s, seen)
        else:
            seen.whole.append((stream.stamps_s[0] - begun_s, time.monotonic()))
        finally:
            await stream.leave()

    def _failed(self, stream: Timed, error: Exception, begun_s: float, seen: Seen) -> None:
        status = STATUS.match(stream.error)
        if status is None or status.group(1) != "429":
            seen.others.append(f"{type(error).__name__}: {error}"[:300])
            return
        seen.refused_s.append((stream.failed_s or time.monotonic()) - begun_s)
        seen.refused_well += RETRY_AFTER.search(stream.error) is not None

    async def steady(self, clients: int, seconds: float) -> float:
        """So many requests open all the time; returns answers per second. Raises RuntimeError if there is none."""
        begun_s, seen = time.monotonic(), Seen()

        async def client() -> None:
            while time.monotonic() - begun_s < seconds:
                await self.ask(seen)

        await asyncio.gather(*(client() for _ in range(clients)))
        if not seen.whole:
            raise RuntimeError(f"no answer is whole: {seen.others[:1]}, {len(seen.refused_s)} refused")
        return len(seen.whole) / (time.monotonic() - begun_s)

    async def storm(self, rate: float, seconds: float) -> Seen:
        """`rate` requests per second at random moments, whatever becomes of them."""
        seen, begun_s = Seen(), time.monotonic()
        at_s = 0.0
        async with asyncio.TaskGroup() as tasks:
            while (at_s := at_s + self._chance.expovariate(rate)) < seconds:
                await asyncio.sleep(max(0.0, begun_s + at_s - time.monotonic()))
                tasks.create_task(self.ask(seen))
        return seen


def resident_bytes(deployment: ServedDeployment) -> int:
    """Of the gateway and all workers, without what they share (their KV pools)."""
    metrics = httpx.get(f"{deployment.url}/metrics", timeout=ANSWER_S).raise_for_status().text
    found = re.search(r"^process_resident_memory_bytes (\S+)", metrics, re.MULTILINE)
    workers = [int(one["pid"]) for one in deployment.get("/status")["workers"]]
    return sum(_resident(pid) for pid in workers) + (int(float(found.group(1))) if found else 0)


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(found.group(1)) << 10 if found else 0


def figures(seen: Seen, peak: float, since_s: float, until_s: float, wait_s: float) -> dict[str, float]:
    """The ratios. Answers count if they ended within the storm, of `since_s` to `until_s`."""
    good = [end_s for ttft_s, end_s in seen.whole if ttft_s <= 2 * wait_s and end_s <= until_s]
    return {
        "goodput_ratio": round(len(good) / (until_s - since_s) / peak, 3),
        "refused_well": round(seen.refused_well / max(1, len(seen.refused_s)), 4),
        "refused_share": round(len(seen.refused_s) / max(1, total(seen)), 3),
        "other_failures": len(seen.others),
    }


def total(seen: Seen) -> int:
    """All requests that were sent."""
    return len(seen.whole) + len(seen.refused_s) + len(seen.others)


async def play(deployment: ServedDeployment, options: argparse.Namespace) -> dict[str, Any]:
    """Peak, storm, rest."""
    load = Load(deployment, options.seed)
    await load.steady(CLIENTS[0], STEP_S / 2)  # warm-up
    rates = [await load.steady(clients, STEP_S) for clients in CLIENTS]
    peak = max(rates)
    deployment.rest()
    before = resident_bytes(deployment)
    since_s = time.monotonic()
    seen = await load.storm(options.factor * peak, options.seconds)
    result = figures(seen, peak, since_s, since_s + options.seconds, options.wait)
    deployment.rest()
    await asyncio.sleep(SETTLE_S)
    result["memory_ratio"] = round(resident_bytes(deployment) / before, 3)
    first_s = [ttft_s for ttft_s, _ in seen.whole]
    return result | {
        "failures_told": sorted(set(seen.others))[:5],
        "this_machine": {
            "peak_per_s": round(peak, 1),
            "offered_per_s": round(total(seen) / options.seconds, 1),
            **_milliseconds("refusal", seen.refused_s),
            **_milliseconds("ttft", first_s),
        },
    }


def _milliseconds(name: str, values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {f"{name}_p{p}_ms": round(1e3 * percentile(values, p), 1) for p in (50, 99, 100) if values}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=5.0, help="requests offered, over the peak")
    parser.add_argument("--wait", type=float, default=2.0, help="--max-queue-wait-s of the deployment")
    parser.add_argument("--colocated", type=int, default=0, help="workers that do both; 0: one of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    flags = (*pool_flags(options.colocated), "--kv-cache-memory-bytes", "256MiB")
    with serving_deployment(*flags, "--max-queue-wait-s", str(options.wait)) as deployment:
        deployment.wait_ready()
        report = uvloop.run(play(deployment, options))
    report |= {name: getattr(options, name) for name in ("seconds", "factor", "wait", "colocated", "seed")}
    print(json.dumps(report | {"load_before": round(load, 2)}, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
