"""Calibrations of the embedded model with factors per channel, others for each layer and head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.model.calibration_file import load_calibration
from engine.model.checkpoint import Checkpoint
from kvcache.codecs.calibration import Calibration, write_calibration
from kvcache.codecs.datatype import LayerFactors
from tests.system.transformers_oracle import TINY


def read_own(file: str = "") -> Calibration:
    """The embedded model's calibration, or that of a file."""
    found = load_calibration(Checkpoint.resolve(str(TINY)), file)
    assert found is not None
    return found


def write_factored(path: Path, *names: str, group: int = 0) -> str:
    """Write the embedded model's calibration with random factors for codecs, and with `group`; returns their hash."""
    own, rng, layers = read_own(), np.random.default_rng(4), list[LayerFactors]()
    model = own.model
    for _ in range(model.layers):
        pairs = rng.uniform(-1, 1, (model.kv_heads, 1, model.head_dim // 2))
        values = rng.uniform(-1, 1, model.kv_heads * model.head_dim)
        both = np.exp2(np.stack([np.tile(pairs, (1, 2, 1)).reshape(-1), values])).astype(np.float32)
        layers.append(LayerFactors(*both))
    made = replace(own, group=group or own.group, factors={name: tuple(layers) for name in names})
    write_calibration(made, path)
    return made.factors_digest
