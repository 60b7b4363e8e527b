"""A coded page as bytes: sections of 64 equal rows, one row per token, and the checks of what goes in.

A page is one layer × one group of KV heads × 64 tokens. Every row of a section is a whole number of bytes, so every
section, and the page, is a multiple of 64 bytes. A row depends on its own token alone: rows may be written in any
order and again.

Sinks: the first token of a sequence stays exact (KVQuant, section 3.5, "attention sink-aware quantization"). It attends
to itself alone, so its keys and values depend on its id only: a reader computes them once per id and keeps them beside
the pool. Pages have no room for them. Row 0 of a sequence's first page is coded like any other row, and the exact one
takes its place after the page was expanded. Calibration leaves first tokens out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.basis import MAX_HALF, Basis
from kvcache.codecs.codec_id import CodecId

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]

# Number of tokens at the beginning of a sequence whose KV is kept exactly.
NUM_SINKS = 1


@dataclass(frozen=True, slots=True)
class PageShape:
    """KV heads of a page and values of a head."""

    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers of one token's keys (and of its values) in a page."""
        return self.heads * self.head_dim


class Codec(Protocol):
    """How keys and values of one page become bytes, and bytes become keys and values."""

    @property
    def codec_id(self) -> CodecId:
        """The canonical id."""

    @property
    def shape(self) -> PageShape:
        """Heads of a page and values of a head."""

    @property
    def basis(self) -> Basis:
        """In which keys and values are coded."""

    @property
    def codes_rotated_keys(self) -> bool:
        """Whether keys go in and come out with their rotary positions; otherwise both are before rotation."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of 64."""

    @property
    def sections(self) -> PageSections:
        """Where the parts of keys and values lie in a page."""

    def encode_rows(self, keys: Floats, values: Floats, page: Bytes, first_row: int = 0) -> None:
        """Writes tokens into rows `first_row` and following of `page`, in place.

        Args:
            keys: [tokens, heads, head_dim], before rotation or after it (`codes_rotated_keys`).
            values: [tokens, heads, head_dim].
            page: [page_bytes] contiguous.

        Raises:
            ValueError: shapes do not fit, or a number is not finite. Nothing was written.
        """

    def expand_page(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """Keys and values of the first `num_rows` rows, each [num_rows, heads, head_dim].

        Raises:
            ValueError: the page is not of `page_bytes`, or has fewer rows.
        """

    def expand_stored(self, page: Bytes, num_rows: int = CHUNK_TOKENS) -> tuple[Floats, Floats]:
        """As `expand_page`, in the basis in which they are coded: what kernels read."""


class PageSections:
    """Where each section of a page lies.

    Args:
        columns: name -> (element type, elements per row), in the order in which they lie in the page.
    """

    def __init__(self, columns: dict[str, tuple[type[np.generic], int]]) -> None:
        # First byte, elements per row, and type of each column.
        self._places: dict[str, tuple[int, int, np.dtype[Any]]] = {}
        offset = 0
        for name, (kind, count) in columns.items():
            dtype = np.dtype(kind).newbyteorder("<")
            self._places[name] = (offset, count, dtype)
            offset += CHUNK_TOKENS * count * dtype.itemsize
        self.page_bytes = offset

    @property
    def offsets(self) -> dict[str, int]:
        """Name -> first byte of the section within a page."""
        return {name: place[0] for name, place in self._places.items()}

    def view_rows(self, page: Bytes, name: str, first: int = 0, count: int = CHUNK_TOKENS) -> NDArray[Any]:
        """Rows `first` to `first + count − 1` of a section, [count, elements per row], in the memory of `page`.

        Raises:
            ValueError: the page is not `page_bytes` contiguous bytes, or does not have these rows.
        """
        if page.dtype != np.uint8 or page.shape != (self.page_bytes,) or not page.flags.c_contiguous:
            raise ValueError(
                f"a page is {self.page_bytes} contiguous bytes, not {page.dtype}{list(page.shape)}"
            )
        if not 0 <= first <= first + count <= CHUNK_TOKENS:
            raise ValueError(f"a page has {CHUNK_TOKENS} rows, not rows {first} to {first + count - 1}")
        offset, columns, dtype = self._places[name]
        size = CHUNK_TOKENS * columns * dtype.itemsize
        return page[offset : offset + size].view(dtype).reshape(CHUNK_TOKENS, columns)[first : first + count]


def check_rows(
    keys: Floats, values: Floats, shape: PageShape, limit: np.float32 = MAX_HALF
) -> tuple[Floats, Floats]:
    """Keys and values as [tokens, width] float32, brought into −limit to limit: what has a scale in float16 is coded
    within the range of float16.

    Raises:
        ValueError: they are not [tokens, heads, head_dim] alike, or hold infinities or NaN.
    """
    rest = (shape.heads, shape.head_dim)
    if keys.shape != values.shape or keys.shape[1:] != rest:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} are not [tokens, {rest[0]}, {rest[1]}]"
        )
    flat = [np.ascontiguousarray(x, np.float32).reshape(len(x), shape.width) for x in (keys, values)]
    if not all(np.isfinite(x).all() for x in flat):
        raise ValueError("keys and values must be finite")
    return np.clip(flat[0], -limit, limit), np.clip(flat[1], -limit, limit)


def to_half(numbers: NDArray[np.floating[Any]]) -> Halves:
    """Nearest float16; what is too large becomes the largest float16, never infinity."""
    halves: Halves = np.clip(numbers, -MAX_HALF, MAX_HALF).astype(np.float16)
    return halves


def restore_sink(keys: Floats, values: Floats, chunk_start: int, sink: tuple[Floats, Floats]) -> None:
    """Puts the exact first token over row 0 of an expanded page, in place, if the page is the sequence's first.

    Args:
        keys: [rows, heads, head_dim], as the codec expanded them. At position 0 rotation changes nothing.
        values: of the same shape.
        chunk_start: position of the page's first token.
        sink: exact keys and values of the first token, each [heads, head_dim].
    """
    if chunk_start == 0 and len(keys):
        keys[0], values[0] = sink
