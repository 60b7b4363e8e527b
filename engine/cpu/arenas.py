"""A step over KV of several classes: linear layers run over all rows, attention over the rows of each class.

    rows     │ class raw │ class nuq4-1% │ padding
    linear   └───────────── all ────────────────┘
    attend   └─ raw pool ┘└─ coded pool ─┘

Works are grouped by the pool that their slabs are in, so the rows of a class are adjacent, and its attention gets a
view of them. A row's result is the same to the last bit in either kind of step: the linear layers do not mix rows, and
the attention of a class does not see the others. A runner with one pool does not use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batching import prefix_plan
from engine.batching.batch import MIN_ROWS, ForwardBatch, PrefillSpan, pack_batch
from engine.cpu.attention import PagedAttention
from engine.cpu.eviction.evictor import CpuEvictor
from engine.step_work import RunnerBounds, StepWork

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PoolAttention:
    """The attention over one pool, whose slabs are numbered from `first`, and the limits of work on it.

    `evictor` evicts KV of the pool; None: nothing may be evicted.
    """

    first: int
    bounds: RunnerBounds
    attention: PagedAttention
    evictor: CpuEvictor | None = None

    def localise(self, work: StepWork) -> StepWork:
        """The work with slabs numbered within this pool."""
        return replace(work, slabs=[slab - self.first for slab in work.slabs]) if self.first else work

    def check_work(self, work: StepWork) -> None:
        """Check a work with slabs numbered within this pool.

        Raises:
            ValueError: as `RunnerBounds.check` and `CpuEvictor.check_work`, or the pool does not evict.
        """
        self.bounds.check(work)
        if work.kept is None:
            return
        if self.evictor is None:
            raise ValueError("nothing is evicted from this pool: that takes the tokens' kinds")
        self.evictor.check_work(work, work.kept)

    def pack_works(
        self, works: Sequence[StepWork], sinks: Sequence[int]
    ) -> tuple[ForwardBatch, PagedAttention]:
        """Pack works in this pool, and the attention for them; see `pack_batch`."""
        batch, attention = pack_batch(works, sinks), self.attention
        if self.evictor is not None and any(work.kept is not None for work in works):
            attention = self.evictor.attend_to(works, sinks)
        return batch, attention

    @property
    def has_sinks(self) -> bool:
        """Whether first tokens are kept beside the pool (`engine.cpu.coded.sink_table`)."""
        return bool(self.bounds.layout.codec)


@dataclass(frozen=True, slots=True)
class PoolRows:
    """The rows of a step that attend to one pool: from `row` on, as many as `batch` has positions."""

    row: int
    batch: ForwardBatch
    attention: PagedAttention

    @property
    def rows(self) -> slice:
        """The group's rows of the whole step."""
        return slice(self.row, self.row + len(self.batch.positions))


class GroupedAttention:
    """Attention of a step whose rows are in several pools: `engine.cpu.attention.CpuAttention`, group by group."""

    def __init__(self, pool_rows: Sequence[PoolRows]) -> None:
        self._pool_rows = list(pool_rows)

    def write(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, rotary: tuple[Floats, Floats],
        norms: tuple[Floats, Floats], eps: float,
    ) -> None:  # fmt: skip
        """Store keys and values of all rows, and prepare their queries. `batch` is not used: each group has its own."""
        for group in self._pool_rows:
            group.attention.write(layer, qkv[group.rows], group.batch, rotary, norms, eps)

    def decode(
        self, layer: int, qkv: torch.Tensor, batch: ForwardBatch, window: int, out: torch.Tensor
    ) -> None:
        """Attention of all rows, those of prefills included. `batch` is not used: each group has its own."""
        for group in self._pool_rows:
            rows, mixed = qkv[group.rows], out[group.rows]
            group.attention.decode(layer, rows, group.batch, window, mixed)
            for span in group.batch.spans:
                group.attention.prefill(layer, rows, span, window, mixed)

    def prefill(
        self, layer: int, qkv: torch.Tensor, span: PrefillSpan, window: int, out: torch.Tensor
    ) -> None:
        """Never called: `pack_groups` leaves the whole batch without spans."""
        raise AssertionError("the groups have the spans")


def pack_groups(
    works: Sequence[StepWork], pools: Sequence[PoolAttention], chosen: Sequence[int], sinks: Sequence[int]
) -> tuple[ForwardBatch, GroupedAttention]:
    """Pack a step of works in several pools.

    Args:
        works: with slabs numbered within their pools.
        pools: all pools.
        chosen: the index of each work's pool.
        sinks: the place of each work's first token among the sinks.

    Returns:
        The batch for the linear layers, with logits in the order of `works`; and the attention of its rows.
    """
    tokens: list[int] = []
    starts = [0] * len(works)
    pool_rows: list[PoolRows] = []
    for number in sorted(set(chosen)):
        mine = [i for i, pool in enumerate(chosen) if pool == number]
        row = len(tokens)
        for i in mine:
            starts[i] = len(tokens)
            tokens += works[i].tokens
        pool_rows.append(
            PoolRows(row, *pools[number].pack_works([works[i] for i in mine], [sinks[i] for i in mine]))
        )
    wanted: list[int] = []
    for work, start in zip(works, starts, strict=True):
        wanted += range(start + len(work.tokens) - work.wanted, start + len(work.tokens))
    none = np.empty(0, np.int64)
    return ForwardBatch(
        tokens=torch.tensor(tokens + [0] * (MIN_ROWS - len(tokens))),
        positions=np.concatenate([group.batch.positions for group in pool_rows]),
        slots=none,
        rows=none,
        lengths=none,
        table=np.empty((0, 0), np.int64),
        plan=prefix_plan.plan_prefixes(np.empty((0, 0), np.int64), none),
        sinks=none,
        spans=(),
        wanted=torch.tensor(wanted + wanted[:1] * (MIN_ROWS - len(wanted)), dtype=torch.int64),
    ), GroupedAttention(pool_rows)
