"""How large a bag is, however ranks split it (`kvcache.eviction.rank_bags`): in frames, and in entries behind the
frames."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from kvcache.layout import KvLayout, Shard


class BagSizes(NamedTuple):
    """What the rows of a bag need, however ranks split it. Heads and pages of layer 0 come first.

    `head_frames` are the frames of each head. Where rows of a page are taken apart, `page_tokens` are the entries of
    each page in the table of tokens; and where they have outliers, `page_outliers` those in the list. Else these are
    empty. Everything is empty if it is not known.
    """

    head_frames: tuple[int, ...] = ()
    page_tokens: tuple[int, ...] = ()
    page_outliers: tuple[int, ...] = ()


def shard_heads(shard: Shard) -> list[tuple[int, int]]:
    """(layer, KV head) of a rank's heads, in the order of its bag."""
    return list(product(range(*shard.layers), range(*shard.heads)))


def shard_pages(layout: KvLayout, shard: Shard) -> list[tuple[int, int]]:
    """(layer, page of the layer) of a rank's pages, in the order of its bag; `layout` is that of all ranks together."""
    first, last = (bound // layout.page_heads for bound in shard.heads)
    return list(product(range(*shard.layers), range(first, last)))


def merge_sizes(layout: KvLayout, shards: Sequence[Shard], sizes: Sequence[BagSizes]) -> BagSizes:
    """The sizes of the bags of all ranks together, whose layout is `layout`.

    Raises:
        ValueError: they are not those of ranks with these shards.
    """
    frames: dict[tuple[int, int], int] = {}
    pages: list[dict[tuple[int, int], int]] = [{}, {}]
    for shard, (head_frames, *of_pages) in zip(shards, sizes, strict=True):
        frames |= dict(zip(shard_heads(shard), head_frames, strict=True))
        for found, counts in zip(pages, of_pages, strict=True):
            found |= dict(zip(shard_pages(layout, shard), counts, strict=True)) if counts else {}
    tokens, outliers = ([found[place] for place in sorted(found)] for found in pages)
    return BagSizes(tuple(frames[place] for place in sorted(frames)), tuple(tokens), tuple(outliers))
