"""How kernels are distributed over a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LaunchTuning:
    """How the kernels are distributed over a device."""

    # Number of programs of a decode launch that the device runs at a time.
    programs: int
    # Sharing a prefix is worth it if it saves this many bytes of reads per layer: the cost of merging its parts.
    saving_bytes: int
    # Number of rows of a matrix product over a shared item or a prefill tile.
    rows: int = 64
    warps: int = 4
    # Number of pages that a program loads ahead.
    stages: int = 3

    @classmethod
    def of(cls, device: torch.device) -> LaunchTuning:
        """The values for a device: two programs per multiprocessor, as many as its shared memory
        has room for; in the interpreter, as few as possible."""
        if device.type != "cuda":
            return cls(programs=1, saving_bytes=0)
        return cls(torch.cuda.get_device_properties(device).multi_processor_count * 2, saving_bytes=16 << 20)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    power_of_two: int = 1 << max(0, number - 1).bit_length()
    return power_of_two
