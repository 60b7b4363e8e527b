"""Attention over coded pages, the slow and obviously right way: every page is expanded by its NumPy codec.

Keys and values are coded when they are written, and every reader attends to the decoded codes, its own token included.
So KV stays a function of the tokens before it: hit or miss, whole or in chunks, the same codes. The one exception is
the first token of a sequence, which stays exact (`engine.cpu.coded.sink_table`).

Codecs that code keys before rotation rotate them when they are read, relative to their chunk
(`kvcache.codecs.rotation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import ForwardBatch, PrefillSpan
from engine.cpu.coded.sink_table import SinkTable
from engine.cpu.jit import LOWEST
from engine.isolation import NonFiniteKv
from kvcache.codecs.page import Codec
from kvcache.codecs.rotation import rotate_chunk_keys, rotate_queries_back, rotate_rows
from kvcache.layout import KvLayout

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CodedPool:
    """A pool of coded pages, and what its readers need to know."""

    # With a codec.
    layout: KvLayout
    # Of the pool, uint8 [slabs, layers, pages per layer, page_bytes].
    data: torch.Tensor
    # By layer and page (`build_page_codecs`).
    codecs: tuple[tuple[Codec, ...], ...]
    # [head_dim / 2]: radians per token of each rotary pair.
    frequencies: Doubles
    # Exact keys and values of first tokens.
    sinks: SinkTable


class CodedAttention:
    """Attention over a pool of coded pages, for a model with `heads` query heads: `CpuAttention` for codecs."""

    def __init__(self, pool: CodedPool, heads: int) -> None:
        self.layout, self.heads = pool.layout, heads
        self._pages, self._codecs = pool.data.numpy(), pool.codecs
        self._frequencies, self._sinks = pool.frequencies, pool.sinks
        self._rotated = pool.codecs[0][0].codes_rotated_keys

    def write(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """Normalise `qkv`, rotate the queries in place, and code keys and values into their pages.

        Arguments are those of `CpuAttention.write`; `rotary` is not used, since angles are computed in float64 here.

        Raises:
            NonFiniteKv: a key or a value is not finite. Nothing was written.
        """
        count = len(batch.positions)
        queries, keys, values = self._split_rows(qkv.numpy()[:count])
        normalise_heads(queries, norms[0], eps)
        normalise_heads(keys, norms[1], eps)
        check_finite_rows(keys.reshape(count, -1), values.reshape(count, -1))
        queries[:] = rotate_rows(queries, batch.positions, self._frequencies)
        if self._rotated:
            # A rotated key may be √2 times as large. Beyond float32 it is clamped, as the codecs do with large numbers.
            with np.errstate(over="ignore"):
                keys = np.nan_to_num(rotate_rows(keys, batch.positions, self._frequencies))
        for start, end in _same_chunk_runs(batch.positions, batch.slots):
            page = self._pages[batch.slots[start], layer]
            row, head = int(batch.positions[start]) % CHUNK_TOKENS, 0
            for codec, bytes_ in zip(self._codecs[layer], page, strict=True):
                part = slice(head, head + codec.shape.heads)
                codec.encode_rows(keys[start:end, part], values[start:end, part], bytes_, row)
                head += codec.shape.heads

    def decode(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, window: int, out: torch.Tensor
    ) -> None:
        """Attention of the decode rows over their pages, into the same rows of `out` [rows, heads * head_dim]."""
        for row, length, slabs, sink in zip(batch.rows, batch.lengths, batch.table, batch.sinks, strict=True):
            part = slice(row, row + 1)
            self._attend(layer, qkv[part], int(length) - 1, slabs, int(sink), window, out[part])

    def prefill(
        self, layer: int, qkv: torch.Tensor, span: PrefillSpan, window: int, out: torch.Tensor
    ) -> None:
        """Causal attention of one prefill span over its prefix and itself, into its rows of `out`."""
        part = slice(span.row, span.row + span.count)
        self._attend(layer, qkv[part], span.start, span.slabs.numpy(), span.sink, window, out[part])

    def _split_rows(self, rows: Floats) -> tuple[Floats, Floats, Floats]:
        """Queries, keys and values, each a view [tokens, heads, head_dim]."""
        width, kv_heads = self.layout.head_dim, self.layout.kv_heads
        parts = np.split(rows, [self.heads * width, (self.heads + kv_heads) * width], axis=1)
        queries, keys, values = (part.reshape(len(rows), -1, width) for part in parts)
        return queries, keys, values

    def _attend(
        self, layer: int, qkv: torch.Tensor, start: int, slabs: Any, sink: int, window: int, out: torch.Tensor
    ) -> None:
        """Attention of consecutive tokens of one sequence, the first at position `start`."""
        queries, _, _ = self._split_rows(qkv.numpy())
        group, width = self.heads // self.layout.kv_heads, self.layout.head_dim
        first = max(0, start + 1 - window) // CHUNK_TOKENS if window else 0
        end = start + len(queries)
        positions = np.arange(start, end)[:, None]
        shape = (len(queries), self.layout.kv_heads, group)
        # The softmax goes on from chunk to chunk, always over 64 places, so that a token's result depends neither on
        # the tokens beside it nor on where a prompt was cut.
        top, total = np.full(shape, LOWEST), np.zeros(shape, np.float32)
        mixed = np.zeros((*shape, width), np.float32)
        for chunk in range(first, self.layout.num_chunks(end)):
            begin = chunk * CHUNK_TOKENS
            count = min(CHUNK_TOKENS, end - begin)
            keys, values = self._expand_chunk(layer, int(slabs[chunk]), begin, count, sink)
            shifted = queries if self._rotated else rotate_queries_back(queries, begin, self._frequencies)
            scores = np.einsum("nhgd,thd->nhgt", shifted.reshape(*shape, width), keys)
            places = np.arange(begin, begin + CHUNK_TOKENS)
            hidden = places > positions
            if window:
                hidden |= places <= positions - window
            scores = np.where(hidden[:, None, None, :], -np.inf, scores / np.float32(np.sqrt(width)))
            higher = np.maximum(top, scores.max(axis=-1))
            weights, fade = np.exp(scores - higher[..., None]), np.exp(top - higher)
            total = total * fade + weights.sum(axis=-1)
            mixed = mixed * fade[..., None] + np.einsum("nhgt,thd->nhgd", weights, values)
            top = higher
        out.numpy()[:] = (mixed / total[..., None]).reshape(len(queries), -1)

    def _expand_chunk(
        self, layer: int, slab: int, begin: int, count: int, sink: int
    ) -> tuple[Floats, Floats]:
        """Keys, rotated relative to the chunk where the codec stores them before rotation, and values of one chunk,
        each [64, kv_heads, head_dim]; rows from `count` on are zero.
        """
        both = np.zeros((2, CHUNK_TOKENS, self.layout.kv_heads, self.layout.head_dim), np.float32)
        head = 0
        for codec, page in zip(self._codecs[layer], self._pages[slab, layer], strict=True):
            both[:, :count, head : head + codec.shape.heads] = codec.expand_page(page, count)
            head += codec.shape.heads
        keys, values = both
        if begin == 0:
            keys[0], values[0] = self._sinks.read(sink, layer)
        return keys if self._rotated else rotate_chunk_keys(keys, self._frequencies), values


class SinkRecorder:
    """Attention of tokens at position 0, each alone: stores their exact keys and values as sinks.

    It takes the place of `CodedAttention` in a forward pass that computes sinks. `slots` are the places in the table of
    the tokens of the pass, in order.
    """

    def __init__(self, layout: KvLayout, heads: int, sinks: SinkTable, slots: list[int]) -> None:
        self._layout, self._heads, self._sinks, self._slots = layout, heads, sinks, slots

    def write(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """Keep the normalised keys, and the values. At position 0 rotation changes nothing."""
        count, width, kv_heads = len(self._slots), self._layout.head_dim, self._layout.kv_heads
        start = self._heads * width
        rows = qkv.numpy()[:count, start:].reshape(count, 2, kv_heads, width)
        keys = np.ascontiguousarray(rows[:, 0])
        normalise_heads(keys, norms[1], eps)
        self._sinks.write(self._slots, layer, keys, rows[:, 1])

    def decode(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, window: int, out: torch.Tensor
    ) -> None:
        """A token that attends to itself alone gets its own values."""
        count, width, kv_heads = len(self._slots), self._layout.head_dim, self._layout.kv_heads
        values = qkv.numpy()[:count, -kv_heads * width :].reshape(count, kv_heads, width)
        out.numpy()[:count] = np.repeat(values, self._heads // kv_heads, axis=1).reshape(count, -1)

    def prefill(
        self, layer: int, qkv: torch.Tensor, span: PrefillSpan, window: int, out: torch.Tensor
    ) -> None:
        """Never called: a pass for sinks has single tokens only."""
        raise AssertionError("a sink is a single token")


def check_finite_rows(*parts: Floats) -> None:
    """Raises NonFiniteKv, with the rows, if a number of a part [rows, width] is not finite."""
    # First at once, since nearly always all are.
    if all(np.isfinite(part).all() for part in parts):
        return
    sound = np.all([np.isfinite(part).all(axis=1) for part in parts], axis=0)
    raise NonFiniteKv(np.flatnonzero(~sound).tolist())


def normalise_heads(heads: Floats, weight: Floats, eps: float) -> None:
    """Root-mean-square normalisation of each head, in place, if the model has `weight` [head_dim] for it."""
    if len(weight):
        mean = np.mean(heads * heads, axis=-1, keepdims=True, dtype=np.float32)
        heads *= np.float32(1) / np.sqrt(mean + np.float32(eps))
        heads *= weight


def _same_chunk_runs(positions: NDArray[np.int64], slots: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges of rows that are consecutive tokens in one slab."""
    if not len(positions):
        return []
    follows = (np.diff(positions) == 1) & (np.diff(slots) == 0)
    starts = [0, *(np.flatnonzero(~follows) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))
