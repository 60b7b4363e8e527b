"""What a step leaves for the next decision: the queries of its last rows, or for `fastgen` sums of attention.

The sums are those that the columns of a prompt get from all its rows, added up while it is computed:

    [layers, kv_heads, 2, tokens]: from all rows, and from the rows whose window of policies holds the column

Two sums per head suffice to tell the mean recovered mass of every policy (`PromptSums.mean_masses`). They take as much
memory as the map of what heads keep, which there is only once they are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.eviction.decision import ColumnSource
from engine.cpu.eviction.head_profile import RowColumns, attend_columns, sum_near_strip, sum_strip
from kvcache.layout import KvLayout

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Rows whose attention is there at a time.
BLOCK_ROWS = 64


class PromptSums:
    """The sums of one sequence, and how many of its rows are in those of each layer.

    A row is added once, whatever steps compute it again.
    """

    def __init__(self, layout: KvLayout, prompt_tokens: int) -> None:
        self.sums = np.zeros((layout.layers, layout.kv_heads, 2, prompt_tokens), np.float32)
        self._counted = np.zeros(layout.layers, np.int64)

    def require_complete(self, key: str) -> None:
        """Raises ValueError unless all rows of the prompt of `key` are counted."""
        counted = int(self._counted.min())
        if counted < self.sums.shape[-1]:
            raise ValueError(
                f"an eviction at {self.sums.shape[-1]} tokens needs the attention of position {counted} of {key},"
                " which was not computed"
            )

    def uncounted(self, layer: int, tokens: Ints) -> Ints:
        """Which of a step's rows, whose tokens are at positions `tokens`, are to be added: as indices of `tokens`."""
        counted, last = int(self._counted[layer]), self.sums.shape[-1]
        if not len(tokens) or tokens[0] > counted:
            return np.zeros(0, np.int64)
        return np.flatnonzero((tokens >= counted) & (tokens < last))

    def add_rows(self, layer: int, head: int, columns: int, sums: Floats, near: Floats) -> None:
        """Add what rows give to the first `columns` columns of a head."""
        self.sums[layer, head, 0, :columns] += sums
        self.sums[layer, head, 1, :columns] += near

    def finish_rows(self, layer: int, end: int) -> None:
        """All heads of a layer have the rows before position `end`."""
        self._counted[layer] = end


class StepRecord(Protocol):
    """What a step leaves for the next decision about a sequence."""

    def store(self, layer: int, qkv: Floats) -> None:
        """The keys of a layer are written; the rotated queries of each row begin its row of `qkv`."""


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """Where the queries of some rows of a step are recorded: the query of position p in row p % 64.

    `positions` says which queries are complete, over all layers. Recording a row again changes nothing.
    """

    # [layers, 64, heads * head_dim] and [64], shared with the owner.
    queries: Floats
    positions: Ints
    # [recorded]: rows of the step, and the positions of their tokens.
    rows: Ints
    tokens: Ints

    def store(self, layer: int, qkv: Floats) -> None:
        """Copy the rotated queries of one layer; the last layer completes them."""
        places = self.tokens % CHUNK_TOKENS
        self.queries[layer, places] = qkv[self.rows, : self.queries.shape[2]]
        if layer + 1 == len(self.queries):
            self.positions[places] = self.tokens


@dataclass(frozen=True, slots=True)
class SumRecord:
    """Adds the attention of some rows of a step to the sums of their sequence.

    Args:
        sums: of the sequence.
        source: its columns up to the last of the rows.
        group: query heads per KV head.
        windows: the sliding window of each layer; 0: none.
        near_tokens: the window of policies.
        rows: of the step.
        tokens: the positions of their tokens, ascending.
    """

    sums: PromptSums
    source: ColumnSource
    group: int
    windows: list[int]
    near_tokens: int
    rows: Ints
    tokens: Ints

    def store(self, layer: int, qkv: Floats) -> None:
        """Add the rows of one layer, whose keys are in the pool, and whose rotated queries begin the rows of `qkv`."""
        wanted = self.sums.uncounted(layer, self.tokens)
        if not len(wanted):
            return
        heads = self.sums.sums.shape[1]
        for head in range(heads):
            columns = self.source.find_columns(layer, head)
            keys = self.source.read_keys(layer, head, columns)
            width = heads * self.group * keys.shape[1]
            for start in range(0, len(wanted), BLOCK_ROWS):
                chosen = wanted[start : start + BLOCK_ROWS]
                tokens, end = self.tokens[chosen], int(self.tokens[chosen[-1]]) + 1
                queries = np.ascontiguousarray(qkv[self.rows[chosen], :width])
                seen = RowColumns.of_positions(
                    tokens, columns.positions[:end], self.windows[layer], self.near_tokens
                )
                strip = attend_columns(queries, head, self.group, keys[:end], seen)
                self.sums.add_rows(layer, head, end, sum_strip(strip, end), sum_near_strip(strip, end, seen))
        self.sums.finish_rows(layer, int(self.tokens[wanted[-1]]) + 1)
