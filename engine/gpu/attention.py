"""Attention on a GPU, in Triton: rotates and stores new KV in pages, then computes decode and prefill over pages.

Decode reads each page once for all query heads of its group (as rows of one matrix product), and each page of a shared
run once for all rows that share it. The chunks of a row are cut into splits, so that small batches use the whole device
too. Splits and shared items leave partial results (weighted values and the logarithm of their weight), which are merged
in a fixed order:

    shared items ──▶ parts S, S+1, ... ─┐
    row's splits ──▶ parts 0 ... S-1   ─┴─▶ merge ──▶ out          S = 1 and nothing shared: straight to out

Prefill reads its own keys and values from the pages too, where `write` has just stored them. Products take the pool's
type and sum in float32. Without a CUDA device everything runs in Triton's interpreter, on CPU tensors: slow, for tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.batching.batch import ForwardBatch
from engine.batching.prefix_plan import PrefixPlan
from engine.gpu.batch import (
    TILE_FIELDS,
    DeviceStep,
    Ints,
    SharedItems,
    cut_prefill_spans,
    cut_shared_runs,
    fill_step,
    measure_sizes,
    view_step,
)
from engine.gpu.decode_rows import (
    EMPTY_PART,
    LOWEST,
    PAGE,
    PRECISION,
    locate_rows,
    store_part,
    weigh_scores,
)
from engine.gpu.launch import LaunchTuning, next_power_of_two
from engine.gpu.triton_kernel import INTERPRETED, ROWS_PER_PROGRAM, tl, triton_kernel
from engine.model.device_step import MAX_PARTS
from kvcache.layout import KvLayout

# A merge of splits takes as long as a program takes for this many chunks.
MERGE_CHUNKS = 2
# A shared item has at least this many chunks, unless its run is shorter: each of its rows costs a part to be merged.
MIN_ITEM_CHUNKS = 8
TILE_NUMBERS = tl.constexpr(TILE_FIELDS)


@triton_kernel
def _absorb(q, k, v, seen, top, total, acc, scale):  # type: ignore[no-untyped-def]
    """Add one page to the running softmax of all rows. q [M, D], k and v [64, D], seen [M, 64]; sums in float32."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    p, fade, top, total = weigh_scores(s, seen, top, total)
    return top, total, acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)


@triton_kernel
def _decode(  # type: ignore[no-untyped-def]
    qkv, rows, lengths, begins, table, items, parts, weights, out,
    splits, shared, row_tiles, most, stride, out_stride, line_stride, slab, offset, scale, window, pool,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SHARED_M: tl.constexpr, DIRECT: tl.constexpr,
    TYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Partial attention. Program (KV head, item * row_tiles + tile of its rows) for the first `shared` of them, which
    have SHARED_M rows; behind them (KV head, row * splits + split).

    It writes parts [rows, most, HEADS, WIDTH] and their weights [rows, most, HEADS] (base-2 logarithms); with DIRECT it
    writes the finished rows of `out`.
    """
    number = tl.program_id(1)
    if SHARED_M > 0:  # noqa: SIM102 (known when it is compiled)
        if number < shared:
            _decode_part(
                qkv, rows, lengths, begins, table, items, parts, weights, out, number, row_tiles, splits, most,
                stride, out_stride, line_stride, slab, offset, scale, window, pool,
                HEADS, GROUP, SHARED_M, True, DIRECT, TYPE, WIDTH, BLOCK_D,
            )  # fmt: skip
            return
    _decode_part(
        qkv, rows, lengths, begins, table, items, parts, weights, out, number - shared, row_tiles, splits, most,
        stride, out_stride, line_stride, slab, offset, scale, window, pool,
        HEADS, GROUP, BLOCK_M, False, DIRECT, TYPE, WIDTH, BLOCK_D,
    )  # fmt: skip


@triton_kernel
def _decode_part(  # type: ignore[no-untyped-def]
    qkv, rows, lengths, begins, table, items, parts, weights, out, number, row_tiles, splits, most,
    stride, out_stride, line_stride, slab, offset, scale, window, pool,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SHARED: tl.constexpr, DIRECT: tl.constexpr,
    TYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program of `_decode`; `number` as `locate_rows` takes it."""
    h = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, PAGE)
    line, part, row, live, first, last, head, low, high, reach, at = locate_rows(
        rows, lengths, begins, items, number, row_tiles, splits, window, GROUP, BLOCK_M, SHARED
    )
    inside = live[:, None] & (d < WIDTH)[None, :]
    q = tl.load(qkv + at[:, None] * stride + head[:, None] * WIDTH + d[None, :], mask=inside, other=0.0).to(
        TYPE
    )
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    for c in range(first, last):
        place = tl.load(table + line * line_stride + c).to(tl.int64) * slab + offset + h * 2 * PAGE * WIDTH
        page = pool + place + t[:, None] * WIDTH + d[None, :]
        token = c * PAGE + t
        there = (token < reach)[:, None] & (d < WIDTH)[None, :]
        k = tl.load(page, mask=there, other=0.0).to(TYPE)
        v = tl.load(page + PAGE * WIDTH, mask=there, other=0.0).to(TYPE)
        seen = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
        top, total, acc = _absorb(q, k, v, seen, top, total, acc, scale)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    store_part(
        acc, top, total, at, row, part, head, d, live, inside, out, parts, weights, most, out_stride,
        HEADS, WIDTH, DIRECT,
    )  # fmt: skip


@triton_kernel
def _merge(  # type: ignore[no-untyped-def]
    parts, weights, rows, covers, out, splits, most, out_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row, head): merge its parts in order, sixteen at a time, by log-sum-exp (Eq. 2 of ChunkAttention)."""
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)[None, :]
    top = tl.full([1], LOWEST, tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    acc = tl.full([BLOCK_D], 0.0, tl.float32)
    count = splits + tl.load(covers + n)
    for begin in range(0, count, 16):
        part = begin + tl.arange(0, 16)
        slot = (n * most + part) * HEADS + head
        weight = tl.load(weights + slot, mask=part < count, other=LOWEST)
        filled = weight > EMPTY_PART
        value = tl.load(parts + slot[:, None] * WIDTH + d, mask=filled[:, None] & (d < WIDTH), other=0.0)
        high = tl.maximum(top, tl.max(weight, 0))
        fade, gain = tl.exp2(top - high), tl.where(filled, tl.exp2(weight - high), 0.0)
        total = total * fade + tl.sum(gain, 0)
        acc = acc * fade + tl.sum(value * gain[:, None], 0)
        top = high
    acc = acc / tl.where(total > 0.0, total, 1.0)
    at = out + tl.load(rows + n).to(tl.int64) * out_stride + head * WIDTH + tl.arange(0, BLOCK_D)
    tl.store(at, acc, mask=tl.arange(0, BLOCK_D) < WIDTH)


@triton_kernel
def _prefill(  # type: ignore[no-untyped-def]
    qkv, tiles, table, pool, out, stride, out_stride, line_stride, slab, offset, scale, window,
    GROUP: tl.constexpr, SPREAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): consecutive tokens of a sequence, with SPREAD rows of the matrix product for each
    token.
    """
    tile = tiles + tl.program_id(0) * TILE_NUMBERS
    h = tl.program_id(1)
    row, count, start, line = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, PAGE)
    # Number of the token within the tile.
    own = m // SPREAD
    head = h * GROUP + m % SPREAD
    inside = ((own < count) & (m % SPREAD < GROUP))[:, None] & (d < WIDTH)[None, :]
    at = (row + own).to(tl.int64)
    q = tl.load(qkv + at[:, None] * stride + head[:, None] * WIDTH + d[None, :], mask=inside, other=0.0).to(
        TYPE
    )
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    begin = 0
    if window > 0:
        begin = tl.maximum(start - window + 1, 0) // PAGE
    end = start + count
    for c in range(begin, (end + PAGE - 1) // PAGE):
        place = tl.load(table + line * line_stride + c).to(tl.int64) * slab + offset + h * 2 * PAGE * WIDTH
        page = pool + place + t[:, None] * WIDTH + d[None, :]
        token = c * PAGE + t
        there = (token < end)[:, None] & (d < WIDTH)[None, :]
        k = tl.load(page, mask=there, other=0.0).to(TYPE)
        v = tl.load(page + PAGE * WIDTH, mask=there, other=0.0).to(TYPE)
        far = (start + own)[:, None] - token[None, :]
        seen = (far >= 0) & ((far < window) | (window <= 0))
        top, total, acc = _absorb(q, k, v, seen, top, total, acc, scale)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + at[:, None] * out_stride + head[:, None] * WIDTH + d[None, :], acc, mask=inside)


@triton_kernel
def _write(  # type: ignore[no-untyped-def]
    qkv, positions, slots, cos, sin, q_norm, k_norm, pool, count, stride, slab, offset, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, NORMED: tl.constexpr, ROTATE_KEYS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Program (tokens, heads): normalise and rotate queries and keys in place; store keys and values in the pages.

    Without ROTATE_KEYS keys are only normalised; without STORE nothing is stored in the pages.
    """
    # A program handles BLOCK_H heads of BLOCK_N tokens; the query heads come before the KV heads.
    line = tl.arange(0, BLOCK_N * BLOCK_H)[:, None]
    n = (tl.program_id(0) * BLOCK_N + line // BLOCK_H).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + line % BLOCK_H
    i = tl.arange(0, HALF)[None, :]
    place = tl.load(positions + n, mask=n < count, other=0)
    slot = tl.load(slots + n, mask=n < count, other=-1).to(tl.int64)
    half = (i < WIDTH // 2) & (n < count)
    inside = half & (h < HEADS + KV_HEADS)
    left = qkv + n * stride + h * WIDTH + i
    x = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(left + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(x * x + y * y, 1)[:, None]
        share = 1.0 / tl.sqrt(squares / WIDTH + eps)
        mine, keys = inside & (h < HEADS), inside & (h >= HEADS)
        left_weight = tl.load(q_norm + i + h * 0, mask=mine, other=0.0)
        left_weight += tl.load(k_norm + i + h * 0, mask=keys, other=0.0)
        right_weight = tl.load(q_norm + WIDTH // 2 + i + h * 0, mask=mine, other=0.0)
        right_weight += tl.load(k_norm + WIDTH // 2 + i + h * 0, mask=keys, other=0.0)
        x, y = x * share * left_weight, y * share * right_weight
    angle = place.to(tl.int64) * (WIDTH // 2) + i
    c = tl.load(cos + angle, mask=half, other=0.0)
    s = tl.load(sin + angle, mask=half, other=0.0)
    if not ROTATE_KEYS:
        c, s = tl.where(h < HEADS, c, 1.0), tl.where(h < HEADS, s, 0.0)
    rotated_x, rotated_y = x * c - y * s, y * c + x * s
    tl.store(left, rotated_x, mask=inside)
    tl.store(left + WIDTH // 2, rotated_y, mask=inside)
    if STORE:
        stored = inside & (h >= HEADS) & (slot >= 0)
        key = pool + slot * slab + offset + (h - HEADS) * 2 * PAGE * WIDTH + (place % PAGE) * WIDTH + i
        value = left + KV_HEADS * WIDTH
        tl.store(key, rotated_x, mask=stored)
        tl.store(key + WIDTH // 2, rotated_y, mask=stored)
        tl.store(key + PAGE * WIDTH, tl.load(value, mask=stored, other=0.0), mask=stored)
        tl.store(
            key + PAGE * WIDTH + WIDTH // 2, tl.load(value + WIDTH // 2, mask=stored, other=0.0), mask=stored
        )


class GpuAttention:
    """Attention over a pool's memory on a device, for a model with `heads` query heads.

    `load` copies a batch to the device; the other methods take its result, and do not wait for the device.

    Raises:
        ValueError: the pool's type is not its layout's, or its memory is not contiguous.
    """

    def __init__(
        self, layout: KvLayout, data: torch.Tensor, heads: int, tuning: LaunchTuning | None = None
    ) -> None:
        kind: torch.dtype = getattr(torch, layout.dtype)
        if data.dtype != (torch.uint8 if layout.codec else kind) or not data.is_contiguous():
            what = "bytes" if layout.codec else layout.dtype
            raise ValueError(f"the pool must be contiguous and of {what}, not {data.dtype}")
        self.layout, self.data, self.heads = layout, data, heads
        self.tuning = tuning or LaunchTuning.of(data.device)
        self._group = heads // layout.kv_heads
        self._slab = layout.chunk_bytes // data.element_size()  # elements
        self._layer = layout.layer_bytes // data.element_size()
        self._scale = float(np.log2(np.e) / np.sqrt(layout.head_dim))
        self._block = max(16, next_power_of_two(layout.head_dim))
        self._spread = next_power_of_two(self._group)
        # Wide heads and float32 need more registers for each row, so fewer rows fit.
        wide, whole = layout.head_dim > 128, kind == torch.float32
        self._rows = max(self.tuning.rows // ((1 + wide) * (1 + whole)), self._spread)
        warps, stages = self.tuning.warps * (1 + whole), self.tuning.stages - whole
        self._launch = {"num_warps": warps, "num_stages": stages}
        self._read_launch = self._launch
        self._programs = self.tuning.programs
        # The interpreter would treat bfloat16 as integers.
        widen = INTERPRETED and kind == torch.bfloat16
        self._type = tl.float32 if widen else _TYPES[kind]
        self._page_constants: dict[str, Any] = {"WIDTH": layout.head_dim, "BLOCK_D": self._block}
        self._cut: tuple[PrefixPlan | None, SharedItems | None] = (None, None)

    def load(self, batch: ForwardBatch) -> DeviceStep:
        """Copy the batch to the device, without padding."""
        shared, tiles = self.cut_batch(batch)
        sizes = measure_sizes(batch, shared, tiles)
        ints: Ints = np.empty(sizes.numbers, np.int32)
        fill_step(ints, sizes, batch, shared, tiles)
        return view_step(torch.from_numpy(ints).to(self.data.device), sizes)

    def cut_batch(self, batch: ForwardBatch) -> tuple[SharedItems, Ints]:
        """Cut the batch's shared runs into items (only if its plan is new), and its prefill spans into tiles."""
        plan, found = self._cut
        if found is None or plan is not batch.plan:
            pays = self._saved_bytes(batch.plan) >= self.tuning.saving_bytes
            found = cut_shared_runs(batch.plan, self._item_chunks(batch.plan) if pays else None)
            self._cut = (batch.plan, found)
        return found, cut_prefill_spans(batch.spans, self._rows // self._spread, len(batch.rows))

    def write(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor], eps: float,
    ) -> None:  # fmt: skip
        """Normalise (with the norms of queries and keys, unless empty) and rotate `qkv` in place; store keys and
        values.

        qkv: [rows, (heads + 2 * kv_heads) * head_dim]. rotary: cosines and sines, [positions, head_dim / 2] float32.
        """
        self._prepare(layer, qkv, step, rotary, norms, eps, rotate_keys=True, store=True)

    def _prepare(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor], eps: float, *, rotate_keys: bool, store: bool,
    ) -> None:  # fmt: skip
        """As `write`; without `rotate_keys` keys are only normalised, without `store` nothing is stored."""
        width, kv_heads, rows, heads = self.layout.head_dim, self.layout.kv_heads, len(qkv), 8
        _write[(-(-rows // ROWS_PER_PROGRAM), -(-(self.heads + kv_heads) // heads))](
            qkv, step.positions, step.slots, *rotary, *norms, self.data, rows, qkv.stride(0), self._slab,
            layer * self._layer, eps, HEADS=self.heads, KV_HEADS=kv_heads, WIDTH=width,
            HALF=next_power_of_two(width // 2),
            BLOCK_N=ROWS_PER_PROGRAM, BLOCK_H=heads, NORMED=norms[0].numel() > 0, ROTATE_KEYS=rotate_keys, STORE=store,
        )  # fmt: skip

    def decode(self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor) -> None:
        """Attention of the decode rows over their pages, into the same rows of `out` [rows, heads * head_dim]."""
        singles, items = step.rows.shape[0], step.items.shape[0]
        if not singles:
            return
        splits = self._count_splits(singles, step.table.shape[1])
        direct = splits == 1 and not items
        count = splits + (MAX_PARTS if items else 0)
        space = (0,) if direct else (singles, count, self.heads)
        weights = torch.empty(space, dtype=torch.float32, device=qkv.device)
        parts = torch.empty((*space, self.layout.head_dim), dtype=torch.float32, device=qkv.device)
        kernel, pool = self._decode_kernel(layer, step)
        least = max(16, self._spread)  # Triton's smallest matrix product has 16 rows
        rows = min(self._rows, max(least, next_power_of_two(singles * self._group)))
        tiles = -(-singles * self._group // rows)
        kernel[(self.layout.kv_heads, items * tiles + singles * splits)](
            qkv, step.rows, step.lengths, step.begins, step.table, step.items, parts, weights, out, splits,
            items * tiles, tiles, count, qkv.stride(0), out.stride(0), step.table.stride(0), self._slab,
            layer * self._layer, self._scale, window, *pool, HEADS=self.heads, GROUP=self._group, BLOCK_M=least,
            SHARED_M=rows if items else 0, DIRECT=direct, TYPE=self._type, **self._page_constants, **self._read_launch,
        )  # fmt: skip
        if not direct:
            _merge[(singles, self.heads)](
                parts, weights, step.rows, step.covers, out, splits, count, out.stride(0), HEADS=self.heads,
                WIDTH=self.layout.head_dim, BLOCK_D=self._block,
            )  # fmt: skip

    def _decode_kernel(self, layer: int, step: DeviceStep) -> tuple[Any, tuple[Any, ...]]:
        """The kernel for decode, and its arguments after those that every pool's kernel takes."""
        return _decode, (self.data,)

    def prefill(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor
    ) -> None:
        """Causal attention of all prefill spans over their prefixes and themselves, into their rows of `out`."""
        self._attend_tiles(qkv, step, (step.table, self.data, self._slab, layer * self._layer), window, out)

    def _attend_tiles(
        self, qkv: torch.Tensor, step: DeviceStep, pages: tuple[torch.Tensor, torch.Tensor, int, int], window: int,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Attention of the step's tiles over raw pages: table of slabs, memory, elements of a slab, layer's place."""
        table, data, slab, offset = pages
        if step.tiles.shape[0]:
            _prefill[(step.tiles.shape[0], self.layout.kv_heads)](
                qkv, step.tiles, table, data, out, qkv.stride(0), out.stride(0), table.stride(0),
                slab, offset, self._scale, window, GROUP=self._group, SPREAD=self._spread,
                WIDTH=self.layout.head_dim, BLOCK_D=self._block, BLOCK_M=max(16, self._rows), TYPE=self._type,
                **self._launch,
            )  # fmt: skip

    def _count_splits(self, singles: int, chunks: int) -> int:
        """Splits per row, at least two chunks each: those with which programs run in the least time.

        The device runs `_programs` at a time, and a program takes as long as its split; more than one split has
        to be merged.
        """
        programs = singles * self.layout.kv_heads

        def time_in_chunks(splits: int) -> float:
            waves = -(-programs * splits // self._programs)
            return waves * chunks / splits + (MERGE_CHUNKS if splits > 1 else 0)

        return min(range(1, max(1, min(-(-chunks // 2), MAX_PARTS)) + 1), key=time_in_chunks)

    def _saved_bytes(self, plan: PrefixPlan) -> int:
        """Bytes of one layer that need not be read if every run is read once for all its rows."""
        chunks = sum((last - first) * (bottom - top - 1) for first, last, top, bottom in plan.runs.tolist())
        return int(chunks * self.layout.layer_bytes)

    def _item_chunks(self, plan: PrefixPlan) -> int:
        """Chunks per item, so that the items of a plan fill the device."""
        tiles = sum(
            (last - first) * -(-(bottom - top) * self._group // self._rows)
            for first, last, top, bottom in plan.runs.tolist()
        )
        return max(MIN_ITEM_CHUNKS, int(tiles) * self.layout.kv_heads // self.tuning.programs)


_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
