"""The bags of a worker with several ranks: each rank has one for its layers and heads, with a map of its own.

All ranks' bags are in the same slabs of a sequence, each in its rank's part of them. So the rank that needs the most
slabs says how many the sequence takes. What a head keeps does not depend on the ranks: the maps of any split say the
same of each head, and can be put together and cut again. Bags with something behind the frames of their heads
(`kvcache.kept_rows.FrameFormat.is_split`) are not for this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvcache.kept_rows import KeptRows, count_bag_slabs
from kvcache.layout import KvLayout, Shard


def shard_heads(shard: Shard) -> list[tuple[int, int]]:
    """(layer, KV head) of a rank's heads, in the order of its bag."""
    return list(product(range(*shard.layers), range(*shard.heads)))


def count_rank_slabs(
    layout: KvLayout, shards: Sequence[Shard], boundary: int, length: int, head_frames: Sequence[int]
) -> int:
    """The slabs of a bag on ranks with these `shards`, whose heads need `head_frames` frames, those of layer 0 first.

    `boundary` and `length` are those of the map (`KeptRows`).

    Raises:
        ValueError: there are not as many heads, or a shard does not fit the layout.
    """
    if len(head_frames) != layout.layers * layout.kv_heads:
        raise ValueError(f"frames of {len(head_frames)} heads are not those of {layout}")
    needed = []
    for shard in shards:
        frames = sum(head_frames[layer * layout.kv_heads + head] for layer, head in shard_heads(shard))
        needed.append(count_bag_slabs(layout.shard_layout(shard), boundary, length, frames))
    return max(needed)


def merge_maps(layout: KvLayout, shards: Sequence[Shard], maps: Sequence[KeptRows]) -> KeptRows:
    """The map of all heads from those of the ranks; `layout` is that of all ranks together.

    Raises:
        ValueError: the maps are of different decisions, or not of ranks with these shards.
    """
    first = maps[0]
    if any((one.boundary, one.length) != (first.boundary, first.length) for one in maps):
        raise ValueError("the maps of the ranks are those of different decisions")
    policies = np.zeros((layout.layers, layout.kv_heads), np.uint8)
    rows: dict[tuple[int, int], NDArray[np.int32]] = {}
    for shard, one in zip(shards, maps, strict=True):
        policies[slice(*shard.layers), slice(*shard.heads)] = one.policies
        own = [one.head_positions(layer, head) for layer, head in np.ndindex(one.counts.shape)]
        rows |= dict(zip(shard_heads(shard), own, strict=True))
    return KeptRows.from_heads(
        layout, first.boundary, first.length, policies, [rows[place] for place in sorted(rows)]
    )


def cut_map(kept: KeptRows, shard: Shard) -> KeptRows:
    """The part of a map of all heads that is one rank's."""
    positions = [kept.head_positions(layer, head) for layer, head in shard_heads(shard)]
    policies = kept.policies[slice(*shard.layers), slice(*shard.heads)]
    part = kept.layout.shard_layout(shard)
    return KeptRows.from_heads(part, kept.boundary, kept.length, policies, positions)
