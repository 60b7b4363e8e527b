"""What one step runs, as arrays: where each token sits, which rows decode and what they share, which spans prefill, who
wants logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import shared
from engine.attention.shared import Plan
from engine.model.linear import MIN_ROWS
from engine.work import Work
from kvcache.layout import CHUNK_TOKENS

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive rows of one sequence, at positions start..start+count-1, its chunks in `slabs`."""

    row: int
    count: int
    start: int
    slabs: torch.Tensor  # [chunks] int64, covering start + count tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The concatenated tokens of a step. Only `tokens` is padded (to the least rows whose products are exact)."""

    tokens: torch.Tensor  # [rows, at least as many as positions] int64
    positions: Ints  # [tokens] place of each token in its sequence
    slots: Ints  # [tokens] the slab that takes the token's keys and values
    rows: Ints  # [decoding] rows of single tokens, served by the paged kernel; those that begin alike are neighbours
    lengths: Ints  # [decoding] tokens each of them attends to, itself included
    table: Ints  # [decoding, most chunks] slabs in order, padded with 0
    plan: Plan  # of the decoding rows, in their order
    spans: tuple[Span, ...]  # rows of several tokens, each span served on its own
    wanted: torch.Tensor  # [rows with logits] int64


def pack(works: Sequence[Work]) -> Batch:
    """The step as arrays. Single tokens go to the paged kernel, sorted by what they share; longer runs to prefill."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    spans: list[Span] = []
    singles: list[tuple[int, Work]] = []
    for work in works:
        row, count, start, slabs = len(tokens), len(work.tokens), work.start, work.slabs
        tokens += work.tokens
        if count == 1:
            positions.append(start)
            slots.append(slabs[start // CHUNK_TOKENS])
            singles.append((row, work))
        else:
            positions += range(start, start + count)
            slots += [slabs[place // CHUNK_TOKENS] for place in range(start, start + count)]
            spans.append(Span(row, count, start, torch.tensor(slabs[: -(-(start + count) // CHUNK_TOKENS)])))
        if work.logits != "none":
            wanted += range(row if work.logits == "all" else row + count - 1, row + count)
    rows, lengths, table, plan = _singles(singles)
    return Batch(
        tokens=torch.tensor(tokens + [0] * (MIN_ROWS - len(tokens))),
        positions=np.array(positions, np.int64),
        slots=np.array(slots, np.int64),
        rows=rows,
        lengths=lengths,
        table=table,
        plan=plan,
        spans=tuple(spans),
        # Padded like the tokens; rows beyond those asked for are dropped after the output matrix.
        wanted=torch.tensor(wanted + wanted[:1] * (MIN_ROWS - len(wanted)), dtype=torch.int64),
    )


def _singles(singles: Sequence[tuple[int, Work]]) -> tuple[Ints, Ints, Ints, Plan]:
    """Rows, lengths, table and plan of the single tokens. The chunk a token is written to is never shared."""
    full = [work.start // CHUNK_TOKENS for _, work in singles]
    order = shared.order([work.slabs for _, work in singles], full)
    chosen = [singles[index] for index in order]
    table = np.zeros((len(chosen), max((len(work.slabs) for _, work in chosen), default=0)), np.int64)
    for line, (_, work) in zip(table, chosen, strict=True):
        line[: len(work.slabs)] = work.slabs
    return (
        np.array([row for row, _ in chosen], np.int64),
        np.array([work.start + 1 for _, work in chosen], np.int64),
        table,
        shared.plan(table, np.array([full[index] for index in order], np.int64)),
    )
