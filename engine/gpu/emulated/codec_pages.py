"""Coded pages in host memory, coded and expanded by the NumPy codecs, many rows at a time.

A coded row depends on its token alone (`kvcache.codecs.page`), so rows of many pages are collected in one scratch page
of 64 rows, and the codec is called once for all. Rows that were expanded are kept and used again as long as their bytes
are the same, so that a decode step expands its new tokens only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from kvcache.codecs.codec_id import CALIBRATED
from kvcache.codecs.page import Bytes, Codec, Floats
from kvcache.layout import KvLayout

Places = NDArray[np.int64]


class LayerPages:
    """The pages of one layer. `pages` is [slabs, pages per layer, page_bytes] uint8, a view of the pool."""

    def __init__(self, layout: KvLayout, pages: Bytes, codecs: tuple[Codec, ...]) -> None:
        self._pages, first = pages, codecs[0]
        self._heads, count = first.shape.heads, len(codecs)
        # Codecs with constants differ from page to page. All others are the same codec.
        calibrated = first.codec_id.family == CALIBRATED
        self._groups = (
            [(codec, [n]) for n, codec in enumerate(codecs)] if calibrated else [(first, [*range(count)])]
        )
        # [64, bytes of a row]: where the bytes of each row lie in a page.
        self._places = _locate_rows(first)
        slabs, row_bytes = len(pages), self._places.shape[1]
        self._known = np.zeros((slabs, count, CHUNK_TOKENS), bool)
        self._bytes: Bytes = np.zeros((slabs, count, CHUNK_TOKENS, row_bytes), np.uint8)
        self._expanded: Floats = np.zeros(
            (slabs, count, self._heads, 2, CHUNK_TOKENS, layout.head_dim), np.float32
        )

    def encode(self, slabs: Places, rows: Places, keys: Floats, values: Floats) -> None:
        """Code tokens into rows of slabs. slabs, rows: [tokens]; keys, values: [tokens, kv_heads, head_dim], finite."""
        if not len(keys):
            return
        width = keys.shape[-1]
        for codec, numbers in self._groups:
            parts = [
                x.reshape(len(x), -1, self._heads, width)[:, numbers].reshape(-1, self._heads, width)
                for x in (keys, values)
            ]
            slab, row = (np.repeat(x, len(numbers)) for x in (slabs, rows))
            page = np.tile(np.array(numbers), len(slabs))
            for begin in range(0, len(slab), CHUNK_TOKENS):
                some = slice(begin, begin + CHUNK_TOKENS)
                scratch: Bytes = np.zeros(self._pages.shape[2], np.uint8)
                codec.encode_rows(parts[0][some], parts[1][some], scratch)
                coded = scratch[self._places[: len(slab[some])]]
                self._pages[slab[some, None], page[some, None], self._places[row[some]]] = coded

    def expand(self, slabs: Places, counts: Places) -> Floats:
        """Keys and values of slabs [n], of which the first `counts` rows exist: [n, kv_heads, 2, 64, head_dim]."""
        rows = self._pages[slabs][:, :, self._places]  # [n, pages, 64, bytes of a row]
        same = self._known[slabs] & (self._bytes[slabs] == rows).all(-1)
        fresh = ~same & (np.arange(CHUNK_TOKENS) < counts[:, None])[:, None]
        for codec, numbers in self._groups:
            at, which, row = np.nonzero(fresh[:, numbers])
            page = np.array(numbers)[which]
            for begin in range(0, len(at), CHUNK_TOKENS):
                some = slice(begin, begin + CHUNK_TOKENS)
                self._expand_some(
                    codec, slabs[at[some]], page[some], row[some], rows[at[some], page[some], row[some]]
                )
        found: Floats = self._expanded[slabs]
        n, _, _, two, tokens, width = found.shape
        return found.reshape(n, -1, two, tokens, width)

    def _expand_some(self, codec: Codec, slabs: Places, pages: Places, rows: Places, coded: Bytes) -> None:
        """Expand at most 64 rows, whose bytes are `coded`, and keep them."""
        scratch: Bytes = np.zeros(self._pages.shape[2], np.uint8)
        scratch[self._places[: len(coded)]] = coded
        for side, numbers in enumerate(codec.expand_page(scratch, len(coded))):
            self._expanded[slabs, pages, :, side, rows] = numbers
        self._bytes[slabs, pages, rows], self._known[slabs, pages, rows] = coded, True


class CodecPages:
    """All layers of a pool of coded pages, uint8 [slabs, layers, pages per layer, page_bytes] in host memory."""

    def __init__(self, layout: KvLayout, data: torch.Tensor, codecs: tuple[tuple[Codec, ...], ...]) -> None:
        pages: Any = data.numpy()
        self.layers = [LayerPages(layout, pages[:, layer], row) for layer, row in enumerate(codecs)]


def _locate_rows(codec: Codec) -> Places:
    """The bytes of each row of a page, [64, bytes of a row]: the row's part of each section, one after the other."""
    starts = [*codec.sections.offsets.values(), codec.page_bytes]
    parts = []
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        size = (end - begin) // CHUNK_TOKENS
        parts.append(begin + np.arange(CHUNK_TOKENS)[:, None] * size + np.arange(size))
    return np.concatenate(parts, axis=1)
