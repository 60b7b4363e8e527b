"""What one step runs, as arrays: where each token sits, which rows decode, which spans prefill, who wants logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

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
    rows: Ints  # [decoding] rows of single tokens, served by the paged kernel
    lengths: Ints  # [decoding] tokens each of them attends to, itself included
    table: Ints  # [decoding, most chunks] slabs in order, padded with 0
    spans: tuple[Span, ...]  # rows of several tokens, served by SDPA
    wanted: torch.Tensor  # [rows with logits] int64


def pack(works: Sequence[Work]) -> Batch:
    """The step as arrays. Single tokens go to the paged kernel, longer runs to prefill."""
    tokens: list[int] = []
    positions, slots, wanted, spans = [], [], [], []
    singles: list[tuple[int, Work]] = []
    for work in works:
        row, count = len(tokens), len(work.tokens)
        tokens += work.tokens
        place = np.arange(work.start, work.start + count)
        positions.append(place)
        slots.append(np.asarray(work.slabs, np.int64)[place // CHUNK_TOKENS])
        wanted += {"last": [row + count - 1], "all": list(range(row, row + count)), "none": []}[work.logits]
        if count == 1:
            singles.append((row, work))
        else:
            chunks = -(-(work.start + count) // CHUNK_TOKENS)
            spans.append(Span(row, count, work.start, torch.tensor(work.slabs[:chunks])))
    table = np.zeros((len(singles), max((len(work.slabs) for _, work in singles), default=0)), np.int64)
    for line, (_, work) in zip(table, singles, strict=True):
        line[: len(work.slabs)] = work.slabs
    return Batch(
        tokens=torch.tensor(tokens + [0] * (MIN_ROWS - len(tokens))),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        rows=np.array([row for row, _ in singles], np.int64),
        lengths=np.array([work.start + 1 for _, work in singles], np.int64),
        table=table,
        spans=tuple(spans),
        # Padded like the tokens; rows beyond those asked for are dropped after the output matrix.
        wanted=torch.tensor(wanted + wanted[:1] * (MIN_ROWS - len(wanted)), dtype=torch.int64),
    )
