"""Which bytes of vLLM's KV tensors are a block, and how they lie in a slab of the transfer buffer.

    backing memory of one rank                            slab of the buffer
    region 0  [num_blocks, block_bytes]  ── block 7 ──▶   rank 0: region 0 | region 1 | ...   rank 1: region 0 | ...
    region 1  [num_blocks, block_bytes]  ── block 7 ──▶

vLLM places the layers of a rank in one backing allocation and describes it with strides (`KVCacheTensor`): layers first
(a region per layer, or per layer and head), or blocks first (one region, whose blocks have all layers). What lies
inside a block's bytes is the attention backend's business: nothing here looks at it, and both workers of a hand-off
have the same backend. Imports torch, not vLLM; any object with the fields of a `KVCacheTensor` will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_worker.port import LayerPart

# Most bytes that copies take of the device's memory, unless one block is larger.
MAX_STAGED_BYTES = 32 << 20


class PlacedLayers(Protocol):
    """The fields of vLLM's `KVCacheTensor` that say where the blocks of some layers are; all but `layers` are bytes."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """Blocks that lie one after the other: block b begins at byte `offset + b * block_bytes` of the allocation."""

    name: str
    offset: int
    block_bytes: int


def find_regions(placed: Sequence[PlacedLayers], num_blocks: int) -> tuple[BlockRegion, ...]:
    """The regions of a rank's KV, in the order in which a slab has their parts. Together they hold every byte once.

    Raises:
        ValueError: the strides describe something else than whole blocks, or regions that overlap in part.
    """
    regions: dict[int, BlockRegion] = {}
    for tensor in placed:
        for region in _regions_of(tensor, num_blocks):
            if regions.setdefault(region.offset, region).block_bytes != region.block_bytes:
                raise ValueError(f"{region.name} and {regions[region.offset].name} overlap in part")
            if region.offset + num_blocks * region.block_bytes > tensor.size:
                raise ValueError(
                    f"the blocks of {region.name} end behind the {tensor.size} bytes of the cache"
                )
    ordered = tuple(regions.values())
    ends = sorted((region.offset, region.offset + num_blocks * region.block_bytes) for region in ordered)
    if any(end > start for (_, end), (start, _) in zip(ends, ends[1:], strict=False)):
        raise ValueError("layers of the KV cache overlap in part")
    return ordered


def _regions_of(tensor: PlacedLayers, num_blocks: int) -> Iterator[BlockRegion]:
    """The regions of one `KVCacheTensor`. Raises ValueError."""
    block_bytes, span = tensor.block_stride, num_blocks * tensor.block_stride
    if block_bytes < 1 or not tensor.layers:
        raise ValueError(f"a KV cache without layers or bytes: {tensor}")
    if tensor.layer_stride < span:
        # Blocks first: a block has the pages of all layers, of this tensor and of others that share the blocks.
        yield BlockRegion(f"{tensor.layers[0]}...", 0, block_bytes)
        return
    parts, rest = divmod(tensor.layer_stride, span)
    if rest:
        raise ValueError(f"a layer of {tensor.layer_stride} bytes is not whole regions of {span}")
    for index, layer in enumerate(tensor.layers):
        for part in range(parts):
            name = layer if parts == 1 else f"{layer}.{part}"
            yield BlockRegion(name, tensor.offset + index * tensor.layer_stride + part * span, block_bytes)


def layer_parts(regions: Sequence[BlockRegion]) -> tuple[LayerPart, ...]:
    """The parts of one rank in a slab, in order."""
    return tuple(LayerPart(region.name, region.block_bytes) for region in regions)


class RankBlocks:
    """The blocks of one rank: `cache` is its backing allocation, of any dtype and on any device.

    `slabs` are the buffer's bytes as `[num_slabs, slab_bytes]` (uint8, on the CPU); this rank's part of a slab begins
    at byte `rank` times the size of its parts. Everything is finished when a method returns.

    Raises:
        ValueError: the allocation is too small for `regions`, or the slabs for the rank's part.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        regions: Sequence[BlockRegion],
        num_blocks: int,
        slabs: torch.Tensor,
        rank: int,
    ) -> None:
        self.part_bytes = sum(region.block_bytes for region in regions)
        start = rank * self.part_bytes
        if start + self.part_bytes > slabs.shape[1]:
            raise ValueError(f"a slab of {slabs.shape[1]} bytes has no room for rank {rank}")
        self._own = slabs[:, start : start + self.part_bytes]
        self._views = split_regions(cache, regions, num_blocks)
        self._device = cache.device
        # On a device the parts of a slab are gathered there, so that each slab is one copy over the bus.
        self._is_staged = cache.device.type != "cpu"

    def save(self, blocks: Sequence[int], slabs: Sequence[int]) -> None:
        """Copy the blocks to slabs of the buffer, one each.

        On a device, it waits for all work that was launched on the current stream before, and for the copies.

        Raises:
            ValueError: the numbers of blocks and slabs differ.
            IndexError: there is no such block or slab.
        """
        self._check_numbers(blocks, slabs)
        if self._is_staged:
            for piece, own in self._staged_pieces(blocks, slabs):
                staged = torch.cat([view.index_select(0, piece) for view in self._views], dim=1)
                for row, slab in enumerate(own):
                    self._own[slab].copy_(staged[row], non_blocking=True)
                self._finish_copies()
            return
        for block, slab, count in join_runs(blocks, slabs):
            for view, part in self._pieces(slab, count):
                part.copy_(view[block : block + count])

    def load(self, blocks: Sequence[int], slabs: Sequence[int]) -> None:
        """Copy slabs of the buffer to the blocks, one each. Raises as `save`."""
        self._check_numbers(blocks, slabs)
        if self._is_staged:
            for piece, own in self._staged_pieces(blocks, slabs):
                shape = (len(own), self.part_bytes)
                staged = torch.empty(shape, dtype=torch.uint8, device=self._device)
                for row, slab in enumerate(own):
                    staged[row].copy_(self._own[slab], non_blocking=True)
                at = 0
                for view in self._views:
                    view.index_copy_(0, piece, staged[:, at : at + view.shape[1]])
                    at += view.shape[1]
                self._finish_copies()
            return
        for block, slab, count in join_runs(blocks, slabs):
            for view, part in self._pieces(slab, count):
                view[block : block + count].copy_(part)

    def _staged_pieces(
        self, blocks: Sequence[int], slabs: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
        """So many (blocks, slabs) at a time that staging them needs little of the device's memory."""
        most = max(1, MAX_STAGED_BYTES // self.part_bytes)
        for first in range(0, len(blocks), most):
            piece = torch.tensor(blocks[first : first + most], dtype=torch.int64, device=self._device)
            yield piece, slabs[first : first + most]

    def _finish_copies(self) -> None:
        """Wait for all work on the device's current stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def zero(self, blocks: Sequence[int]) -> None:
        """Make every byte of the blocks zero. Raises IndexError if there is no such block."""
        self._check_numbers(blocks, None)
        for block in blocks:
            for view in self._views:
                view[block].zero_()

    def _pieces(self, slab: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each region, and the bytes of `count` slabs that belong to it."""
        at = 0
        for view in self._views:
            yield view, self._own[slab : slab + count, at : at + view.shape[1]]
            at += view.shape[1]

    def _check_numbers(self, blocks: Sequence[int], slabs: Sequence[int] | None) -> None:
        """Raises ValueError or IndexError: slices beyond the end would silently copy less."""
        num_blocks, num_slabs = self._views[0].shape[0], self._own.shape[0]
        if slabs is not None and len(blocks) != len(slabs):
            raise ValueError(f"{len(blocks)} blocks cannot be copied to or from {len(slabs)} slabs")
        if any(not 0 <= block < num_blocks for block in blocks):
            raise IndexError(f"there are {num_blocks} blocks, not all of {list(blocks)}")
        if any(not 0 <= slab < num_slabs for slab in slabs or ()):
            raise IndexError(f"there are {num_slabs} slabs, not all of {list(slabs or ())}")


def split_regions(cache: torch.Tensor, regions: Sequence[BlockRegion], num_blocks: int) -> list[torch.Tensor]:
    """Views `[num_blocks, block_bytes]` (uint8) of each region of a backing allocation.

    Raises ValueError if the allocation is too small.
    """
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    views = []
    for region in regions:
        end = region.offset + num_blocks * region.block_bytes
        if end > raw.numel():
            raise ValueError(f"{region.name} ends at byte {end} of {raw.numel()}")
        views.append(raw[region.offset : end].view(num_blocks, region.block_bytes))
    return views


def join_runs(firsts: Sequence[int], seconds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs (first, second, count) of pairs in which both numbers grow by one, in order."""
    at = 0
    while at < len(firsts):
        count = 1
        while (
            at + count < len(firsts)
            and firsts[at + count] == firsts[at] + count
            and seconds[at + count] == seconds[at] + count
        ):
            count += 1
        yield firsts[at], seconds[at], count
        at += count
