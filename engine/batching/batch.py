"""Packs the work of one step into arrays that the attention kernels and the decoder take.

The arrays are: token ids, positions, decode rows, shared prefixes, prefill spans, and the rows that need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.batching import prefix_plan
from engine.batching.prefix_plan import PrefixPlan
from engine.step_work import StepWork

Ints = NDArray[np.int64]
# The least rows of a matrix product.
MIN_ROWS = 1


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A prefill: `count` consecutive rows of one sequence, at positions start to start + count - 1; KV in `slabs`."""

    row: int
    count: int
    start: int
    # [chunks] int64: slabs of the first start + count tokens.
    slabs: torch.Tensor
    # The place of its first token among the sinks; 0 for pools without a codec.
    sink: int = 0


@dataclass(frozen=True, slots=True)
class PoolSpan:
    """`count` rows from `row` on whose hidden states behind the last layer are added up."""

    row: int
    count: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The concatenated tokens of a step. Only `tokens` and `wanted` are padded (to `MIN_ROWS`)."""

    # [rows] int64: the tokens, then padding.
    tokens: torch.Tensor
    # [tokens]: position of each token in its sequence.
    positions: Ints
    # [tokens]: the slab into which each token's keys and values are written.
    slots: Ints
    # [decoding]: rows that decode one token each, for the paged kernel. Rows with equal prefixes are adjacent.
    rows: Ints
    # [decoding]: number of tokens that each row attends to, its own included.
    lengths: Ints
    # [decoding, max chunks]: slabs of each row in order, padded with 0.
    table: Ints
    # The prefixes that decode rows share, in the order of these rows.
    plan: PrefixPlan
    # [decoding]: the place of each row's first token among the sinks; 0 for pools without a codec.
    sinks: Ints
    # Prefills of several tokens; the kernel computes them one span at a time.
    spans: tuple[PrefillSpan, ...]
    # [rows with logits] int64: indices of the rows that need logits.
    wanted: torch.Tensor
    # What is pooled; its rows of results come behind the logits.
    pools: tuple[PoolSpan, ...] = ()

    @property
    def num_results(self) -> int:
        """Rows of results: logits, then sums of hidden states, each as wide as logits."""
        return len(self.wanted) + len(self.pools)


def split_results(results: torch.Tensor, works: Sequence[StepWork], hidden: int) -> list[torch.Tensor]:
    """The results of each work: its logits [rows, vocab], or a sum of hidden states [1, hidden]."""
    if all(work.logits == "last" for work in works):
        # As `torch.split` does, in half of the time.
        return list(results[: len(works)].unsqueeze(1).unbind())
    pooled = [work.pooled_rows is not None for work in works]
    order = sorted(range(len(works)), key=pooled.__getitem__)
    counts = [works[index].wanted for index in order]
    parts = dict(zip(order, torch.split(results[: sum(counts)], counts), strict=True))
    return [parts[index][:, :hidden] if pooled[index] else parts[index] for index in range(len(works))]


def sum_spans(normed: torch.Tensor, pools: Sequence[PoolSpan]) -> torch.Tensor:
    """The sums [pools, hidden] of `normed`, the hidden states of the rows of all `pools`, one after another."""
    parts = torch.split(normed, [pool.count for pool in pools])
    return torch.stack([part.sum(0) for part in parts])


def pooled_row_numbers(pools: Sequence[PoolSpan]) -> torch.Tensor:
    """The numbers of the rows of all `pools`, one after another."""
    return torch.cat([torch.arange(pool.row, pool.row + pool.count) for pool in pools])


def count_rows(works: Sequence[StepWork]) -> tuple[int, int]:
    """Rows of a step after packing, padding included: those of tokens, and those that need logits."""
    wanted = sum(work.wanted for work in works)
    return max(MIN_ROWS, sum(len(work.tokens) for work in works)), max(MIN_ROWS, wanted) if wanted else 0


def pack_batch(works: Sequence[StepWork], sinks: Sequence[int] = ()) -> ForwardBatch:
    """Pack a step. Single tokens become decode rows, sorted by shared prefix; several tokens become prefill spans.

    Tokens after an eviction (`KeptWork.evicted`) become neither: they are only written, each to its sequence's ring.
    `sinks` are the places of the works' first tokens among the sinks, for pools with a codec.
    """
    if works and len(works) >= MIN_ROWS and all(work.is_plain_decode for work in works):
        return _pack_plain_decodes(works, sinks)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    spans: list[PrefillSpan] = []
    pools: list[PoolSpan] = []
    single_works: list[tuple[int, StepWork, int]] = []
    for work, sink in zip(works, sinks or [0] * len(works), strict=True):
        row, count, start, slabs = len(tokens), len(work.tokens), work.start, work.slabs
        tokens += work.tokens
        if work.kept is not None and work.kept.evicted:
            positions += range(start, start + count)
            slots += [slabs[work.kept.ring_place]] * count
        elif count == 1:
            positions.append(start)
            slots.append(slabs[start // CHUNK_TOKENS])
            single_works.append((row, work, sink))
        else:
            positions += range(start, start + count)
            slots += [slabs[place // CHUNK_TOKENS] for place in range(start, start + count)]
            used = torch.tensor(slabs[: -(-(start + count) // CHUNK_TOKENS)])
            spans.append(PrefillSpan(row, count, start, used, sink))
        if (pooled := work.pooled_rows) is not None:
            pools.append(PoolSpan(row + pooled[0], pooled[1]))
        elif work.logits != "none":
            wanted += range(row if work.logits == "all" else row + count - 1, row + count)
    rows, lengths, table, plan, row_sinks = _pack_decodes(single_works)
    return ForwardBatch(
        tokens=torch.tensor(tokens + [0] * (MIN_ROWS - len(tokens))),
        positions=np.array(positions, np.int64),
        slots=np.array(slots, np.int64),
        rows=rows,
        lengths=lengths,
        table=table,
        plan=plan,
        sinks=row_sinks,
        spans=tuple(spans),
        # Padded like the tokens; the decoder's caller drops the logits of padding rows.
        wanted=torch.tensor(wanted + wanted[:1] * (MIN_ROWS - len(wanted)), dtype=torch.int64),
        pools=tuple(pools),
    )


def _pack_plain_decodes(works: Sequence[StepWork], sinks: Sequence[int]) -> ForwardBatch:
    """As `pack_batch`, of a step that only decodes, which is the usual one: each work is a row."""
    count, starts = len(works), [work.start for work in works]
    slabs, full = [work.slabs for work in works], [start // CHUNK_TOKENS for start in starts]
    positions = np.array(starts, np.int64)
    rows, lengths, row_sinks = np.arange(count), positions + 1, np.array(sinks or [0] * count, np.int64)
    order = prefix_plan.sort_by_prefix(slabs, full)
    lines, depths = slabs, full
    if order != list(range(count)):
        rows = np.array(order, np.int64)
        lengths, row_sinks = lengths[rows], row_sinks[rows]
        lines, depths = [slabs[index] for index in order], [full[index] for index in order]
    table = np.zeros((count, max(map(len, lines))), np.int64)
    for index, line in enumerate(lines):
        table[index, : len(line)] = line
    return ForwardBatch(
        tokens=torch.from_numpy(np.array([work.tokens[0] for work in works], np.int64)),
        positions=positions,
        slots=np.array([line[chunk] for line, chunk in zip(slabs, full, strict=True)], np.int64),
        rows=rows,
        lengths=lengths,
        table=table,
        plan=prefix_plan.plan_prefixes(table, np.array(depths, np.int64)),
        sinks=row_sinks,
        spans=(),
        wanted=torch.arange(count),
    )


def _pack_decodes(
    single_works: Sequence[tuple[int, StepWork, int]],
) -> tuple[Ints, Ints, Ints, PrefixPlan, Ints]:
    """Rows, lengths, table, plan and sinks of the decode rows.

    The chunk that a row writes its token to is never shared.
    """
    full = [work.start // CHUNK_TOKENS for _, work, _ in single_works]
    order = prefix_plan.sort_by_prefix([work.slabs for _, work, _ in single_works], full)
    chosen = [single_works[index] for index in order]
    table = np.zeros((len(chosen), max((len(work.slabs) for _, work, _ in chosen), default=0)), np.int64)
    for line, (_, work, _) in zip(table, chosen, strict=True):
        line[: len(work.slabs)] = work.slabs
    return (
        np.array([row for row, _, _ in chosen], np.int64),
        np.array([work.start + 1 for _, work, _ in chosen], np.int64),
        table,
        prefix_plan.plan_prefixes(table, np.array([full[index] for index in order], np.int64)),
        np.array([sink for _, _, sink in chosen], np.int64),
    )
