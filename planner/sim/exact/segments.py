"""Segments of simulated sequences: what stays of whole chunks, where decode workers share it.

Each chunk keeps the same share of its rows, so segments have the same lengths in all prompts. What is in one depends on
its chunks alone, as in the engine (`kvcache.eviction.kept_segments`), so their names are enough for its address.
"""

from __future__ import annotations

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import SEGMENT_SLABS, KeepSpec
from engine.sequence import Sequence
from kvcache.eviction.kept_segments import (
    DIGEST_BYTES,
    KeptSegment,
    kept_begin,
    segment_keys,
)
from planner.types import KvKeep

# Of every map, and the address before every first chunk.
DIGEST, ROOT = bytes(DIGEST_BYTES), b"simulated"
Segments = tuple[KeptSegment, ...]


def cut_segments(keep: KvKeep, prompt: int) -> Segments:
    """The segments of a prompt of so many tokens, whose newest 64 are not judged yet; a shorter one has none."""
    first, last, segments = 0, max(0, prompt - CHUNK_TOKENS) // CHUNK_TOKENS, list[KeptSegment]()
    while first < last:
        end = first
        while end < last and keep.bag_chunks((end + 1 - first) * CHUNK_TOKENS) <= SEGMENT_SLABS:
            end += 1
        slabs = keep.bag_chunks((end - first) * CHUNK_TOKENS)
        if end - first <= slabs:
            # It would save nothing.
            break
        segments.append(KeptSegment(end, slabs, DIGEST))
        first = end
    return tuple(segments)


def count_bag_slabs(keep: KvKeep, segments: Segments, tokens: int) -> int:
    """The slabs of the bag behind `segments` of a sequence that decides at `tokens` tokens."""
    return keep.bag_chunks(tokens - kept_begin(KeepSpec(), segments))


def plan_kept(seq: Sequence, keep: KvKeep) -> tuple[Segments, int]:
    """The segments of a sequence that decides now, and the slabs of its bag; later decisions leave segments as they
    are.
    """
    segments = seq.segments
    if not seq.kept_slabs:
        segments = cut_segments(keep, len(seq.prompt)) if seq.cuts_kept else ()
    return segments, count_bag_slabs(keep, segments, seq.computed)


def name_segments(keys: list[bytes], keep: KeepSpec, segments: Segments) -> list[bytes]:
    """The addresses of the slabs of segments, of a prompt whose full chunks are named `keys`; none without names."""
    return segment_keys(ROOT if keys else b"", keys, keep, segments)


def describe_segments(segments: Segments) -> str:
    """The segments in one word, which `read_segments` reads."""
    return ",".join(f"{one.end}:{one.slabs}" for one in segments)


def read_segments(text: str) -> Segments:
    """The segments that `describe_segments` has described."""
    pairs = [one.split(":") for one in text.split(",") if one]
    return tuple(KeptSegment(int(end), int(slabs), DIGEST) for end, slabs in pairs)
