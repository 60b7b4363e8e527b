"""Attention over coded pages on a GPU, in Triton: `engine.gpu.attention` for pools with a codec.

    write     normalise and rotate the step's rows, then code keys and values into their pages (`encode`)
    decode    the kernels read codes: a page of a KV head is expanded once, in registers, for all query heads of a row,
              and in shared runs for up to 64 query rows
    prefill   the chunks that a prompt attends to are expanded once, one layer at a time, into scratch in the layout and
              type of a raw pool, which the kernel for raw pools reads

Keys of `nuq*` are stored before rotation. Decode rotates queries back by the first position of a chunk, and keys by
their place in it: the same 64 angles in every chunk (`kvcache.codecs.rotation`). Heads of `tq*` are stored after a
random rotation, which is orthogonal: decode applies it to queries, and undoes it once, in the result. The first token
of a sequence is exact: its numbers take the place of row 0 of the sequence's first page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.gpu.attention import GpuAttention
from engine.gpu.batch import DeviceStep
from engine.gpu.coded.encode import _encode
from engine.gpu.coded.expand import _expand, expand_halves, expand_head, mix_heads, unmix_heads
from engine.gpu.coded.page_format import CALIBRATED, ROTATED, describe_pages
from engine.gpu.decode_rows import LOWEST, PAGE, PRECISION, absorb_scores, locate_rows, store_part
from engine.gpu.launch import LaunchTuning, next_power_of_two
from engine.gpu.triton_kernel import ROWS_PER_PROGRAM, triton_kernel
from kvcache.codecs.hadamard import rotate_heads
from kvcache.codecs.page import Codec
from kvcache.layout import KvLayout

Doubles = NDArray[np.float64]

# Numbers of a row that one warp codes.
NUMBERS_PER_WARP = 128


@triton_kernel
def _read_queries(  # type: ignore[no-untyped-def]
    queries, table, live, BLOCK_M: tl.constexpr, TYPE: tl.constexpr, FORMAT: tl.constexpr
):
    """The queries at [BLOCK_M]: for `nuq*` their two halves in float32, else twice the same, as keys are stored."""
    if FORMAT.family == CALIBRATED:
        HALF: tl.constexpr = FORMAT.width // 2
        i = tl.arange(0, FORMAT.half_block)[None, :]
        mask = live[:, None] & (i < HALF)
        x = tl.load(queries[:, None] + i, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(queries[:, None] + HALF + i, mask=mask, other=0.0).to(tl.float32)
    else:
        d = tl.arange(0, FORMAT.block)[None, :]
        x = tl.load(queries[:, None] + d, mask=live[:, None] & (d < FORMAT.width), other=0.0)
        if FORMAT.family == ROTATED:
            x = mix_heads(x.to(tl.float32), table, BLOCK_M, FORMAT)
        x = x.to(TYPE)
        y = x
    return x, y


@triton_kernel
def _score_page(  # type: ignore[no-untyped-def]
    x, y, data, shorts, longs, table, at, head, c, there, sink, cos, sin,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Products of the queries (`_read_queries`) and the keys of chunk c, whose page is at byte `at`, [BLOCK_M, 64]."""
    if FORMAT.family == CALIBRATED:
        HALF: tl.constexpr = FORMAT.width // 2
        left, right = expand_halves(
            data, shorts, longs, table, at, head, c, there, sink, cos, sin, tl.arange(0, PAGE), FORMAT, KEYS
        )
        i = tl.arange(0, FORMAT.half_block)
        angle = c * PAGE * HALF + i
        cosine = tl.load(cos + angle, mask=i < HALF, other=0.0)[None, :]
        sine = tl.load(sin + angle, mask=i < HALF, other=0.0)[None, :]
        back_x, back_y = (x * cosine + y * sine).to(TYPE), (y * cosine - x * sine).to(TYPE)
        s = tl.dot(back_x, tl.trans(left.to(TYPE)), input_precision=PRECISION)
        s += tl.dot(back_y, tl.trans(right.to(TYPE)), input_precision=PRECISION)
    else:
        k = expand_head(data, shorts, longs, table, at, head, c, there, sink, FORMAT, KEYS)
        s = tl.dot(x, tl.trans(k.to(TYPE)), input_precision=PRECISION)
    return s


@triton_kernel
def _decode_coded(  # type: ignore[no-untyped-def]
    qkv, rows, lengths, begins, table, items, parts, weights, out,
    splits, most, stride, out_stride, line_stride, slab, offset, scale, window,
    row_sinks, data, shorts, longs, tables, sinks, cos, sin, table_stride, sink_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SHARED: tl.constexpr, DIRECT: tl.constexpr,
    TYPE: tl.constexpr, FORMAT: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """As `engine.gpu.attention._decode`, over coded pages."""
    WIDTH: tl.constexpr = FORMAT.width
    h = tl.program_id(0)
    d = tl.arange(0, FORMAT.block)
    line, part, row, live, first, last, head, low, high, reach, at = locate_rows(
        rows, lengths, begins, items, splits, window, GROUP, BLOCK_M, SHARED
    )
    inside = live[:, None] & (d < WIDTH)[None, :]
    page, own_head = h // FORMAT.heads, h % FORMAT.heads
    own, base = tables + page * table_stride, offset + page * FORMAT.page_bytes
    x, y = _read_queries(qkv + at * stride + head * WIDTH, own, live, BLOCK_M, TYPE, FORMAT)
    sink = sinks + tl.load(row_sinks + line).to(tl.int64) * sink_stride + h * WIDTH
    values = sink + HEADS // GROUP * WIDTH
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, FORMAT.block], 0.0, tl.float32)
    for c in range(first, last):
        place = tl.load(table + line * line_stride + c).to(tl.int64) * slab + base
        token = c * PAGE + tl.arange(0, PAGE)
        there = token < reach
        s = _score_page(
            x, y, data, shorts, longs, own, place, own_head, c, there, sink, cos, sin, TYPE, FORMAT, KEYS
        )
        v = expand_head(data, shorts, longs, own, place, own_head, c, there, values, FORMAT, VALUES)
        seen = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
        top, total, acc = absorb_scores(s * scale, v.to(TYPE), seen, top, total, acc)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if FORMAT.family == ROTATED:
        acc = unmix_heads(acc, own, BLOCK_M, FORMAT)
    store_part(
        acc, top, total, at, row, part, head, d, live, inside, out, parts, weights, most, out_stride,
        HEADS, WIDTH, DIRECT,
    )  # fmt: skip


class CodedGpuAttention(GpuAttention):
    """Attention over a pool of coded pages on a device, for a model with `heads` query heads.

    Args:
        layout: with a codec; its dtype is the type of the model's rows.
        data: the pool, uint8 [slabs, layers, pages per layer, page_bytes].
        heads: query heads.
        codecs: by layer and page (`engine.cpu.coded.attention.build_page_codecs`).
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
        self._format = describe_pages(codecs, device)
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
        # To expand a page takes more registers than to load one.
        self._read_launch = {"num_warps": 2 * self.tuning.warps, "num_stages": 1}
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
            KV_HEADS=self.layout.kv_heads, enable_fp_fusion=False, **self._page_constants, **self._read_launch,
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
