"""Device memory that a pool of coded pages takes beside its slabs."""

from __future__ import annotations

from diptych.chunks import CHUNK_TOKENS
from kvcache.layout import KvLayout

FLOAT_BYTES = 4


def coded_memory_bytes(layout: KvLayout, max_model_len: int, *, sink_slots: int, step_chunks: int) -> int:
    """Bytes of first tokens, angles, and scratch for prefills, to be left free when `num_slabs` is chosen.

    Args:
        layout: of the pool, with a codec.
        max_model_len: most tokens of a sequence.
        sink_slots: how many first tokens are kept.
        step_chunks: chunks that the prefills of one step attend to: their number times those of the longest one. They
            are expanded one layer at a time.
    """
    numbers = layout.kv_heads * layout.head_dim
    sinks = sink_slots * layout.layers * 2 * numbers * FLOAT_BYTES
    angles = max(max_model_len, CHUNK_TOKENS) * layout.head_dim * FLOAT_BYTES
    return sinks + angles + step_chunks * 2 * CHUNK_TOKENS * numbers * layout.itemsize
