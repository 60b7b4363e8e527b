"""Segments: what heads keep of whole chunks of a prompt, where that is the same for every request that begins so.

The rule `zap` judges each row by itself, so the kept rows of a chunk do not depend on what comes behind it, once all
its rows are older than 64 tokens. A segment is a small bag (`kvcache.eviction.kept_rows`) of up to `SEGMENT_SLABS`
slabs with the kept rows of consecutive whole chunks. It ends before the first chunk that would not fit, which only the
chunks before it and that chunk itself decide; the last one may end sooner, with the last chunk that is judged.

    whole chunks │ segment │ segment │ ring │ bag: the rest of the prompt, and the answer
    └──────── shared, in the prefix tree ─┘

A slab of a segment has an address, as a chunk has one (`kvcache.prefix_tree`): a hash of the address before it, the
address of the segment's last chunk, and the digest of its map. The first one follows the last whole chunk, the rule and
the threshold. Two workers may decide differently about a row whose score is at the threshold but for rounding; their
maps then differ, and so do the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import SEGMENT_SLABS, KeepSpec
from diptych.hashing import hash_fields

DIGEST_BYTES = 16


class KeptSegment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A segment: the number of the prompt's first chunk behind it, its slabs, and the digest of its map."""

    end: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    slabs: Annotated[int, Meta(ge=1, le=SEGMENT_SLABS)]
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


def count_segment_slabs(segments: Sequence[KeptSegment]) -> int:
    """Slabs of all of these segments."""
    return sum(one.slabs for one in segments)


def kept_begin(spec: KeepSpec, segments: Sequence[KeptSegment]) -> int:
    """The first position whose kept rows are in the bag: behind the segments."""
    return segments[-1].end * CHUNK_TOKENS if segments else spec.boundary


def are_in_order(spec: KeepSpec, segments: Sequence[KeptSegment], num_tokens: int) -> bool:
    """Whether segments may be those of `num_tokens` tokens: they follow the boundary and each other."""
    start = spec.boundary_chunks
    for one in segments:
        if one.end - start <= one.slabs:
            return False
        start = one.end
    return not segments or start * CHUNK_TOKENS <= num_tokens


def segment_keys(
    root: bytes, keys: Sequence[bytes], spec: KeepSpec, segments: Sequence[KeptSegment]
) -> list[bytes]:
    """The addresses of all slabs of segments, 32 bytes each.

    Args:
        root: before the prompt's first chunk; empty: nothing is shared, and has addresses.
        keys: addresses of the prompt's full chunks, at least up to the last segment's end.
        spec: by which rows were dropped.
        segments: in their order.
    """
    if not root or not segments:
        return []
    before = keys[spec.boundary_chunks - 1] if spec.boundary else root
    parent = hash_fields(["kept", before, spec.rule, repr(spec.threshold)])
    found = list[bytes]()
    for one in segments:
        parent = hash_fields(["segment", parent, keys[one.end - 1], one.digest])
        found += [parent, *(hash_fields(["segment", parent, n]) for n in range(1, one.slabs))]
    return found
