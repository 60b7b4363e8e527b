"""A prepared file: the packed weights of a rank, section after section, as the kernels take them.

    head        4 KiB: MAGIC, then where the index is, its size and digest, and the size of the file
    sections    each a whole number of 4 KiB blocks (`engine.cpu.weights.decoder_weights`)
    index       msgpack: the file's key, and where each section, array and matrix lies

A section is contiguous and begins at a block, so that it can be mapped, or read past the page cache, without a copy.
The head is written last: a file whose writer died has none. Anybody who can write the file can make a process compute
nonsense, so it lies in a folder that only its owner may write to. Bytes of sections are not verified when a file is
opened, since that would read all of it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.cpu.linear import PackedMatrix, padded_outputs
from engine.cpu.matmul import PANEL_OUTPUTS, panel_items
from engine.cpu.weights.decoder_weights import WeightSection
from engine.cpu.weights.prepared_name import MAGIC

BLOCK_BYTES = 4096
# Arrays begin at cache lines.
LINE_BYTES = 64
HEAD = struct.Struct(f"<{len(MAGIC)}sQQ32sQ")


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """An array of a section; `at` is its first byte within the section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int


class StoredMatrix(msgspec.Struct, frozen=True, array_like=True):
    """A packed matrix of a section; `at` and `bias_at` are the first bytes of its panels and of its bias."""

    name: str
    kind: str
    outputs: int
    inputs: int
    dtype: str
    at: int
    bias_at: int


class StoredSection(msgspec.Struct, frozen=True, array_like=True):
    """A section; `at` is its first byte within the file. `num_bytes` are whole blocks."""

    at: int
    num_bytes: int
    arrays: tuple[StoredArray, ...]
    matrices: tuple[StoredMatrix, ...]


class PreparedIndex(msgspec.Struct, frozen=True):
    """What is in a prepared file. `key` names the weights and everything that their packing depends on."""

    key: str
    sections: dict[str, StoredSection]


class PreparedWriter:
    """Writes a prepared file section by section. The caller owns the open `file`, which is empty."""

    def __init__(self, file: int) -> None:
        self._file, self._at = file, BLOCK_BYTES
        self._sections: dict[str, StoredSection] = {}

    def write_section(self, name: str, section: WeightSection) -> None:
        """Append a section. Raises OSError, for example if the disk is full."""
        parts: list[NDArray[np.generic]] = []
        place = 0

        def put(part: NDArray[np.generic]) -> int:
            nonlocal place
            at, padding = place, -part.nbytes % LINE_BYTES
            parts.extend((part, np.zeros(padding, np.uint8)))
            place += part.nbytes + padding
            return at

        arrays = tuple(
            StoredArray(title, one.dtype.str, one.shape, put(one)) for title, one in section.arrays.items()
        )
        matrices = tuple(
            StoredMatrix(
                title, one.kind, one.outputs, one.inputs, one.panels.dtype.str, put(one.panels), put(one.bias)
            )
            for title, one in section.matrices.items()
        )
        num_bytes = round_to_blocks(place)
        parts.append(np.zeros(num_bytes - place, np.uint8))
        self._sections[name] = StoredSection(self._at, num_bytes, arrays, matrices)
        for part in parts:
            self._write_bytes(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)

    def finish(self, key: str) -> None:
        """Write index and head, and wait until all bytes are on the disk. Raises OSError."""
        index_at = self._at
        index = msgspec.msgpack.encode(PreparedIndex(key, self._sections))
        self._write_bytes(memoryview(index))
        digest = hashlib.sha256(index).digest()
        os.pwrite(self._file, HEAD.pack(MAGIC, index_at, len(index), digest, self._at), 0)
        os.fsync(self._file)

    def _write_bytes(self, content: memoryview) -> None:
        while content:
            written = os.pwrite(self._file, content, self._at)
            self._at, content = self._at + written, content[written:]


def round_to_blocks(num_bytes: int) -> int:
    """The size of the blocks that `num_bytes` bytes take."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def read_index(file: int, key: str) -> PreparedIndex:
    """The index of an open prepared file, after checking that the file is whole and has this key.

    Raises:
        ValueError: it is truncated, of another version, or of other weights.
        OSError: it cannot be read.
    """
    head = os.pread(file, HEAD.size, 0)
    if len(head) < HEAD.size:
        raise ValueError("it has no head")
    magic, at, num_bytes, digest, total = HEAD.unpack(head)
    if magic != MAGIC:
        raise ValueError("it is not a prepared file of this version")
    if total != os.fstat(file).st_size or at + num_bytes != total:
        raise ValueError("it is truncated")
    content = os.pread(file, num_bytes, at)
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("its index is damaged")
    try:
        index = msgspec.msgpack.decode(content, type=PreparedIndex)
    except msgspec.MsgspecError as error:
        raise ValueError("its index is not one") from error
    if index.key != key:
        raise ValueError("it is of other weights")
    if any(one.at % BLOCK_BYTES or one.at + one.num_bytes > at for one in index.sections.values()):
        raise ValueError("a section lies outside")
    return index


def map_sections(path: Path, key: str) -> dict[str, WeightSection]:
    """Map a prepared file, and return its sections, which are views of the mapping.

    All processes that map the file share its pages, and none can change it: a page that a process wrote to would become
    its own.

    Raises:
        ValueError: the file is truncated, of another version, or of other weights.
        OSError: it cannot be opened or mapped.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        index = read_index(file, key)
        mapped = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    view = memoryview(mapped)
    return {
        name: view_section(view[one.at : one.at + one.num_bytes], one) for name, one in index.sections.items()
    }


def view_section(memory: memoryview, section: StoredSection) -> WeightSection:
    """The section whose bytes are in `memory`, without a copy.

    Raises:
        ValueError: an array does not fit into the memory.
    """
    arrays = {one.name: _view_array(memory, one.dtype, one.shape, one.at) for one in section.arrays}
    return WeightSection(arrays, {matrix.name: _view_matrix(memory, matrix) for matrix in section.matrices})


def _view_array(memory: memoryview, dtype: str, shape: tuple[int, ...], at: int) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.ndarray(shape, dtype, memory, at)
    return found


def _view_matrix(memory: memoryview, matrix: StoredMatrix) -> PackedMatrix:
    """The matrix that `matrix` describes. Raises ValueError if it does not fit into the memory."""
    items = padded_outputs(matrix.outputs) // PANEL_OUTPUTS * panel_items(matrix.kind, matrix.inputs)
    panels: NDArray[np.generic] = np.ndarray((items,), matrix.dtype, memory, matrix.at)
    bias: NDArray[np.float32] = np.ndarray(
        (padded_outputs(matrix.outputs),), np.float32, memory, matrix.bias_at
    )
    return PackedMatrix(matrix.kind, matrix.outputs, matrix.inputs, panels, bias)
