"""What one API key that floods a deployment does to another key that sends one request a second.

    python -m benchmarks.fair [--json] [--short] [--rounds 2] [--seconds 30] [--open 1024] [--colocated N]

One deployment of the embedded model with three API keys. The quiet key sends a request every second, whether those
before are answered or not: alone, then beside a flood, and so on for `--rounds`. The floods:

    plain       1,024 requests open at every moment, with no priority, of a key like any other
    refused     the same with `priority: -10`, of a key that may not: each is answered with 403
    urgent      the same with `priority: -10`, of a key in --priority-keys: the operator lets it go first

    fair_ratio        99th percentile of the time to first token of the quiet key, beside the flood / alone
    median_ratio      the same of the median
    quiet_refused     requests of the quiet key that were refused, or not answered in full
    flood_answered    requests of the flood that were answered in full per second
    flood_refused     by status, requests of the flood that were refused

`fair_ratio` without more is the worse one of `plain` and `refused`. The flood comes from a process of its own; a client
of it that is refused comes again a second or two later. Times in milliseconds are this machine's, which also runs the
clients; ratios are what is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.interference import percentile
from benchmarks.load.deployment import (
    ANSWER_S,
    STOP_S,
    ServedDeployment,
    StampedStream,
    pool_flags,
    serving_deployment,
)
from benchmarks.load.short_form import add_short_form

FLOODS = ("plain", "refused", "urgent")
QUIET_TOKENS, FLOOD_TOKENS, PROMPT_WORDS = 16, 32, 40
SETTLE_S, BACK_OFF_S = 8.0, 1.0
MODEL = "tiny"
STATUS = re.compile(r"HTTP/1\.1 (\d{3})")


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys: `urgent` alone may ask for a priority below 0."""

    quiet: str
    flood: str
    urgent: str


@dataclass(slots=True)
class Seen:
    """Seconds to the first token of the quiet key's requests, and what became of the others."""

    ttft_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    flood_answered: int = 0
    flood_refused: Counter[str] = field(default_factory=Counter)
    flood_s: float = 0.0


class Load:
    """Clients with one API key. Prompts are random words, so that hardly two begin alike."""

    def __init__(self, port: int, key: str, seed: int) -> None:
        self._port, self._key, self.chance = port, key, random.Random(seed)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["".join(self.chance.choices(letters, k=4)) for _ in range(2000)]

    async def open(self, tokens: int, **more: Any) -> StampedStream:
        """Send one request."""
        prompt = " ".join(self.chance.choices(self._words, k=PROMPT_WORDS))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
        return await StampedStream.open(self._port, key=self._key, **body)

    async def quiet(self, seen: Seen, seconds: float) -> None:
        """A request a second."""

        async def ask() -> None:
            sent_s = time.monotonic()
            stream = await self.open(QUIET_TOKENS)
            try:
                await stream.done()
                seen.ttft_s.append(stream.stamps_s[0] - sent_s)
            except (RuntimeError, TimeoutError) as error:
                seen.failures.append(str(error)[:300])
            finally:
                await stream.leave()

        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(seconds)):
                await asyncio.sleep(max(0.0, begun_s + number - time.monotonic()))
                tasks.create_task(ask())

    async def flood(self, count: int, priority: int | None) -> tuple[int, Counter[str]]:
        """So many requests open at every moment, until standard input ends. Returns the answered, and the refused."""
        answered, refused = 0, Counter[str]()

        async def client() -> None:
            nonlocal answered
            while True:
                await asyncio.sleep(self.chance.random())
                stream = await self.open(FLOOD_TOKENS, priority=priority)
                try:
                    await stream.done()
                    answered += 1
                except (RuntimeError, TimeoutError):
                    status = STATUS.match(stream.error)
                    refused[status.group(1) if status else "other"] += 1
                    await asyncio.sleep(BACK_OFF_S)
                finally:
                    await stream.leave()

        clients = [asyncio.create_task(client()) for _ in range(count)]
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
        await over.wait()
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return answered, refused


@contextlib.contextmanager
def flooding(deployment: ServedDeployment, keys: Keys, kind: str, count: int, seen: Seen) -> Iterator[None]:
    """A flood, from a process of its own: the quiet client's times are not to be those of its event loop."""
    key, priority = keys.urgent if kind == "urgent" else keys.flood, None if kind == "plain" else -10
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fair", "--flood-from-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        begun_s = time.monotonic()
        process.stdin.write(json.dumps([deployment.port, key, count, priority]) + "\n")
        process.stdin.flush()
        try:
            yield
        finally:
            process.stdin.close()
            answered, refused = json.loads(process.stdout.read())
            seen.flood_s += time.monotonic() - begun_s
            seen.flood_answered += answered
            seen.flood_refused += Counter(refused)


def flood_from_stdin() -> None:
    """The process of a flood: port, key, number of requests and their priority come in one line."""
    port, key, count, priority = json.loads(os.read(0, 4096))
    print(json.dumps(uvloop.run(Load(port, key, 2).flood(count, priority))))


def play(deployment: ServedDeployment, keys: Keys, kind: str, options: argparse.Namespace) -> dict[str, Seen]:
    """Alone and beside a flood, in turn."""
    load = Load(deployment.port, keys.quiet, options.seed)
    seen = {"alone": Seen(), "beside": Seen()}
    uvloop.run(load.quiet(Seen(), 5.0))  # warm-up
    for _ in range(options.rounds):
        uvloop.run(load.quiet(seen["alone"], options.seconds))
        with flooding(deployment, keys, kind, options.open, seen["beside"]):
            time.sleep(SETTLE_S)
            uvloop.run(load.quiet(seen["beside"], options.seconds))
        rest(deployment, keys)
    return seen


def rest(deployment: ServedDeployment, keys: Keys) -> None:
    """Wait until nothing is open. Raises TimeoutError."""
    deadline_s = time.monotonic() + STOP_S
    shown = {"authorization": f"Bearer {keys.quiet}"}
    while time.monotonic() < deadline_s:
        state = httpx.get(f"{deployment.url}/status", headers=shown, timeout=ANSWER_S).json()
        if not state["sequences"] and not any(one["stats"]["slabs_used"] for one in state["workers"]):
            return
        time.sleep(0.1)
    raise TimeoutError("the deployment does not come to rest")


def figures(kind: str, seen: dict[str, Seen]) -> dict[str, Any]:
    """The ratios of one flood, and this machine's times."""
    alone, beside = seen["alone"], seen["beside"]
    fields: dict[str, Any] = {
        "fair_ratio": ratio(beside.ttft_s, alone.ttft_s, 99),
        "median_ratio": ratio(beside.ttft_s, alone.ttft_s, 50),
        "quiet_refused": len(alone.failures) + len(beside.failures),
        "quiet_asked": len(alone.ttft_s) + len(beside.ttft_s) + len(alone.failures) + len(beside.failures),
        "flood_answered_per_s": round(beside.flood_answered / beside.flood_s, 1),
        "flood_refused": dict(sorted(beside.flood_refused.items())),
        "failures": sorted(set(alone.failures + beside.failures))[:3],
    }
    for name, one in seen.items():
        for p in (50, 99, 100):
            fields[f"{name}_p{p}_ms"] = round(1e3 * percentile(one.ttft_s, p), 1) if one.ttft_s else None
    return fields


def ratio(beside: list[float], alone: list[float], p: int) -> float | None:
    """The percentile of one over that of the other; None if nothing was answered, as beside an urgent flood."""
    return round(percentile(beside, p) / percentile(alone, p), 2) if beside and alone else None


@contextlib.contextmanager
def keyed(flags: Sequence[str]) -> Iterator[tuple[ServedDeployment, Keys]]:
    """A deployment with three keys, two of which are like any other."""
    keys = Keys(*(secrets.token_hex(24) for _ in range(3)))
    with tempfile.TemporaryDirectory() as folder:
        usual, urgent = Path(folder, "keys"), Path(folder, "priority-keys")
        for file, held in ((usual, (keys.quiet, keys.flood)), (urgent, (keys.urgent,))):
            file.touch(0o600)
            file.write_text("\n".join(held))
        named = ("--api-key-file", str(usual), "--priority-keys", str(urgent))
        with serving_deployment(*flags, *named) as deployment:
            deployment.wait_ready()
            yield deployment, keys


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=30, help="of each run of the quiet key")
    parser.add_argument("--open", type=int, default=1024, help="requests of the flood that are open")
    parser.add_argument("--colocated", type=int, default=0, help="workers that do both; 0: one of each kind")
    parser.add_argument("--flood", choices=FLOODS, nargs="+", help="only these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flood-from-stdin", action="store_true", help=argparse.SUPPRESS)
    add_short_form(parser, rounds=1, seconds=15, flood=["plain", "refused"])
    options = parser.parse_args()
    if options.flood_from_stdin:
        return flood_from_stdin()
    load = os.getloadavg()[0]
    flags = (*pool_flags(options.colocated), "--kv-cache-memory-bytes", "256MiB")
    with keyed(flags) as (deployment, keys):
        kinds = options.flood or list(FLOODS)
        floods = {kind: figures(kind, play(deployment, keys, kind, options)) for kind in kinds}
    counted = [floods[kind] for kind in ("plain", "refused") if kind in floods]
    fields: dict[str, Any] = {"fair_ratio": None}
    if ratios := [one["fair_ratio"] for one in counted if one["fair_ratio"] is not None]:
        fields["fair_ratio"] = max(ratios)
    fields["quiet_refused"] = sum(one["quiet_refused"] for one in counted)
    fields |= {"floods": floods, "load_before": round(load, 2)}
    fields |= {name: getattr(options, name) for name in ("rounds", "seconds", "open", "colocated", "seed")}
    print(json.dumps(fields, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
