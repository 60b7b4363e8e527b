"""What sharing a system prompt is worth to a whole deployment: prefix caching on, against off.

    python -m benchmarks.prefix_serving [--json] [--rounds 5] [--streams 32] [--system-tokens 1500]
                                        [--question-tokens 32] [--answer-tokens 400] [--colocated 0]

32 streams arrive at once. All prompts begin with the same 1,500 tokens, which the deployment has not seen before, and
end with a question of their own. When all have ended, one more stream with the same beginning comes alone. Two
deployments of the embedded model that differ in one flag only, one prefill and one decode worker each (or, with
`--colocated N`, N workers for both):

    on      `--enable-prefix-caching`
    off     `--no-enable-prefix-caching`

Every figure is on / off, the median over rounds of the rounds' own ratios; a round measures both deployments, in
alternating order, with texts of its own, while the other one is idle.

    ttft_ratio          the median stream's time to its first token
    ttft_last_ratio     the same of the last stream
    lone_ttft_ratio     the same of the stream that comes alone, when the beginning is known
    throughput_ratio    tokens of all answers / time from the first prompt sent to the last answer's end
    tpot_ratio          the median stream's time per token after its first
    kv_ratio            KV slabs that decode workers hold / streams that are being answered, means over the burst

Slabs are sampled from the workers' books while the streams run. Per stream, since without sharing prompts take so much
longer to be read that fewer streams run at a time; `running` in the output is how many. `cached_share` is the share of
all prompts' full chunks that `on` found, warm-up included. Times in milliseconds are this machine's; ratios are what is
compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import (
    ANSWER_S,
    ServedDeployment,
    StampedStream,
    pool_flags,
    serving_deployment,
)
from benchmarks.load.prompts import PromptTokens
from benchmarks.load.rounds import Measure, measure_rounds

FLAGS = {"on": "--enable-prefix-caching", "off": "--no-enable-prefix-caching"}
COMMON = ("--kv-cache-memory-bytes", "512MiB")
SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Seen:
    """One round of one deployment. Durations in seconds; slabs and running streams are means over the burst."""

    ttft_s: list[float]
    tpot_s: list[float]
    lone_ttft_s: float
    busy_s: float
    tokens: int
    slabs: float
    running: float

    def figures(self) -> dict[str, float]:
        """The figures of which ratios are reported."""
        return {
            "ttft": median(self.ttft_s),
            "ttft_last": max(self.ttft_s),
            "lone_ttft": self.lone_ttft_s,
            "throughput": self.tokens / self.busy_s,
            "tpot": median(self.tpot_s),
            "kv": self.slabs / self.running,
        }


def compare(on: Sequence[Seen], off: Sequence[Seen]) -> dict[str, float]:
    """`<figure>_ratio`: the median over rounds of on / off."""
    pairs = [(a.figures(), b.figures()) for a, b in zip(on, off, strict=True)]
    return {f"{name}_ratio": round(median(a[name] / b[name] for a, b in pairs), 3) for name in pairs[0][0]}


def summary(rounds: Sequence[Seen]) -> dict[str, float]:
    """One deployment's medians over rounds: milliseconds, tokens per second, slabs."""
    found = {name: median(seen.figures()[name] for seen in rounds) for name in rounds[0].figures()}
    times = {f"{name}_ms": round(found[name] * 1e3, 2) for name in ("ttft", "ttft_last", "lone_ttft", "tpot")}
    return times | {
        "tokens_per_s": round(found["throughput"], 1),
        "slabs_per_stream": round(found["kv"], 2),
        "running": round(median(seen.running for seen in rounds), 1),
    }


async def watch(deployment: ServedDeployment, samples: list[tuple[float, int]]) -> None:
    """Note, until cancelled, when the workers that write answers held how many slabs."""
    async with httpx.AsyncClient(timeout=ANSWER_S) as client:
        while True:
            workers = (await client.get(f"{deployment.url}/status")).raise_for_status().json()["workers"]
            used = sum(one["stats"]["slabs_used"] for one in workers if one["role"] != "prefill")
            samples.append((time.monotonic(), used))
            await asyncio.sleep(SAMPLE_S)


def held(samples: Sequence[tuple[float, int]], stamps_s: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean slabs, and mean streams between their first and last token, over the samples at which one was."""
    seen = [(sum(one[0] <= at_s <= one[-1] for one in stamps_s), slabs) for at_s, slabs in samples]
    busy = [(slabs, running) for running, slabs in seen if running]
    if not busy:
        raise RuntimeError("the streams ended before the books were looked at: ask for longer answers")
    return mean(slabs for slabs, _ in busy), mean(running for _, running in busy)


def cached_share(deployment: ServedDeployment) -> float:
    """Of the prompt tokens that were looked up by the workers that prefill, how many were found."""
    workers = deployment.get("/status")["workers"]
    split = any(one["role"] == "prefill" for one in workers)
    stats = [one["stats"] for one in workers if one["role"] == "prefill" or not split]
    queries = sum(one["prefix_queries"] for one in stats)
    return round(sum(one["prefix_hits"] for one in stats) / queries, 3) if queries else 0.0


async def measure(
    deployment: ServedDeployment, prompts: Sequence[list[int]], lone: list[int], answer: int
) -> Seen:
    """One round of one deployment."""
    model = deployment.get("/v1/models")["data"][0]["id"]
    fixed: dict[str, Any] = {"model": model, "temperature": 0, "ignore_eos": True, "max_tokens": answer}
    samples: list[tuple[float, int]] = []
    watcher = asyncio.create_task(watch(deployment, samples))
    streams: list[StampedStream] = []
    try:
        sent_s: list[float] = []
        for prompt in prompts:
            sent_s.append(time.monotonic())
            streams.append(await StampedStream.open(deployment.port, prompt=prompt, **fixed))
        for stream in streams:
            await stream.done()
        end_s = time.monotonic()
        watcher.cancel()
        last_s = time.monotonic()
        last = await StampedStream.open(deployment.port, prompt=lone, **fixed | {"max_tokens": 2})
        streams.append(last)
        await last.done()
    finally:
        watcher.cancel()
        for stream in streams:
            await stream.leave()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    all_stamps = [stream.stamps_s for stream in streams[:-1]]
    slabs, running = held(samples, all_stamps)
    return Seen(
        ttft_s=[stamps[0] - at_s for stamps, at_s in zip(all_stamps, sent_s, strict=True)],
        tpot_s=[(stamps[-1] - stamps[0]) / (answer - 1) for stamps in all_stamps],
        lone_ttft_s=last.stamps_s[0] - last_s,
        busy_s=end_s - sent_s[0],
        tokens=answer * len(prompts),
        slabs=slabs,
        running=running,
    )


async def play(
    deployments: Mapping[str, ServedDeployment], options: argparse.Namespace
) -> dict[str, list[Seen]]:
    """All rounds, with prompts of their own."""
    texts = PromptTokens(deployments["off"])

    def prepare_round() -> Measure[Seen]:
        system = texts.take(options.system_tokens)
        *prompts, lone = (system + texts.take(options.question_tokens) for _ in range(options.streams + 1))
        return lambda deployment: measure(deployment, prompts, lone, options.answer_tokens)

    return await measure_rounds(deployments, options.rounds, prepare_round)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    shape = {"rounds": 5, "streams": 32, "system_tokens": 1500, "question_tokens": 32, "answer_tokens": 400}
    for name, default in shape.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--colocated", type=int, default=0, help="workers for both; 0 is one for each")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        deployments = {
            mode: stack.enter_context(serving_deployment(*pool_flags(options.colocated), flag, *COMMON))
            for mode, flag in FLAGS.items()
        }
        for deployment in deployments.values():
            deployment.wait_ready()
        seen = uvloop.run(play(deployments, options))
        share = cached_share(deployments["on"])
    report: dict[str, Any] = compare(seen["on"], seen["off"]) | {"cached_share": share}
    report |= {name: getattr(options, name) for name in (*shape, "colocated")}
    report |= {
        "load_before": round(load, 2),
        "this_machine": {mode: summary(found) for mode, found in seen.items()},
    }
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
