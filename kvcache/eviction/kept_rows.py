"""Where the rows that heads keep lie in memory: a bag of frames, and the map that describes it.

A frame is 16 tokens of one layer and KV head: their keys, then their values. A bag is a list of slabs that belong to
one sequence. Its frames are numbered through: frame f lies in slab f // F at place f % F, with F frames per slab.

    map | layer 0, head 0 | layer 0, head 1 | ... | the last layer's last head | tokens | outliers | unused

Each head has as many frames as its rows need, so the number of rows of each head says where everything lies. Rows are
in the order of their positions. The first frames hold the encoded map, so a bag describes itself: it is moved as slabs
like any others.

Where a page is one head's, a frame is a quarter of it, with the same sections of 16 rows. Codecs that code several
heads together have frames of their own (`FrameFormat`, `kvcache.eviction.coded_frames`). What the heads of a page
share of a token is then in a table, once for each token that any of them keeps; and outliers are in a list behind it.
Both go page by page.

The encoded map, little-endian, filled up with zeros to whole frames:

    magic "KEPT", version u16, layers u16, heads u16, 0 u16, boundary u32, length u32, kept rows u32, outliers u32
    policy u8 per head, kept rows u32 per head, kept positions per head: bits of positions boundary to length - 1
    outliers u32 per page, where frames have a list of outliers
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.bit_packing import packed_bytes
from kvcache.codecs.codec_id import CALIBRATED, CodecId
from kvcache.codecs.storage import index_bits, outliers_per_side
from kvcache.eviction.policies import FULL, LAST_POLICY
from kvcache.layout import KvLayout

FRAME_TOKENS = 16
FRAMES_PER_PAGE = CHUNK_TOKENS // FRAME_TOKENS

_HEADER = struct.Struct("<4s4H4I")
_MAGIC, _VERSION = b"KEPT", 4
# Scale and zero point of a token's values, two float16.
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class FrameFormat:
    """The sizes of frames of a layout, and of what is behind the frames of its heads.

    `is_split` says that rows of a page are taken apart by head, since a page codes several together (`nuq*`). A frame
    then has the codes of 16 keys, those of 16 values (`code_bytes` each), the numbers of outliers of each row's key and
    value (`count_bits` each, as a stream of bits), and the number of its first outlier, u32. A table has `token_bytes`
    for each token and page, and a list `outlier_bytes` for each outlier: its place within the head, u8 or u16, and its
    residual, float16. A page has up to `slots` outliers of each token's keys, and as many of its values.
    """

    frame_bytes: int
    is_split: bool = False
    code_bytes: int = 0
    slots: int = 0
    count_bits: int = 0
    token_bytes: int = 0
    outlier_bytes: int = 0

    @classmethod
    def of_layout(cls, layout: KvLayout) -> FrameFormat:
        """The format of a layout's frames."""
        codec_id = layout.codec_id
        if codec_id is None or codec_id.family != CALIBRATED:
            return cls(layout.page_bytes // FRAMES_PER_PAGE)
        return cls.of_calibrated(codec_id, layout.head_dim)

    @classmethod
    def of_calibrated(cls, codec_id: CodecId, head_dim: int) -> FrameFormat:
        """The format for a codec `nuq*`, by its canonical id, and heads of `head_dim` values."""
        code_bytes = packed_bytes(head_dim, codec_id.code_bits[0])
        slots = 2 * outliers_per_side(codec_id, codec_id.group or head_dim)
        bits = slots.bit_length()
        size = 2 * FRAME_TOKENS * code_bytes + -(-2 * FRAME_TOKENS * bits // 8) + 4
        outlier_bytes = 2 + index_bits(head_dim) // 8 if slots else 0
        return cls(size, True, code_bytes, slots, bits, _TOKEN_BYTES, outlier_bytes)

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """First bytes, in a split frame, of the codes of keys and of values, the numbers of outliers, and the first."""
        counts = 2 * FRAME_TOKENS * self.code_bytes
        return 0, FRAME_TOKENS * self.code_bytes, counts, self.frame_bytes - 4

    def table_frames(self, tokens: int) -> int:
        """Frames of a table of so many tokens."""
        return -(-tokens // (self.frame_bytes // self.token_bytes)) if tokens else 0

    def list_frames(self, outliers: int) -> int:
        """Frames of a list of so many outliers."""
        return -(-outliers // (self.frame_bytes // self.outlier_bytes)) if outliers else 0


def frame_bytes(layout: KvLayout) -> int:
    """Bytes of a frame: 16 tokens of one layer and head."""
    return FrameFormat.of_layout(layout).frame_bytes


def frames_per_slab(layout: KvLayout) -> int:
    """Frames of a slab. What they leave of it is unused."""
    return layout.chunk_bytes // frame_bytes(layout)


def most_bag_slabs(layout: KvLayout, tokens: int) -> int:
    """Slabs of a bag of `tokens` tokens if all heads keep everything, and all slots of outliers are used."""
    form, heads = FrameFormat.of_layout(layout), layout.layers * layout.kv_heads
    frames = _lead_frames(layout, 0, tokens) + heads * count_frames(tokens)
    if form.is_split:
        rows = layout.layers * layout.pages_per_layer * tokens
        frames += form.table_frames(rows) + form.list_frames(2 * form.slots * rows)
    return -(-frames // frames_per_slab(layout))


def most_extra_slabs(layout: KvLayout, tokens: int) -> int:
    """Slabs that a sequence which evicts may need beyond those of its tokens, up to `tokens`, if every head keeps
    everything: the ring, the map, and what frames take more than pages.

    More tokens of the same chunk only enlarge the bag. But a new chunk counts whole with its first token, of which the
    bag has few frames: so a sequence that ends with a full chunk may need more than the longest one.
    """
    lengths = [tokens, *range(CHUNK_TOKENS, tokens, CHUNK_TOKENS)]
    return max(2, *(1 + most_bag_slabs(layout, one) - layout.num_chunks(one) for one in lengths))


def count_frames(rows: int) -> int:
    """Frames that so many rows of one head need."""
    return -(-rows // FRAME_TOKENS)


def count_bag_slabs(layout: KvLayout, boundary: int, length: int, frames: int) -> int:
    """Slabs of a bag whose heads need so many frames in all; `boundary` and `length` are those of its map."""
    return -(-(_lead_frames(layout, boundary, length) + frames) // frames_per_slab(layout))


def map_frames(first_frame: bytes | memoryview, layout: KvLayout, num_slabs: int) -> int:
    """How many frames the map of a bag takes, from the bag's first frame.

    Raises:
        ValueError: the frame does not begin a map of this layout, or the map is larger than a bag of `num_slabs` slabs.
    """
    boundary, length, _, _ = _read_header(first_frame, layout)
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
        layout: of the pool.
        boundary: tokens before the bag, in whole chunks: all heads keep them.
        length: tokens that had KV when the rows were chosen.
        policies: [layers, heads].
        counts: kept rows, [layers, heads] int32.
        positions: of the kept rows, ascending within each head, one head after the other, int32.
        page_outliers: how many outliers the rows of each page have, those of layer 0 first; empty: frames have no list
            of outliers (`FrameFormat`), or they are not counted yet.
    """

    layout: KvLayout
    boundary: int
    length: int
    policies: NDArray[np.uint8]
    counts: NDArray[np.int32]
    positions: NDArray[np.int32]
    page_outliers: tuple[int, ...] = ()

    @classmethod
    def from_heads(
        cls,
        layout: KvLayout,
        boundary: int,
        length: int,
        policies: NDArray[np.uint8],
        positions: Sequence[NDArray[np.int32]],
        page_outliers: tuple[int, ...] = (),
    ) -> KeptRows:
        """The map of heads whose kept positions are given one by one, those of layer 0 first.

        Raises:
            ValueError: they do not fit the layout, the range of positions, the policies or the outliers.
        """
        counts = np.array([len(one) for one in positions], np.int32)
        if len(counts) != policies.size:
            raise ValueError(f"there are {policies.size} policies and positions of {len(counts)} heads")
        flat = np.concatenate([np.asarray(one, np.int32) for one in positions])
        kept = cls(layout, boundary, length, policies, counts.reshape(policies.shape), flat, page_outliers)
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
    def table_frame(self) -> int:
        """The number of the frame in which the table of tokens begins."""
        return self.lead + int(self._frames().sum())

    @property
    def outlier_frame(self) -> int:
        """The number of the frame in which the list of outliers begins."""
        form = FrameFormat.of_layout(self.layout)
        return self.table_frame + (form.table_frames(sum(self.page_tokens)) if form.is_split else 0)

    @property
    def page_tokens(self) -> tuple[int, ...]:
        """How many tokens any head of a page keeps, for each page of a chunk, those of layer 0 first."""
        counts: list[int] = self._token_mask().sum(axis=1).tolist()
        return tuple(counts)

    @property
    def outliers(self) -> int:
        """How many outliers the rows have."""
        return sum(self.page_outliers)

    @property
    def num_frames(self) -> int:
        """Frames of the bag that are in use, the map's included."""
        return self.outlier_frame + FrameFormat.of_layout(self.layout).list_frames(self.outliers)

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

    def number_tokens(self) -> NDArray[np.int32]:
        """The number of each kept row's token in the table of tokens, in the order of `positions`.

        Tokens are numbered page by page, those of layer 0 first, and by position within each page.
        """
        numbers = np.cumsum(self._token_mask().reshape(-1), dtype=np.int32) - 1
        rows: NDArray[np.int32] = numbers[self._page_of_rows() * self._span + self.positions - self.boundary]
        return rows

    @property
    def _span(self) -> int:
        return self.length - self.boundary

    def _page_of_rows(self) -> NDArray[np.int64]:
        """The number of each kept row's page within a chunk."""
        pages = np.arange(self.counts.size) // self.layout.page_heads
        return np.repeat(pages, self.counts.reshape(-1))

    def _token_mask(self) -> NDArray[np.bool_]:
        """Which tokens any head of a page keeps, [pages of a chunk, length - boundary]."""
        mask = np.zeros((self.counts.size // self.layout.page_heads, self._span), np.bool_)
        mask[self._page_of_rows(), self.positions - self.boundary] = True
        return mask

    def encode(self) -> bytes:
        """The map as the first `lead` frames of the bag."""
        heads = self.counts.size
        bits = np.zeros((heads, self.length - self.boundary), np.bool_)
        bits[np.repeat(np.arange(heads), self.counts.reshape(-1)), self.positions - self.boundary] = True
        header = _HEADER.pack(
            _MAGIC, _VERSION, *self.counts.shape, 0, self.boundary, self.length, self.num_rows, self.outliers
        )
        data = header + self.policies.tobytes() + self.counts.astype("<u4").tobytes()
        data += np.packbits(bits, axis=1, bitorder="little").tobytes()
        pages = _outlier_pages(self.layout)
        data += np.array(self.page_outliers or [0] * pages, "<u4").tobytes()
        return data.ljust(self.lead * frame_bytes(self.layout), b"\0")

    @classmethod
    def decode(cls, data: bytes | memoryview, layout: KvLayout) -> KeptRows:
        """The map that `encode` made. `data` may come from anywhere: everything is checked.

        Raises:
            ValueError: it is not exactly the frames of a map of this layout, or contradicts itself.
        """
        boundary, length, total, outliers = _read_header(data, layout)
        shape = (layout.layers, layout.kv_heads)
        heads, span = shape[0] * shape[1], length - boundary
        size = _lead_frames(layout, boundary, length) * frame_bytes(layout)
        if len(data) != size:
            raise ValueError(f"a map of kept rows of {span} tokens has {size} bytes, not {len(data)}")
        parts = np.split(
            np.frombuffer(data, np.uint8)[_HEADER.size :],
            np.cumsum([heads, 4 * heads, heads * -(-span // 8), 4 * _outlier_pages(layout)]),
        )
        bits = np.unpackbits(parts[2].reshape(heads, -1), axis=1, bitorder="little")
        if bits[:, span:].any() or parts[4].any():
            raise ValueError("a map of kept rows is filled up with something else than zeros")
        counts = parts[1].view("<u4").astype(np.int64)
        by_page = tuple(parts[3].view("<u4").tolist())
        if total != counts.sum() or not np.array_equal(counts, bits.sum(axis=1)) or outliers != sum(by_page):
            raise ValueError(
                "a map of kept rows contradicts itself: its counts are not those of its positions or pages"
            )
        positions = (np.nonzero(bits)[1] + boundary).astype(np.int32)
        policies, rows = parts[0].copy().reshape(shape), counts.astype(np.int32).reshape(shape)
        kept = cls(layout, boundary, length, policies, rows, positions, by_page)
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
        owners[self.table_frame : self.num_frames] += 1
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
        shape = (self.layout.layers, self.layout.kv_heads)
        if self.policies.shape != shape or self.counts.shape != shape:
            raise ValueError(f"a map of {self.counts.shape} heads is not of a layout with {shape}")
        _require_range(self.boundary, self.length)
        if self.policies.max() > LAST_POLICY:
            raise ValueError(f"policies are 0 to {LAST_POLICY}, not {self.policies.max()}")
        if (self.counts < 0).any() or int(self.counts.sum()) != self.num_rows:
            raise ValueError(f"{self.num_rows} rows are kept, not those that are counted")
        if not self.num_rows:
            self._require_outliers()
            return
        if self.positions.min() < self.boundary or self.positions.max() >= self.length:
            raise ValueError(f"kept positions are not all within {self.boundary} to {self.length - 1}")
        head = np.repeat(np.arange(self.counts.size), self.counts.reshape(-1))
        if ((np.diff(self.positions) <= 0) & (np.diff(head) == 0)).any():
            raise ValueError("the positions that a head keeps do not ascend")
        counts = self.counts.reshape(-1).astype(np.int64)
        full = (self.policies.reshape(-1) == FULL) & (counts > 0)
        first = self.positions[(np.cumsum(counts) - counts)[full]]
        if (first != self.length - counts[full]).any():
            raise ValueError("a head that keeps everything lacks rows")
        self._require_outliers()

    def require_full_heads(self, windows: Sequence[int]) -> None:
        """Check that heads that keep everything keep all rows that their layer's sliding window (0: none) lets be seen.

        Raises:
            ValueError: one lacks rows, or has more.
        """
        spans = [min(self._span, window - 1) if window else self._span for window in windows]
        if ((self.counts != np.array(spans)[:, None]) & (self.policies == FULL)).any():
            raise ValueError("a head that keeps everything has not the rows that its layer sees")

    def _require_outliers(self) -> None:
        """Raises ValueError if a page has more outliers than its kept tokens have slots for."""
        if not self.page_outliers:
            return
        if len(self.page_outliers) != _outlier_pages(self.layout):
            raise ValueError(f"outliers of {len(self.page_outliers)} pages are not those of {self.layout}")
        slots = FrameFormat.of_layout(self.layout).slots
        for count, tokens in zip(self.page_outliers, self.page_tokens, strict=True):
            if not 0 <= count <= 2 * slots * tokens:
                raise ValueError(f"{tokens} kept tokens of a page cannot have {count} outliers")


def _lead_frames(layout: KvLayout, boundary: int, length: int) -> int:
    heads = layout.layers * layout.kv_heads
    size = _HEADER.size + heads * (1 + 4 + -(-(length - boundary) // 8)) + 4 * _outlier_pages(layout)
    return -(-size // frame_bytes(layout))


def _outlier_pages(layout: KvLayout) -> int:
    """The pages of a chunk whose outliers are counted: 0 if frames have no list of them."""
    return layout.layers * layout.pages_per_layer if FrameFormat.of_layout(layout).slots else 0


def _read_header(data: bytes | memoryview, layout: KvLayout) -> tuple[int, int, int, int]:
    """Boundary, length, number of kept rows and of outliers.

    Raises:
        ValueError: it is no header of a map of this layout.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"a map of kept rows is cut off after {len(data)} bytes")
    magic, version, layers, heads, zero, boundary, length, total, outliers = _HEADER.unpack_from(data)
    if (magic, version, zero) != (_MAGIC, _VERSION, 0):
        raise ValueError("this is no map of kept rows, or one of another version")
    if (layers, heads) != (layout.layers, layout.kv_heads):
        raise ValueError(
            f"a map of {layers} layers and {heads} heads is not of a layout with {layout.layers} and {layout.kv_heads}"
        )
    _require_range(boundary, length)
    return boundary, length, total, outliers


def _require_range(boundary: int, length: int) -> None:
    if boundary % CHUNK_TOKENS or not 0 <= boundary <= length:
        raise ValueError(f"kept positions cannot be within {boundary} to {length - 1}")
