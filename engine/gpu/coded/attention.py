"""Attention over coded pages on a GPU, in Triton: `engine.gpu.attention` for pools with a codec.

    write     normalise and rotate the step's rows, then code keys and values into their pages (`encode`)
    decode    the kernels read codes: a page of a KV head becomes a matrix once, in registers, for all query heads of a
              row, and in shared runs for up to 64 query rows (`products`)
    prefill   the chunks that a prompt attends to are expanded once, one layer at a time, into scratch in the layout and
              type of a raw pool, which the kernel for raw pools reads

Keys of `nuq*` are stored before rotation. Decode rotates queries back by the first position of a chunk, and keys by
their place in it: the same 64 angles in every chunk (`kvcache.codecs.rotation`). Heads of `tq*` are stored after a
random rotation, which is orthogonal: decode applies it to queries, and undoes it once, in the result. The first token
of a sequence is exact: decode begins with it and leaves out row 0 of the sequence's first page, prefill puts it there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.gpu.attention import GpuAttention
from engine.gpu.batch import DeviceStep
from engine.gpu.coded.encode import _encode
from engine.gpu.coded.expand import _expand, unmix_heads
from engine.gpu.coded.page_format import BF16, CALIBRATED, FP16, GROUPED, ROTATED, describe_pages
from engine.gpu.coded.products import add_values, read_queries, score_page, score_sink
from engine.gpu.coded.unpack import load_words, pack_levels
from engine.gpu.decode_rows import LOWEST, PAGE, locate_rows, store_part, weigh_scores
from engine.gpu.launch import LaunchTuning, next_power_of_two
from engine.gpu.triton_kernel import ROWS_PER_PROGRAM, tl, triton_kernel
from kvcache.codecs.hadamard import rotate_heads
from kvcache.codecs.page import Codec
from kvcache.layout import KvLayout

Doubles = NDArray[np.float64]

# Warps of a decode program by family of codecs, and its programs that run at a time over those over raw pages: what was
# fastest on an H200 at the shape of Llama-3.1-8B.
DECODE_LAUNCH = {
    FP16.value: (4, 1.0), BF16.value: (4, 1.0), GROUPED.value: (2, 0.5), CALIBRATED.value: (8, 1.0),
    ROTATED.value: (4, 1.0),
}  # fmt: skip
# Numbers of a row that one warp codes.
NUMBERS_PER_WARP = 128


@triton_kernel
def _decode_coded(  # type: ignore[no-untyped-def]
    qkv, rows, lengths, begins, table, items, parts, weights, out,
    splits, shared, row_tiles, most, stride, out_stride, line_stride, slab, offset, scale, window,
    row_sinks, data, shorts, longs, tables, sinks, cos, sin, table_stride, sink_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SHARED_M: tl.constexpr, DIRECT: tl.constexpr,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """As `engine.gpu.attention._decode`, over coded pages."""
    number = tl.program_id(1)
    if SHARED_M > 0:  # noqa: SIM102 (known when it is compiled)
        if number < shared:
            _decode_part(
                qkv, rows, lengths, begins, table, items, parts, weights, out, number, row_tiles, splits, most,
                stride, out_stride, line_stride, slab, offset, scale, window,
                row_sinks, data, shorts, longs, tables, sinks, cos, sin, table_stride, sink_stride,
                HEADS, GROUP, SHARED_M, True, DIRECT, TYPE, FORMAT, KEYS, VALUES,
            )  # fmt: skip
            return
    _decode_part(
        qkv, rows, lengths, begins, table, items, parts, weights, out, number - shared, row_tiles, splits, most,
        stride, out_stride, line_stride, slab, offset, scale, window,
        row_sinks, data, shorts, longs, tables, sinks, cos, sin, table_stride, sink_stride,
        HEADS, GROUP, BLOCK_M, False, DIRECT, TYPE, FORMAT, KEYS, VALUES,
    )  # fmt: skip


@triton_kernel
def _begin_with_sink(  # type: ignore[no-untyped-def]
    x, y, sink, exact, begins_here, scale, d,
    LIMIT: tl.constexpr, SPLIT: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """The running softmax of rows that begin with the exact first token, whose value is at `exact`; others are empty.

    Returns the highest score and the sum of weights [BLOCK_M], and the sums of values [BLOCK_M, COUNT]: with SPLIT of
    both halves, else twice the same.
    """
    top = tl.where(begins_here, score_sink(x, y, sink, FORMAT) * scale, LOWEST)
    acc_x = tl.where(begins_here[:, None], tl.load(exact + d, mask=d < LIMIT, other=0.0)[None, :], 0.0)
    acc_y = acc_x
    if SPLIT:
        rest = tl.load(exact + LIMIT + d, mask=d < LIMIT, other=0.0)
        acc_y = tl.where(begins_here[:, None], rest[None, :], 0.0)
    return top, tl.where(begins_here, 1.0, 0.0), acc_x, acc_y


@triton_kernel
def _decode_part(  # type: ignore[no-untyped-def]
    qkv, rows, lengths, begins, table, items, parts, weights, out, number, row_tiles, splits, most,
    stride, out_stride, line_stride, slab, offset, scale, window,
    row_sinks, data, shorts, longs, tables, sinks, cos, sin, table_stride, sink_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SHARED: tl.constexpr, DIRECT: tl.constexpr,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One program of `_decode_coded`; `number` as `locate_rows` takes it."""
    WIDTH: tl.constexpr = FORMAT.width
    SPLIT: tl.constexpr = FORMAT.halves == 1 and FORMAT.family == GROUPED
    # Channels of one sum of values, and in how many numbers they are kept.
    LIMIT: tl.constexpr = WIDTH // 2 if SPLIT else WIDTH
    COUNT: tl.constexpr = FORMAT.half_block if SPLIT else FORMAT.block
    h = tl.program_id(0)
    d = tl.arange(0, COUNT)
    line, part, row, live, first, last, head, low, high, reach, at = locate_rows(
        rows, lengths, begins, items, number, row_tiles, splits, window, GROUP, BLOCK_M, SHARED
    )
    page, own_head = h // FORMAT.heads, h % FORMAT.heads
    own, base = tables + page * table_stride, offset + page * FORMAT.page_bytes
    x, y = read_queries(qkv + at * stride + head * WIDTH, own, live, BLOCK_M, TYPE, FORMAT)
    key_levels, value_levels = pack_levels(own, KEYS, TYPE), pack_levels(own, VALUES, TYPE)
    # The first token of the sequence is exact. It comes before all pages, and its place in the first one is not seen.
    sink = sinks + tl.load(row_sinks + line).to(tl.int64) * sink_stride + h * WIDTH
    begins_here = live & (first == 0) & (low == 0) & (high > 0)
    top, total, acc_x, acc_y = _begin_with_sink(
        x, y, sink, sink + HEADS // GROUP * WIDTH, begins_here, scale, d, LIMIT, SPLIT, FORMAT
    )
    low_x, low_y = total * 0.0, total * 0.0
    # Codes of the next page are read while this one is used, and the slab of the page after it.
    entries, final = table + line * line_stride, tl.maximum(last - 1, 0)
    place = tl.load(entries + tl.minimum(first, final)).to(tl.int64) * slab + base
    ahead = tl.load(entries + tl.minimum(first + 1, final))
    keys = load_words(longs, place, own_head, FORMAT, KEYS, FORMAT.halves)
    values = load_words(longs, place, own_head, FORMAT, VALUES, SPLIT)
    for c in range(first, last):
        next_place = ahead.to(tl.int64) * slab + base
        next_keys = load_words(longs, next_place, own_head, FORMAT, KEYS, FORMAT.halves)
        next_values = load_words(longs, next_place, own_head, FORMAT, VALUES, SPLIT)
        ahead = tl.load(entries + tl.minimum(c + 2, final))
        token = c * PAGE + tl.arange(0, PAGE)
        there = token < reach
        s = score_page(
            x, y, keys, data, shorts, longs, own, key_levels, place, own_head, there, cos, sin, c, TYPE, FORMAT, KEYS,
        )  # fmt: skip
        seen = (token[None, :] >= tl.maximum(low, 1)[:, None]) & (token[None, :] < high[:, None])
        p, fade, top, total = weigh_scores(s * scale, seen, top, total)
        acc_x, low_x = acc_x * fade[:, None], low_x * fade
        if SPLIT:
            acc_y, low_y = acc_y * fade[:, None], low_y * fade
        acc_x, acc_y, low_x, low_y = add_values(
            p, acc_x, acc_y, low_x, low_y, values, data, shorts, longs, own, value_levels, place, own_head, there,
            TYPE, FORMAT, VALUES,
        )  # fmt: skip
        place, keys, values = next_place, next_keys, next_values
    _store_sums(
        acc_x, acc_y, low_x, low_y, top, total, own, at, row, part, head, d, live, out, parts, weights, most,
        out_stride, HEADS, BLOCK_M, DIRECT, LIMIT, SPLIT, FORMAT,
    )  # fmt: skip


@triton_kernel
def _store_sums(  # type: ignore[no-untyped-def]
    acc_x, acc_y, low_x, low_y, top, total, table, at, row, part, head, d, live, out, parts, weights, most, out_stride,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, DIRECT: tl.constexpr, LIMIT: tl.constexpr, SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Store what `_decode_part` has summed up: products acc and zero points low, over the sum of weights."""
    share = 1.0 / tl.where(total > 0.0, total, 1.0)[:, None]
    acc_x = (acc_x + low_x[:, None]) * share
    if FORMAT.family == ROTATED:
        acc_x = unmix_heads(acc_x, table, BLOCK_M, FORMAT)
    inside = live[:, None] & (d < LIMIT)[None, :]
    store_part(
        acc_x, top, total, at, row, part, head, d, live, inside, out, parts, weights, most, out_stride,
        HEADS, FORMAT.width, DIRECT,
    )  # fmt: skip
    if SPLIT:
        store_part(
            (acc_y + low_y[:, None]) * share, top, total, at, row, part, head, d + LIMIT, live, inside, out,
            parts, weights, most, out_stride, HEADS, FORMAT.width, DIRECT,
        )  # fmt: skip


class CodedGpuAttention(GpuAttention):
    """Attention over a pool of coded pages on a device, for a model with `heads` query heads.

    Args:
        layout: with a codec; its dtype is the type of the model's rows.
        data: the pool, uint8 [slabs, layers, pages per layer, page_bytes].
        heads: query heads.
        codecs: by layer and page (`kvcache.page_codecs.build_page_codecs`).
        frequencies: [head_dim / 2], radians per token of each rotary pair.
        max_model_len: most tokens of a sequence.
        sink_slots: how many different first tokens a step may have.

    Raises:
        ConfigError: the kernels cannot handle the codec for heads of this size.
        ValueError: the pool is not of bytes, or its memory is not contiguous.
    """

    def __init__(
        self,
        layout: KvLayout,
        data: torch.Tensor,
        heads: int,
        codecs: tuple[tuple[Codec, ...], ...],
        frequencies: Doubles,
        max_model_len: int,
        sink_slots: int,
        tuning: LaunchTuning | None = None,
    ) -> None:
        super().__init__(layout, data, heads, tuning)
        device = data.device
        self._format = describe_pages(codecs, device, getattr(torch, layout.dtype))
        flat = data.view(-1)
        # The pool's memory, as bytes and as whole numbers of two and of four bytes.
        self._memory = (flat, flat.view(torch.int16), flat.view(torch.int32))
        angles = np.arange(max(max_model_len, CHUNK_TOKENS), dtype=np.float64)[:, None] * frequencies
        cos, sin = (
            torch.from_numpy(table.astype(np.float32)).to(device)
            for table in (np.cos(angles), np.sin(angles))
        )
        self._angles = (cos, sin)
        # [slots, layers, 2, kv_heads, head_dim] float32; for `tq*` after the random rotation, like the pages.
        self.sinks = torch.zeros(
            sink_slots, layout.layers, 2, layout.kv_heads, layout.head_dim, dtype=torch.float32, device=device
        )
        # [1]: 1 after a step with a key or value that is not finite.
        self.broken = torch.zeros(1, dtype=torch.int32, device=device)
        self._page_constants = {
            "FORMAT": self._format.numbers, "KEYS": self._format.keys, "VALUES": self._format.values,
        }  # fmt: skip
        # Pages are read into registers: nothing can be loaded ahead into shared memory.
        warps, share = DECODE_LAUNCH[self._format.numbers.family]
        self._read_launch = {"num_warps": warps, "num_stages": 1}
        self._programs = max(1, int(self.tuning.programs * share))
        # To expand a page takes more registers than to load one.
        self._expand_launch = {"num_warps": 2 * self.tuning.warps, "num_stages": 1}
        seed = codecs[0][0].codec_id.seed
        self._mix = None if seed is None else _mixing_matrix(seed, layout.head_dim).to(device)

    def write(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor], eps: float,
    ) -> None:  # fmt: skip
        """Normalise and rotate `qkv` in place, keys only if the codec stores them rotated; code keys and values.

        `rotary` is not used: angles are computed in float64 here. A number that is not finite sets `broken`, and its
        row is not stored.
        """
        self._prepare(
            layer, qkv, step, self._angles, norms, eps, rotate_keys=self._format.rotated, store=False
        )
        numbers, tables = self._format.numbers, self._format.tables
        page = numbers.heads * numbers.width
        limit = numbers.group or page
        count = (
            next_power_of_two(limit)
            if limit == numbers.group
            else max(numbers.block, next_power_of_two(page))
        )
        _encode[(-(-len(qkv) // ROWS_PER_PROGRAM), self.layout.pages_per_layer * (page // limit), 2)](
            qkv, step.positions, step.slots, *self._memory, tables[layer], self.broken, len(qkv), qkv.stride(0),
            self._slab, layer * self._layer, tables.stride(1), HEADS=self.heads, KV_HEADS=self.layout.kv_heads,
            ROWS=ROWS_PER_PROGRAM, COUNT=count, LIMIT=limit, num_warps=max(1, min(4, count // NUMBERS_PER_WARP)),
            enable_fp_fusion=False, **self._page_constants,
        )  # fmt: skip

    def prefill(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor
    ) -> None:
        """As `GpuAttention.prefill`, over chunks that are expanded first."""
        if not step.tiles.shape[0]:
            return
        spans, (lines, chunks) = step.spans.shape[0], step.table.shape
        scratch = self.expand_spans(layer, step, window, qkv.dtype)
        numbers = torch.arange(
            (spans - lines) * chunks, spans * chunks, dtype=torch.int32, device=qkv.device
        ).view(lines, chunks)
        self._attend_tiles(qkv, step, (numbers, scratch, scratch[0].numel(), 0), window, out)

    def expand_spans(self, layer: int, step: DeviceStep, window: int, kind: torch.dtype) -> torch.Tensor:
        """The chunks of a step's prefill spans as raw pages: keys at their positions, with sinks.

        Returns [spans * chunks, kv_heads, 2, 64, head_dim] of type `kind`. What no token attends to is not written.
        """
        spans, (lines, chunks) = step.spans.shape[0], step.table.shape
        shape = (spans * chunks, self.layout.kv_heads, 2, CHUNK_TOKENS, self.layout.head_dim)
        scratch = torch.empty(shape, dtype=kind, device=self.data.device)
        _expand[(spans * chunks, self.layout.kv_heads)](
            step.spans, step.table, *self._memory, *self._layer_arrays(layer), scratch, lines - spans, chunks,
            step.table.stride(0), self._slab, layer * self._layer, *self._strides, window,
            KV_HEADS=self.layout.kv_heads, enable_fp_fusion=False, **self._page_constants, **self._expand_launch,
        )  # fmt: skip
        return scratch

    def normalise(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, norms: tuple[torch.Tensor, torch.Tensor], eps: float
    ) -> None:  # fmt: skip
        """Normalise the keys of `qkv` in place; its queries are rotated too."""
        self._prepare(layer, qkv, step, self._angles, norms, eps, rotate_keys=False, store=False)

    def keep_sinks(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer of several sinks: `slots` [n] int64, keys and values [n, kv_heads, head_dim]."""
        rows = torch.stack([keys, values], dim=1).float()
        if self._mix is not None:
            rows = rows @ self._mix
        self.sinks[:, layer].index_copy_(0, slots, rows)

    def _decode_kernel(self, layer: int, step: DeviceStep) -> tuple[Any, tuple[Any, ...]]:
        """As `GpuAttention._decode_kernel`."""
        return _decode_coded, (step.sinks, *self._memory, *self._layer_arrays(layer), *self._strides)

    def _layer_arrays(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Tables and sinks of a layer, and all angles."""
        return (self._format.tables[layer], self.sinks[:, layer], *self._angles)

    @property
    def _strides(self) -> tuple[int, int]:
        """Numbers from a page's table to the next one, and from a sink to the next one."""
        return self._format.tables.stride(1), self.sinks.stride(0)


def _mixing_matrix(seed: int, width: int) -> torch.Tensor:
    """The random rotation of `tq*` as a matrix [head_dim, head_dim]: rows of heads are multiplied by it."""
    return torch.from_numpy(rotate_heads(np.eye(width, dtype=np.float32), seed))
