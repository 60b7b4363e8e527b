"""The time per token of streams with a tool that they may call, over that of streams without."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.load.deployment import ServedDeployment, StampedStream
from benchmarks.load.rounds import no_garbage_collection
from benchmarks.tool_parts.schemas import wide_tools

CHAT = "/v1/chat/completions"
NUM_STREAMS, NEW_TOKENS = 16, 256


def make_body(number: int, has_tools: bool) -> dict[str, Any]:
    """A stream of a fixed length, whose prompt is about as long with a tool and without."""
    [tool] = wide_tools(1, 2)
    text = f"Question {number}: " + "what is a list in Python? " * 8
    if not has_tools:
        # In the place of the tool's description.
        text = json.dumps(tool["function"]) + text
    asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0}
    asked |= {"ignore_eos": True, "max_tokens": NEW_TOKENS}
    return asked | ({"tools": [tool]} if has_tools else {})


def pace_of(stamps_s: Sequence[float], num_tokens: int) -> float:
    """Seconds per token behind the first one of a stream of so many tokens, from when its events came."""
    # The first event has the role, the last one the finish reason.
    first, *_, last = stamps_s[1:-1]
    return (last - first) / (num_tokens - 1)


async def measure_pace(deployment: ServedDeployment, first: int, has_tools: bool) -> float:
    """Mean seconds per token of streams at once."""
    streams = [
        await StampedStream.open(deployment.port, CHAT, **make_body(first + number, has_tools))
        for number in range(NUM_STREAMS)
    ]
    for stream in streams:
        await stream.done()
        await stream.leave()
    return statistics.mean(pace_of(stream.stamps_s, NEW_TOKENS) for stream in streams)


async def compare_paces(deployment: ServedDeployment, rounds: int) -> dict[str, Any]:
    """Rounds with tools and without, one after the other, in an order that alternates; the first does not count."""
    paces_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for has_tools in (True, False) if number % 2 else (False, True):
            with no_garbage_collection():
                found_s = await measure_pace(deployment, number * NUM_STREAMS, has_tools)
            deployment.rest()
            if number:
                paces_s[has_tools].append(found_s)
    return compare_rounds(paces_s[True], paces_s[False])


def compare_rounds(with_tools_s: Sequence[float], without_s: Sequence[float]) -> dict[str, Any]:
    """The figures of rounds that were measured in pairs."""
    ratios = [tools / plain for tools, plain in zip(with_tools_s, without_s, strict=True)]
    return {
        "tool_tpot_ratio": round(statistics.median(ratios), 4),
        "tool_tpot_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "tool_tpot_ms": round(1e3 * statistics.median(with_tools_s), 3),
        "plain_tpot_ms": round(1e3 * statistics.median(without_s), 3),
        "rounds": len(ratios),
    }
