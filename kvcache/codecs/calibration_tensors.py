"""The tensors of a calibration file: which there must be, and what they may hold."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.codecs.codec_id import CALIBRATED, CODE_BITS, CodecId
from kvcache.codecs.datatype import MAX_FACTOR, MIN_SCALE, Datatype, LayerConstants, LayerFactors

Tensors = dict[str, NDArray[Any]]

# Largest absolute value of a level. Q-Norm stretches the range -1 to 1 by far less.
MAX_LEVEL = 4.0
TENSOR_PATTERN = re.compile(r"(?P<codec>[a-z0-9%-]+)\.(?P<part>[a-z_]+)")
CHANNEL_PARTS = ("key_scales", "key_zeros")
TABLE_PARTS = ("key_centroids", "key_levels", "value_centroids", "value_levels")
FACTOR_PARTS = ("key_factors", "value_factors")


def check_tensors(tensors: Tensors, layers: int, kv_heads: int, head_dim: int) -> None:
    """Refuses tensors that are unknown, missing, of another type or shape, or hold impossible numbers.

    Raises:
        ValueError: what is wrong.
    """
    matches = {name: TENSOR_PATTERN.fullmatch(name) for name in tensors}
    unknown = [name for name, match in matches.items() if match is None or match["codec"] not in CODE_BITS]
    named = {match["codec"] for match in matches.values() if match is not None} & CODE_BITS.keys()
    codecs = {name for name in named if CodecId(name).family == CALIBRATED}
    factored = {name for name in named if CodecId(name).takes_factors}
    channels = kv_heads * head_dim
    expected: dict[str, tuple[type[np.generic], int]] = {}
    expected |= {f"{codec}.{part}": (np.float16, channels) for codec in codecs for part in CHANNEL_PARTS}
    expected |= {
        f"{codec}.{part}": (np.float32, 1 << CODE_BITS[codec][0]) for codec in codecs for part in TABLE_PARTS
    }
    expected |= {f"{codec}.{part}": (np.float32, channels) for codec in factored for part in FACTOR_PARTS}
    if unknown or not codecs or tensors.keys() != expected.keys():
        wrong = sorted(unknown or tensors.keys() ^ expected.keys())
        raise ValueError(f"tensors that are unknown or missing: {', '.join(wrong)[:100] or 'all'}")
    for name, (kind, count) in expected.items():
        array = tensors[name]
        if array.dtype != kind or array.shape != (layers, count):
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds numbers that are not finite")
        if name.endswith("key_scales") and (array < MIN_SCALE).any():
            raise ValueError(f"{name} holds scales below {MIN_SCALE}")
        if name.endswith("factors"):
            _check_factors(name, array, head_dim)
        elif kind is np.float32:
            limit = 1.0 if name.endswith("centroids") else MAX_LEVEL
            if (np.diff(array) < 0).any() or (np.abs(array) > limit).any():
                raise ValueError(f"{name} is not ascending within {-limit} to {limit}")


def read_constants(tensors: Tensors, layers: int) -> dict[str, tuple[LayerConstants, ...]]:
    present = [name for name in CODE_BITS if f"{name}.{CHANNEL_PARTS[0]}" in tensors]
    return {
        name: tuple(
            LayerConstants(
                tensors[f"{name}.key_scales"][layer],
                tensors[f"{name}.key_zeros"][layer],
                Datatype(tensors[f"{name}.key_centroids"][layer], tensors[f"{name}.key_levels"][layer]),
                Datatype(tensors[f"{name}.value_centroids"][layer], tensors[f"{name}.value_levels"][layer]),
            )
            for layer in range(layers)
        )
        for name in present
    }


def _check_factors(name: str, array: NDArray[Any], head_dim: int) -> None:
    """Refuses factors [layers, channels] out of range, and those of keys that rotation to a position would not keep."""
    if (array < 1 / MAX_FACTOR).any() or (array > MAX_FACTOR).any():
        raise ValueError(f"{name} holds factors beyond {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}")
    if name.endswith("key_factors"):
        pairs = array.reshape(len(array), -1, 2, head_dim // 2)
        if (pairs[:, :, 0] != pairs[:, :, 1]).any():
            raise ValueError(f"{name} holds two factors for one rotary pair")


def read_factors(tensors: Tensors, layers: int) -> dict[str, tuple[LayerFactors, ...]]:
    """Factors by codec name and layer, of tensors that were checked."""
    present = [name for name in CODE_BITS if f"{name}.{FACTOR_PARTS[0]}" in tensors]
    return {
        name: tuple(
            LayerFactors(*(tensors[f"{name}.{part}"][layer] for part in FACTOR_PARTS))
            for layer in range(layers)
        )
        for name in present
    }
