"""The weights of a block, layer after layer: those that stay are mapped, the others are read while they are not needed.

    layers on disk    j ──▶ buffer 0   computed with
                    j+1 ──▶ buffer 1   read by a thread meanwhile; after the last one comes the first again

Every layer is read once for each time that it is entered. Both kinds come from the same prepared file
(`engine.cpu.weights.prepared_file`), so that answers do not depend on which is which.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from engine.cpu.offload.disk_file import DirectFile, DiskRate, allocate_memory
from engine.cpu.weights.decoder_weights import (
    FIRST_SECTION,
    LAST_SECTION,
    CpuLayer,
    DecoderWeights,
    WeightSection,
    build_ends,
    build_layer,
    layer_section,
)
from engine.cpu.weights.prepared_file import PreparedIndex, StoredSection, read_index, view_section
from engine.model.architecture import ModelConfig


class WeightStream:
    """The weights in the prepared file `path`, of which the layers `resident` stay in memory.

    With `overlap` the next layer on disk is read while one is computed.

    Raises:
        ValueError: the file is truncated, or of other weights.
        OSError: it cannot be opened or mapped.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        resident: frozenset[int],
        *,
        overlap: bool = True,
        rate: DiskRate | None = None,
    ) -> None:
        self._config = config
        self.index = open_index(path)
        self.file = DirectFile.open_existing(path, rate)
        sections = self.index.sections
        self.streamed = [index for index in range(config.layers) if index not in resident]
        self._resident = _map_resident(path, self.index, config, resident)
        size = max((sections[layer_section(index)].num_bytes for index in self.streamed), default=0)
        self._buffers = [allocate_memory(size) for _ in range(2 if overlap else 1)] if self.streamed else []
        self._reader = ThreadPoolExecutor(1, "weights") if overlap and self.streamed else None
        # What is in each buffer, or is being read into it: the layer, and when it is there.
        self._held: list[tuple[int, Future[None] | None]] = [(-1, None)] * len(self._buffers)
        self._next = 0

    @property
    def ends(self) -> DecoderWeights:
        """The weights outside the layers: the embedding, the last norm and the product to logits."""
        return self._resident[1]

    def enter_layer(self, index: int, last: bool = False) -> CpuLayer:
        """The weights of a layer, read if need be; valid until the next call.

        The layer on disk that comes next is read meanwhile. In a step that is the `last` one, that is not the first
        layer again.

        Raises:
            OSError: the disk failed.
        """
        if (found := self._resident[0].get(index)) is not None:
            return found
        slot = self._find_or_read(index)
        following = self.streamed[(self.streamed.index(index) + 1) % len(self.streamed)]
        if self._reader is not None and (following > index or not last):
            self._begin_read(following, 1 - slot)
        section = self._section(index)
        view = view_section(self._buffers[slot][: section.num_bytes], section)
        return build_layer(view, self._config.windows[index])

    def _section(self, index: int) -> StoredSection:
        return self.index.sections[layer_section(index)]

    def _find_or_read(self, index: int) -> int:
        """The buffer that has a layer; reads it if none has. Raises OSError."""
        slot = next((i for i, (held, _) in enumerate(self._held) if held == index), None)
        if slot is None:
            slot = 0
            self._begin_read(index, slot)
        pending = self._held[slot][1]
        if pending is not None:
            try:
                pending.result()
            except BaseException:
                self._held[slot] = (-1, None)
                raise
        # Entering the layer again reads it again: a buffer is kept for one step only.
        self._held[slot] = (-1, None)
        return slot

    def _begin_read(self, index: int, slot: int) -> None:
        """Read a layer into a buffer: in the thread, or at once without one. Raises OSError if at once."""
        section = self._section(index)
        memory = self._buffers[slot][: section.num_bytes]
        held, pending = self._held[slot]
        if held == index:
            return
        if pending is not None:
            # A layer that was read ahead and never entered, because its block had ended.
            pending.exception()
        if self._reader is None:
            self._held[slot] = (-1, None)
            self.file.read_into(memory, section.at)
            self._held[slot] = (index, None)
        else:
            self._held[slot] = (index, self._reader.submit(self.file.read_into, memory, section.at))

    def close(self) -> None:
        """End the thread, and close the file."""
        if self._reader is not None:
            self._reader.shutdown(wait=True)
        self.file.close()


def open_index(path: Path) -> PreparedIndex:
    """The index of a prepared file. Raises ValueError and OSError as `read_index`."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # What was written before is not needed in memory.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return read_index(file, path.stem)
    finally:
        os.close(file)


def _map_resident(
    path: Path, index: PreparedIndex, config: ModelConfig, resident: frozenset[int]
) -> tuple[dict[int, CpuLayer], DecoderWeights]:
    """The layers that stay in memory, and the ends. All processes that map the file share them. Raises OSError."""
    names = [FIRST_SECTION, *(layer_section(one) for one in sorted(resident)), LAST_SECTION]
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = {name: _map_section(file, index.sections[name]) for name in names}
    finally:
        os.close(file)
    layers = {one: build_layer(found[layer_section(one)], config.windows[one]) for one in resident}
    return layers, build_ends(found)


def _map_section(file: int, section: StoredSection) -> WeightSection:
    """A section of an open prepared file, mapped and read, so that no step waits for it. Raises OSError."""
    flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    mapped = mmap.mmap(file, section.num_bytes, flags=flags, prot=protection, offset=section.at)
    mapped.madvise(mmap.MADV_WILLNEED)
    # Touches every page.
    np.frombuffer(mapped, np.uint8)[:: mmap.PAGESIZE].max(initial=0)
    return view_section(memoryview(mapped), section)
