"""Attention over coded pages by compiled kernels: what `engine.cpu.coded.attention` computes, fast.

One kernel set per family of codecs (`engine.cpu.coded.page_factory`). Decode expands each page of a row once into
scratch, for all query heads. Chunks that several rows share, and the chunks of a prefill span, are expanded once into a
small pool in the raw layout, which the kernels for raw pools read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import ForwardBatch, PrefillSpan
from engine.cpu.attention import crossover_queries, worthwhile_plan
from engine.cpu.coded.attention import CodedAttention, CodedPool, check_finite_rows, normalise_heads
from engine.cpu.coded.families import grouped_kernels, nuq_expand, nuq_frames, plain_kernels, turbo_kernels
from engine.cpu.coded.page_factory import build_page_kernels
from engine.cpu.coded.page_kernels import (
    BYTES,
    CALIBRATED,
    GROUPED,
    PLAIN,
    ROTATED,
    SECTIONS,
    PageKernels,
    number_functions,
)
from engine.cpu.coded.stored_space import basis_arrays
from engine.cpu.eviction.evicted_works import EvictedWork, KeptBag, SegmentGroup, pad_table
from engine.cpu.eviction.segment_kernels import State
from engine.cpu.tiled_attention import build_prefill_kernel
from kvcache.codecs.grouped import GroupedCodec
from kvcache.codecs.nuq import NuqCodec
from kvcache.codecs.page import Codec
from kvcache.codecs.plain import PlainCodec
from kvcache.codecs.turbo import MAX_LLOYD_BITS, TurboCodec
from kvcache.eviction.kept_rows import FRAMES_PER_PAGE, FrameFormat, frames_per_slab

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
# Cosines and sines by position, flat.
Angles = tuple[Floats, Floats]

NO_TABLE = (np.empty(0, np.float32), np.empty(0, np.float32))
# Positions whose angles are computed at once.
ANGLE_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PageFamily:
    """The kernels of a pool's codecs, and what they take."""

    kernels: PageKernels
    # `engine.cpu.coded.page_kernels`: figures and offsets of a page.
    page: NDArray[np.int64]
    # Of each layer, [pages, n].
    constants: list[Floats]
    # Of a frame: its figures, and of each layer the constants of its heads, [kv_heads, n].
    frame: NDArray[np.int64]
    heads: list[Floats]


def find_family(codecs: Sequence[Sequence[Codec]], head_dim: int) -> PageFamily:
    """The kernels for the codecs of a pool (`kvcache.page_codecs.build_page_codecs`), all of one kind."""
    first = codecs[0][0]
    number, detail = _find_number(first)
    kernels = build_page_kernels(number, head_dim)
    figures = (first.page_bytes, first.shape.heads, *first.codec_id.code_bits, detail)
    page = np.array([*figures, *first.sections.offsets.values()], np.int64)
    constants = [np.stack([_page_constants(codec) for codec in row]) for row in codecs]
    if not isinstance(first, NuqCodec):
        frame = page.copy()
        frame[[BYTES, *range(SECTIONS, len(page))]] //= FRAMES_PER_PAGE
        return PageFamily(kernels, page, constants, frame, constants)
    heads = [
        np.concatenate([nuq_frames.head_constants(one, first.shape) for one in layer]) for layer in constants
    ]
    frame_format = FrameFormat.of_calibrated(first.codec_id, head_dim)
    return PageFamily(kernels, page, constants, nuq_frames.frame_figures(page, frame_format), heads)


def _find_number(codec: Codec) -> tuple[int, int]:
    """The number of a codec's functions, and the one that it has in `DETAIL`."""
    bits = codec.codec_id.code_bits[0]
    if isinstance(codec, NuqCodec):
        return number_functions(CALIBRATED, 0), 2 * codec.per_side
    if isinstance(codec, TurboCodec):
        return number_functions(ROTATED, int(bits > MAX_LLOYD_BITS)), 0
    if isinstance(codec, GroupedCodec):
        variant = grouped_kernels.find_variant(bits, codec.group, codec.shape.head_dim)
        return number_functions(GROUPED, variant), codec.group
    assert isinstance(codec, PlainCodec) and codec.codec_id.name != "raw", (
        f"there are no kernels for {codec.codec_id}"
    )
    return number_functions(PLAIN, 0), plain_kernels.find_kind(codec.codec_id.name)


def _page_constants(codec: Codec) -> Floats:
    """What the kernels of a codec take as the constants of a page."""
    if isinstance(codec, NuqCodec):
        return nuq_expand.page_constants(codec)
    if isinstance(codec, TurboCodec):
        return turbo_kernels.page_constants(codec)
    return np.empty(0, np.float32)


def build_angles(frequencies: Doubles, positions: int) -> Angles:
    """Cosines and sines of all positions below `positions`, computed in float64.

    Args:
        frequencies: [head_dim / 2], radians per token of each rotary pair.
        positions: rounded up to whole chunks.

    Returns:
        Two flat arrays [positions · head_dim / 2]. `engine.model.memory_plan.angle_table_bytes` is their size.
    """
    positions = -(-positions // CHUNK_TOKENS) * CHUNK_TOKENS
    cos, sin = np.empty((2, positions, len(frequencies)), np.float32)
    # In pieces, so that the numbers in float64 take little memory.
    for start in range(0, positions, ANGLE_ROWS):
        rows = np.arange(start, min(start + ANGLE_ROWS, positions), dtype=np.float64)
        angles = rows[:, None] * frequencies
        cos[start : start + len(rows)], sin[start : start + len(rows)] = np.cos(angles), np.sin(angles)
    return cos.reshape(-1), sin.reshape(-1)


class CompiledAttention(CodedAttention):
    """`CodedAttention` by compiled kernels. `angles` are those of `build_angles`; several pools can share them."""

    def __init__(self, pool: CodedPool, heads: int, angles: Angles) -> None:
        super().__init__(pool, heads)
        layout = pool.layout
        # Slabs may lie further apart than they are long.
        self._slab = pool.data.stride(0)
        self._flat = pool.data.as_strided((self._slab * len(pool.data),), (1,)).numpy()
        family = find_family(pool.codecs, layout.head_dim)
        self._layer, self._page, self._constants = layout.layer_bytes, family.page, family.constants
        self._kernels, self._frame, self._heads = family.kernels, family.frame, family.heads
        self._bases = [basis_arrays(row, layout.head_dim) for row in pool.codecs]
        self._span = build_prefill_kernel(layout.head_dim)
        self._angles = angles
        self.alone = crossover_queries(heads // layout.kv_heads)

    def write(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """As `CodedAttention.write`.

        Raises:
            NonFiniteKv: a key or a value is not finite. Nothing was written.
        """
        count = len(batch.positions)
        if not count:
            return
        rows = qkv.numpy()[:count]
        queries, keys, _ = self._split_rows(rows)
        normalise_heads(queries, norms[0], eps)
        normalise_heads(keys, norms[1], eps)
        check_finite_rows(rows[:, self.heads * self.layout.head_dim :])
        self._kernels.encode(
            rows,
            batch.positions,
            batch.slots,
            self.heads,
            self._place(layer),
            self._angles,
            self._rotated,
        )

    def decode(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, window: int, out: torch.Tensor
    ) -> None:
        """As `CpuAttention.decode`: first chunks that rows share, then each row's other chunks."""
        if not len(batch.rows):
            return
        plan = worthwhile_plan(batch, window, self.alone, self.heads // self.layout.kv_heads)
        tops, totals = np.empty((2, len(batch.rows), self.heads), np.float32)
        sinks, place = self._sinks.of_layer(layer), (self._place(layer), self._read_angles)
        if len(plan.runs):
            shared = (batch.rows, batch.table, batch.sinks, sinks)
            self._kernels.shared(qkv.numpy(), shared, plan.runs, *place, (tops, totals), out.numpy())
        rows = (batch.rows, batch.lengths, batch.table, batch.sinks, sinks)
        state = (plan.shared, tops, totals)
        self._kernels.decode(qkv.numpy(), rows, state, *place, window, out.numpy())

    def prefill(
        self, layer: int, qkv: torch.Tensor, span: PrefillSpan, window: int, out: torch.Tensor
    ) -> None:
        """As `CpuAttention.prefill`."""
        rows, length = slice(span.row, span.row + span.count), span.start + span.count
        first = max(0, span.start + 1 - window) // CHUNK_TOKENS if window else 0
        slabs = span.slabs.numpy()
        # Chunks before the window are never touched, so they take no memory.
        pool = self._take_chunks(len(slabs))
        size = self._raw_floats
        self._expand_chunks(layer, slabs[first:], first, length, span.sink, pool[first * size :])
        queries, outputs, kv_heads = qkv[rows].numpy(), out[rows].numpy(), self.layout.kv_heads
        in_basis = self._has_basis(layer)
        if in_basis:
            # A copy, since decisions about eviction record the queries themselves.
            queries = queries[:, : self.heads * self.layout.head_dim].copy()
            self._kernels.map_queries(queries, kv_heads, self._bases[layer], False)
        self._span(
            queries, span.start, np.arange(len(slabs)), pool, size, 0, self.heads, kv_heads, window, outputs
        )
        if in_basis:
            self._kernels.map_queries(outputs, kv_heads, self._bases[layer], True)

    @property
    def first_codec(self) -> Codec:
        """The codec of the first page; those of all others have the same sections."""
        return self._codecs[0][0]

    def expand_chunks(
        self, layer: int, slabs: NDArray[np.int64], first: int, length: int, sink: int
    ) -> Floats:
        """Chunks `first` and following of a sequence of `length` tokens, in `slabs`, as in a raw pool: keys rotated.

        Returns:
            [chunks, kv_heads, 2, 64, head_dim]. Rows from `length` on are zeros.
        """
        pool = self._take_chunks(len(slabs))
        self._expand_chunks(layer, slabs, first, length, sink, pool)
        expanded = pool.reshape(len(slabs), self.layout.kv_heads, 2, CHUNK_TOKENS, self.layout.head_dim)
        if len(slabs) and (rest := (first + len(slabs)) * CHUNK_TOKENS - length) > 0:
            expanded[-1, :, :, CHUNK_TOKENS - rest :] = 0
        for head in range(self.layout.kv_heads if self._has_basis(layer) else 0):
            self._restore_rows(layer, head, expanded[:, head].swapaxes(1, 2))
        return expanded

    def list_kept_kernels(self, segments: bool) -> list[Any]:
        """The kernels for rows that heads kept; those of segments if there may be any."""
        return [self._kernels.kept, self._kernels.ragged, *([self._kernels.segments] if segments else [])]

    def expand_kept(self, layer: int, head: int, bag: KeptBag, sink: int) -> Floats:
        """The rows that a head keeps, [rows, 2, head_dim]: keys, rotated to their positions, and values."""
        out = np.empty((int(bag.counts[layer, head]), 2, self.layout.head_dim), np.float32)
        self._kernels.kept(
            self._flat, self._slab, *self._view_bag(layer, bag), head,
            self._sinks.of_layer(layer)[sink], self._read_angles, out,
        )  # fmt: skip
        if self._has_basis(layer):
            self._restore_rows(layer, head, out)
        return out

    def add_segments(
        self, layer: int, qkv: torch.Tensor, rows: NDArray[np.int64], group: SegmentGroup, state: State,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Add the rows of segments to the step's `rows`, their members, whose maxima and sums are `state`."""
        self._kernels.segments(
            qkv.numpy(), rows, self._sinks.of_layer(layer)[group.sink], self._flat, self._slab,
            *self._view_segments(layer, group.bags), self._read_angles, state, out.numpy(),
        )  # fmt: skip

    def _view_segments(self, layer: int, bags: Sequence[KeptBag]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """As `_view_bag`, of the segments of a sequence, kept with the first one."""
        views, key = bags[0].views, (layer, len(bags))
        if key not in views:
            all_frames, all_heads = zip(*(self._view_bag(layer, bag) for bag in bags), strict=True)
            slabs = pad_table([bag.slabs for bag in bags])
            numbers = (np.array([frames[n] for frames in all_frames], np.int64) for n in (4, 5, 6))
            frames = (*all_frames[0][:2], slabs, all_frames[0][3], *numbers, all_frames[0][7])
            firsts, counts, begins = (np.stack([heads[n] for heads in all_heads]) for n in range(3))
            rows = counts.sum(axis=1)
            begins += (np.cumsum(rows) - rows)[:, None]
            views[key] = frames, (
                firsts, counts, begins, *(np.concatenate([heads[n] for heads in all_heads]) for n in (3, 4)),
            )  # fmt: skip
        return views[key]

    def attend_kept(
        self, layer: int, qkv: torch.Tensor, rows: Any, work: EvictedWork, window: int, state: State,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Attention of the rows of an evicted sequence, into the same rows of `out`.

        `rows` are their numbers, their positions, and how many kept rows of each head they skip, [rows, kv_heads].
        `state` is that of its segments (`clear_state` without any).
        """
        self._kernels.ragged(
            qkv.numpy(), rows, np.asarray(work.chunks, np.int64), work.ring, work.bag.kept.length,
            self._sinks.of_layer(layer)[work.sink], self._place(layer),
            *self._view_bag(layer, work.bag), self._read_angles, window, state, out.numpy(),
        )  # fmt: skip

    def _view_bag(self, layer: int, bag: KeptBag) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What kernels take as `frames` and `heads`, which is the same in every step."""
        if layer not in bag.views:
            kept, slabs = bag.kept, np.asarray(bag.slabs, np.int64)
            frames = (
                self._frame, self._heads[layer], slabs, frames_per_slab(self.layout), bag.table_frame,
                bag.outlier_frame, kept.outliers, self._bases[layer],
            )  # fmt: skip
            bag.views[layer] = frames, _find_rows(layer, bag)
        return bag.views[layer]

    def _has_basis(self, layer: int) -> bool:
        """Whether rows of a layer are stored in another basis than that of the model."""
        return self._bases[layer] is not None

    def _restore_rows(self, layer: int, head: int, rows: Floats) -> None:
        """Rows [..., 2, head_dim] of one KV head out of the basis, in place; there may be none.

        A slab's rows that were never written may hold any number; they stay apart from all others, and nobody reads
        them.
        """
        if not rows.size:
            return
        basis = self._codecs[layer][head // self.first_codec.shape.heads].basis
        with np.errstate(over="ignore", invalid="ignore"):
            rows[..., 0, :] = basis.restore_keys(rows[..., 0, :])
            rows[..., 1, :] = basis.restore_values(rows[..., 1, :])

    @property
    def _raw_floats(self) -> int:
        """Numbers of one layer of a chunk."""
        return self.layout.kv_heads * 2 * CHUNK_TOKENS * self.layout.head_dim

    def _take_chunks(self, count: int) -> Floats:
        """Scratch for the numbers of one layer of `count` chunks."""
        return np.empty(count * self._raw_floats, np.float32)

    def _place(self, layer: int) -> tuple[Any, ...]:
        """Where a layer's pages lie in the pool, what is in a page, and the layer's constants and basis."""
        place = self._flat, self._slab, layer * self._layer, self._page
        return *place, self._constants[layer], self._bases[layer]

    def _expand_chunks(
        self, layer: int, slabs: NDArray[np.int64], first: int, length: int, sink: int, pool: Floats
    ) -> None:
        """Chunks `first` and following of a sequence of `length` tokens, into `pool`."""
        sink_rows = self._sinks.of_layer(layer)
        self._kernels.expand(
            slabs, first, length, sink_rows[sink], self._place(layer), self._read_angles, pool
        )

    @property
    def _read_angles(self) -> Angles:
        """Cosines and sines by which keys are rotated when they are read; empty if they are stored rotated."""
        return NO_TABLE if self._rotated else self._angles


def _find_rows(layer: int, bag: KeptBag) -> tuple[NDArray[Any], ...]:
    """What kernels take as `heads`."""
    counts = bag.counts[layer]
    start = int(bag.counts[:layer].sum())
    rows = slice(start, start + int(counts.sum()))
    begins = np.cumsum(counts) - counts
    return bag.frames[layer], counts, begins, bag.kept.positions[rows], bag.tokens[rows]
