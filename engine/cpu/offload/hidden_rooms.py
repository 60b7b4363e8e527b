"""The activations of a block between two layers: one room for each batch, in memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.cpu.offload.disk_file import DirectFile
from engine.cpu.offload.disk_rooms import PlacedRooms, RoomVisit
from engine.offload.policy import BlockPolicy
from engine.offload.sizes import FLOAT_BYTES, round_up


class HiddenRooms(PlacedRooms[int]):
    """The activations of all batches by batch, of a model with `hidden` numbers per token, in `layers` layers.

    `file` has rooms for those on disk; None if there are none.
    """

    def __init__(self, hidden: int, layers: int, policy: BlockPolicy, file: DirectFile | None) -> None:
        self._hidden, self._layers = hidden, layers
        room_bytes = round_up(policy.rows * policy.prompt_tokens * hidden * FLOAT_BYTES)
        here = policy.hidden_batches_in_memory()
        super().__init__(range(policy.batches), here, room_bytes, file, policy.overlap)

    def begin_step(self, rows: Mapping[int, int]) -> None:
        """A step computes so many rows of some batches, by batch, layer after layer."""
        if self._disk is None:
            return
        visits = []
        for layer in range(self._layers):
            for batch, count in rows.items():
                if batch not in self._rooms:
                    continue
                whole = [(0, round_up(count * self._hidden * FLOAT_BYTES))]
                # The first layer's input is computed, and the last one's output is used at once.
                reads, writes = whole if layer else [], whole if layer < self._layers - 1 else []
                visits.append(RoomVisit(self._rooms[batch], reads, writes))
        self._disk.begin_step(visits)

    def enter(self, batch: int, rows: int) -> torch.Tensor:
        """The activations [rows, hidden] of a batch, a view that the layer changes. Raises OSError."""
        memory = self._memory.get(batch)
        if memory is None:
            assert self._disk is not None
            memory = self._disk.windows[self._disk.enter()]
        size = rows * self._hidden * FLOAT_BYTES
        return torch.frombuffer(memory[:size], dtype=torch.float32).view(rows, self._hidden)
