"""Copies between a device's pool and host memory that happen as late as their events allow, into poisoned targets.

A GPU copies at some moment between the start of a batch and the first `is_done` that answers True. `LateCopies` copies
at that last moment, from whatever the sources then contain, so a caller that does not wait gets wrong bytes each time:

    target read too early        it is poison (0xFF: no number in float types)
    source reused too early      the copy takes the new content, and `faults` names the slab
    target written or copied into meanwhile, or a slab given back too early      `faults` names the slab
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import torch

from kvcache.device.copies import CopyBatch, view_slabs
from kvcache.device.pool import DevicePool
from kvcache.slab_ledger import SlabLedger

POISON = 0xFF
# Sides of sources and targets.
SIDES = {"to_host": ("device", "host"), "to_device": ("host", "device")}

# How often `is_done` answers False to the next batch; None: until `release`.
Lateness = Callable[[], int | None]


def seeded_lateness(seed: int, max_polls: int = 20) -> Lateness:
    """Batches end at a random call of `is_done`, at most the one after `max_polls`; equal seeds give equal numbers."""
    numbers = random.Random(seed)
    return lambda: numbers.randint(0, max_polls)


class LateBatch:
    """Copies that were started together, and end when `is_done` was called often enough or at `release`."""

    def __init__(self, copies: LateCopies, name: str, moves: Sequence[LateMove], polls: int | None) -> None:
        self.name, self.moves, self.polls = name, moves, polls
        self._copies = copies

    def is_done(self) -> bool:
        """Whether the copies have ended. The call that first answers True performs them."""
        return self._copies.poll(self)


class LateMove:
    """One copy of a slab that has not been performed; it poisons the target when it is made."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, slabs: tuple[int, int]) -> None:
        self.slabs, self._source, self._target = slabs, source, target
        self._first = source.clone()
        target.fill_(POISON)

    def perform(self) -> list[str]:
        """Copy what the source now contains. Returns what happened to source and target since the start."""
        faults = [] if torch.equal(self._source, self._first) else [f"source {self.slabs[0]} was changed"]
        if not bool((self._target == POISON).all()):
            faults.append(f"target {self.slabs[1]} was changed")
        self._target.copy_(self._source)
        return faults


class LateCopies:
    """See the module: a `SlabCopies` for tests. The pool is of CPU tensors.

    Args:
        pool: the device's pool. Giving back one of its slabs that a copy uses is a fault.
        memory: the host's slabs, as for `kvcache.device.copies.DirectCopies`.
        lateness: how late each batch is; by default all wait for `release`.
        host_ledger: who owns the host's slabs; watched as the pool is.
    """

    def __init__(
        self,
        pool: DevicePool,
        memory: memoryview,
        lateness: Lateness = lambda: None,
        host_ledger: SlabLedger | None = None,
    ) -> None:
        self._device, self._host = pool.slab_bytes, view_slabs(memory, pool.layout.chunk_bytes)
        self._lateness, self._lock = lateness, threading.RLock()
        self._batches: list[LateBatch] = []
        # Slabs that copies use now, by side.
        self._busy: dict[str, list[int]] = {"device": [], "host": []}
        # What a GPU would not have forgiven, in order.
        self.faults: list[str] = []
        self._watch_ledger(pool, "device")
        if host_ledger is not None:
            self._watch_ledger(host_ledger, "host")

    @property
    def in_flight(self) -> int:
        """Number of batches that were started and have not ended."""
        return len(self._batches)

    def to_host(self, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        """See `SlabCopies.to_host`."""
        return self._start("to_host", pairs)

    def to_device(self, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        """See `SlabCopies.to_device`."""
        return self._start("to_device", pairs)

    def release(self) -> None:
        """Perform all copies in flight."""
        with self._lock:
            for batch in list(self._batches):
                self._perform(batch)

    def close(self) -> None:
        """Perform all copies in flight."""
        self.release()

    def check_faults(self) -> None:
        """Raises AssertionError if there were faults."""
        assert not self.faults, self.faults

    def poll(self, batch: LateBatch) -> bool:
        """One call of the batch's `is_done`."""
        with self._lock:
            if batch in self._batches and batch.polls is not None:
                if batch.polls == 0:
                    self._perform(batch)
                batch.polls -= 1
            return batch not in self._batches

    def _start(self, name: str, pairs: Sequence[tuple[int, int]]) -> CopyBatch:
        """Poison the targets, and keep the copies for later."""
        source_side, target_side = SIDES[name]
        sides = {"device": self._device, "host": self._host}
        with self._lock:
            sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
            # Two copies may read the same slab. Nothing may write to a slab that a copy reads or writes.
            twice = {slab for slab in targets if targets.count(slab) > 1}
            self._add_faults(name, "target", twice | set(targets) & set(self._busy[target_side]))
            self._add_faults(name, "source", set(sources) & self._written(source_side))
            moves = [
                LateMove(sides[source_side][source], sides[target_side][target], (source, target))
                for source, target in pairs
            ]
            self._busy[source_side] += sources
            self._busy[target_side] += targets
            batch = LateBatch(self, name, moves, self._lateness())
            self._batches.append(batch)
            return batch

    def _written(self, side: str) -> set[int]:
        """Slabs of a side that copies in flight write to."""
        into = "to_host" if side == "host" else "to_device"
        return {move.slabs[1] for batch in self._batches if batch.name == into for move in batch.moves}

    def _add_faults(self, name: str, role: str, slabs: set[int]) -> None:
        self.faults += [f"{name}: {role} {slab} is used by another copy" for slab in sorted(slabs)]

    def _perform(self, batch: LateBatch) -> None:
        """End a batch."""
        self._batches.remove(batch)
        source_side, target_side = SIDES[batch.name]
        for move in batch.moves:
            self.faults += [f"{batch.name}: {fault} during the copy" for fault in move.perform()]
            self._busy[source_side].remove(move.slabs[0])
            self._busy[target_side].remove(move.slabs[1])

    def _watch_ledger(self, ledger: SlabLedger, side: str) -> None:
        """Record a fault when a slab of `ledger` that a copy uses is given back."""
        give_back = ledger.give_back

        def watched(slabs: Sequence[int], owner: str) -> None:
            with self._lock:
                busy = sorted(set(slabs) & set(self._busy[side]))
                self.faults += [f"{owner} gave back {side} slab {slab} during a copy" for slab in busy]
            give_back(slabs, owner)

        ledger.give_back = watched  # type: ignore[method-assign]
