"""What one step runs, as arrays: where each token sits, which rows decode, which spans prefill, who wants logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

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
