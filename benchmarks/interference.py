"""What a long prompt does to requests that are already decoding: one worker for both, against one for each.

    python -m benchmarks.interference [--json] [--rounds 9] [--streams 4] [--prompt-tokens 1500] [--colocated 1]

Four streams decode; a prompt of 1,500 tokens arrives; the client notes when each event of the four comes. Three
deployments of the embedded model, all with the same kernels and one compute thread per worker:

    chunked         `--colocated 1`, prompts cut into 512 tokens a step
    unchunked       `--colocated 1 --no-enable-chunked-prefill`
    disaggregated   `--prefill 1 --decode 1`

Colocated is one worker, since the question is what happens to streams that share a worker with the prompt. With
`--colocated 2` both sides have two cores: half of the streams are then on the other worker, and the gap is that of the
rest.

    gap_ratio   the longest gap between two events of a stream, the smaller of the two colocated / disaggregated
    p99_ratio   the same of the 99th percentile of all gaps

Both count gaps that touch the window from sending the prompt to the end of its 16 tokens, so the hand-off and the
first steps after it are in. Each is the median over rounds; a round measures the three deployments in turn, in rotating
order, with texts of its own, while the other two are idle. Times in milliseconds are this machine's, ratios are what
is compared. `calm` is the second before the prompt: what the machine does to streams with no prompt at all.
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
from statistics import median
from typing import Any

import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import ServedDeployment, StampedStream, serving_deployment
from benchmarks.load.prompts import PromptTexts
from benchmarks.load.rounds import Measure, measure_rounds

COLOCATED = {"chunked": ("--max-num-batched-tokens", "512"), "unchunked": ("--no-enable-chunked-prefill",)}
COMMON = ("--kv-cache-memory-bytes", "256MiB")
SHORT_TOKENS, ANSWER_TOKENS, WARM_EVENTS, CALM_S = 32, 16, 24, 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One round of one deployment. Gaps in seconds."""

    calm: list[float]
    gaps: list[float]
    ttft_s: float  # of the long prompt


def gaps_within(stamps_s: Sequence[float], start_s: float, end_s: float) -> list[float]:
    """Gaps between neighbours that touch the window at all: a gap that began before it counts whole."""
    pairs = zip(stamps_s, stamps_s[1:], strict=False)
    return [late - early for early, late in pairs if late > start_s and early < end_s]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of `values` that at least `percent` of 100 do not exceed. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[-(-percent * len(values) // 100) - 1]


def summary(rounds: Sequence[Seen]) -> dict[str, float]:
    """Medians over rounds, milliseconds."""
    figures = {
        "max_gap_ms": [max(seen.gaps) for seen in rounds],
        "p99_ms": [percentile(seen.gaps, 99) for seen in rounds],
        "median_ms": [median(seen.gaps) for seen in rounds],
        "calm_max_gap_ms": [max(seen.calm) for seen in rounds],
        "calm_p99_ms": [percentile(seen.calm, 99) for seen in rounds],
        "prompt_ttft_ms": [seen.ttft_s for seen in rounds],
    }
    return {name: round(median(values) * 1e3, 2) for name, values in figures.items()}


def compare(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The better of the colocated deployments against the disaggregated one."""
    split = found["disaggregated"]
    best = {name: min(found[mode][name] for mode in COLOCATED) for name in ("max_gap_ms", "p99_ms")}
    return {
        "gap_ratio": round(best["max_gap_ms"] / split["max_gap_ms"], 2),
        "p99_ratio": round(best["p99_ms"] / split["p99_ms"], 2),
    }


def modes(colocated: int) -> dict[str, tuple[str, ...]]:
    """The deployments, as arguments of `diptych serve`."""
    together = {mode: ("--colocated", str(colocated), *flags) for mode, flags in COLOCATED.items()}
    return together | {"disaggregated": ("--prefill", "1", "--decode", "1")}


async def measure(deployment: ServedDeployment, short: Sequence[str], long: str) -> Seen:
    """One round of one deployment: streams, a calm second, the prompt."""
    model = deployment.get("/v1/models")["data"][0]["id"]
    fixed = {"model": model, "temperature": 0, "ignore_eos": True}
    streams: list[StampedStream] = []
    try:
        for text in short:
            streams.append(await StampedStream.open(deployment.port, prompt=text, max_tokens=1900, **fixed))
        for stream in streams:
            await stream.until(WARM_EVENTS)
        calm_s = time.monotonic()
        await asyncio.sleep(CALM_S)
        sent_s = time.monotonic()
        arrival = await StampedStream.open(deployment.port, prompt=long, max_tokens=ANSWER_TOKENS, **fixed)
        streams.append(arrival)
        await arrival.done()
        end_s = time.monotonic()
        for stream in streams[:-1]:
            await stream.until(len(stream.stamps_s) + 1)  # so that the last gap has both its ends
    finally:
        for stream in streams:
            await stream.leave()
    others = [stream.stamps_s for stream in streams[:-1]]
    return Seen(
        calm=[gap for stamps in others for gap in gaps_within(stamps, calm_s, sent_s)],
        gaps=[gap for stamps in others for gap in gaps_within(stamps, sent_s, end_s)],
        ttft_s=arrival.stamps_s[0] - sent_s,
    )


async def play(
    deployments: dict[str, ServedDeployment], options: argparse.Namespace
) -> dict[str, list[Seen]]:
    """All rounds, with texts of their own."""
    texts = PromptTexts(deployments["disaggregated"])

    def prepare_round() -> Measure[Seen]:
        short = [texts.take(SHORT_TOKENS) for _ in range(options.streams)]
        long = texts.take(options.prompt_tokens)
        return lambda deployment: measure(deployment, short, long)

    return await measure_rounds(deployments, options.rounds, prepare_round)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--colocated", type=int, default=1, help="workers of each colocated deployment")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        deployments = {
            mode: stack.enter_context(serving_deployment(*flags, *COMMON))
            for mode, flags in modes(options.colocated).items()
        }
        for deployment in deployments.values():
            deployment.wait_ready()
        seen = uvloop.run(play(deployments, options))
    found = {mode: summary(rounds) for mode, rounds in seen.items()}
    report: dict[str, Any] = compare(found)
    report |= {name: getattr(options, name) for name in ("rounds", "streams", "prompt_tokens", "colocated")}
    report |= {"load_before": round(load, 2), "this_machine": found}
    report["max_gaps_ms"] = {
        mode: [round(max(one.gaps) * 1e3, 1) for one in rounds] for mode, rounds in seen.items()
    }
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
