"""Lets the heads of a layer compete on the CPU: the rule `ada` (`kvcache.eviction.ada`).

First each head marks its rows by what the last rows look at, and the marks of all heads of a layer are counted, those
of other ranks too. The counts say which marks stay; then each head keeps its rows that have them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.eviction.decision import DecisionPoint, HeadColumns
from engine.cpu.eviction.head_profile import RowColumns, sum_attention
from kvcache.eviction.ada import GOES, STAYS, LayerTally, Marks, mark_answer, mark_prompt
from kvcache.eviction.policies import COMPETED, FULL, SHORT_PROMPT_TOKENS, select_visible
from kvcache.layout import KvLayout

Policies = NDArray[np.uint8]


class HeadCompetition:
    """Marks rows, and keeps those that stay.

    Args:
        layout: of the pool.
        group: query heads per KV head.
        windows: the sliding window of each layer; 0: none.
    """

    def __init__(self, layout: KvLayout, group: int, windows: Sequence[int]) -> None:
        self._layout, self._group, self._windows = layout, group, list(windows)

    def choose_policies(self, point: DecisionPoint) -> Policies:
        """The policies of all heads at the end of a prompt, [layers, kv_heads]: a short prompt keeps everything."""
        policy = FULL if point.prompt_tokens <= SHORT_PROMPT_TOKENS else COMPETED
        return np.full((self._layout.layers, self._layout.kv_heads), policy, np.uint8)

    def mark_heads(self, point: DecisionPoint, policies: Policies) -> tuple[list[Marks], LayerTally]:
        """The marks of what each head has, those of layer 0 first, and how many of each layer compete."""
        tally, marks = LayerTally(self._layout.layers), list[Marks]()
        for layer, head in np.ndindex(policies.shape):
            if policies[layer, head] == FULL:
                columns = point.source.find_columns(layer, head)
                seen = select_visible(columns.positions, point.length, self._windows[layer])
                marks.append(np.where(seen, STAYS, GOES).astype(np.int16))
            elif point.is_prompt:
                marks.append(self._mark_prompt(point, layer, head, tally))
            else:
                marks.append(self._mark_answer(point, layer, head, tally))
        return marks, tally

    def keep_marked(
        self, point: DecisionPoint, marks: Sequence[Marks], cuts: Sequence[int]
    ) -> list[HeadColumns]:
        """What each head keeps behind the boundary, where `cuts` has the lowest mark that stays in each layer."""
        kept, heads = list[HeadColumns](), self._layout.kv_heads
        for number, one in enumerate(marks):
            columns = point.source.find_columns(number // heads, number % heads)
            stays = (one >= cuts[number // heads]) & (columns.positions >= point.spec.boundary)
            kept.append(columns.select(stays))
        return kept

    def _mark_prompt(self, point: DecisionPoint, layer: int, head: int, tally: LayerTally) -> Marks:
        window, positions = self._windows[layer], np.arange(point.length)
        columns = point.source.find_columns(layer, head)
        sums, means = self._sum_columns(point, columns, layer, head)
        visible = select_visible(positions, point.length, window)
        marks = mark_prompt(means, point.length, point.spec.boundary, visible)
        tally.add_prompt_head(layer, marks, sums.astype(np.float64) / len(point.rows))
        return marks

    def _mark_answer(self, point: DecisionPoint, layer: int, head: int, tally: LayerTally) -> Marks:
        columns, window = point.source.find_columns(layer, head), self._windows[layer]
        positions, prompt, before = columns.positions, point.prompt_tokens, point.length - CHUNK_TOKENS
        answer = np.arange(prompt, before)
        seen = np.arange(point.spec.boundary, prompt)
        seen = seen[select_visible(seen, before, window)]
        kept = np.count_nonzero((positions >= point.spec.boundary) & (positions < prompt))
        share = kept / len(seen) if len(seen) else 1.0
        competing = answer[select_visible(answer, point.length, window)]
        means = np.zeros(len(positions), np.float32)
        if len(competing):
            _, means = self._sum_columns(point, columns, layer, head)
        visible = select_visible(positions, point.length, window)
        marks = mark_answer(means, positions, prompt, point.length, visible)
        tally.add_answer_head(layer, marks, share * len(competing))
        return marks

    def _sum_columns(
        self, point: DecisionPoint, columns: HeadColumns, layer: int, head: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The attention of the last rows to each column of a head: its sum, and its mean over rows that see it."""
        queries = point.queries[layer, point.rows % CHUNK_TOKENS]
        keys = point.source.read_keys(layer, head, columns)
        row_columns = RowColumns.of_positions(point.rows, columns.positions, self._windows[layer], 1)
        sums = sum_attention(queries, head, self._group, keys, row_columns)
        rows = np.maximum(row_columns.count_rows(len(sums)), 1).astype(np.float32)
        return sums, sums / rows
