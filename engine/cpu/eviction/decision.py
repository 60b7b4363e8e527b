"""Decides on the CPU which rows every head keeps by the rule `fastgen`, and what all rules decide from.

The columns of a head are what it still has: at the end of the prompt all its tokens, in whole chunks; at the end of a
block of the answer the chunks that no head evicts from, the head's frames, and the 64 newest tokens in the ring. Of
layers with a sliding window no head keeps what has left it, but for tokens in those chunks.

This module says where they lie in a raw pool, whose rows are its keys and values: `[rows, head_dim]`. For pools with a
codec `engine.cpu.coded.kept_store` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from diptych.eviction_spec import KeepSpec
from engine.cpu.eviction.head_profile import RowColumns, sum_attention
from kvcache.eviction.kept_rows import FRAME_TOKENS, KeptRows, frames_per_slab
from kvcache.eviction.policies import (
    FULL,
    KeepRule,
    choose_policies,
    kept_mask,
    pick_frequent,
    select_visible,
    split_rows,
)
from kvcache.layout import KvLayout

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

ROWS_PER_PAGE = 2 * CHUNK_TOKENS
ROWS_PER_FRAME = 2 * FRAME_TOKENS


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """The tokens that a head has: their positions, ascending, and where their source has them.

    `places` has a line for each column: in a raw pool the rows with its key and with its value.
    """

    # [columns], [columns, ...]
    positions: Ints
    places: Ints

    def select(self, chosen: NDArray[np.bool_]) -> HeadColumns:
        """Some of the columns; `chosen` is [columns]."""
        columns = np.flatnonzero(chosen)
        return HeadColumns(self.positions[columns], np.take(self.places, columns, axis=0))


class ColumnSource(Protocol):
    """Says what columns heads have."""

    def find_columns(self, layer: int, head: int) -> HeadColumns:
        """The columns of one KV head."""

    def read_keys(self, layer: int, head: int, columns: HeadColumns) -> Floats:
        """The keys of all columns of one KV head, as readers attend to them: rotated, [columns, head_dim]."""

    def read_rows(self, layer: int, head: int, columns: HeadColumns) -> tuple[Floats, Floats]:
        """The keys and values of some columns of one KV head, as readers attend to them, [columns, head_dim] each."""


class ChunkColumns:
    """The columns of tokens in pages of slabs, which are those of every head.

    Position p is row p % 64 of page `slabs[i]`, where `slabs` has one slab for each of `positions`. `memory` is the
    pool's.
    """

    def __init__(self, layout: KvLayout, memory: Floats, slabs: Ints, positions: Ints) -> None:
        self._heads, self._memory = layout.kv_heads, memory
        self._positions = positions
        keys = slabs * (layout.layers * layout.kv_heads * ROWS_PER_PAGE) + positions % CHUNK_TOKENS
        # Rows of the keys and values of the first head of the first layer.
        self._places = np.stack([keys, keys + CHUNK_TOKENS], axis=1)

    @classmethod
    def of_prompt(cls, layout: KvLayout, memory: Floats, slabs: Sequence[int], length: int) -> ChunkColumns:
        """The first `length` tokens of a sequence in whole chunks, whose slabs are `slabs`."""
        positions = np.arange(length)
        return cls(layout, memory, np.asarray(slabs, np.int64)[positions // CHUNK_TOKENS], positions)

    def find_columns(self, layer: int, head: int) -> HeadColumns:
        """The columns of one KV head."""
        return HeadColumns(self._positions, self._places + (layer * self._heads + head) * ROWS_PER_PAGE)

    def read_keys(self, layer: int, head: int, columns: HeadColumns) -> Floats:
        """The keys of columns of one KV head."""
        return np.take(self._memory, columns.places[:, 0], axis=0)

    def read_rows(self, layer: int, head: int, columns: HeadColumns) -> tuple[Floats, Floats]:
        """The keys and values of columns of one KV head."""
        keys, values = np.take(self._memory, columns.places.T, axis=0)
        return keys, values


class BagColumns:
    """The columns of a sequence after eviction: whole chunks, then kept rows, then the newest tokens in the ring.

    Args:
        prefix: the chunks.
        kept: what is in the bag.
        bag: its slabs.
        ring: the newest tokens.
    """

    def __init__(self, prefix: ChunkColumns, kept: KeptRows, bag: Sequence[int], ring: ChunkColumns) -> None:
        self._prefix, self._kept, self._ring = prefix, kept, ring
        self._bag, self._first = np.asarray(bag, np.int64), kept.first_frames
        self._per_slab = frames_per_slab(kept.layout)

    def find_columns(self, layer: int, head: int) -> HeadColumns:
        """The columns of one KV head."""
        positions = self._kept.head_positions(layer, head).astype(np.int64)
        places = np.arange(len(positions))
        frames = self._first[layer, head] + places // FRAME_TOKENS
        slabs = self._bag[frames // self._per_slab]
        keys = (slabs * self._per_slab + frames % self._per_slab) * ROWS_PER_FRAME + places % FRAME_TOKENS
        bag = HeadColumns(positions, np.stack([keys, keys + FRAME_TOKENS], axis=1))
        parts = [self._prefix.find_columns(layer, head), bag, self._ring.find_columns(layer, head)]
        return HeadColumns(
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.places for part in parts]),
        )

    def read_keys(self, layer: int, head: int, columns: HeadColumns) -> Floats:
        """The keys of columns of one KV head."""
        return self._ring.read_keys(layer, head, columns)

    def read_rows(self, layer: int, head: int, columns: HeadColumns) -> tuple[Floats, Floats]:
        """The keys and values of columns of one KV head."""
        return self._ring.read_rows(layer, head, columns)


@dataclass(frozen=True, slots=True)
class DecisionPoint:
    """A sequence at a decision point: its last rows with their queries, and what its heads have.

    `kinds` are the kinds of all its tokens, [length] uint8. `rows` are the positions of the recorded queries,
    ascending (`fastgen` has none of a prompt); the query of position p is `queries[layer, p % 64]`, of
    [heads * head_dim] floats.
    """

    prompt_tokens: int
    spec: KeepSpec
    kinds: NDArray[np.uint8]
    rows: Ints
    queries: Floats
    source: ColumnSource

    @property
    def length(self) -> int:
        """Tokens that have KV."""
        return len(self.kinds)

    @property
    def is_prompt(self) -> bool:
        """Whether it is the end of the prompt."""
        return self.length == self.prompt_tokens


class HeadDecider:
    """Chooses a policy for each head at a prompt's end, and applies it later.

    Args:
        layout: of the pool.
        group: query heads per KV head.
        windows: the sliding window of each layer; 0: none.
        rule: what the policies are made of.
    """

    def __init__(self, layout: KvLayout, group: int, windows: Sequence[int], rule: KeepRule) -> None:
        self._layout, self._group = layout, group
        self._windows, self._rule = list(windows), rule

    def profile_prompt(
        self, point: DecisionPoint, sums: Floats
    ) -> tuple[NDArray[np.uint8], list[HeadColumns]]:
        """Choose the policy of every head at the end of the prompt (FastGen, algorithm 1).

        Args:
            point: the end of a prompt.
            sums: the attention of all rows (`engine.cpu.eviction.step_records`).

        Returns:
            The policies, [layers, kv_heads]; and what each head keeps behind the boundary, those of layer 0 first.
        """
        policies = np.empty((self._layout.layers, self._layout.kv_heads), np.uint8)
        kept, positions, boundary = list[HeadColumns](), np.arange(point.length), point.spec.boundary
        splits = [
            split_rows(
                policy, point.kinds, positions, point.length, point.prompt_tokens, boundary, self._rule
            )
            for policy in range(FULL)
        ]
        near = positions >= point.length - self._rule.window_tokens(point.prompt_tokens, boundary)
        for layer, head in np.ndindex(policies.shape):
            window = self._windows[layer]
            rows = point.length - positions
            scores = sums[layer, head, 0] / (np.minimum(rows, window) if window else rows)
            fixed = [self._keep_fixed(policy, split, scores, point) for policy, split in enumerate(splits)]
            masses = self._mean_masses(fixed, sums[layer, head])
            policy = int(choose_policies(masses, point.spec.threshold, point.prompt_tokens))
            policies[layer, head] = policy
            wanted = (positions >= boundary) & select_visible(positions, point.length, window)
            if policy != FULL:
                has_window = "local" in self._rule.policy_parts(policy)
                wanted &= fixed[policy] | near if has_window else fixed[policy]
            kept.append(point.source.find_columns(layer, head).select(wanted))
        return policies, kept

    def _keep_fixed(
        self, policy: int, split: tuple[Bools, Bools], scores: Floats, point: DecisionPoint
    ) -> Bools:
        """What a policy keeps of a prompt, its window aside (`kvcache.eviction.policies.mask_without_window`)."""
        plain, candidates = split
        if "frequent" not in self._rule.policy_parts(policy):
            return plain
        count = self._rule.num_frequent(point.length, point.spec.boundary)
        return plain | pick_frequent(scores, candidates, count)

    def _mean_masses(self, fixed: Sequence[Bools], sums: Floats) -> NDArray[np.float64]:
        """The mass that policies 0 to 3 recover, the mean over all rows, from the sums of a head, [2, columns]."""
        whole, near = sums.astype(np.float64)
        masses = np.empty(FULL)
        for policy, kept in enumerate(fixed):
            has_window = "local" in self._rule.policy_parts(policy)
            masses[policy] = np.where(kept, whole, near if has_window else 0.0).sum() / len(whole)
        return masses

    def apply_policies(self, point: DecisionPoint, policies: NDArray[np.uint8]) -> list[HeadColumns]:
        """What each head keeps behind the boundary at a point of the answer (FastGen, algorithm 2), as above."""
        kept = list[HeadColumns]()
        for layer, head in np.ndindex(policies.shape):
            columns, policy = point.source.find_columns(layer, head), int(policies[layer, head])
            positions, scores = columns.positions, None
            if policy != FULL and "frequent" in self._rule.policy_parts(policy):
                row_columns, visible = self._find_rows(point, positions, self._windows[layer])
                scores = self._sum_columns(point, columns, layer, head, row_columns) / visible
            mask = kept_mask(
                policy, point.kinds[positions], positions, scores, point.length, point.prompt_tokens,
                point.spec.boundary, self._rule,
            )  # fmt: skip
            mask &= select_visible(positions, point.length, self._windows[layer])
            kept.append(columns.select(mask & (positions >= point.spec.boundary)))
        return kept

    def _find_rows(self, point: DecisionPoint, positions: Ints, window: int) -> tuple[RowColumns, Ints]:
        """Which of the columns at `positions` each row sees; and how many rows see each column, 1 if none does."""
        row_columns = RowColumns.of_positions(point.rows, positions, window, 1)
        return row_columns, np.maximum(row_columns.count_rows(len(positions)), 1)

    def _sum_columns(
        self, point: DecisionPoint, columns: HeadColumns, layer: int, head: int, row_columns: RowColumns
    ) -> Floats:
        """The attention of each column of a head, as `sum_attention`."""
        queries = point.queries[layer, point.rows % CHUNK_TOKENS]
        keys = point.source.read_keys(layer, head, columns)
        return sum_attention(queries, head, self._group, keys, row_columns)
