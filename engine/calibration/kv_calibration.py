"""Calibrates KV codecs for a model: runs it over text, layer by layer, and fits to what it computed.

All of it is the model of transformers and arithmetic of NumPy: `engine.calibration.kv_capture` runs the model,
`engine.calibration.fitting` fits ranges and datatypes of `nuq*`, `engine.calibration.channel_factors` factors per
channel of `int*` and `tq*`. The same model, text and machine give the same numbers to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from engine.calibration.channel_factors import FactorFit, fit_factors, select_factors
from engine.calibration.fitting import Weigh, fit_layer, weigh_errors
from engine.calibration.kv_capture import capture_layers, rotary_frequencies
from kvcache.codecs.calibration import CALIBRATED_NAMES, FACTORED_NAMES, CalibratedModel, Calibration
from kvcache.codecs.codec_id import parse_codec_id
from kvcache.codecs.datatype import LayerConstants
from kvcache.codecs.page import NUM_SINKS

# Bytes of a number that `capture_layers` keeps: itself and its squared gradient, for keys and for values.
SAMPLE_NUMBER_BYTES = 16
# Most bytes of samples that are kept at a time. A model with more is run again for the next layers.
MAX_SAMPLE_BYTES = 1 << 30

# Is called with (layers that are done, sequences of the present run that are done).
Progress = Callable[[range, int], None]


def calibrate_model(
    model: nn.Module,
    sequences: Sequence[torch.Tensor],
    calibrated: CalibratedModel,
    group: int,
    *,
    names: Sequence[str] = CALIBRATED_NAMES,
    factored: Sequence[str] = FACTORED_NAMES,
    weigh: Weigh = weigh_errors,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    progress: Progress | None = None,
) -> Calibration:
    """Constants of all layers, for each codec of `names`.

    Args:
        model: as `capture_layers` takes it.
        sequences: token ids, each [tokens], at least two.
        calibrated: the model; it becomes part of the file.
        group: values that share a scale per token: whole heads that divide the KV heads evenly.
        names: codecs with calibration.
        factored: codecs that get factors per channel where these help.
        weigh: as `fit_layer` takes it.
        max_sample_bytes: decides how many layers are captured per run of the model; at least one is.
        progress: called with the layers that a run captures, and the sequences of it that are done.

    Raises:
        ValueError: there is no layer, or a sequence is too short.
    """
    ids = [parse_codec_id(name) for name in names]
    tokens = sum(len(sequence) - NUM_SINKS for sequence in sequences)
    layer_bytes = SAMPLE_NUMBER_BYTES * tokens * calibrated.kv_heads * calibrated.head_dim
    at_once = max(1, max_sample_bytes // max(1, layer_bytes))
    fitted, factors = list[dict[str, LayerConstants]](), list[dict[str, FactorFit]]()
    factor_ids = [parse_codec_id(name) for name in factored]
    positions = np.concatenate([np.arange(NUM_SINKS, len(sequence)) for sequence in sequences])
    frequencies = rotary_frequencies(model)
    for first in range(0, calibrated.layers, at_once):
        layers = range(first, min(first + at_once, calibrated.layers))

        def tell(done: int, layers: range = layers) -> None:
            if progress is not None:
                progress(layers, done)

        samples = capture_layers(model, sequences, layers, tell)
        while samples:
            # Samples are let go one by one, before the next layers are captured.
            sample = samples.pop(0)
            fitted.append(fit_layer(sample, ids, group, weigh))
            factors.append(fit_factors(sample, positions, frequencies, factor_ids))
    constants = {name: tuple(layer[name] for layer in fitted) for name in names}
    return Calibration(calibrated, group, tokens, constants, select_factors(factors))
