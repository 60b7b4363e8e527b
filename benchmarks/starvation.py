"""What a long prompt every second does to the first tokens of short ones, and they to it.

    python -m benchmarks.starvation [--json] [--rounds 5] [--seconds 20] [--rate 5] [--colocated N]

One deployment of the embedded model. Short prompts (20 to 100 tokens, 8 tokens to write) arrive at random, `--rate` per
second on average, for `--seconds`; then the same arrivals, with texts of their own, and a prompt of 2,000 tokens every
second beside them. The two alternate, and change places from round to round.

    short_p99_ratio      99th percentile of the time to the first token of the short ones, beside / alone
    short_median_ratio   the same of the median
    long_served          the share of the long prompts that were answered in full

Percentiles are over all rounds; times in milliseconds are this machine's, ratios are what is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.interference import percentile
from benchmarks.load.deployment import (
    ServedDeployment,
    StampedStream,
    pool_flags,
    serving_deployment,
)
from benchmarks.load.prompts import PromptTexts, tokenize_text

SHORT_TOKENS, SHORT_ANSWER, LONG_ANSWER = (20, 100), 8, 8


@dataclass(slots=True)
class Seen:
    """Seconds to the first token of each that was answered in full, and how many were asked."""

    short_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    longs: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt, and when to send it, in seconds from the beginning."""

    at_s: float
    text: str
    long: bool


class Scraps:
    """Pieces of the standard library's sources, of about so many tokens; hardly two are alike."""

    def __init__(self, deployment: ServedDeployment) -> None:
        self._text = "\n".join(
            inspect.getsource(module) for module in (argparse, asyncio.base_events, inspect)
        )
        sample = self._text[:20_000]
        self._chars = len(sample) / len(tokenize_text(deployment, sample))
        self._place = random.Random(0)

    def take(self, tokens: int) -> str:
        """Text of about `tokens` tokens."""
        length = int(tokens * self._chars)
        at = self._place.randrange(len(self._text) - length)
        return self._text[at : at + length]


def arrivals(
    scraps: Scraps, texts: PromptTexts, draw: random.Random, options: argparse.Namespace, beside: bool
) -> list[Arrival]:
    """One run's prompts, in order. The moments and lengths of short ones depend on `draw` alone."""
    found, at_s = [], 0.0
    while (at_s := at_s + draw.expovariate(options.rate)) < options.seconds:
        found.append(Arrival(at_s, scraps.take(draw.randint(*SHORT_TOKENS)), False))
    if beside:
        for second in range(int(options.seconds)):
            found.append(Arrival(second + 0.5, texts.take(options.long_tokens), True))
    return sorted(found, key=lambda arrival: arrival.at_s)


async def measure(deployment: ServedDeployment, requests: Sequence[Arrival], seen: Seen) -> None:
    """Send each at its moment, whatever became of those before."""
    model = deployment.get("/v1/models")["data"][0]["id"]
    begun_s = time.monotonic()

    async def ask(arrival: Arrival) -> None:
        await asyncio.sleep(begun_s + arrival.at_s - time.monotonic())
        answer = LONG_ANSWER if arrival.long else SHORT_ANSWER
        fixed = {"model": model, "temperature": 0, "ignore_eos": True, "max_tokens": answer}
        sent_s = time.monotonic()
        stream = await StampedStream.open(deployment.port, prompt=arrival.text, **fixed)
        await stream.done()
        (seen.long_s if arrival.long else seen.short_s).append(stream.stamps_s[0] - sent_s)
        await stream.leave()

    seen.longs += sum(arrival.long for arrival in requests)
    await asyncio.gather(*(ask(arrival) for arrival in requests))


async def play(deployment: ServedDeployment, options: argparse.Namespace) -> dict[str, Seen]:
    """All rounds; one before them is warm-up and not counted."""
    scraps, texts = Scraps(deployment), PromptTexts(deployment)
    seen = {"alone": Seen(), "beside": Seen()}
    for number in range(options.rounds + 1):
        order = ["alone", "beside"] if number % 2 else ["beside", "alone"]
        for mode in order:
            requests = arrivals(scraps, texts, random.Random(number), options, mode == "beside")
            await measure(deployment, requests, seen[mode] if number else Seen())
            deployment.rest()
    return seen


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=5.0, help="short prompts per second")
    parser.add_argument("--long-tokens", type=int, default=2000)
    parser.add_argument("--colocated", type=int, default=0, help="workers that do both; 0: one of each kind")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        deployment = stack.enter_context(
            serving_deployment(*pool_flags(options.colocated), "--kv-cache-memory-bytes", "256MiB")
        )
        deployment.wait_ready()
        seen = uvloop.run(play(deployment, options))
    alone, beside = seen["alone"], seen["beside"]
    report: dict[str, float] = {
        "short_p99_ratio": round(percentile(beside.short_s, 99) / percentile(alone.short_s, 99), 2),
        "short_median_ratio": round(median(beside.short_s) / median(alone.short_s), 2),
        "long_served": round(len(beside.long_s) / beside.longs, 3),
    }
    report |= {
        name: getattr(options, name) for name in ("rounds", "seconds", "rate", "long_tokens", "colocated")
    }
    milliseconds = {
        f"{name}_{kind}_ms": round(value * 1e3, 1)
        for name, values in (("alone", alone.short_s), ("beside", beside.short_s), ("long", beside.long_s))
        for kind, value in (("median", median(values)), ("p99", percentile(values, 99)))
    }
    shown = report | {"load_before": round(load, 2), "this_machine": milliseconds}
    print(json.dumps(shown, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
