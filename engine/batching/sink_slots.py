"""Which first tokens' keys and values are kept in which slots, for pools with a codec.

The first token of a sequence attends to itself alone, so its KV depends on its id only. Rank 0 decides by `SinkSlots`
which ids have a slot; a step carries its `SinkPlan` to the other ranks, so that the tables of all ranks agree
(`engine.cpu.coded.sink_table`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

# Slots of a table that no memory plan has sized.
DEFAULT_SLOTS = 256


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """The sinks of a step: the slot of each work's first token, and (slot, token id) of those to compute first."""

    slots: list[int] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)


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
