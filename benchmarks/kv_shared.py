"""What it saves that decode workers share evicted prefixes: slabs, bytes on the wire, and decode attention.

    python -m benchmarks.kv_shared [--json] [--rounds 30] [--threshold 0.5] [--streams 16] [--prefix-tokens 1536]

Streams over one prefix of source text, each with a question of 64 tokens, evicted by `zap`. Unshared ones have a
`cache_salt` each, so that nothing is common to them.

    slabs           slabs in use at the decode worker of 1P1D while all streams decode, shared / unshared
    wire            bytes that move for the second request / for the first one
    attention       decode attention of all layers and the packing of its step, shared / unshared; processor time,
                    medians of rounds by turns
    attention_bag   the same, shared / sequences with one bag each, without segments
    kept_share      rows that stay

`attention` is measured in KV classes `raw` and `nuq4-1%`; the others in `raw`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from tokenizers import Tokenizer

import benchmarks.script_path  # noqa: F401
from benchmarks.engine import EMBEDDED
from benchmarks.kv_ragged import read_kinds, thread_seconds
from benchmarks.load.deployment import ANSWER_S, ServedDeployment, serving_deployment
from diptych.eviction_spec import KeepSpec
from engine.batching.batch import pack_batch
from engine.cpu.eviction.evictor import EvictionSetup
from engine.cpu.model_runner import CpuModelRunner
from engine.model.calibration_file import load_surrogate
from engine.model.checkpoint import Checkpoint
from engine.model.kv_codec import resolve_kv_codec
from engine.protocols import EvictionOrder
from engine.step_work import KeptWork, StepWork
from kvcache.eviction.kept_segments import count_segment_slabs
from kvcache.pool import KvPool

QUESTION, RING, CONTEXT, ANSWER = 64, 32, 2048, 384
CODECS = ("raw", "nuq4-1%")
SOURCES = Path(__file__).parents[1] / "engine"
POLL_S, MEMORY = 0.05, "512MiB"


def read_prompts(tokenizer: Tokenizer, prefix_tokens: int, streams: int) -> list[list[int]]:
    """Prompts of source text that begin alike."""
    text = "\n".join(file.read_text() for file in sorted(SOURCES.rglob("*.py")))
    ids: list[int] = tokenizer.encode(text).ids
    questions = ids[prefix_tokens:]
    return [ids[:prefix_tokens] + questions[n * QUESTION : (n + 1) * QUESTION] for n in range(streams)]


@dataclass
class SharedBenchmark:
    """Sequences that share segments, have segments of their own, or have one bag, over the embedded model."""

    prompts: list[list[int]]
    codec: str
    threshold: float
    works: dict[str, list[StepWork]] = field(
        default_factory=lambda: {"bag": [], "unshared": [], "shared": []}
    )
    kept_share: float = 1.0

    def __post_init__(self) -> None:
        files = Checkpoint.resolve(str(EMBEDDED))
        codec, calibration = resolve_kv_codec(files, self.codec)
        layout, surrogate = files.layout(codec=codec), load_surrogate(files)
        assert surrogate is not None
        self.spec = KeepSpec(self.threshold, 0, surrogate.rule)
        chunks = layout.num_chunks(len(self.prompts[0]))
        self.pool = KvPool(layout, (len(self.prompts) + 1) * (2 * chunks + 8))
        setup = EvictionSetup(
            read_kinds(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))), surrogate=surrogate
        )
        self.runner = CpuModelRunner.load(files, self.pool, CONTEXT, calibration, eviction=setup)
        (attention,) = self.runner._attentions
        assert attention.evictor is not None
        self.evictor, self._segments = attention.evictor, list[int]()
        self._free: list[int] = np.random.default_rng(1).permutation(self.pool.num_slabs).tolist()
        self._slabs = [self._free.pop() for _ in range(chunks)]
        for number, prompt in enumerate(self.prompts):
            self._add_sequence(number, prompt)
        heads, width = files.config.heads, layout.head_dim
        generator = torch.Generator().manual_seed(2)
        self.qkv = torch.randn(len(self.prompts), (heads + 2 * layout.kv_heads) * width, generator=generator)
        self.out = torch.empty(len(self.prompts), heads * width)

    def _add_sequence(self, number: int, prompt: list[int]) -> None:
        """Prefill a prompt, evict it with and without segments, and make the works of all three kinds."""
        kept = KeptWork("prompt", len(prompt), self.spec, False)
        self.runner.run([StepWork(prompt, 0, self._slabs, "none", prompt[0], kept)])
        for kind in ("bag", "unshared"):
            key = f"{kind} {number}"
            order = EvictionOrder(key, prompt, len(prompt), self.spec, self._slabs, cuts=kind != "bag")
            report = self.runner.plan_eviction(order)
            count = count_segment_slabs(report.segments)
            mine = [self._free.pop() for _ in range(count + report.bag_slabs)]
            self.runner.apply_eviction(key, mine)
            self._add_work(kind, key, prompt, mine[:count], mine[count:])
            self.kept_share = report.kept_rows / report.all_rows
        self._segments, key = self._segments or mine[:count], f"shared {number}"
        self.runner.load_kept(key, 0, len(prompt), self._segments + mine[count:], report.segments)
        self._add_work("shared", key, prompt, self._segments, mine[count:])

    def _add_work(self, kind: str, key: str, prompt: list[int], segments: list[int], bag: list[int]) -> None:
        ring = self._free.pop()
        self.pool.data[ring] = self.pool.data[self._slabs[0]]
        kept = KeptWork(key, len(prompt), self.spec, True, len(segments))
        slabs = [*segments, ring, *bag]
        self.works[kind].append(StepWork([5], len(prompt) + RING - 1, slabs, "none", prompt[0], kept))

    def decode(self, kind: str) -> None:
        """Attention of all layers."""
        works = self.works[kind]
        sinks = [0] * len(works) if self.pool.layout.codec else []
        batch, attention = pack_batch(works, sinks), self.evictor.attend_to(works, sinks)
        for layer in range(self.pool.layout.layers):
            attention.decode(layer, self.qkv, batch, 0, self.out)

    def measure(self, rounds: int) -> dict[str, float]:
        """Milliseconds of each kind."""
        taken = {kind: list[float]() for kind in self.works}
        for number in range(rounds + 1):
            for kind, times in taken.items():
                seconds = thread_seconds(partial(self.decode, kind))
                times += [seconds] if number else []
        return {kind: 1e3 * median(times) for kind, times in taken.items()}


async def ask(
    client: httpx.AsyncClient, prompt: list[int], threshold: float, salt: str, tokens: int = ANSWER
) -> None:
    """One answer. Raises httpx.HTTPError."""
    body: dict[str, Any] = {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "diptych": {"keep": {"threshold": threshold, "rule": "zap"}},
    }  # fmt: skip
    (await client.post("/v1/completions", json=body | {"cache_salt": salt})).raise_for_status()


async def count_slabs(
    deployment: ServedDeployment, prompts: list[list[int]], threshold: float, salts: list[str]
) -> int:
    """The slabs that the decode worker uses while it decodes all prompts' answers: the least that was seen.

    Prompts are asked for once before, so that no answer ends before all are there.
    """
    seen = list[int]()
    async with httpx.AsyncClient(base_url=deployment.url, timeout=ANSWER_S) as client:
        pairs = list(zip(prompts, salts, strict=True))
        await asyncio.gather(*(ask(client, prompt, threshold, salt, 2) for prompt, salt in pairs))
        tasks = [asyncio.create_task(ask(client, prompt, threshold, salt)) for prompt, salt in pairs]
        while not all(task.done() for task in tasks):
            workers = (await client.get("/status")).raise_for_status().json()["workers"]
            stats = [one["stats"] for one in workers if one["role"] == "decode"]
            if sum(one["running"] for one in stats) == len(prompts) and not any(
                one["waiting"] for one in stats
            ):
                seen.append(sum(one["slabs_used"] for one in stats))
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*tasks)
    return min(seen)


async def measure_deployment(
    deployment: ServedDeployment, prompts: list[list[int]], threshold: float
) -> dict[str, float]:
    """`slabs` and `wire`, with the figures that they are made from."""
    moved = [deployment.metric("diptych:transfer_bytes_total")]
    async with httpx.AsyncClient(base_url=deployment.url, timeout=ANSWER_S) as client:
        for prompt in prompts[:2]:
            await ask(client, prompt, threshold, "first")
            await asyncio.sleep(1.0)
            moved.append(deployment.metric("diptych:transfer_bytes_total"))
    shared = await count_slabs(deployment, prompts, threshold, ["all"] * len(prompts))
    await asyncio.to_thread(deployment.rest)
    salts = [f"salt {n}" for n in range(len(prompts))]
    unshared = await count_slabs(deployment, prompts, threshold, salts)
    first, second = moved[1] - moved[0], moved[2] - moved[1]
    return {
        "slabs": round(shared / unshared, 3),
        "wire": round(second / first, 3),
        "slabs_shared": shared,
        "slabs_unshared": unshared,
        "first_bytes": first,
        "second_bytes": second,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prefix-tokens", type=int, default=1536)
    options = parser.parse_args()
    load, tokenizer = os.getloadavg()[0], Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    prompts = read_prompts(tokenizer, options.prefix_tokens, options.streams)
    pools = (
        *("--prefill", "1", "--decode", "1", "--local-prefill", "never"),
        *("--kv-cache-memory-bytes", MEMORY, "--max-num-seqs", "32"),
    )
    report: dict[str, Any] = {}
    with serving_deployment(*pools) as deployment:
        deployment.wait_ready()
        report |= asyncio.run(measure_deployment(deployment, prompts, options.threshold))
    for codec in CODECS:
        bench = SharedBenchmark(prompts, codec, options.threshold)
        taken, name = bench.measure(options.rounds), "" if codec == "raw" else f"_{codec.partition('-')[0]}"
        report[f"attention{name}"] = round(taken["shared"] / taken["unshared"], 3)
        report[f"attention_bag{name}"] = round(taken["shared"] / taken["bag"], 3)
        report |= {f"{kind}{name}_ms": round(ms, 2) for kind, ms in taken.items()}
        report.setdefault("kept_share", round(bench.kept_share, 3))
    report |= {"streams": options.streams, "threshold": options.threshold, "load_before": round(load, 2)}
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
