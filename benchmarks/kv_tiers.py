"""What host memory and a disk below the KV pools are worth to a whole deployment, and what they cost unused.

    python -m benchmarks.kv_tiers [--json] [--parts ttft traffic chats unused links] [--rounds 5] [--pairs 1]
                                  [--prefix-tokens 1536] [--prefixes 200] [--requests 1500]

Deployments of the embedded model with `--pairs` prefill and as many decode workers each, whose pools differ in nothing:

    none    no tiers
    host    `--kv-host-bytes`, with room for everything
    disk    host memory for little more than one prefix, and a disk with room for everything

Prompts are random tokens. Every figure is a ratio of one run, in which the deployments take turns.

    host_ttft, disk_ttft    TTFT of a prompt whose prefix left the pool / of the same prompt cold, median over rounds
    computed, throughput    requests for `--prefixes` prefixes of 512 tokens, drawn by Zipf 1.1, with pools for 20:
                            prefix tokens computed, and requests per second, `host` / `none`
    turns                   chats of six turns: prompt tokens computed, `host` / `none`
    unused                  prompts of 512 tokens that never come again: requests per second, `host` / `none`

The part `links` needs root, `ip`, `bridge` and `tc`: its workers are on hosts of their own, with links of 200 Mbit/s.

    pull                    seconds to the second token of a prompt whose prefix left both pools, `host` / `none`
    slow_ttft               its TTFT with host memory that is read at 1 MB/s / `none`

`this_machine` has the figures themselves, in milliseconds and per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import (
    ANSWER_S,
    STOP_S,
    ReachedDeployment,
    ServedDeployment,
    StampedStream,
    serving_deployment,
)
from benchmarks.load.tiered_links import check_slow, summarize_links, tiered_links
from tests.support.network_namespaces import why_unavailable
from tests.support.waiting import wait_for

PARTS, LINKS = ("ttft", "traffic", "chats", "unused"), "links"
SLAB_BYTES = 393_216  # of the embedded model
# What is on its way to a store does not count as waiting; statistics come with heartbeats, four in a second.
SETTLE_S = 1.0
CHUNK, SHORT, ZIPF, STREAMS = 64, 512, 1.1, 4
# The pool: 20 prefixes of 512 tokens.
POOL = 20 * SHORT // CHUNK
ROUNDS_OF_CHAT, CHATS, ROUND_TOKENS = 6, 24, 96


def flags_of(mode: str, pairs: int, folder: Path, prefix_tokens: int) -> tuple[str, ...]:
    """The flags of a deployment."""
    pools = (
        "--prefill",
        str(pairs),
        "--decode",
        str(pairs),
        "--kv-cache-memory-bytes",
        str(POOL * SLAB_BYTES),
    )
    if mode == "none":
        return pools
    room = "4GiB" if mode == "host" else str((prefix_tokens // CHUNK + 8) * (SLAB_BYTES + 8192) + (2 << 20))
    disk = ("--kv-disk-bytes", "4GiB", "--kv-disk-folder", str(folder / "kv")) if mode == "disk" else ()
    return (*pools, "--kv-host-bytes", room, *disk)


class Prompts:
    """Random tokens, none of them twice."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def take(self, tokens: int) -> list[int]:
        return [self._random.randrange(3, 4000) for _ in range(tokens)]


async def token_seconds(deployment: ReachedDeployment, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first and to the second token of a prompt's answer."""
    fixed: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 2}
    begun_s = time.monotonic()
    stream = await StampedStream.open(deployment.port, prompt=prompt, **fixed)
    try:
        await stream.done()
    finally:
        await stream.leave()
    return stream.stamps_s[0] - begun_s, stream.stamps_s[1] - begun_s


async def measure_again(
    deployment: ReachedDeployment, prompts: Prompts, pairs: int, prefix_tokens: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """`token_seconds` of a prompt cold, and after others have taken its place in the pool."""
    prompt = prompts.take(prefix_tokens + 16)
    cold = await token_seconds(deployment, prompt)
    for _ in range(pairs * (POOL // (prefix_tokens // CHUNK) + 2)):
        await token_seconds(deployment, prompts.take(prefix_tokens))
    await asyncio.to_thread(wait_stored, deployment)
    return cold, await token_seconds(deployment, prompt)


async def measure_ttft(
    deployment: ReachedDeployment, prompts: Prompts, pairs: int, prefix_tokens: int
) -> tuple[float, float]:
    """TTFT of a prompt cold, and after others have taken its place in the pool."""
    cold, again = await measure_again(deployment, prompts, pairs, prefix_tokens)
    return cold[0], again[0]


async def measure_links(
    deployments: Mapping[str, ReachedDeployment], rounds: int, prefix_tokens: int
) -> dict[str, Any]:
    """The figures of the part `links`; the first round opens connections."""
    prompts, seconds = Prompts(), {name: list[tuple[float, float]]() for name in deployments}
    for _ in range(rounds + 1):
        for name, deployment in deployments.items():
            _, again = await measure_again(deployment, prompts, 1, prefix_tokens)
            seconds[name].append(again)
    check_slow(deployments["slow"])
    seconds = {name: rows[1:] for name, rows in seconds.items()}
    here = {name: [[round(1e3 * one, 1) for one in row] for row in rows] for name, rows in seconds.items()}
    return summarize_links(seconds) | {"links_ms": here}


def wait_stored(deployment: ReachedDeployment) -> None:
    """Wait until no chunk waits to be stored, and none was for `SETTLE_S`. Raises AssertionError if that takes long."""
    deployment.rest()
    seen, since_s = list[tuple[int, int]](), time.monotonic()

    def is_settled() -> bool:
        nonlocal seen, since_s
        tiers = [
            one
            for worker in deployment.get("/status")["workers"]
            for one in worker["stats"]["tiers"].values()
        ]
        counts = [(one["waiting_chunks"], one["stored_chunks"]) for one in tiers]
        if counts != seen or any(waiting for waiting, _ in counts):
            seen, since_s = counts, time.monotonic()
        return time.monotonic() - since_s > SETTLE_S

    wait_for(is_settled, STOP_S)


async def serve_all(deployment: ServedDeployment, prompts: Sequence[list[int]]) -> tuple[float, int]:
    """Requests per second with some at a time, and the prompt tokens that were computed."""
    waiting, computed = list(reversed(prompts)), 0
    async with httpx.AsyncClient(base_url=deployment.url, timeout=ANSWER_S) as client:

        async def work() -> None:
            nonlocal computed
            while waiting:
                prompt = waiting.pop()
                body = {
                    "model": "tiny",
                    "prompt": prompt,
                    "max_tokens": 8,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
                details = answer["usage"].get("prompt_tokens_details") or {}
                computed += len(prompt) - details.get("cached_tokens", 0)

        begun_s = time.monotonic()
        await asyncio.gather(*(work() for _ in range(STREAMS)))
        return len(prompts) / (time.monotonic() - begun_s), computed


def draw_traffic(prompts: Prompts, prefixes: int, requests: int) -> list[list[int]]:
    """Requests for prefixes that are drawn by Zipf's law, each with an end of its own."""
    known = [prompts.take(SHORT) for _ in range(prefixes)]
    weights = list(accumulate(1 / (rank + 1) ** ZIPF for rank in range(prefixes)))
    drawn = random.Random(1).choices(known, cum_weights=weights, k=requests)
    return [prefix + prompts.take(16) for prefix in drawn]


def draw_chats(prompts: Prompts) -> list[list[int]]:
    """The prompts of chats that take turns: each has all before it. Answers are the client's, in the next prompt."""
    chats = [prompts.take(SHORT) for _ in range(CHATS)]
    found = []
    for _ in range(ROUNDS_OF_CHAT):
        for place, chat in enumerate(chats):
            found.append(chat)
            chats[place] = chat + prompts.take(ROUND_TOKENS)
    return found


async def compare(
    deployments: Mapping[str, ServedDeployment], requests: Sequence[list[int]]
) -> dict[str, tuple[float, int]]:
    """What `serve_all` says of the deployments with and without host memory."""
    return {mode: await serve_all(deployments[mode], requests) for mode in ("none", "host")}


async def play(deployments: Mapping[str, ServedDeployment], options: argparse.Namespace) -> dict[str, Any]:
    """All parts; the report."""
    prompts, report, here = Prompts(), dict[str, Any](), dict[str, Any]()
    for deployment in deployments.values():
        await serve_all(deployment, [prompts.take(300) for _ in range(8)])
    if "ttft" in options.parts:
        for mode in ("host", "disk"):
            pairs = [
                await measure_ttft(deployments[mode], prompts, options.pairs, options.prefix_tokens)
                for _ in range(options.rounds)
            ]
            report[f"{mode}_ttft"] = round(median(warm / cold for cold, warm in pairs), 3)
            here[f"{mode}_ttft_ms"] = [[round(1e3 * one, 1) for one in pair] for pair in pairs]
    if "traffic" in options.parts:
        found = await compare(deployments, draw_traffic(prompts, options.prefixes, options.requests))
        report["computed"] = round(found["host"][1] / found["none"][1], 3)
        report["throughput"] = round(found["host"][0] / found["none"][0], 3)
        here["traffic"] = found
    if "chats" in options.parts:
        found = await compare(deployments, draw_chats(prompts))
        report["turns"] = round(found["host"][1] / found["none"][1], 3)
        here["chats"] = found
    if "unused" in options.parts:
        ratios = []
        for _ in range(options.rounds):
            found = await compare(deployments, [prompts.take(SHORT) for _ in range(40)])
            ratios.append(found["host"][0] / found["none"][0])
        report["unused"] = round(median(ratios), 3)
        here["unused"] = [round(one, 3) for one in ratios]
    return report | {"this_machine": here}


def measure_served(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all parts of deployments of this machine."""
    folder = Path(tempfile.mkdtemp(prefix="kv-tiers-"))
    modes = [mode for mode in ("none", "host", "disk") if mode != "none" or options.parts != ["ttft"]]
    try:
        with contextlib.ExitStack() as stack:
            deployments = {
                mode: stack.enter_context(
                    serving_deployment(*flags_of(mode, options.pairs, folder, options.prefix_tokens))
                )
                for mode in modes
                if mode != "disk" or "ttft" in options.parts
            }
            for deployment in deployments.values():
                deployment.wait_ready()
            return asyncio.run(play(deployments, options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, LINKS], default=list(PARTS))
    shape = {"rounds": 5, "pairs": 1, "prefix_tokens": 1536, "prefixes": 200, "requests": 1500}
    for name, default in shape.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options = parser.parse_args()
    if LINKS in options.parts and (why := why_unavailable()):
        parser.error(why)
    load, report = os.getloadavg()[0], dict[str, Any]()
    if set(options.parts) - {LINKS}:
        report |= measure_served(options)
    if LINKS in options.parts:
        with tiered_links(POOL * SLAB_BYTES, 1 << 30) as links:
            found = asyncio.run(measure_links(links, options.rounds, options.prefix_tokens))
        report.setdefault("this_machine", {})["links_ms"] = found.pop("links_ms")
        report |= found
    report |= {name: getattr(options, name) for name in shape} | {"load_before": round(load, 2)}
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
