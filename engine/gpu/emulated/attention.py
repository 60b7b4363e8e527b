"""Attention over pages in torch, for the emulated device: gathers the pages of a step, then attends densely.

Scores, softmax and sums are float32 whatever the pool's type is.
Places at which a sequence has no token yet may hold anything: they become zeros when they are gathered.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as nnf

from diptych.chunks import CHUNK_TOKENS
from engine.batching.batch import ForwardBatch
from engine.gpu.batch import (
    DeviceStep,
    Ints,
    SharedItems,
    cut_prefill_spans,
    cut_shared_runs,
    fill_step,
    measure_sizes,
    view_step,
)
from kvcache.layout import KvLayout

# Most numbers of keys and values that a block of decode rows attends to at once.
BLOCK_NUMBERS = 1 << 24
# A prefill span is one tile.
WHOLE_SPAN = 1 << 30


class TorchAttention:
    """See `engine.gpu.kernels.StepAttention`; arguments as `engine.gpu.attention.GpuAttention`.

    Raises:
        ValueError: the pool's type is not its layout's.
    """

    def __init__(self, layout: KvLayout, data: torch.Tensor, heads: int) -> None:
        kind: torch.dtype = torch.uint8 if layout.codec else getattr(torch, layout.dtype)
        if data.dtype != kind:
            raise ValueError(f"the pool must be of {kind}, not {data.dtype}")
        self.layout, self.data, self.heads = layout, data, heads
        self._group = heads // layout.kv_heads

    def load(self, batch: ForwardBatch) -> DeviceStep:
        """See `StepAttention.load`."""
        shared, tiles = self.cut_batch(batch)
        sizes = measure_sizes(batch, shared, tiles)
        ints: Ints = np.empty(sizes.numbers, np.int32)
        fill_step(ints, sizes, batch, shared, tiles)
        return view_step(torch.from_numpy(ints), sizes)

    def cut_batch(self, batch: ForwardBatch) -> tuple[SharedItems, Ints]:
        """See `StepAttention.cut_batch`. Shared chunks need no items here."""
        return cut_shared_runs(batch.plan, None), cut_prefill_spans(batch.spans, WHOLE_SPAN, len(batch.rows))

    def write(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor], eps: float,
    ) -> None:  # fmt: skip
        """See `engine.gpu.attention.GpuAttention.write`."""
        self.prepare_rows(qkv, step, rotary, norms, eps, rotate_keys=True)
        _, keys, values = self.split_rows(qkv)
        live = step.slots >= 0
        slots, rows = step.slots[live].long(), step.positions[live].long() % CHUNK_TOKENS
        self.data[slots, layer, :, :, rows] = torch.stack([keys, values], dim=2)[live]

    def prepare_rows(
        self, qkv: torch.Tensor, step: DeviceStep, rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor], eps: float, *, rotate_keys: bool,
    ) -> None:  # fmt: skip
        """Normalise queries and keys in `qkv` in place (unless `norms` are empty), and rotate them to their positions.

        Without `rotate_keys` keys are only normalised.
        """
        queries, keys, _ = self.split_rows(qkv)
        cos, sin = (table[step.positions.long()][:, None] for table in rotary)  # [rows, 1, head_dim / 2]
        for heads, norm, rotated in ((queries, norms[0], True), (keys, norms[1], rotate_keys)):
            rows = heads.float()
            if norm.numel():
                rows = nnf.rms_norm(rows, norm.shape, norm, eps)
            if rotated:
                left, right = rows.chunk(2, dim=-1)
                rows = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
            heads.copy_(rows)

    def split_rows(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim]."""
        counts = [self.heads, self.layout.kv_heads, self.layout.kv_heads]
        queries, keys, values = torch.split(qkv.view(len(qkv), -1, self.layout.head_dim), counts, dim=1)
        return queries, keys, values

    def decode(self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor) -> None:
        """See `engine.gpu.attention.GpuAttention.decode`. Padding rows become zeros."""
        rows, lengths = step.rows.long(), step.lengths.long()
        live = lengths > 0
        out[rows[~live]] = 0
        if not bool(live.any()):
            return
        lows = (lengths - window).clamp(min=0) if window else torch.zeros_like(lengths)
        first = int(lows[live].min()) // CHUNK_TOKENS
        end = self.layout.num_chunks(int(lengths.max()))
        numbers = (end - first) * 2 * CHUNK_TOKENS * self.layout.kv_heads * self.layout.head_dim
        queries, _, _ = self.split_rows(qkv)
        for some in torch.split(torch.nonzero(live)[:, 0], max(1, BLOCK_NUMBERS // numbers)):
            pages = self._gather_rows(
                layer, step.table[some, first:end], lengths[some], first, step.sinks[some]
            )
            places = torch.arange(first * CHUNK_TOKENS, end * CHUNK_TOKENS)
            seen = (places < lengths[some, None]) & (places >= lows[some, None])
            out[rows[some]] = self._attend_rows(queries[rows[some]].float(), pages, seen).to(out.dtype)

    def _gather_rows(
        self, layer: int, table: torch.Tensor, lengths: torch.Tensor, first: int, sinks: torch.Tensor
    ) -> torch.Tensor:
        """The pages of decode rows, float32 [rows, chunks, kv_heads, 2, 64, head_dim].

        table: [rows, chunks], the slabs of chunks `first` on of each row, of which `lengths` [rows] tokens exist.
        """
        chunks = torch.arange(first, first + table.shape[1]).expand(table.shape)
        counts = (lengths[:, None] - chunks * CHUNK_TOKENS).clamp(0, CHUNK_TOKENS)
        pages = self.gather_pages(layer, *(x.reshape(-1) for x in (table.long(), chunks, counts)))
        return self.place_sinks(layer, pages.view(*table.shape, *pages.shape[1:]), first, sinks)

    def gather_pages(
        self, layer: int, slabs: torch.Tensor, chunks: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """One layer of slabs that are chunks `chunks` of their sequences: float32 [n, kv_heads, 2, 64, head_dim].

        Keys are as after rotation. Rows from `counts` on are zeros.
        """
        pages = self.data[slabs, layer].float()
        return clear_absent_rows(pages, counts)

    def place_sinks(self, layer: int, pages: torch.Tensor, first: int, sinks: torch.Tensor) -> torch.Tensor:
        """`pages` [rows, chunks, kv_heads, 2, 64, head_dim] from chunk `first` on, with exact first tokens."""
        return pages

    def _attend_rows(self, queries: torch.Tensor, pages: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Attention of one query per row: queries [rows, heads, head_dim], seen [rows, places]; [rows, all heads]."""
        rows, chunks, kv_heads = pages.shape[:3]
        # [rows, chunks, kv_heads, group, 64]: the pages stay as they lie.
        keys, values = pages.unbind(3)
        scores = queries.view(rows, 1, kv_heads, self._group, -1) @ keys.transpose(-1, -2)
        scores = scores.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, self._group, -1)
        scores = (scores / self.layout.head_dim**0.5).masked_fill_(~seen[:, None, None], float("-inf"))
        weights = scores.softmax(-1).view(rows, kv_heads, self._group, chunks, CHUNK_TOKENS)
        mixed: torch.Tensor = weights.permute(0, 3, 1, 2, 4) @ values
        return mixed.sum(1).reshape(rows, -1)

    def prefill(
        self, layer: int, qkv: torch.Tensor, step: DeviceStep, window: int, out: torch.Tensor
    ) -> None:
        """See `engine.gpu.attention.GpuAttention.prefill`."""
        singles = step.rows.shape[0]
        queries, _, _ = self.split_rows(qkv)
        for row, count, start, line in step.tiles.tolist():
            first = max(0, start - window + 1) // CHUNK_TOKENS if window else 0
            end = start + count
            chunks = torch.arange(first, self.layout.num_chunks(end))
            counts = (end - chunks * CHUNK_TOKENS).clamp(max=CHUNK_TOKENS)
            pages = self.gather_pages(layer, step.table[line, chunks].long(), chunks, counts)
            sink = step.spans[line - singles, 2:]
            keys, values = (
                self.place_sinks(layer, pages[None], first, sink)[0]
                .permute(2, 1, 0, 3, 4)
                .reshape(2, self.layout.kv_heads, -1, self.layout.head_dim)
            )
            places = torch.arange(first * CHUNK_TOKENS, first * CHUNK_TOKENS + keys.shape[1])
            far = torch.arange(start, end)[:, None] - places
            seen = (far >= 0) & (far < window) if window else far >= 0
            # From position 0 on without a window, query i sees the first i + 1 places.
            causal = not start and not window
            found = nnf.scaled_dot_product_attention(
                queries[row : row + count].float().transpose(0, 1)[None],
                keys.repeat_interleave(self._group, dim=0)[None],
                values.repeat_interleave(self._group, dim=0)[None],
                None if causal else seen,
                is_causal=causal,
            )
            out[row : row + count] = found[0].transpose(0, 1).reshape(count, -1).to(out.dtype)


def clear_absent_rows(pages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`pages` [n, kv_heads, 2, 64, head_dim] with zeros in the rows from `counts` [n] on, changed in place."""
    cut = torch.nonzero(counts < CHUNK_TOKENS)[:, 0]
    absent = torch.arange(CHUNK_TOKENS) >= counts[cut, None]
    pages[cut] = pages[cut].masked_fill_(absent[:, None, None, :, None], 0)
    return pages
