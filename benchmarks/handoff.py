"""What the hand-off costs a request, and how much of that is hidden.

    python -m benchmarks.handoff [--json] [--short] [--rounds 15] [--only first_gap exposed bytes digest]

`first_gap_ratio`   request start to second token, one prefill and one decode worker / one worker for both; nothing else
                    runs. Prompts of 128 to 1,900 new tokens, the same for both, alternating; medians
                    over rounds, geometric mean over lengths. The second token is the first that a decode worker
                    writes: reading, first token, hand-off and one step are in it, and all that lies between them.
`exposed`           by transport, prompts of 1,024 to 1,900 tokens: `exposed_share` = seconds of pulling that came after
                    the ticket / all seconds of pulling, with pipelining; `exposed_ratio` = the same seconds / those of
                    a deployment without pipelining.
`bytes_ratio`       bytes moved with the prefix tree / without it: prompts of 1,024 tokens, of which 960 are common.
`digest_share`      seconds of hashing, at both ends / seconds of the whole transfer over shared memory: hashing at the
                    source, and what hashing adds to the copies at the target.

Deployments are `diptych serve` with the embedded model. Times in milliseconds are this machine's; ratios are what is
compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

import httpx
import numpy as np
import uvloop

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import (
    ServedDeployment,
    StampedStream,
    pool_flags,
    serving_deployment,
)
from benchmarks.load.prompts import PromptTokens
from benchmarks.load.rounds import no_garbage_collection
from benchmarks.load.short_form import add_short_form
from benchmarks.transfer import EMBEDDED, POOL_BYTES
from kvtransfer.copy_hash import CopyHasher
from kvtransfer.digests import HASH_FUNCTIONS
from kvtransfer.stream_copy import copy_bytes_at

LENGTHS = (128, 256, 512, 1024, 1500, 1900)
LONG = (1024, 1500, 1900)
COMMON = ("--kv-cache-memory-bytes", "256MiB")
ANSWER_TOKENS = 8
SHARED_TOKENS, TAIL_TOKENS = 960, 64
PARTS = ("first_gap", "exposed", "bytes", "digest")


def gap_ratios(found: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[int, float]:
    """By length: the median of `split` over the median of `whole`, both seconds to the second token by round."""
    return {
        length: median(found["split"][length]) / median(found["whole"][length]) for length in found["whole"]
    }


def total(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have all of `labels`, from the text a deployment exposes."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    samples = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return sum(
        float(value)
        for head, _, value in samples
        if head.partition("{")[0] == name and all(pair in head for pair in wanted)
    )


def digest_share(hashing_s: float, hashed_s: float, bare_s: float) -> float:
    """`hashing_s` at the source and what hashing adds at the target, of a transfer that includes both."""
    return (hashing_s + max(0.0, hashed_s - bare_s)) / (hashing_s + hashed_s)


class Client:
    """Requests to one deployment, one at a time."""

    def __init__(self, deployment: ServedDeployment) -> None:
        self.deployment = deployment
        model = deployment.get("/v1/models")["data"][0]["id"]
        self._fixed = {"model": model, "temperature": 0, "ignore_eos": True, "max_tokens": ANSWER_TOKENS}

    async def second_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from connecting to the second event of the answer."""
        with no_garbage_collection():
            began_s = time.monotonic()
            stream = await StampedStream.open(self.deployment.port, prompt=list(prompt), **self._fixed)
            try:
                await stream.done()
            finally:
                await stream.leave()
        self.deployment.rest()
        return stream.stamps_s[1] - began_s

    def metrics(self) -> str:
        """What `/metrics` says."""
        return httpx.get(f"{self.deployment.url}/metrics", timeout=60).raise_for_status().text


async def alternate(clients: Mapping[str, Client], rounds: int) -> dict[str, dict[int, list[float]]]:
    """Seconds to the second token, by deployment and length; the first round is warm-up and not counted."""
    prompts = PromptTokens(next(iter(clients.values())).deployment)
    found: dict[str, dict[int, list[float]]] = {name: {n: [] for n in LENGTHS} for name in clients}
    for number in range(rounds + 1):
        for length in LENGTHS:
            prompt = prompts.take(length)
            order = list(clients) if (number + length) % 2 else list(clients)[::-1]
            for name in order:
                seconds = await clients[name].second_token_s(prompt)
                if number:
                    found[name][length].append(seconds)
    return found


def first_gap(rounds: int) -> dict[str, Any]:
    """The two deployments side by side."""
    with contextlib.ExitStack() as stack:
        deployments = {
            name: stack.enter_context(serving_deployment(*pool_flags(colocated), *COMMON))
            for name, colocated in (("whole", 1), ("split", 0))
        }
        for deployment in deployments.values():
            deployment.wait_ready()
        clients = {name: Client(deployment) for name, deployment in deployments.items()}
        found = uvloop.run(alternate(clients, rounds))
    ratios = gap_ratios(found)
    return {
        "first_gap_ratio": round(geometric_mean(ratios.values()), 3),
        "first_gap_by_length": {length: round(ratio, 3) for length, ratio in ratios.items()},
        "second_token_ms": {
            name: {length: round(median(times) * 1e3, 2) for length, times in lengths.items()}
            for name, lengths in found.items()
        },
    }


async def _ask_all(client: Client, prompts: Sequence[Sequence[int]]) -> None:
    for prompt in prompts:
        await client.second_token_s(prompt)


def _moved(
    flags: Sequence[str], prompts: Callable[[PromptTokens], Sequence[Sequence[int]]]
) -> dict[str, float]:
    """What one deployment says of moving the KV of these prompts, after a warm-up."""
    with serving_deployment(*pool_flags(0), *COMMON, *flags) as deployment:
        deployment.wait_ready()
        client, source = Client(deployment), PromptTokens(deployment)
        asyncio.run(_ask_all(client, [source.take(LENGTHS[-1])] * 2))
        before = client.metrics()
        asyncio.run(_ask_all(client, prompts(source)))
        after = client.metrics()

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    part = "diptych:transfer_part_seconds_total"
    return {
        "hidden_s": grown(part, part="hidden"),
        "exposed_s": grown(part, part="exposed"),
        "num_bytes": grown("diptych:transfer_bytes_total"),
    }


def exposed(rounds: int) -> dict[str, Any]:
    """Every transport with and without pipelining."""

    def prompts(source: PromptTokens) -> list[list[int]]:
        return [source.take(length) for _ in range(rounds) for length in LONG]

    fields: dict[str, Any] = {}
    for transport in ("shm", "nixl"):
        on, off = (
            _moved(("--transports", transport, flag), prompts)
            for flag in ("--pipelined-transfer", "--no-pipelined-transfer")
        )
        pulling_s = on["hidden_s"] + on["exposed_s"]
        fields[transport] = {
            "exposed_share": round(on["exposed_s"] / pulling_s, 3) if pulling_s else None,
            "exposed_ratio": round(on["exposed_s"] / off["exposed_s"], 3) if off["exposed_s"] else None,
            "exposed_ms": round(on["exposed_s"] / rounds / len(LONG) * 1e3, 3),
            "exposed_unpipelined_ms": round(off["exposed_s"] / rounds / len(LONG) * 1e3, 3),
        }
    return {"exposed": fields}


def moved_bytes(rounds: int) -> dict[str, Any]:
    """Prompts that share most of their beginning, with the prefix tree and without."""

    def prompts(source: PromptTokens) -> list[list[int]]:
        common = source.take(SHARED_TOKENS)
        return [common + source.take(TAIL_TOKENS) for _ in range(rounds)]

    flags = ("--enable-prefix-caching", "--no-enable-prefix-caching")
    on, off = (_moved((flag,), prompts)["num_bytes"] for flag in flags)
    return {"bytes_ratio": round(on / off, 3), "bytes_moved": {"with tree": int(on), "without": int(off)}}


def digests(rounds: int) -> dict[str, Any]:
    """Hashing at the source, and copies with and without hashing, alternating; median CPU seconds of this thread."""
    chunk, chunks = EMBEDDED.chunk_bytes, EMBEDDED.num_chunks(LENGTHS[-1])
    pools = [np.random.default_rng(seed).integers(0, 255, POOL_BYTES, np.uint8) for seed in range(2)]
    source = pools[0].data
    far, own = (pool.ctypes.data for pool in pools)
    slabs, whole = POOL_BYTES // chunk, np.array([(0, 0, 0, 0, chunk)], np.int64)
    places = [np.array([(at, chunk)], np.int64) for at in (far, own)]

    def copied(first: int, hashed: bool) -> None:
        for slab in range(first, first + chunks):
            if hashed:
                CopyHasher().copy_slab(whole, chunk, places[0], slab, places[1], slab)
            else:
                copy_bytes_at(own + slab * chunk, far + slab * chunk, chunk)

    def hashed(first: int) -> None:
        for slab in range(first, first + chunks):
            HASH_FUNCTIONS["xxh3"](source[slab * chunk : (slab + 1) * chunk])

    def seconds(work: Callable[..., None], *arguments: Any) -> float:
        began_s = time.thread_time()
        work(*arguments)
        return time.thread_time() - began_s

    times: list[tuple[float, float, float]] = []
    for number in range(3 * rounds + 1):  # the first touches every page that the others do not
        first = [(number * 3 + place) * chunks % (slabs - chunks) for place in range(3)]
        taken = (
            seconds(hashed, first[0]),
            seconds(copied, first[1], True),
            seconds(copied, first[2], False),
        )
        times += [taken] * (number > 0)
    at_source, both, bare = (median(column) for column in zip(*times, strict=True))
    return {
        "digest_share": round(digest_share(at_source, both, bare), 3),
        "digest_ms": {
            "hash at the source": round(at_source * 1e3, 3),
            "copy and hash": round(both * 1e3, 3),
            "copy": round(bare * 1e3, 3),
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    add_short_form(parser, rounds=3)
    options = parser.parse_args()
    fields: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 2), "rounds": options.rounds}
    measures: dict[str, Callable[[int], dict[str, Any]]] = {
        "first_gap": first_gap,
        "exposed": exposed,
        "bytes": moved_bytes,
        "digest": digests,
    }
    for part in options.only:
        fields |= measures[part](options.rounds)
    print(json.dumps(fields, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
