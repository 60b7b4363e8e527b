"""The part of a check that copies KV between the device and a transfer buffer, and hands it over within one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_parts.check_part import PartContext
from kvcache.device.copies import CopyBatch, DirectCopies, SlabCopies
from kvcache.device.pool import DevicePool
from kvcache.device.stream_copies import open_stream_copies
from kvcache.layout import KvLayout, Shard
from kvtransfer.buffered_links import BufferedLinks
from kvtransfer.cooperative import run_to_end
from kvtransfer.transfer_buffer import TransferBuffer
from kvtransfer.transports.links import TransportLinks
from kvtransfer.transports.shm import ShmSource

# The KV of Llama-3.1-8B in bfloat16.
LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
TOY = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")
TOKENS, ROUNDS = (512, 2048), 7
ALGORITHM = "xxh3"
WORKER, LIFE = "prefill-0", "life"


@dataclass(frozen=True, slots=True)
class OfferedKv:
    """As much of a ticket as a pull reads."""

    worker: str = WORKER
    incarnation: str = LIFE


class DeviceSide:
    """A pool on the device, a transfer buffer of as many slabs, and the copies between them, as a worker has them."""

    def __init__(self, layout: KvLayout, num_slabs: int, device: torch.device) -> None:
        self.pool = DevicePool(layout, num_slabs, device)
        self.buffer = TransferBuffer(layout, num_slabs * layout.chunk_bytes)
        memory = self.buffer.memory.view
        self.copies: SlabCopies = (
            open_stream_copies(self.pool, memory)
            if device.type == "cuda"
            else DirectCopies(self.pool, memory)
        )

    def __enter__(self) -> DeviceSide:
        return self

    def __exit__(self, *raised: object) -> None:
        self.copies.close()
        self.buffer.close()

    def fill(self, seed: int) -> None:
        """Random bytes in all slabs of the device."""
        bytes_, generator = self.pool.slab_bytes, torch.Generator(self.pool.data.device).manual_seed(seed)
        for slab in bytes_:
            slab.copy_(
                torch.randint(256, slab.shape, dtype=torch.uint8, device=slab.device, generator=generator)
            )


def measure_copies(context: PartContext) -> None:
    """Copies of whole chunks beside plain page-locked ones; hand-offs of 512 and 2,048 tokens, byte for byte."""
    layout, device = (TOY, torch.device("cpu")) if context.is_toy else (LAYOUT, torch.device("cuda", 0))
    num_slabs = layout.num_chunks(max(TOKENS))
    with DeviceSide(layout, num_slabs, device) as source, DeviceSide(layout, num_slabs, device) as target:
        source.fill(1)
        ratios = []
        for name, copy, plain in (
            ("to_host", source.copies.to_host, plain_copy(source.pool, to_host=True)),
            ("to_device", source.copies.to_device, plain_copy(source.pool, to_host=False)),
        ):
            pairs = [(slab, slab) for slab in range(num_slabs)]
            ours_s = median_seconds(partial(run_batch, copy, pairs))
            ratios.append(median_seconds(plain) / ours_s)
            gb_per_s = num_slabs * layout.chunk_bytes / ours_s / 1e9
            context.record({f"{name}_gb_per_s": round(gb_per_s, 2), "copy_ratio": round(min(ratios), 3)})
        links, wrong = link_buffers(source, target), 0
        try:
            for tokens in TOKENS:
                taken = []
                for seed in range(ROUNDS):
                    source.fill(seed)
                    seconds, num_wrong = hand_over(links, source, target, layout.num_chunks(tokens))
                    taken.append(seconds)
                    wrong += num_wrong
                context.record(
                    {f"handoff_ms_{tokens}": round(median(taken) * 1e3, 2), "handoff_wrong": wrong}
                )
        finally:
            links.close()


def plain_copy(pool: DevicePool, to_host: bool) -> Callable[[], object]:
    """Copies all slabs to or from page-locked memory, one after the other, and waits for the device."""
    on_gpu = pool.data.device.type == "cuda"
    host = torch.empty_like(pool.slab_bytes, device="cpu", pin_memory=on_gpu)
    sources, targets = (pool.slab_bytes, host) if to_host else (host, pool.slab_bytes)

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    return copy


def median_seconds(call: Callable[[], object]) -> float:
    """Median time of a call that waits for its end; the first two warm up."""
    times = []
    for _ in range(ROUNDS + 2):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return median(times[2:])


def run_batch(
    copy: Callable[[Sequence[tuple[int, int]]], CopyBatch], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy slabs, and wait until they are copied."""
    batch = copy(pairs)
    while not batch.is_done():
        pass


def link_buffers(source: DeviceSide, target: DeviceSide) -> BufferedLinks:
    """The links with which `target` pulls from the buffer of `source`, over shared memory."""
    layout = source.pool.layout
    whole = Shard((0, layout.layers), (0, layout.kv_heads))
    endpoint = ShmSource([(whole, source.buffer.memory)], WORKER).endpoint()
    links = BufferedLinks(TransportLinks(["shm"], target.buffer.pool), target.buffer, target.copies)
    run_to_end(links.link_task(WORKER, LIFE, {"shm": endpoint}))
    return links


def hand_over(
    links: BufferedLinks, source: DeviceSide, target: DeviceSide, num_chunks: int
) -> tuple[float, int]:
    """Hand over the first chunks, one step after the other; returns seconds, and how many are not what was sent."""
    pairs = [(slab, slab) for slab in range(num_chunks)]
    began_s = time.perf_counter()
    run_batch(source.copies.to_host, pairs)
    sent = [source.buffer.pool.hash_slab(slab, ALGORITHM) for slab in range(num_chunks)]
    offered: Any = OfferedKv()
    arrived = run_to_end(links.pull_task(offered, pairs))
    seconds = time.perf_counter() - began_s
    same = (target.pool.slab_bytes == source.pool.slab_bytes)[:num_chunks].all(dim=1)
    wrong = sum(
        not (left == right and bool(equal)) for left, right, equal in zip(sent, arrived, same, strict=True)
    )
    return seconds, wrong
