"""What it gains to compute prompts whose decode room is about to be free: `--decode-overdraft auto` over `off`.

    python -m benchmarks.kv_room [--json] [--short] [--rounds 5] [--seconds 12] [--open 12] [--only simulator]

Two prefill workers and a decode worker, prompts of 1,024 tokens that share nothing, answers of 32; so many requests are
open at every moment. `bound`: each pool has room for four requests. `free`: it has room for all.

    gain        requests per second, auto / off, `bound`
    gap_p99     99th percentile of the time between the first two tokens, auto / off, `bound`
    free_gain   as `gain`, `free`
    late_share  of the prompts that began early in `bound`, those whose KV had to wait

Each for `simulator` and `deployment`. The exact simulator's steps vary by a tenth, from a seed; all of its requests
arrive at once. In the deployment, of the embedded model, both settings are measured by turns, on the same prompts:
`gain` is the median of the rounds' ratios, `gap_p99` that of all rounds together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.interference import percentile
from benchmarks.load.deployment import ServedDeployment, StampedStream, serving_deployment
from benchmarks.load.rounds import Measure, measure_rounds
from benchmarks.load.short_form import add_short_form
from diptych.chunks import CHUNK_TOKENS
from planner.costs.step import StepCost, StepVariation
from planner.sim.exact.deployment import InstanceSpec, SimDeployment
from planner.sim.exact.simulate import ExactSimulation
from planner.types import DECODE, PREFILL, InstancePool, Job, JobResult, Parallelism, Placement

PROMPT, ANSWER, REQUESTS_AT_ONCE, FREE_REQUESTS = 1024, 32, 4, 40
REQUEST_SLABS = -(-(PROMPT + ANSWER) // CHUNK_TOKENS)
MODES = ("off", "auto")
# A prompt takes 58 ms, a step of four answers 4.6 ms.
COST = StepCost((5e-3, 5e-5, 2e-9), ((4e-3, 1e-7, 5e-5),))
STEP_DEVIATION, TAPE = 0.1, 997
TOKEN_BYTES, HOP_S, GATEWAY_S = 2048.0, 2e-4, 1e-3
SIM_REQUESTS = 600
FREE_MEMORY = "256MiB"


@dataclass(frozen=True, slots=True)
class RoomRun:
    """Requests per second, the first gaps in seconds, and how many prompts began early, in time and too early."""

    rate: float
    gaps_s: list[float]
    in_time: int = 0
    late: int = 0


def simulate_room(slabs: int, overdraft: bool, seed: int) -> RoomRun:
    """One run of the exact simulator, with so many slabs at the decode worker."""
    draw = random.Random(seed)
    tapes = [
        tuple(max(0.5, draw.gauss(1.0, deviation)) for _ in range(TAPE))
        for deviation in (STEP_DEVIATION, STEP_DEVIATION / 2)
    ]
    usual = InstanceSpec(
        COST,
        FREE_REQUESTS * REQUEST_SLABS * CHUNK_TOKENS,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        variation=StepVariation(tapes=(tapes[0], tapes[1])),
    )
    pools = tuple(InstancePool(role, Parallelism(), count) for role, count in ((PREFILL, 2), (DECODE, 1)))
    deployment = SimDeployment(
        Placement(pools),
        (usual, replace(usual, kv_tokens=slabs * CHUNK_TOKENS)),
        hop_s=HOP_S,
        gateway_s=GATEWAY_S,
        max_model_len=4096,
        token_bytes=TOKEN_BYTES,
        overdraft=overdraft,
    )
    results = list[JobResult]()
    simulation = ExactSimulation(deployment, results.append)
    simulation.run([Job(0.0, PROMPT, ANSWER)] * SIM_REQUESTS)
    patience = simulation.gateways[0].relay.pairs.patience
    gaps_s = [
        sum(result.parts[part] for part in ("decode_admission", "transfer", "first_decode"))
        for result in results
    ]
    ended_s = max(result.ended_s for result in results)
    return RoomRun(len(results) / ended_s, gaps_s, patience.num_in_time, patience.num_late)


def pool_flags(memory: str) -> tuple[str, ...]:
    """Flags for pools of so many bytes each."""
    return ("--prefill", "2", "--decode", "1", "--kv-cache-memory-bytes", memory)


async def measure_room(
    deployment: ServedDeployment, seconds: float, open_requests: int, seed: int
) -> RoomRun:
    """Requests that are open at every moment for so many seconds."""
    before = deployment.get("/status")["decode_overdraft"]
    gaps_s, ends_s = list[float](), list[float]()
    begun_s = time.monotonic()

    async def client(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        while time.monotonic() < begun_s + seconds:
            prompt = [draw.randrange(1, 256) for _ in range(PROMPT)]
            body: dict[str, Any] = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": ANSWER,
                "ignore_eos": True,
            }
            stream = await StampedStream.open(deployment.port, **body)
            try:
                await stream.done()
            finally:
                await stream.leave()
            ends_s.append(stream.stamps_s[-1])
            gaps_s.append(stream.stamps_s[1] - stream.stamps_s[0])

    async with asyncio.TaskGroup() as tasks:
        for number in range(open_requests):
            tasks.create_task(client(number))
    after = deployment.get("/status")["decode_overdraft"]
    done = sum(end_s <= begun_s + seconds for end_s in ends_s)
    return RoomRun(
        done / seconds,
        gaps_s,
        after["in_time"] - before["in_time"],
        after["late"] - before["late"],
    )


def serve_room(memory: str, options: argparse.Namespace) -> tuple[dict[str, list[RoomRun]], int]:
    """The runs of both settings, by turns, and the bytes of a slab."""
    seeds = iter(range(options.seed, options.seed + options.rounds + 1))

    def prepare_round() -> Measure[RoomRun]:
        seed = next(seeds)
        return lambda deployment: measure_room(deployment, options.seconds, options.open, seed)

    with ExitStack() as stack:
        deployments = {
            mode: stack.enter_context(
                serving_deployment(
                    "--model",
                    "tiny",
                    *pool_flags(memory),
                    "--decode-overdraft",
                    mode,
                    "--max-queue-wait-s",
                    "300",
                )
            )
            for mode in MODES
        }
        for deployment in deployments.values():
            deployment.wait_ready()
        runs = uvloop.run(measure_rounds(deployments, options.rounds, prepare_round))
        (worker, *_) = deployments["off"].get("/status")["workers"]
        ((_, kv_class),) = worker["kv_classes"].items()
        return runs, kv_class["chunk_bytes"]


def compare_runs(runs: dict[str, list[RoomRun]]) -> dict[str, Any]:
    """The ratios of one kind of pool."""
    gaps_s = {mode: [gap_s for one in runs[mode] for gap_s in one.gaps_s] for mode in MODES}
    early = sum(one.in_time + one.late for one in runs["auto"])
    return {
        "gain": _median_ratio([one.rate for one in runs["auto"]], [one.rate for one in runs["off"]]),
        "gap_p99": round(percentile(gaps_s["auto"], 99) / percentile(gaps_s["off"], 99), 3),
        "gap_p50": round(percentile(gaps_s["auto"], 50) / percentile(gaps_s["off"], 50), 3),
        "early_share": round(early / len(gaps_s["auto"]), 3),
        "late_share": round(sum(one.late for one in runs["auto"]) / early, 3) if early else None,
        **{f"{mode}_per_s": round(statistics.median(one.rate for one in runs[mode]), 2) for mode in MODES},
        **{f"{mode}_gap_p99_ms": round(1e3 * percentile(gaps_s[mode], 99), 1) for mode in MODES},
    }


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return round(statistics.median(one / two for one, two in zip(above, below, strict=True)), 3)


def simulated_runs(requests: int, seeds: int) -> dict[str, list[RoomRun]]:
    """The simulator's runs with room for so many requests."""
    slabs = requests * REQUEST_SLABS
    return {mode: [simulate_room(slabs, mode == "auto", seed) for seed in range(seeds)] for mode in MODES}


def summary(bound: dict[str, Any], free: dict[str, Any]) -> dict[str, Any]:
    """The figures of one of simulator and deployment."""
    heads = {"gain": bound["gain"], "gap_p99": bound["gap_p99"], "free_gain": free["gain"]}
    return {**heads, "late_share": bound["late_share"], "bound": bound, "free": free}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run of the deployment")
    parser.add_argument("--open", type=int, default=12, help="requests that are open at every moment")
    parser.add_argument("--only", choices=("simulator", "deployment"), help="leave the other one out")
    parser.add_argument("--seed", type=int, default=1)
    add_short_form(parser, rounds=3, seconds=8.0)
    options = parser.parse_args()
    fields: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 2)}
    if options.only != "deployment":
        found = [
            compare_runs(simulated_runs(count, options.rounds)) for count in (REQUESTS_AT_ONCE, FREE_REQUESTS)
        ]
        fields["simulator"] = summary(*found)
    if options.only != "simulator":
        free, slab_bytes = serve_room(FREE_MEMORY, options)
        bound, _ = serve_room(str(REQUESTS_AT_ONCE * REQUEST_SLABS * slab_bytes), options)
        fields["deployment"] = summary(compare_runs(bound), compare_runs(free))
    fields |= {name: getattr(options, name) for name in ("rounds", "seconds", "open", "seed")}
    print(json.dumps(fields, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
