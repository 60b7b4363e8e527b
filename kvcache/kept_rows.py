"""Where the rows that heads keep lie in memory: a bag of frames, and the map that describes it.

A frame is 16 tokens of one page: their keys, then their values. It is a quarter of a page, so a slab has four frames
per page. A bag is a list of slabs that belong to one sequence. Its frames are numbered through: frame f lies in slab
f // F at place f % F, with F frames per slab.

    frames of the map | frames of layer 0, head 0 | of layer 0, head 1 | ... | of the last layer's last head | unused

Each head has as many frames as its rows need, so the number of rows of each head says where everything lies. Rows are
in the order of their positions. The first frames hold the encoded map, so a bag describes itself: it is moved as slabs
like any others. Heads that share a page (`KvLayout.page_heads`) keep the same rows, and count as one head here.

The encoded map, little-endian, filled up with zeros to whole frames:

    magic "KEPT", version u16, layers u16, heads u16, 0 u16, boundary u32, length u32, kept rows u32
    policy u8 per head, kept rows u32 per head, kept positions per head: bits of positions boundary to length - 1
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.keep import FULL
from kvcache.layout import KvLayout

FRAME_TOKENS = 16
FRAMES_PER_PAGE = CHUNK_TOKENS // FRAME_TOKENS

_HEADER = struct.Struct("<4s4H3I")
_MAGIC, _VERSION = b"KEPT", 1


def frame_bytes(layout: KvLayout) -> int:
    """Bytes of a frame: 16 tokens of a page."""
    return layout.page_bytes // FRAMES_PER_PAGE


def frames_per_slab(layout: KvLayout) -> int:
    """Frames of a slab."""
    return FRAMES_PER_PAGE * layout.layers * layout.pages_per_layer


def count_frames(rows: int) -> int:
    """Frames that so many rows of one head need."""
    return -(-rows // FRAME_TOKENS)


def map_frames(first_frame: bytes | memoryview, layout: KvLayout, num_slabs: int) -> int:
    """How many frames the map of a bag takes, from the bag's first frame.

    Raises:
        ValueError: the frame does not begin a map of this layout, or the map is larger than a bag of `num_slabs` slabs.
    """
    boundary, length, _ = _read_header(first_frame, layout)
    lead = _lead_frames(layout, boundary, length)
    if lead > num_slabs * frames_per_slab(layout):
        raise ValueError(
            f"the map of kept rows takes {lead} frames, more than a bag of {num_slabs} slabs has"
        )
    return lead


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """The rows that each head keeps of positions `boundary` to `length` - 1, and where they lie in a bag.

    Args:
        layout: of the pool. Heads are its pages per layer.
        boundary: tokens before the bag, in whole chunks: all heads keep them.
        length: tokens that had KV when the rows were chosen.
        policies: [layers, heads].
        counts: kept rows, [layers, heads] int32.
        positions: of the kept rows, ascending within each head, one head after the other, int32.
    """

    layout: KvLayout
    boundary: int
    length: int
    policies: NDArray[np.uint8]
    counts: NDArray[np.int32]
    positions: NDArray[np.int32]

    @classmethod
    def from_heads(
        cls,
        layout: KvLayout,
        boundary: int,
        length: int,
        policies: NDArray[np.uint8],
        positions: Sequence[NDArray[np.int32]],
    ) -> KeptRows:
        """The map of heads whose kept positions are given one by one, those of layer 0 first.

        Raises:
            ValueError: they do not fit the layout, the range of positions or the policies.
        """
        counts = np.array([len(one) for one in positions], np.int32)
        if len(counts) != policies.size:
            raise ValueError(f"there are {policies.size} policies and positions of {len(counts)} heads")
        flat = np.concatenate([np.asarray(one, np.int32) for one in positions])
        kept = cls(layout, boundary, length, policies, counts.reshape(policies.shape), flat)
        kept._require_order()
        return kept

    @property
    def lead(self) -> int:
        """Frames that the encoded map takes. They depend on layout, boundary and length, not on what is kept."""
        return _lead_frames(self.layout, self.boundary, self.length)

    @property
    def first_frames(self) -> NDArray[np.int64]:
        """The number of each head's first frame in the bag, [layers, heads]."""
        frames = self._frames()
        before: NDArray[np.int64] = self.lead + np.cumsum(frames) - frames
        return before.reshape(self.counts.shape)

    @property
    def num_frames(self) -> int:
        """Frames of the bag that are in use, the map's included."""
        return self.lead + int(self._frames().sum())

    @property
    def num_slabs(self) -> int:
        """Slabs that the bag needs."""
        return -(-self.num_frames // frames_per_slab(self.layout))

    @property
    def num_rows(self) -> int:
        """Kept rows of all layers and heads."""
        return len(self.positions)

    @property
    def all_rows(self) -> int:
        """Rows that all layers and heads would have without eviction."""
        return self.counts.size * (self.length - self.boundary)

    def first_frame(self, layer: int, head: int) -> int:
        """The number of the first frame of one head in the bag."""
        return int(self.first_frames[layer, head])

    def head_positions(self, layer: int, head: int) -> NDArray[np.int32]:
        """Positions of the rows that one head keeps, ascending."""
        before = int(self.counts.reshape(-1)[: layer * self.counts.shape[1] + head].sum())
        return self.positions[before : before + int(self.counts[layer, head])]

    def encode(self) -> bytes:
        """The map as the first `lead` frames of the bag."""
        heads = self.counts.size
        bits = np.zeros((heads, self.length - self.boundary), np.bool_)
        bits[np.repeat(np.arange(heads), self.counts.reshape(-1)), self.positions - self.boundary] = True
        header = _HEADER.pack(
            _MAGIC, _VERSION, *self.counts.shape, 0, self.boundary, self.length, self.num_rows
        )
        data = header + self.policies.tobytes() + self.counts.astype("<u4").tobytes()
        data += np.packbits(bits, axis=1, bitorder="little").tobytes()
        return data.ljust(self.lead * frame_bytes(self.layout), b"\0")

    @classmethod
    def decode(cls, data: bytes | memoryview, layout: KvLayout) -> KeptRows:
        """The map that `encode` made. `data` may come from anywhere: everything is checked.

        Raises:
            ValueError: it is not exactly the frames of a map of this layout, or contradicts itself.
        """
        boundary, length, total = _read_header(data, layout)
        shape = (layout.layers, layout.pages_per_layer)
        heads, span = shape[0] * shape[1], length - boundary
        size = _lead_frames(layout, boundary, length) * frame_bytes(layout)
        if len(data) != size:
            raise ValueError(f"a map of kept rows of {span} tokens has {size} bytes, not {len(data)}")
        parts = np.split(
            np.frombuffer(data, np.uint8)[_HEADER.size :],
            np.cumsum([heads, 4 * heads, heads * -(-span // 8)]),
        )
        bits = np.unpackbits(parts[2].reshape(heads, -1), axis=1, bitorder="little")
        if bits[:, span:].any() or parts[3].any():
            raise ValueError("a map of kept rows is filled up with something else than zeros")
        counts = parts[1].view("<u4").astype(np.int64)
        if total != counts.sum() or not np.array_equal(counts, bits.sum(axis=1)):
            raise ValueError(
                "a map of kept rows contradicts itself: its counts are not those of its positions"
            )
        positions = (np.nonzero(bits)[1] + boundary).astype(np.int32)
        policies, rows = parts[0].copy().reshape(shape), counts.astype(np.int32).reshape(shape)
        kept = cls(layout, boundary, length, policies, rows, positions)
        kept._require_order()
        return kept

    def check(self) -> None:
        """Check that frames are conserved: each is the map's, one head's or unused, and no slab too many is taken.

        Raises:
            AssertionError: an inconsistency; the text says which.
        """
        try:
            self._require_order()
        except ValueError as error:
            raise AssertionError(str(error)) from None
        owners = np.zeros(self.num_slabs * frames_per_slab(self.layout), np.int64)
        owners[: self.lead] += 1
        for first, rows in zip(self.first_frames.reshape(-1), self.counts.reshape(-1), strict=True):
            owners[first : first + count_frames(int(rows))] += 1
        used = int((owners == 1).sum())
        if (owners > 1).any() or used != self.num_frames:
            raise AssertionError(f"{self.num_frames} frames are in use, but {used} have one owner")
        if len(owners) - used >= frames_per_slab(self.layout):
            raise AssertionError(f"a bag of {used} frames has a slab too many: {self.num_slabs}")

    def _frames(self) -> NDArray[np.int64]:
        """Frames of each head, layer-major, [layers · heads]."""
        frames: NDArray[np.int64] = -(-self.counts.reshape(-1).astype(np.int64) // FRAME_TOKENS)
        return frames

    def _require_order(self) -> None:
        """Raises ValueError unless positions ascend within their range and fit counts, policies and layout."""
        shape = (self.layout.layers, self.layout.pages_per_layer)
        if self.policies.shape != shape or self.counts.shape != shape:
            raise ValueError(f"a map of {self.counts.shape} heads is not of a layout with {shape}")
        _require_range(self.boundary, self.length)
        if self.policies.max() > FULL:
            raise ValueError(f"policies are 0 to {FULL}, not {self.policies.max()}")
        if (self.counts < 0).any() or int(self.counts.sum()) != self.num_rows:
            raise ValueError(f"{self.num_rows} rows are kept, not those that are counted")
        if (self.counts[self.policies == FULL] != self.length - self.boundary).any():
            raise ValueError("a head that keeps everything lacks rows")
        if not self.num_rows:
            return
        if self.positions.min() < self.boundary or self.positions.max() >= self.length:
            raise ValueError(f"kept positions are not all within {self.boundary} to {self.length - 1}")
        head = np.repeat(np.arange(self.counts.size), self.counts.reshape(-1))
        if ((np.diff(self.positions) <= 0) & (np.diff(head) == 0)).any():
            raise ValueError("the positions that a head keeps do not ascend")


def _lead_frames(layout: KvLayout, boundary: int, length: int) -> int:
    heads = layout.layers * layout.pages_per_layer
    size = _HEADER.size + heads * (1 + 4 + -(-(length - boundary) // 8))
    return -(-size // frame_bytes(layout))


def _read_header(data: bytes | memoryview, layout: KvLayout) -> tuple[int, int, int]:
    """Boundary, length and number of kept rows.

    Raises:
        ValueError: it is no header of a map of this layout.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"a map of kept rows is cut off after {len(data)} bytes")
    magic, version, layers, heads, zero, boundary, length, total = _HEADER.unpack_from(data)
    if (magic, version, zero) != (_MAGIC, _VERSION, 0):
        raise ValueError("this is no map of kept rows, or one of another version")
    if (layers, heads) != (layout.layers, layout.pages_per_layer):
        raise ValueError(
            f"a map of {layers} layers and {heads} heads is not of a layout with {layout.layers} and"
            f" {layout.pages_per_layer}"
        )
    _require_range(boundary, length)
    return boundary, length, total


def _require_range(boundary: int, length: int) -> None:
    if boundary % CHUNK_TOKENS or not 0 <= boundary <= length:
        raise ValueError(f"kept positions cannot be within {boundary} to {length - 1}")
