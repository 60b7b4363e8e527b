"""Exact keys and values of first tokens, for pools with a codec.

The first token of a sequence attends to itself alone, so its KV depends on its id only. It is computed once per id, by
a forward pass of that single token, and kept beside the pool. Pages have no room for it (`kvcache.codecs.sinks`).

`SinkSlots` decides, on rank 0, which ids are kept in which slots; `SinkTable` holds the numbers, on every rank. A step
carries its `SinkPlan` to the other ranks, so that all tables agree. The memory plan says how many slots there are
(`engine.model.memory_plan.sink_table_slots`), at least one for every sequence of a step.
"""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import KvLayout

Floats = NDArray[np.float32]

# Slots of a table that no memory plan has sized.
DEFAULT_SLOTS = 256
# The table always has more than one slot: kernels are compiled for arrays of several.
MIN_SLOTS = 16


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """The sinks of a step: the slot of each work's first token, and (slot, token id) of those to compute first."""

    slots: list[int] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)


class SinkTable:
    """Sinks by slot: keys and values [layers, kv_heads, head_dim] each, of one rank's layers and heads."""

    def __init__(self, layout: KvLayout, slots: int = DEFAULT_SLOTS) -> None:
        shape = (max(slots, MIN_SLOTS), layout.layers, 2, layout.kv_heads, layout.head_dim)
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


class SinkSlots:
    """Which token ids are in the table. An id that was not used for the longest time makes room for another one."""

    def __init__(self, capacity: int = DEFAULT_SLOTS) -> None:
        self._capacity = capacity
        self._slots: OrderedDict[int, int] = OrderedDict()

    def plan(self, tokens: Sequence[int]) -> SinkPlan:
        """The slots of these first tokens. Sinks that are missing become known with `keep`, when they were computed.

        Raises:
            ValueError: there are more different tokens than slots.
        """
        wanted = dict.fromkeys(tokens)
        if len(wanted) > self._capacity:
            raise ValueError(f"a step has {len(wanted)} first tokens, and the table {self._capacity} slots")
        missing = [token for token in wanted if token not in self._slots]
        for token in wanted:
            if token in self._slots:
                self._slots.move_to_end(token)
        if not missing:
            return SinkPlan([self._slots[token] for token in tokens])
        while len(self._slots) > self._capacity - len(missing):
            self._slots.popitem(last=False)
        taken = set(self._slots.values())
        free = (slot for slot in range(self._capacity) if slot not in taken)
        fresh = dict(zip(missing, free, strict=False))
        slots = [self._slots[token] if token in self._slots else fresh[token] for token in tokens]
        return SinkPlan(slots, [(slot, token) for token, slot in fresh.items()])

    def keep(self, plan: SinkPlan) -> None:
        """The missing sinks of this plan are in the tables of all ranks now."""
        self._slots.update((token, slot) for slot, token in plan.missing)
