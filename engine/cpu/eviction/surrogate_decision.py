"""Decides what heads keep by a linear function of their own keys and values: the rule `zap` (`kvcache.eviction.zap`).

Nothing is recorded for it. A row is scored once, when it becomes older than 64 tokens: those of a prompt at its end,
those of the answer at the second decision point behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych.chunks import CHUNK_TOKENS
from engine.cpu.eviction.decision import DecisionPoint, HeadColumns
from engine.cpu.eviction.row_kernels import score_rows
from kvcache.eviction.policies import FIRST_TOKENS, FULL, PREDICTED, SHORT_PROMPT_TOKENS, select_visible
from kvcache.eviction.zap import Angles, KeepSurrogate
from kvcache.layout import KvLayout


class SurrogateDecider:
    """Scores rows, and keeps those above a threshold.

    Args:
        layout: of the pool.
        windows: the sliding window of each layer; 0: none.
        surrogate: the weights of the pool's layers and heads.
        frequencies: of the model's rotation, [head_dim / 2].
    """

    def __init__(
        self,
        layout: KvLayout,
        windows: Sequence[int],
        surrogate: KeepSurrogate,
        frequencies: NDArray[np.float64],
    ) -> None:
        self._layout, self._windows = layout, list(windows)
        self.surrogate, self._frequencies = surrogate, frequencies
        self._weights = surrogate.weights.astype(np.float64)

    def choose_policies(self, point: DecisionPoint) -> NDArray[np.uint8]:
        """The policies of all heads at the end of a prompt, [layers, kv_heads]: a short prompt keeps everything."""
        policy = FULL if point.prompt_tokens <= SHORT_PROMPT_TOKENS else PREDICTED
        return np.full((self._layout.layers, self._layout.kv_heads), policy, np.uint8)

    def keep_rows(self, point: DecisionPoint, policies: NDArray[np.uint8]) -> list[HeadColumns]:
        """What each head keeps behind the boundary, those of layer 0 first."""
        threshold = self.surrogate.find_threshold(point.spec.threshold)
        boundary, newest = point.spec.boundary, point.length - CHUNK_TOKENS
        # Rows before it were scored at the decision point before this one.
        scored = max(boundary, FIRST_TOKENS, 0 if point.is_prompt else newest - CHUNK_TOKENS)
        angles = Angles(np.arange(scored, newest), self._frequencies) if scored < newest else None
        kept = list[HeadColumns]()
        for layer, head in np.ndindex(policies.shape):
            columns = point.source.find_columns(layer, head)
            positions = columns.positions
            stays = (positions >= boundary) & select_visible(positions, point.length, self._windows[layer])
            # Nothing was dropped of these columns yet but the first ones, by a window of less than 65 tokens.
            first, end = np.searchsorted(positions, (scored, newest))
            if angles is not None and policies[layer, head] != FULL:
                some = HeadColumns(positions[first:end], columns.places[first:end])
                keys, values = point.source.read_rows(layer, head, some)
                scores = score_rows(keys, values, angles, self._weights[layer, head])
                stays[first:end] &= scores >= threshold
            kept.append(columns.select(stays))
        return kept
