"""Counts the memory that evictions (docs/eviction.md) need beside the KV pool, over all ranks of a worker.

What is remembered of each sequence that evicts, from the end of its prompt until it leaves or is computed again:

    queries      those of 64 tokens, of every layer and head, as float32
    its map      where the rows are that its heads keep, at most all: two numbers each; before the first decision rule
                 `fastgen` has two sums each there

and of the one sequence that is deciding at a time, a float32 copy of the rows that it keeps, as long as its bag. Codes
take about as much at most: their copy, with what one layer expands to.
"""

from __future__ import annotations

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import PROFILE_ROWS
from kvcache.layout import KvLayout

# Bytes of a float32.
_FLOAT_BYTES = 4
# Bytes of a kept row in the map (`engine.cpu.eviction.ragged_attention.KeptBag`): its position and, in coded pools, the
# number of its token.
_MAP_ROW_BYTES = 4 + 4
# Bytes of a row while it is decided about: its position, and where its key and its value lie.
_COLUMN_BYTES = 3 * 8


def query_record_bytes(layout: KvLayout, heads: int) -> int:
    """Bytes of the recorded queries of one sequence, with `heads` query heads: 64 rows of every layer, as float32."""
    return _FLOAT_BYTES * layout.layers * PROFILE_ROWS * heads * layout.head_dim


def remembered_bytes(layout: KvLayout, heads: int, max_model_len: int) -> int:
    """Most bytes that are remembered of one sequence that evicts: its queries and its map."""
    rows = layout.layers * layout.kv_heads * max_model_len
    return query_record_bytes(layout, heads) + _MAP_ROW_BYTES * rows


def decision_bytes(layout: KvLayout, max_model_len: int) -> int:
    """Most bytes while one sequence decides: a copy of all its rows, with a slab for their map, and where they lie."""
    rows = (layout.num_chunks(max_model_len) + 1) * CHUNK_TOKENS * layout.layers * layout.kv_heads
    return rows * (_FLOAT_BYTES * 2 * layout.head_dim + _COLUMN_BYTES)


def eviction_bytes(layout: KvLayout, heads: int, max_model_len: int, num_seqs: int) -> int:
    """Most bytes beside the pool while `num_seqs` sequences evict; 0 without any."""
    if num_seqs == 0:
        return 0
    remembered = num_seqs * remembered_bytes(layout, heads, max_model_len)
    return remembered + decision_bytes(layout, max_model_len)


def count_evicting(layout: KvLayout, heads: int, max_model_len: int, spare_bytes: int, most: int) -> int:
    """How many sequences may evict at once with `spare_bytes` of memory, at most `most`."""
    rest = spare_bytes - decision_bytes(layout, max_model_len)
    return max(0, min(most, rest // remembered_bytes(layout, heads, max_model_len)))
