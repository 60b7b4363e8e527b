"""A small model over coded pages: its calibration, and the rows in which two runs differ."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from engine.calibration.fitting import fit_layer
from engine.model.calibration_file import identify_model
from engine.model.checkpoint import Checkpoint
from kvcache.codecs.calibration import Calibration
from kvcache.codecs.codec_id import CALIBRATED, CodecId, complete_codec_id, parse_codec_id
from kvcache.codecs.datatype import LayerFactors
from tests.unit.codecs.oracles import random_sample

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
HEADS, HEAD_DIM = 2, 32
CONTEXT, SLABS = 256, 16
# A flipped code changes logits by more than rounding does, but few codes flip.
SAME, MOST_ROWS = 2e-3, 0.9
# Logits of several prompts that should be equal, and those.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def calibrate(files: Checkpoint, group: int = HEADS * HEAD_DIM) -> Calibration:
    rng, names = np.random.default_rng(5), ("nuq4-1%", "nuq4", "nuq3-1%", "nuq2-1%")
    sample = random_sample(rng, 400, HEADS, HEAD_DIM)
    layers = [fit_layer(sample, map(parse_codec_id, names), group) for _ in range(files.config.layers)]
    constants = {name: tuple(layer[name] for layer in layers) for name in names}
    return Calibration(identify_model(files), group, 400, constants)


def with_factors(calibration: Calibration, name: str) -> Calibration:
    """With factors of `int4@` or `tq4@`, others for each layer and head; of other names without."""
    if not name.endswith("@"):
        return calibration
    rng, layers = np.random.default_rng(11), list[LayerFactors]()
    for _ in range(calibration.model.layers):
        pairs = np.tile(rng.uniform(-3, 3, (HEADS, 1, HEAD_DIM // 2)), (1, 2, 1)).reshape(-1)
        values = rng.uniform(-3, 3, HEADS * HEAD_DIM)
        layers.append(LayerFactors(*(np.exp2(one).astype(np.float32) for one in (pairs, values))))
    return replace(calibration, factors={name[:-1]: tuple(layers)})


def complete(name: str, calibration: Calibration) -> CodecId:
    codec_id = parse_codec_id(name.rstrip("@"))
    if codec_id.family == CALIBRATED:
        codec_id = replace(codec_id, group=calibration.group)
    return complete_codec_id(codec_id, HEADS, HEAD_DIM, calibration.digest_for(codec_id.name))


def rows_that_differ(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of rows whose logits differ by more than rounding."""
    return float(((found - expected).abs().amax(dim=1) > SAME).float().mean())


def typical_difference(pairs: Pairs) -> float:
    """Of several prompts, the median share of rows that differ: all rows after a flipped code do, and in few prompts an
    early one flips.
    """
    return median(rows_that_differ(*pair) for pair in pairs)
