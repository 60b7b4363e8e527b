"""Exact keys and values of first tokens, for pools with a codec.

The first token of a sequence attends to itself alone, so its KV depends on its id only. It is computed once per id, by
a forward pass of that single token, and kept beside the pool. Pages have no room for it (`kvcache.codecs.page`).

Which ids are kept in which slots is decided on rank 0 (`engine.batching.sink_slots`); `SinkTable` holds the numbers, on
every rank. The memory plan says how many slots there are (`engine.model.memory_plan.sink_table_slots`), at least one
for every sequence of a step.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
from numpy.typing import NDArray

from engine.batching.sink_slots import DEFAULT_SLOTS
from kvcache.layout import KvLayout

Floats = NDArray[np.float32]

# The table always has several slots and layers: kernels are compiled for arrays of several, with gaps between them.
MIN_SLOTS, MIN_LAYERS = 16, 2


class SinkTable:
    """Sinks by slot: keys and values [layers, kv_heads, head_dim] each, of one rank's layers and heads."""

    def __init__(self, layout: KvLayout, slots: int = DEFAULT_SLOTS) -> None:
        layers = max(layout.layers, MIN_LAYERS)
        shape = (max(slots, MIN_SLOTS), layers, 2, layout.kv_heads, layout.head_dim)
        # A mapping of its own: slots take memory when they are first written, and are never moved.
        memory = mmap.mmap(-1, 4 * math.prod(shape))
        self._rows = np.frombuffer(memory, np.float32).reshape(shape)

    def view_layer(self, layer: int) -> SinkTable:
        """A table of one layer, which has number 0 there, over the same memory."""
        found = SinkTable.__new__(SinkTable)
        found._rows = self._rows[:, layer : layer + 1]
        return found

    def write(self, slots: list[int], layer: int, keys: Floats, values: Floats) -> None:
        """Store one layer of several sinks; keys and values are [slots, kv_heads, head_dim]."""
        self._rows[slots, layer, 0], self._rows[slots, layer, 1] = keys, values

    def read(self, slot: int, layer: int) -> tuple[Floats, Floats]:
        """Keys and values of one layer of a sink, each [kv_heads, head_dim]."""
        keys, values = self._rows[slot, layer]
        return keys, values

    def of_layer(self, layer: int) -> Floats:
        """All sinks of one layer, [slots, 2, kv_heads, head_dim], in the memory of the table."""
        return self._rows[:, layer]
