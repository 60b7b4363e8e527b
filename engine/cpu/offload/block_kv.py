"""The KV of a block: one room for each layer and batch, in memory or on disk, and the attention over it.

    room (layer j, batch k)    chunk 0 │ chunk 1 │ ...      one layer of 64 tokens each, in whole disk blocks

The kernels are those of the resident engine (`engine.cpu.attention`, `engine.cpu.coded`), over pools of one layer. So
answers are the same to the last bit wherever KV lies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.attention import CpuAttention, PagedAttention
from engine.cpu.coded.attention import CodedPool
from engine.cpu.coded.compiled_attention import Angles, CompiledAttention
from engine.cpu.coded.sink_table import SinkTable
from engine.cpu.offload.disk_file import DirectFile
from engine.cpu.offload.disk_rooms import PlacedRooms, RoomVisit, merge_ranges
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import FLOAT_BYTES, batch_chunks, round_up
from engine.step_work import StepWork
from kvcache.codecs.calibration import Calibration
from kvcache.codecs.page import Codec
from kvcache.layout import KvLayout, Shard
from kvcache.page_codecs import build_page_codecs


@dataclass(frozen=True, slots=True)
class KvCoding:
    """What attention over coded KV takes beside the pages."""

    # By layer and page.
    codecs: tuple[tuple[Codec, ...], ...]
    # Radians per token of each rotary pair.
    frequencies: NDArray[np.float64]
    angles: Angles
    sinks: SinkTable


def build_coding(
    layout: KvLayout,
    calibration: Calibration | None,
    frequencies: NDArray[np.float64],
    angles: Angles,
    sinks: SinkTable,
) -> KvCoding:
    """The coding of a layout with a codec. Raises ConfigError as `build_page_codecs`."""
    whole = Shard((0, layout.layers), (0, layout.kv_heads))
    return KvCoding(build_page_codecs(layout, calibration, whole), frequencies, angles, sinks)


class BlockKv(PlacedRooms[tuple[int, int]]):
    """The KV of all batches of a block by layer and batch, for a model with `layout` and `heads` query heads.

    `file` has rooms for the KV that is on disk (`disk_bytes`); None if there is none. `coding` is given if the layout
    has a codec.
    """

    def __init__(
        self,
        layout: KvLayout,
        heads: int,
        policy: BlockPolicy,
        file: DirectFile | None,
        coding: KvCoding | None = None,
    ) -> None:
        self._layout, self._heads, self._coding = replace(layout, layers=1), heads, coding
        self._chunk_bytes, self._chunks = round_up(layout.layer_bytes), batch_chunks(policy)
        pairs = product(range(layout.layers), range(policy.batches))
        here = policy.kv_pairs_in_memory(layout.layers)
        super().__init__(pairs, here, self._chunks * self._chunk_bytes, file, policy.overlap)
        self._built: dict[tuple[int, str, int], PagedAttention] = {}

    def begin_step(self, works: dict[int, list[StepWork]]) -> None:
        """A step computes `works` of some batches, by batch, layer after layer."""
        if self._disk is None:
            return
        changes = {batch: self._list_chunks(mine) for batch, mine in works.items()}
        layers = sorted({layer for layer, _ in self._rooms})
        visits = [
            RoomVisit(self._rooms[layer, batch], *changes[batch])
            for layer in layers
            for batch in works
            if (layer, batch) in self._rooms
        ]
        self._disk.begin_step(visits)

    def _list_chunks(self, works: Iterable[StepWork]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """What a step reads of a batch's room before, and what it changes."""
        read, changed = list[int](), list[int]()
        for work in works:
            read += work.slabs[: -(-work.start // CHUNK_TOKENS)]
            last = -(-(work.start + len(work.tokens)) // CHUNK_TOKENS)
            changed += work.slabs[work.start // CHUNK_TOKENS : last]
        return merge_ranges(read, self._chunk_bytes), merge_ranges(changed, self._chunk_bytes)

    def enter(self, layer: int, batch: int) -> PagedAttention:
        """The attention over the KV of a batch in a layer, which is layer 0 for it. Raises OSError."""
        if (memory := self._memory.get((layer, batch))) is not None:
            return self._attend_to(memory, (layer, "memory", batch))
        assert self._disk is not None
        window = self._disk.enter()
        return self._attend_to(self._disk.windows[window], (layer, "window", window))

    def _attend_to(self, memory: memoryview, name: tuple[int, str, int]) -> PagedAttention:
        """The attention of a layer over a room in memory; `name` names both."""
        if name not in self._built:
            self._built[name] = self._build_attention(memory, name[0])
        return self._built[name]

    def _build_attention(self, memory: memoryview, layer: int) -> PagedAttention:
        layout, coding = self._layout, self._coding
        flat = torch.frombuffer(memory[: self._chunks * self._chunk_bytes], dtype=torch.uint8)
        slabs = flat.view(self._chunks, self._chunk_bytes)
        if coding is None:
            floats = slabs.view(torch.float32)[:, : layout.chunk_bytes // FLOAT_BYTES]
            return CpuAttention(layout, floats.view(self._chunks, *layout.chunk_shape), self._heads)
        used = slabs[:, : layout.chunk_bytes]
        data = used.view(self._chunks, 1, layout.pages_per_layer, layout.page_bytes)
        codecs = (coding.codecs[layer],)
        pool = CodedPool(layout, data, codecs, coding.frequencies, coding.sinks.view_layer(layer))
        return CompiledAttention(pool, self._heads, coding.angles)
