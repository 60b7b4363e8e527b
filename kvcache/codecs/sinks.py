"""Sinks: the first token of a sequence stays exact (KVQuant, section 3.5, "attention sink-aware quantization").

The first token attends to itself alone, so its keys and values depend on its id only: a reader computes them once per
id and keeps them beside the pool. Pages have no room for them. Row 0 of a sequence's first page is coded like any other
row, and the exact one takes its place after the page was expanded. Calibration leaves first tokens out.
"""

from __future__ import annotations

from kvcache.codecs.page import Floats

# Number of tokens at the beginning of a sequence whose KV is kept exactly.
NUM_SINKS = 1


def restore_sink(keys: Floats, values: Floats, chunk_start: int, sink: tuple[Floats, Floats]) -> None:
    """Puts the exact first token over row 0 of an expanded page, in place, if the page is the sequence's first.

    Args:
        keys: [rows, heads, head_dim], as the codec expanded them. At position 0 rotation changes nothing.
        values: of the same shape.
        chunk_start: position of the page's first token.
        sink: exact keys and values of the first token, each [heads, head_dim].
    """
    if chunk_start == 0 and len(keys):
        keys[0], values[0] = sink
