"""The transfer buffer of a vLLM worker, as the worker's process makes it and as each rank opens it.

A slab has one block of vLLM: the parts of rank 0, then those of rank 1, and so on (`vllm_worker.blocks`). To tickets,
digests and transports it is opaque: a layout of one layer with a "head" per rank, so workers that are split otherwise
have another chunk shape. Beside the slabs lies a mark for each slab and rank, by which a rank reports a copy while
vLLM's step still runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.chunks import CHUNK_TOKENS
from diptych.errors import ConfigError
from kvcache.layout import KvLayout
from kvtransfer.shared_memory import SharedMemory, SharedMemoryAddress, attach_memory
from kvtransfer.transfer_buffer import TransferBuffer, min_buffer_bytes
from vllm_worker.port import PortFacts

# What a slab is described as; its bytes may be of any type.
SLAB_DTYPE, SLAB_ITEM_BYTES = "float16", 2
# A part is a multiple of this: keys and values of `CHUNK_TOKENS` tokens with one item each.
PART_UNIT_BYTES = 2 * CHUNK_TOKENS * SLAB_ITEM_BYTES
MARK_BYTES = 8


def slab_layout(part_bytes: int, ranks: int) -> KvLayout:
    """The layout of slabs with `part_bytes` bytes of each rank.

    Raises ConfigError if no layout has that size: a block's size is odd in vLLM's terms.
    """
    if part_bytes < 1 or part_bytes % PART_UNIT_BYTES:
        raise ConfigError(
            "this model's KV cannot be handed over",
            f"a block has {part_bytes} bytes on each rank, which is no multiple of {PART_UNIT_BYTES}",
            "use another --kv-cache-dtype or --tensor-parallel-size",
        )
    return KvLayout(1, ranks, part_bytes // PART_UNIT_BYTES, SLAB_DTYPE)


def open_buffer(facts: PortFacts, num_bytes: int) -> TransferBuffer:
    """A buffer of at most `num_bytes` bytes for the blocks that `facts` describe.

    Raises:
        ConfigError: it is too small for one request of `facts.max_model_len` tokens, or no slab can be described.
    """
    layout = slab_layout(sum(part.block_bytes for part in facts.parts), facts.ranks)
    if num_bytes < (least := min_buffer_bytes(layout, facts.max_model_len)):
        raise ConfigError(
            f"a transfer buffer of {num_bytes} bytes is too small",
            f"the KV of one request of {facts.max_model_len} tokens has {least} bytes",
            f"use --transfer-buffer-bytes {least} or more, or a smaller --max-model-len",
        )
    return TransferBuffer(layout, num_bytes)


@dataclass(frozen=True, slots=True)
class BufferAddress:
    """How a rank's process opens the buffer and its marks."""

    slabs: SharedMemoryAddress
    marks: SharedMemoryAddress
    num_slabs: int
    slab_bytes: int
    ranks: int


class SaveMarks:
    """A number for each slab and rank: that of the last save whose copy this rank has ended.

    It is negative if the rank could not make the copy. `view` has `MARK_BYTES` for each; other processes may write it.
    """

    def __init__(self, view: memoryview, ranks: int) -> None:
        self._marks, self._ranks = view.cast("q"), ranks

    def write(self, slabs: list[int], rank: int, number: int, failed: bool = False) -> None:
        """A rank has ended save `number`, of these slabs."""
        for slab in slabs:
            self._marks[slab * self._ranks + rank] = -number if failed else number

    def read(self, slabs: list[int], number: int) -> bool | None:
        """Whether all ranks have made the copies of save `number`; None: some have not ended."""
        made = True
        for slab in slabs:
            for mark in self._marks[slab * self._ranks : (slab + 1) * self._ranks]:
                if abs(mark) != number:
                    return None
                made = made and mark == number
        return made


class SharedMarks:
    """The memory of the marks of a buffer with `num_slabs` slabs and `ranks` ranks; `marks` reads and writes it."""

    def __init__(self, num_slabs: int, ranks: int) -> None:
        self.memory = SharedMemory(num_slabs * ranks * MARK_BYTES)
        self.marks = SaveMarks(self.memory.view, ranks)

    def close(self) -> None:
        """Other processes can open the memory no longer. Idempotent."""
        self.memory.close()


class MappedBuffer:
    """The buffer and its marks as a rank maps them. Raises OSError if they cannot be opened."""

    def __init__(self, address: BufferAddress) -> None:
        self.address = address
        self.slabs = attach_memory(address.slabs, writable=True)
        self.marks = SaveMarks(attach_memory(address.marks, writable=True), address.ranks)
