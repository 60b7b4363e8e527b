"""Codecs by name, with a calibration for those that need one."""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.calibration.fitting import fit_layer
from kvcache.codecs.calibration import CalibratedModel, Calibration
from kvcache.codecs.codec_id import CODE_BITS, complete_codec_id, parse_codec_id
from kvcache.codecs.page import Codec
from kvcache.codecs.registry import build_codec
from tests.unit.codecs.oracles import random_sample

HEADS, HEAD_DIM = 4, 32
NAMES = tuple(CODE_BITS)
NUQ = tuple(name for name in NAMES if name.startswith("nuq"))


@cache
def calibration(heads: int = HEADS, head_dim: int = HEAD_DIM) -> Calibration:
    """Two layers, fitted to random tensors with outlier channels."""
    rng = np.random.default_rng(7)
    layers = [
        fit_layer(random_sample(rng, 400, heads, head_dim), map(parse_codec_id, NUQ), heads * head_dim)
        for _ in range(2)
    ]
    model = CalibratedModel("model", 2, heads, head_dim)
    return Calibration(
        model, heads * head_dim, 400, {name: tuple(one[name] for one in layers) for name in NUQ}
    )


def make_codec(name: str, heads: int = HEADS, head_dim: int = HEAD_DIM) -> Codec:
    known = calibration(heads, head_dim)
    kind = parse_codec_id(name)
    codec_id = complete_codec_id(kind, heads, head_dim, known.digest_for(kind.name))
    return build_codec(codec_id, head_dim, known, layer=1)
