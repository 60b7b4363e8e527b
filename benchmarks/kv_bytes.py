"""Bytes of a token's KV in the pool and on the wire, and how many streams a small pool serves at once, per codec.

    python -m benchmarks.kv_bytes [--json] [--codecs raw int8 tq4 nuq4-1%] [--only bytes streams freed kept]
                                  [--tokens 1024] [--answer 64] [--pool 64MiB] [--keep 0.98 0.95 0.91 0.85 0.75]
                                  [--prompts 10]

All figures are counters of running deployments of the embedded model, but for those of `freed`, which are counted in an
engine (`benchmarks.kept_slabs`).

    pool_bytes_per_token    one prefill and one decode worker, 4 streams of 1,024 tokens: slabs that the decode worker
                            holds when all of them run, times the bytes of a slab, over their tokens
    wire_bytes_per_token    the same deployment: `diptych:transfer_bytes_total` over the prompts' tokens
    pool_error, wire_error  their difference from the storage formula (`kvcache.codecs.storage.bytes_per_token`), as a
                            part of it
    streams                 one worker for both with a pool of 64 MiB, and as many streams of 1,024 tokens as have room
                            in it: how many of them ran at once; null if any was preempted
    pruned_pct              per threshold of `--keep`: share of the KV of prompts of 1,000 to 1,900 tokens of held-out
                            text that heads drop at the end of the prompt
    freed_ratio             bytes that the pool gets back, while 64 more tokens are generated, as a part of those
                            dropped; `keep_freed_ratio` is that of all thresholds together, null if nothing was dropped
    streams_ratio           `streams` of the last codec / `streams` of the first one

With `--only kept`, which is not measured otherwise, the last codec meets prompts of held-out text, alone and with each
threshold of `--keep`:

    streams_gain            streams that run at once in the pool, more of them than have room, over those of the codec
                            alone; the aim, 0.9 / (1 - pruned share), is `streams_aim`
    wire_kept               bytes on the wire over those of the codec alone, of `--prompts` prompts
    kept_share              KV that heads keep, as a part of that of all rows of these prompts
    wire_error              `wire_kept` / `kept_share` - 1

Prompts share nothing, except those of `kept`, which are cut from the same text at other places. With `--only` the
others are not measured; `freed` is raw KV of one rank.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.kept_slabs import FOLDER, FreedMeter
from benchmarks.load.deployment import ServedDeployment, serving_deployment
from kvcache.codecs.codec_id import parse_codec_id
from kvcache.codecs.storage import bytes_per_token
from models.calibration import held_out_windows

# Layers, KV heads and values of a head of the embedded model.
SHAPE = (6, 4, 32)
CHUNK_TOKENS = 64
POOL_STREAMS, WIRE_PROMPTS = 4, 24
ANSWER_S, SAMPLE_S = 3600.0, 0.05
# Bytes of KV that were moved so far, and hand-overs.
MOVED, MOVES = "diptych:transfer_bytes_total", "diptych:transfer_seconds_count"
# Bytes of KV that heads kept and dropped at the last decision of answers.
PRUNED = "diptych:kv_pruned_bytes_total"
# Of the streams for which the aim has room, these are sent.
CROWD = 1.5


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen while streams ran: most streams at a time, the slabs they held then, and preemptions."""

    running: int
    slabs: int
    preemptions: int


def make_prompts(count: int, tokens: int) -> list[list[int]]:
    """Random token ids; no two prompts begin alike."""
    rng = random.Random(0)
    return [
        [1000 + number % 64, 1000 + number // 64, *rng.choices(range(100, 4000), k=tokens - 2)]
        for number in range(count)
    ]


def worker_stats(deployment: ServedDeployment, role: str) -> dict[str, Any]:
    """The statistics of the only worker with this role."""
    (stats,) = (one["stats"] for one in deployment.get("/status")["workers"] if one["role"] == role)
    return dict(stats)


def chunk_bytes(deployment: ServedDeployment) -> int:
    """Bytes of a slab, as the workers say."""
    sizes = {
        kv_class["chunk_bytes"]
        for one in deployment.get("/status")["workers"]
        for kv_class in one["kv_classes"].values()
    }
    (size,) = sizes
    return int(size)


async def run_streams(deployment: ServedDeployment, prompts: Sequence[list[int]], answer: int) -> Watched:
    """Send all prompts at once, and watch the decode worker until all are answered."""
    before = sum(worker_stats(deployment, "decode")["preemptions"].values())
    seen: list[tuple[int, int, int]] = []
    async with httpx.AsyncClient(
        base_url=deployment.url, timeout=ANSWER_S, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def ask(prompt: list[int]) -> None:
            body = {"prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
            (await client.post("/v1/completions", json=body | {"model": "tiny"})).raise_for_status()

        async def watch() -> None:
            while True:
                workers = (await client.get("/status")).raise_for_status().json()["workers"]
                (stats,) = (one["stats"] for one in workers if one["role"] == "decode")
                seen.append(
                    (stats["running"], stats["slabs_used"], sum(stats["preemptions"].values()) - before)
                )
                await asyncio.sleep(SAMPLE_S)

        watcher = asyncio.create_task(watch())
        try:
            await asyncio.gather(*map(ask, prompts))
        finally:
            watcher.cancel()
    running = max(one[0] for one in seen)
    return Watched(running, max(slabs for now, slabs, _ in seen if now == running), seen[-1][2])


def measure_bytes(codec: str, tokens: int, answer: int) -> dict[str, float]:
    """Bytes of a token in the pool and on the wire."""
    with serving_deployment("--prefill", "1", "--decode", "1", "--kv-cache-codec", codec) as deployment:
        deployment.wait_ready()
        prompts = make_prompts(POOL_STREAMS + WIRE_PROMPTS, tokens)
        size = chunk_bytes(deployment)
        short = [prompt[: tokens - answer] for prompt in prompts[:POOL_STREAMS]]
        watched = uvloop.run(run_streams(deployment, short, answer))
        deployment.rest()
        before = deployment.metric(MOVED)
        uvloop.run(run_streams(deployment, prompts[POOL_STREAMS:], 2))
        moved = deployment.metric(MOVED) - before
        canonical = next(iter(deployment.get("/status")["workers"][0]["kv_classes"]))
    formula = bytes_per_token(parse_codec_id(canonical), *SHAPE)
    pool = watched.slabs * size / (watched.running * tokens)
    wire = moved / (WIRE_PROMPTS * tokens)
    return {
        "formula_bytes_per_token": round(formula, 2),
        "pool_bytes_per_token": round(pool, 2),
        "wire_bytes_per_token": round(wire, 2),
        "pool_error": round(pool / formula - 1, 4),
        "wire_error": round(wire / formula - 1, 4),
    }


def measure_streams(codec: str, tokens: int, answer: int, pool: str) -> dict[str, float | None]:
    """How many streams ran at once, of as many as have room; None if any was preempted."""
    limits = ("--kv-cache-memory-bytes", pool, "--max-num-seqs", "512", "--max-num-batched-tokens", "2048")
    waits = ("--max-queue-wait-s", "1h", "--request-timeout-s", "1h")
    with serving_deployment("--colocated", "1", "--kv-cache-codec", codec, *limits, *waits) as deployment:
        deployment.wait_ready()
        slabs = worker_stats(deployment, "decode")["slabs_total"]
        room = slabs // -(-tokens // CHUNK_TOKENS)
        watched = uvloop.run(run_streams(deployment, make_prompts(room, tokens - answer), answer))
    streams = None if watched.preemptions else watched.running
    return {"slabs": slabs, "room": room, "streams": streams, "preemptions": watched.preemptions}


def measure_freed(thresholds: Sequence[float], prompts: int) -> dict[str, Any]:
    """Per threshold, what heads drop of prompts, and how much of it comes back to the pool."""
    meter = FreedMeter(prompts)
    freed = {threshold: meter.measure(threshold) for threshold in thresholds}
    pruned = sum(one.pruned for one in freed.values())
    return {
        "keep_freed_ratio": round(sum(one.freed for one in freed.values()) / pruned, 4) if pruned else None,
        "keep": {
            str(threshold): {
                "pruned_pct": round(100 * one.pruned / one.whole, 1),
                "freed_ratio": None if one.freed_ratio is None else round(one.freed_ratio, 4),
            }
            for threshold, one in freed.items()
        },
    }


def text_prompts(count: int, tokens: int) -> list[list[int]]:
    """Held-out text, cut at places of equal distance; no two prompts begin alike."""
    return [window.tolist() for window in held_out_windows(FOLDER, count, tokens)]


def kept_bytes(deployment: ServedDeployment) -> tuple[float, float]:
    """Bytes of KV that heads kept, and of all rows, at the last decisions of all answers."""
    lines = [line for line in deployment.metrics().splitlines() if line.startswith(PRUNED)]
    found = [(line, float(line.rsplit(" ", 1)[1])) for line in lines]
    return sum(value for line, value in found if 'outcome="kept"' in line), sum(value for _, value in found)


def keep_flags(threshold: float) -> tuple[str, ...]:
    """Flags for this threshold."""
    return ("--kv-keep", str(threshold)) if threshold < 1 else ()


def count_kept_streams(codec: str, threshold: float, aim: float, options: argparse.Namespace) -> Watched:
    """How many streams ran at once in a pool, of `CROWD * aim` times as many as have room in it whole."""
    limits = ("--kv-cache-memory-bytes", options.pool, "--max-num-seqs", "256")
    waits = ("--max-num-batched-tokens", "4096", "--max-queue-wait-s", "1h", "--request-timeout-s", "1h")
    flags = ("--colocated", "1", "--kv-cache-codec", codec, *keep_flags(threshold), *limits, *waits)
    with serving_deployment(*flags) as deployment:
        deployment.wait_ready()
        room = worker_stats(deployment, "decode")["slabs_total"] / -(-options.tokens // CHUNK_TOKENS)
        prompts = text_prompts(round(CROWD * aim * room), options.tokens - options.answer)
        return uvloop.run(run_streams(deployment, prompts, options.answer))


def measure_kept_wire(codec: str, threshold: float, options: argparse.Namespace) -> tuple[float, float]:
    """Bytes that move for `--prompts` prompts with this threshold, and the share that heads keep."""
    flags = ("--prefill", "1", "--decode", "1", "--kv-cache-codec", codec, *keep_flags(threshold))
    with serving_deployment(*flags) as deployment:
        deployment.wait_ready()
        size, prompts = chunk_bytes(deployment), text_prompts(options.prompts, options.tokens)
        bytes_before, moves_before = deployment.metric(MOVED), deployment.metric(MOVES)
        uvloop.run(run_streams(deployment, prompts, 2))
        deployment.rest()
        moved, moves = deployment.metric(MOVED) - bytes_before, deployment.metric(MOVES) - moves_before
        kept, whole = kept_bytes(deployment)
    # Canaries move one chunk each.
    return moved - (moves - len(prompts)) * size, kept / whole if whole else 1.0


def measure_kept(codec: str, options: argparse.Namespace) -> dict[str, Any]:
    """Per threshold, streams and bytes on the wire against the codec alone."""
    plain_wire, _ = measure_kept_wire(codec, 1.0, options)
    plain = count_kept_streams(codec, 1.0, 1.0, options)
    found: dict[str, Any] = {}
    for threshold in options.keep:
        wire, share = measure_kept_wire(codec, threshold, options)
        aim = 0.9 / share
        streams = count_kept_streams(codec, threshold, aim, options)
        found[str(threshold)] = {
            "kept_share": round(share, 4),
            "wire_kept": round(wire / plain_wire, 4),
            "wire_error": round(wire / plain_wire / share - 1, 4),
            "streams": streams.running,
            "streams_gain": round(streams.running / plain.running, 3),
            "streams_aim": round(aim, 3),
            "preemptions": streams.preemptions,
        }
    return {"codec": codec, "streams": plain.running, "preemptions": plain.preemptions, "keep": found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--codecs", nargs="+", default=["raw", "int8", "tq4", "nuq4-1%"])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["bytes", "streams", "freed", "kept"],
        default=["bytes", "streams", "freed"],
    )
    parser.add_argument("--tokens", type=int, default=1024, help="prompt and answer of a stream")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--pool", default="64MiB")
    parser.add_argument("--keep", nargs="+", type=float, default=[0.98, 0.95, 0.91, 0.85, 0.75])
    parser.add_argument(
        "--prompts", type=int, default=10, help="prompts of `freed` and of `kept` for each threshold"
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    figures: dict[str, Any] = {codec: {} for codec in options.codecs}
    for codec in options.codecs:
        if "bytes" in options.only:
            figures[codec] |= measure_bytes(codec, options.tokens, options.answer)
        if "streams" in options.only and codec in (options.codecs[0], options.codecs[-1]):
            figures[codec] |= measure_streams(codec, options.tokens, options.answer, options.pool)
    found: dict[str, Any] = {}
    first, last = (figures[codec].get("streams") for codec in (options.codecs[0], options.codecs[-1]))
    if first and last:
        found["streams_ratio"] = round(last / first, 2)
    errors = [
        abs(one[name]) for one in figures.values() for name in ("pool_error", "wire_error") if name in one
    ]
    if errors:
        found["max_error"] = max(errors)
    if "freed" in options.only:
        found |= measure_freed(options.keep, options.prompts)
    if "kept" in options.only:
        found["kept"] = measure_kept(options.codecs[-1], options)
    found |= {
        "tokens": options.tokens,
        "pool": options.pool,
        "load_before": round(load, 2),
        "codecs": figures,
    }
    print(json.dumps(found, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
