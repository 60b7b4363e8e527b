"""What hostile requests do to streams that run beside them.

    python -m benchmarks.stall [--json] [--short] [--bodies 2000] [--streams 16] [--calm 20] [--seconds 120]

One deployment of the embedded model with a data directory, and `--streams` streams that are asked for again whenever
one ends. First `--calm` seconds of these alone; then a process of its own sends every body of `benchmarks.hostile` that
is as much work as its bound allows, and `--bodies` random ones, beside the clients of
`benchmarks.load.hostile_clients`: sockets that read nothing, half of which come again when they are cut, slow readers,
uploads, and batches over hostile files.

    max_gap_ms      the longest time between two events of a stream, beside the hostile requests
    p999_gap_ms     99.9th percentile of all those times; `calm_` before a name: of the streams alone
    loop_lag_ms     an upper bound of the 99.9th percentile of how late the gateway's event loop was, from its metrics
    loop_lag_max_ms an upper bound of the largest
    loop_work_ms    the same, of its lag as far as it is processor time of the loop itself; loop_work_max_ms
    links_broken    lives of workers that the gateway saw end
    lost            streams that failed
    refused         times that a stream was refused for load before it began (429, 503)
    machine_late_max_ms  how late the latest of two processes was that only sleep, one on each core: what the machine
                    itself does to everybody; `calm_` before it: of the streams alone
    stolen_s        processor time that a hypervisor took away meanwhile
    loop_queued_max_ms  an upper bound of how long the loop's thread, ready to run, waited for a core without a break
    unanswered      hostile requests whose connection ended first: a body that is refused is not read to its end
    lockouts        new clients with a key that were not served within a second; `clients` is how many there were
    gateway_peak_ratio  the most resident memory of the gateway over its bound; gateway_compose_ratio: over what compose
                    gives its container
    disk_ratio      the most bytes on disk of the data directory over the hostile key's share
    gateway_mb      the most resident memory of the gateway, beside its bound (`gateway_bound_mb`) and that at rest
    preparers_mb    the most memory of its preparers together that is theirs alone, beside its bound

Streams and hostile requests have keys of their own. Gaps hold the time of workers, too, which have more rows to decode
beside the hostile requests; lag is the gateway's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import ServedDeployment, StampedStream, serving_deployment
from benchmarks.load.machine import Sleepers, sleeping_processes, stolen_s
from benchmarks.load.short_form import add_short_form
from services.gateway.openai.request_limits import RequestLimits
from services.gateway.preparation.fork_server import MAX_PREPARER_BYTES
from services.gateway.preparation.preparer_pool import default_num_preparers

PROMPT, ANSWER_TOKENS = "Once upon a time", 400
LAG, WORK = "diptych:event_loop_lag_seconds_bucket", "diptych:event_loop_work_seconds_bucket"
LOST = "diptych:workers_lost_total"
MIB = 1 << 20
FRIEND, FOE = (secrets.token_hex(24) for _ in range(2))  # API keys; a command line has one of them
REFUSED = ("HTTP/1.1 429", "HTTP/1.1 503")
PAUSE_S = 0.5  # after a refusal
# The hostile key's share of the disk, and the memory that docker-compose.yml gives the gateway.
TENANT_BYTES, COMPOSE_BYTES = 1 << 30, 1 << 30
# Connections that the gateway may have: fewer than the hostile sockets that read nothing.
MAX_CONNECTIONS = 256
# A new client comes this often, and is to be served within this time.
CLIENT_EVERY_S, CLIENT_S = 0.25, 1.0


@dataclass(slots=True)
class Seen:
    """Gaps in seconds between the events of streams, by the moment at which they ended; and streams that failed."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    finished: int = 0
    refused: int = 0

    def within(self, start_s: float, end_s: float) -> list[float]:
        """Those that touch the window, sorted."""
        return sorted(gap_s for at_s, gap_s in self.gaps if at_s > start_s and at_s - gap_s < end_s)


@dataclass(slots=True)
class Memory:
    """The most that the gateway and its preparers had, in bytes; and how long the gateway's loop waited for a core.

    `queued` has the seconds for which the loop's thread was ready to run but had no core, between two looks each, with
    the moment of the later one.
    """

    gateway: psutil.Process
    data: Path
    rest_bytes: int = 0
    disk_bytes: int = 0
    gateway_bytes: int = 0
    preparers_bytes: int = 0
    queued: list[tuple[float, float]] = field(default_factory=list)
    queued_s: float | None = None

    def look(self) -> None:
        self.gateway_bytes = max(self.gateway_bytes, self.gateway.memory_info().rss)
        own = 0
        for child in self.gateway.children(recursive=True):
            try:
                own += child.memory_full_info().uss
            except psutil.Error:
                continue
        self.preparers_bytes = max(self.preparers_bytes, own)
        self.disk_bytes = max(self.disk_bytes, disk_bytes(self.data))
        with open(f"/proc/{self.gateway.pid}/schedstat", encoding="ascii") as file:  # of its main thread
            queued_s = 1e-9 * int(file.read().split()[1])
        if self.queued_s is not None:
            self.queued.append((time.monotonic(), queued_s - self.queued_s))
        self.queued_s = queued_s


def disk_bytes(folder: Path) -> int:
    """The bytes that the files below a folder take on the disk."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += 512 * file.lstat().st_blocks
        except FileNotFoundError:
            continue
    return total


def quantile(values: list[float], share: float) -> float:
    """Of sorted values; 0 of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def get(deployment: ServedDeployment, path: str) -> httpx.Response:
    """Raises httpx.HTTPError."""
    headers = {"authorization": f"Bearer {FRIEND}"}
    return httpx.get(f"{deployment.url}{path}", headers=headers, timeout=60).raise_for_status()


def samples(deployment: ServedDeployment) -> dict[str, float]:
    """The metrics that are looked at, by name and labels."""
    found = {}
    for line in get(deployment, "/metrics").text.splitlines():
        if line.startswith((LAG, WORK, LOST)):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def bounds(histogram: str, before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """Upper bounds in milliseconds of the 99.9th percentile and of the largest value between two looks."""
    counts = sorted(
        (1e3 * float(name.split('le="')[1].split('"')[0]), after[name] - before.get(name, 0.0))
        for name in after
        if name.startswith(histogram)
    )
    total = counts[-1][1]
    p999 = next(bound for bound, count in counts if count >= 0.999 * total)
    return p999, next(bound for bound, count in counts if count >= total)


async def follow(deployment: ServedDeployment, model: str, seen: Seen, stop: asyncio.Event) -> None:
    """One stream after the other. A refusal for load is waited out, as clients do; anything else is a loss."""
    number = 0
    while not stop.is_set():
        number += 1
        fixed: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": ANSWER_TOKENS}
        stream = await StampedStream.open(
            deployment.port, key=FRIEND, model=model, prompt=f"{PROMPT} {number}", **fixed
        )
        try:
            await stream.done()
            seen.finished += 1
        except (RuntimeError, TimeoutError) as error:
            if stream.error.startswith(REFUSED):
                seen.refused += 1
                await asyncio.sleep(PAUSE_S)
            else:
                seen.failed.append(str(error)[-300:])
        stamps = stream.stamps_s
        seen.gaps += [(late, late - early) for early, late in zip(stamps, stamps[1:], strict=False)]
        await stream.leave()


async def come_anew(deployment: ServedDeployment, served: list[float], stop: asyncio.Event) -> None:
    """New clients with a key, one after the other; `served` gets the seconds that each took, infinity if it failed."""
    head = (
        "GET /v1/models HTTP/1.1",
        "host: localhost",
        f"authorization: Bearer {FRIEND}",
        "connection: close",
    )
    request = "\r\n".join((*head, "", ""))
    while not stop.is_set():
        begun_s, took_s = time.monotonic(), float("inf")
        try:
            async with asyncio.timeout(10 * CLIENT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
                writer.write(request.encode())
                if (await reader.readline()).startswith(b"HTTP/1.1 200"):
                    took_s = time.monotonic() - begun_s
                writer.transport.abort()
        except OSError:
            pass
        served.append(took_s)
        await asyncio.sleep(CLIENT_EVERY_S)


async def watch(memory: Memory, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.get_running_loop().run_in_executor(None, memory.look)
        await asyncio.sleep(0.25)


async def play(
    deployment: ServedDeployment, data: Path, sleepers: Sleepers, options: argparse.Namespace
) -> dict[str, Any]:
    """Both parts; returns the figures. `data` is the data directory."""
    card = get(deployment, "/v1/models").json()["data"][0]
    [gateway] = [
        one
        for one in psutil.Process(deployment.process.pid).children(recursive=True)
        if "services.gateway" in one.cmdline() and "services.gateway" not in (one.parent() or one).cmdline()
    ]
    memory, seen, stop = Memory(gateway, data, gateway.memory_info().rss), Seen(), asyncio.Event()
    streams = [
        asyncio.create_task(follow(deployment, card["id"], seen, stop)) for _ in range(options.streams)
    ]
    watching = asyncio.create_task(watch(memory, stop))
    await asyncio.sleep(5.0)
    calm_s, first = time.monotonic(), samples(deployment)
    await asyncio.sleep(options.calm)
    loud_s, before, stolen_before_s = time.monotonic(), samples(deployment), stolen_s()
    served: list[float] = []
    newcomers = asyncio.create_task(come_anew(deployment, served, stop))
    sent = await load(deployment, card, options)
    end_s, after = time.monotonic(), samples(deployment)
    stop.set()
    taken_s = stolen_s() - stolen_before_s
    await asyncio.gather(*streams, watching, newcomers)
    sleepers.stop()
    calm, loud = seen.within(calm_s, loud_s), seen.within(loud_s, end_s)
    lag_ms, lag_max_ms = bounds(LAG, before, after)
    work_ms, work_max_ms = bounds(WORK, before, after)
    calm_lag_ms, calm_lag_max_ms = bounds(LAG, first, before)
    limits = RequestLimits()
    bound = memory.rest_bytes + limits.max_bodies_bytes + limits.max_answer_bytes
    return {
        "max_gap_ms": round(1e3 * quantile(loud, 1.0), 1),
        "p999_gap_ms": round(1e3 * quantile(loud, 0.999), 1),
        "calm_max_gap_ms": round(1e3 * quantile(calm, 1.0), 1),
        "calm_p999_gap_ms": round(1e3 * quantile(calm, 0.999), 1),
        "loop_work_ms": work_ms,
        "loop_work_max_ms": work_max_ms,
        "loop_lag_ms": lag_ms,
        "loop_lag_max_ms": lag_max_ms,
        "calm_loop_lag_ms": calm_lag_ms,
        "calm_loop_lag_max_ms": calm_lag_max_ms,
        "loop_queued_max_ms": round(
            1e3 * max((one for at_s, one in memory.queued if loud_s < at_s <= end_s), default=0.0)
        ),
        "machine_late_max_ms": round(1e3 * sleepers.max_late_s(loud_s, end_s)),
        "calm_machine_late_max_ms": round(1e3 * sleepers.max_late_s(calm_s, loud_s)),
        "stolen_s": round(taken_s, 1),
        "links_broken": int(after.get(LOST, 0) - before.get(LOST, 0)),
        "lost": len(seen.failed),
        "refused": seen.refused,
        "lockouts": sum(took_s > CLIENT_S for took_s in served),
        "clients": len(served),
        "gateway_peak_ratio": round(memory.gateway_bytes / bound, 3),
        "gateway_compose_ratio": round(memory.gateway_bytes / COMPOSE_BYTES, 3),
        "disk_ratio": round(memory.disk_bytes / TENANT_BYTES, 3),
        "unanswered": sum(sent["unanswered"].values()),
        "gateway_mb": round(memory.gateway_bytes / MIB),
        "gateway_rest_mb": round(memory.rest_bytes / MIB),
        "gateway_bound_mb": round(bound / MIB),
        "preparers_mb": round(memory.preparers_bytes / MIB),
        "preparers_bound_mb": round(default_num_preparers() * MAX_PREPARER_BYTES / MIB),
        "streams": seen.finished,
        "hostile": sum(sent["statuses"].values()),
        "hostile_s": sent["took_s"],
        "failures": seen.failed[:5] + list(sent["unanswered"])[:5],
        "statuses": sent["statuses"],
        "hostile_clients": sent["clients"],
        "broken_clients": sent["broken_clients"],
    }


async def load(
    deployment: ServedDeployment, card: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Send the hostile bodies from a process of their own."""
    arguments = [str(deployment.port), card["id"], str(card["max_model_len"]), FOE]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.hostile", *arguments, "--bodies", str(options.bodies),
        "--seed", str(options.seed), "--concurrency", str(options.concurrency),
        "--seconds", str(options.seconds), stdout=subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    report: dict[str, Any] = json.loads(out)
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--bodies", type=int, default=2000, help="random hostile bodies")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--calm", type=float, default=20.0, help="seconds without hostile bodies")
    parser.add_argument("--concurrency", type=int, default=8, help="hostile requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="of hostile clients, at least")
    add_short_form(parser, bodies=150, streams=8, calm=10.0, seconds=60.0)
    options = parser.parse_args()
    flags = ["--prefill", "1", "--decode", "1", "--kv-cache-memory-bytes", "256MiB"]
    flags += ["--max-connections", str(MAX_CONNECTIONS), "--max-tenant-bytes", str(TENANT_BYTES)]
    with (
        tempfile.TemporaryDirectory(prefix="diptych-stall-") as name,
        serving_deployment(
            *flags, "--data-dir", f"{name}/data", "--api-key", FRIEND, "--api-key", FOE
        ) as deployment,
    ):
        deployment.wait_ready()
        with sleeping_processes() as sleepers:
            report = uvloop.run(play(deployment, Path(name, "data"), sleepers, options))
    report["load_average"] = round(os.getloadavg()[0], 1)
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:20s} {value}")


if __name__ == "__main__":
    main()
