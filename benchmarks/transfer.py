"""How fast KV is handed over, beside what the machine can do at all.

    python -m benchmarks.transfer [--json] [--rounds N] [--no-system]

`shm_ratio`       hand-off GB/s over shared memory / GB/s of one contiguous memcpy of as many bytes, both out of
                  another process's memory; the smallest over all cases.
`split_ratio`     the same between workers that are split into ranks, differently; the smallest over all cases.
`nixl_ratio`      hand-off GB/s over NIXL / GB/s of a bare NIXL read of as many bytes (one request, the caller spins,
                  nothing is verified), both with UCX over the loopback device; the smallest over all cases.
`digest_share`    of the time of a hand-off over shared memory, the part that goes into hashing: one minus the time of
                  the same hand-off with a hash that reads nothing / its time; the largest over all cases. At the
                  source every byte is hashed once more, while it is computed.
`first_touch`     time of a hand-off over shared memory into slabs that a worker has populated (`worker.prefault`) and
                  nobody has used / into the same slabs later.
`transfer_share`  seconds of KV transfer / seconds end to end, summed over requests of 512 prompt and 64 output tokens
                  to a deployment that this starts; null, with the reason, when it does not start.

A hand-off is everything between the ticket and permission to decode: reserve, pull, hash every byte, check every
digest. The source is a real second process that writes and digests fresh KV before every round, as a prefill worker
does. The rounds of what is compared are interleaved, and medians are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np

import benchmarks.script_path  # noqa: F401
from benchmarks.load.deployment import serving_deployment
from kvcache.layout import KvLayout, Shard, split_layout
from kvtransfer import ticket as tickets
from kvtransfer.cooperative import run_to_end
from kvtransfer.digests import ChunkDigester, DigestContext
from kvtransfer.handoff import (
    CommitSlabs,
    FreeSlabs,
    HandoffOutcome,
    PullChunks,
    ReserveSlabs,
    hand_off,
    perform_effects,
)
from kvtransfer.pipelined_pull import LayerCopy
from kvtransfer.resharding import ShardedPool
from kvtransfer.shared_memory import SharedMemory, attach_memory
from kvtransfer.transports import shm
from kvtransfer.transports.links import TransportLinks, open_sources
from kvtransfer.transports.nixl import NixlEndpoint
from kvtransfer.transports.nixl_agent import NixlAgent, address_of

KEY = b"benchmark key, not a secret"
POOL_BYTES = 256 << 20  # several times the last-level cache, so that targets are as cold as in a busy pool


@dataclass(frozen=True, slots=True)
class Case:
    """One request's KV: a model's layout, a prompt's length, and (tp, pp) on both sides."""

    name: str
    layout: KvLayout
    tokens: int
    here: tuple[int, int] = (1, 1)
    there: tuple[int, int] = (1, 1)

    @property
    def chunks(self) -> int:
        return self.layout.num_chunks(self.tokens)

    @property
    def num_bytes(self) -> int:
        return self.chunks * self.layout.chunk_bytes

    @property
    def num_slabs(self) -> int:
        return max(POOL_BYTES // self.layout.chunk_bytes, 4 * self.chunks)

    def memories(self, split: tuple[int, int]) -> list[tuple[Shard, SharedMemory]]:
        """A pool, by rank."""
        held = split_layout(self.layout, *split)
        return [
            (shard, SharedMemory(self.num_slabs * self.layout.shard_layout(shard).chunk_bytes))
            for shard in held
        ]

    def parts(self, memories: list[tuple[Shard, SharedMemory]]) -> ShardedPool:
        return ShardedPool(self.layout, [(shard, memory.view) for shard, memory in memories])


EMBEDDED = KvLayout(layers=6, kv_heads=4, head_dim=32, dtype="float32")
LARGER = KvLayout(layers=16, kv_heads=4, head_dim=128, dtype="float32")
CASES = [
    Case("embedded model, 512 tokens", EMBEDDED, 512),
    Case("embedded model, 2048 tokens", EMBEDDED, 2048),
    Case("16 layers x 4 heads x 128, 512 tokens", LARGER, 512),
]
SPLITS = [
    Case("embedded model, 512 tokens, tp 1 to 2", EMBEDDED, 512, (1, 1), (2, 1)),
    Case("embedded model, 512 tokens, tp 2 to 1", EMBEDDED, 512, (2, 1), (1, 1)),
    Case("embedded model, 512 tokens, tp 2 to 2", EMBEDDED, 512, (2, 1), (2, 1)),
    Case("embedded model, 512 tokens, pp 1 to 2", EMBEDDED, 512, (1, 1), (1, 2)),
    Case("16 layers x 4 heads x 128, 512 tokens, tp 4 to 2", LARGER, 512, (4, 1), (2, 1)),
]


class Origin:
    """The source process: its memory, and offers of fresh KV."""

    def __init__(self, case: Case, transport: str) -> None:
        self.case, self.places = case, _places(case)
        self.memories = case.memories(case.here)
        self.pool = case.parts(self.memories)
        self.sources = open_sources([transport], self.memories, "source")
        self.fresh = np.random.default_rng(0).integers(0, 255, case.num_bytes, np.uint8)

    def offer(self, number: int) -> str:
        slabs, at = next(self.places), 0
        for memory, size in zip(self.pool.memories, self.pool.slab_bytes, strict=True):
            for slab in slabs:
                memory[slab * size : (slab + 1) * size] = self.fresh[at : at + size].data
                at += size
        layout = self.case.layout
        terms = DigestContext(
            str(number),
            1,
            self.case.tokens,
            (0, layout.layers),
            layout.dtype,
            layout.chunk_shape,
            "f",
            layout.chunk_bytes,
        )
        ticket = tickets.issue_ticket(KEY, terms, "source", "life", slabs, self.pool.hash_slab)
        return tickets.encode_ticket(ticket, KEY).hex()

    def serve(self) -> None:
        print(*(source.endpoint().hex() for source in self.sources.values()), flush=True)
        for number, _ in enumerate(sys.stdin):
            print(self.offer(number), flush=True)


class Unread:
    """A hash that reads nothing."""

    def update(self, data: object, /) -> None:
        """Takes no time."""

    def digest(self) -> bytes:
        return b""


class Pair:
    """The puller's end: the source process, an own pool, links, and places that rotate through both pools."""

    def __init__(self, case: Case, transport: str) -> None:
        self.case, self.places = case, _places(case)
        number = (CASES + SPLITS).index(case)
        args = [sys.executable, "-m", "benchmarks.transfer", "--source", transport, str(number)]
        self.process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = bytes.fromhex(self._line())
        self.own = case.memories(case.there)
        for _, memory in self.own:
            memory.populate_pages(0, memory.num_bytes)  # every page is there before the first round
        self.links = TransportLinks([transport], case.parts(self.own))
        self.route = self.links.link_worker("source", "life", {transport: self.endpoint})

    def offer(self) -> tickets.Ticket:
        assert self.process.stdin is not None
        self.process.stdin.write("offer\n")
        self.process.stdin.flush()
        return tickets.decode_ticket(bytes.fromhex(self._line()), KEY)

    def fetch(self, *, hashed: bool = True) -> float:
        """Seconds of one hand-off; without `hashed` no byte is read for a digest, and none is compared."""
        ticket, place = self.offer(), next(self.places)
        if not hashed:
            return self._copy(ticket, place)
        committed: list[int] = []
        table: dict[type[Any], Callable[[Any], Any]] = {
            ReserveSlabs: lambda effect: place,
            PullChunks: lambda effect: self.links.pull_slabs(effect.ticket, effect.pairs),
            CommitSlabs: lambda effect: committed.extend(effect.slabs),
            FreeSlabs: lambda effect: None,
        }
        began = time.perf_counter()
        outcome = perform_effects(
            hand_off(ticket, len(place), ChunkDigester(KEY, ticket.context).matches_chunk), table
        )
        taken = time.perf_counter() - began
        assert isinstance(outcome, HandoffOutcome) and outcome.error is None and committed == place
        return taken

    def _copy(self, ticket: tickets.Ticket, place: list[int]) -> float:
        lane = self.links.connection_to("source", "life")
        copies = [
            LayerCopy(chunk.slab, own, 0, self.case.layout.layers, Unread())
            for chunk, own in zip(ticket.chunks, place, strict=True)
        ]
        began = time.perf_counter()
        run_to_end(lane.copy_layers(copies, lambda: False))
        return time.perf_counter() - began

    def close(self) -> None:
        self.links.close()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        for _, memory in self.own:
            memory.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def memcpy(pair: Pair) -> Callable[[], float]:
    """One contiguous copy of fresh bytes per rank of the source, out of its memory: what C's memcpy makes of it."""
    known = msgspec.msgpack.decode(pair.endpoint, type=shm.ShmEndpoint).shards
    case, theirs = pair.case, [np.frombuffer(attach_memory(address), np.uint8) for _, address in known]
    sizes = [case.layout.shard_layout(shard).chunk_bytes for shard, _ in known]
    if case.here == case.there:
        own = [np.frombuffer(memory.view, np.uint8) for _, memory in pair.own]
    else:
        own = [np.ones(memory.nbytes, np.uint8) for memory in theirs]

    def once() -> float:
        source, target = pair.offer().chunks[0].slab, next(pair.places)[0]
        began = time.perf_counter()
        for there, here, size in zip(theirs, own, sizes, strict=True):
            num_bytes = size * case.chunks
            np.copyto(here[target * size :][:num_bytes], there[source * size :][:num_bytes])
        return time.perf_counter() - began

    return once


def bare_nixl(pair: Pair) -> Callable[[], float]:
    """One NIXL read of the same slabs: a descriptor per slab, one request, the caller spins until it is done."""
    endpoint = msgspec.msgpack.decode(pair.endpoint, type=NixlEndpoint)
    (_, memory), (_, far, _) = pair.own[0], endpoint.shards[0]
    agent = NixlAgent(f"bare-{os.getpid()}", [memory.view], serve=False)
    peer, base, size = (
        agent.add_peer(endpoint.metadata),
        address_of(memory.view),
        pair.case.layout.chunk_bytes,
    )

    def once() -> float:
        ticket, place = pair.offer(), next(pair.places)
        segments = [
            (far + chunk.slab * size, base + own * size, size)
            for chunk, own in zip(ticket.chunks, place, strict=True)
        ]
        began = time.perf_counter()
        handle = agent.post_read(peer, segments)
        while not agent.is_done(handle):
            pass
        return time.perf_counter() - began

    return once


def compare(case: Case, transport: str, rounds: int) -> dict[str, Any]:
    """Interleaved rounds of the hand-off and of what bounds it."""
    pair = Pair(case, transport)
    try:
        bound = memcpy(pair) if transport == "shm" else bare_nixl(pair)
        ours, theirs = [], []
        for number in range(rounds + 3):
            pulled, bounded = pair.fetch(), bound()
            if number >= 3:  # the first rounds touch every page and connect
                ours.append(pulled)
                theirs.append(bounded)
        mine, limit = (case.num_bytes / statistics.median(times) / 1e9 for times in (ours, theirs))
        return {
            "case": case.name,
            "mb": round(case.num_bytes / 1e6, 2),
            "hand_off_gb_per_s": round(mine, 3),
            ("memcpy_gb_per_s" if transport == "shm" else "bare_nixl_gb_per_s"): round(limit, 3),
            "ratio": round(mine / limit, 3),
            "hand_off_ms": round(statistics.median(ours) * 1e3, 3),
            "measured_at_link": {
                "gb_per_s": round(pair.route.gb_per_s, 2),
                "latency_us": round(pair.route.latency_us, 1),
            },
        }
    finally:
        pair.close()


def digest_share(case: Case, rounds: int) -> float:
    """How much of a hand-off over shared memory is hashing; rounds with and without it are interleaved."""
    pair = Pair(case, "shm")
    try:
        whole, bare = [], []
        for number in range(rounds + 3):
            hashed, copied = pair.fetch(), pair.fetch(hashed=False)
            if number >= 3:
                whole.append(hashed)
                bare.append(copied)
        return round(1 - statistics.median(bare) / statistics.median(whole), 3)
    finally:
        pair.close()


def first_touch(case: Case, pairs: int = 3) -> float:
    """The first hand-offs into all slabs of fresh pools, beside the second ones."""
    ratios = []
    for _ in range(pairs):
        pair = Pair(case, "shm")
        try:
            passes = [[pair.fetch() for _ in range(case.num_slabs // case.chunks)] for _ in range(2)]
        finally:
            pair.close()
        first, later = (statistics.median(times) for times in passes)
        ratios.append(first / later)
    return round(statistics.median(ratios), 3)


def transfer_share(requests: int = 12) -> dict[str, Any]:
    """Start a deployment of the embedded model, drive it, and read the two sums from its metrics.

    Returns `transfer_share` None and `transfer_share_skipped` with the reason when the deployment does not start.
    """
    try:
        with serving_deployment() as deployment, httpx.Client(base_url=deployment.url, timeout=120) as client:
            deployment.wait_ready()
            return _share(client, requests)
    except RuntimeError as error:
        return {"transfer_share": None, "transfer_share_skipped": str(error)}


def _share(client: httpx.Client, requests: int) -> dict[str, Any]:
    model = client.get("/v1/models").json()["data"][0]["id"]
    rng = random.Random(0)

    def ask() -> None:
        prompt = [rng.randrange(300, 4000) for _ in range(512)]
        body = {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()

    ask()  # warm
    before = _sums(client)
    for _ in range(requests):
        ask()
    after = _sums(client)
    transfer, whole = (late - early for late, early in zip(after, before, strict=True))
    if not transfer or not whole:  # a share of 0 would look like the best possible result
        return {
            "transfer_share": None,
            "transfer_share_skipped": "the deployment's metrics tell of no transfer",
        }
    return {
        "transfer_share": round(transfer / whole, 5),
        "transfer_ms": round(transfer / requests * 1e3, 3),
        "end_to_end_ms": round(whole / requests * 1e3, 1),
    }


def _sums(client: httpx.Client) -> tuple[float, float]:
    """Seconds of KV transfer and seconds end to end, summed over all labels."""
    lines = client.get("/metrics").text.splitlines()

    def total(name: str) -> float:
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name
        )

    return total("diptych:transfer_seconds_sum"), total("vllm:e2e_request_latency_seconds_sum")


def _places(case: Case) -> Iterator[list[int]]:
    """Contiguous runs of slabs, one after the other through the whole pool."""
    runs = case.num_slabs // case.chunks
    return (list(range(run * case.chunks, (run + 1) * case.chunks)) for run in itertools.cycle(range(runs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--no-system", action="store_true", help="do not start a deployment for transfer_share"
    )
    parser.add_argument("--source", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.update({"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n"})
    if args.source:
        Origin((CASES + SPLITS)[int(args.source[1])], args.source[0]).serve()
        return
    memory = [compare(case, "shm", args.rounds) for case in CASES]
    split = [compare(case, "shm", args.rounds) for case in SPLITS]
    wire = [compare(case, "nixl", args.rounds) for case in CASES]
    report: dict[str, Any] = {
        "shm_ratio": min(case["ratio"] for case in memory),
        "split_ratio": min(case["ratio"] for case in split),
        "nixl_ratio": min(case["ratio"] for case in wire),
        "digest_share": max(digest_share(case, args.rounds) for case in CASES),
        "first_touch": first_touch(CASES[0]),
        "shm": memory,
        "split": split,
        "nixl": wire,
    }
    if not args.no_system:
        report |= transfer_share()
    print(json.dumps(report, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
