"""Finds factors per channel for `int*` and `tq*`, where they lower the error: channels that stick out take up the range
that all of a group share.

For each layer, KV head, side and codec, candidates are tried on what the model computed, and the one with the least
error stays, or none. An error of a number costs its squared gradient (the Fisher information, as for `nuq*`).

    ends     1 / the largest magnitude: all channels get one range
    roots    its square root: half of that
    Fisher   (squared gradient / mean square)^¼: the least error where a row's numbers share their errors, as after a
             random rotation, since the error is Σ f² s² · Σ F / f² (Cauchy and Schwarz)

The two numbers of a rotary pair get one factor (`kvcache.codecs.basis`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.calibration.fitting import LayerSample
from kvcache.codecs.basis import Basis, Floats
from kvcache.codecs.codec_id import CodecId, complete_codec_id
from kvcache.codecs.datatype import MAX_FACTOR, LayerFactors
from kvcache.codecs.grouped import GroupedCodec
from kvcache.codecs.registry import build_codec
from kvcache.codecs.rotation import rotate_rows
from kvcache.codecs.turbo import TurboCodec

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Tokens on which candidates are tried, evenly spread.
MAX_TOKENS = 2048
# A candidate must lower the error by this share: less is chance.
MIN_GAIN = 0.03
# All layers together, a codec's error must fall by this share: less is not worth another class of KV.
MIN_CODEC_GAIN = 0.2
TINY = 1e-30


@dataclass(frozen=True, slots=True)
class FactorFit:
    """Factors of one layer for a codec, and the error of the layer's rows without them and with them."""

    factors: LayerFactors
    plain_error: float
    error: float


@dataclass(frozen=True, slots=True)
class HeadSide:
    """Keys, at their positions, or values of one KV head, [tokens, head_dim], and what an error costs."""

    name: str
    rows: Floats
    fisher: Floats
    # Takes an error to where `fisher` is that of its numbers.
    to_fisher: Callable[[Floats], Floats]

    def cost(self, codec: GroupedCodec | TurboCodec, factors: Floats) -> float:
        """The error of all rows, coded with factors."""
        basis = Basis(factors, factors, codec.basis.seed)
        restored = basis.restore_keys(codec.round_rows(self.name, basis.store_keys(self.rows)))
        error = self.to_fisher(restored - self.rows)
        return float((np.square(error) * self.fisher).sum(dtype=np.float64))

    def list_candidates(self) -> list[Floats]:
        """Factors to try, [head_dim] each."""
        rows, fisher = self.rows.astype(np.float64), self.fisher.mean(axis=0, dtype=np.float64)
        largest, square = np.abs(rows).max(axis=0), np.square(rows).mean(axis=0)
        if self.name == "key":
            pairs = rows.reshape(len(rows), 2, -1)
            largest = np.tile(np.sqrt(np.square(pairs).sum(axis=1)).max(axis=0), 2)
            square, fisher = (np.tile(one.reshape(2, -1).sum(axis=0), 2) for one in (square, fisher))
        # Channels that hardly move count as if they moved a little.
        ends = 1 / np.maximum(largest, max(largest.max() / MAX_FACTOR, TINY))
        least = max(square.max() / MAX_FACTOR**2, TINY)
        roots = (np.maximum(fisher, TINY) / np.maximum(square, least)) ** 0.25
        return [_normalise(one, largest > 0) for one in (ends, np.sqrt(ends), roots)]


def _normalise(factors: Doubles, alive: Bools) -> Floats:
    """Factors within bounds whose geometric mean over channels that are `alive` is one.

    Channels that are always zero get 1: any factor leaves them zero, and theirs would push those of all others away.
    """
    even = np.ones_like(factors)
    if alive.any():
        even[alive] = factors[alive] / np.exp(np.log(factors[alive]).mean())
    bounded: Floats = np.clip(even, 1 / MAX_FACTOR, MAX_FACTOR).astype(np.float32)
    return bounded


def fit_factors(
    sample: LayerSample, positions: Ints, frequencies: Doubles, codec_ids: Iterable[CodecId]
) -> dict[str, FactorFit]:
    """Factors of one layer for each codec, by name; ones where none help. `select_factors` says whether they are used.

    Args:
        sample: without first tokens.
        positions: [tokens] of the sample, in their sequences.
        frequencies: [head_dim / 2], radians per token of each rotary pair.
        codec_ids: `int*` and `tq*`; only their names matter.
    """
    sides, head_dim = _split_sides(sample, positions, frequencies), 2 * len(frequencies)
    found = {}
    for codec_id in codec_ids:
        codec = build_codec(complete_codec_id(CodecId(codec_id.name), 1, head_dim), head_dim)
        assert isinstance(codec, GroupedCodec | TurboCodec)
        chosen = [[_choose_factors(codec, head_side) for head_side in heads] for heads in sides]
        keys, values = (np.concatenate([factors for factors, _, _ in heads]) for heads in chosen)
        plain = sum(error for heads in chosen for _, error, _ in heads)
        fitted = sum(error for heads in chosen for _, _, error in heads)
        found[codec_id.name] = FactorFit(LayerFactors(keys, values), plain, fitted)
    return found


def select_factors(layers: Sequence[Mapping[str, FactorFit]]) -> dict[str, tuple[LayerFactors, ...]]:
    """The factors of all layers, by name of the codec, for codecs whose error they lower enough.

    Any other codec keeps the id, and the bytes, that it has without a calibration.
    """
    found = {}
    for name in layers[0] if layers else ():
        fits = [layer[name] for layer in layers]
        if sum(one.error for one in fits) < (1 - MIN_CODEC_GAIN) * sum(one.plain_error for one in fits):
            found[name] = tuple(one.factors for one in fits)
    return found


def _choose_factors(codec: GroupedCodec | TurboCodec, head_side: HeadSide) -> tuple[Floats, float, float]:
    """The candidate with the least error, [head_dim], the error without factors, and the one with these."""
    ones = np.ones(head_side.rows.shape[1], np.float32)
    costs = [(head_side.cost(codec, factors), factors) for factors in head_side.list_candidates()]
    (least, best), plain = min(costs, key=lambda pair: pair[0]), head_side.cost(codec, ones)
    return (best, plain, least) if least < (1 - MIN_GAIN) * plain else (ones, plain, plain)


def _split_sides(
    sample: LayerSample, positions: Ints, frequencies: Doubles
) -> tuple[list[HeadSide], list[HeadSide]]:
    """Keys and values of every KV head, of evenly spread tokens."""
    chosen, head_dim = slice(None, None, -(-len(positions) // MAX_TOKENS)), 2 * len(frequencies)
    at = positions[chosen]
    keys, values, key_fisher, value_fisher = (
        np.ascontiguousarray(array[chosen]).reshape(len(at), -1, head_dim)
        for array in (sample.keys, sample.values, sample.key_fisher, sample.value_fisher)
    )
    rotated = rotate_rows(keys, at, frequencies)

    def rotate_back(errors: Floats) -> Floats:
        return rotate_rows(errors, -at, frequencies)

    heads = range(keys.shape[1])
    return (
        [HeadSide("key", rotated[:, h], key_fisher[:, h], rotate_back) for h in heads],
        [HeadSide("value", values[:, h], value_fisher[:, h], lambda errors: errors) for h in heads],
    )
