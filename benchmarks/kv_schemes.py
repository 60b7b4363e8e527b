"""What `benchmarks.kv_quality` compares on the embedded model: all codecs, baselines, and ablations.

Rows in brackets are baselines and ablations, not codecs: `[intN per token]` has one scale per token over all heads,
`[fp8 per tensor]` is e4m3 with one scale for the keys of a layer and one for its values; the others are nuq at 2 bits
with one thing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.calibration.channel_factors import fit_factors, select_factors
from engine.calibration.fitting import LayerSample, Weigh, fit_layer, weigh_errors
from engine.calibration.kv_capture import rotary_frequencies
from engine.calibration.kv_quality import CodingScheme, build_scheme, complete_id
from kvcache.codecs.calibration import FACTORED_NAMES, CalibratedModel, Calibration
from kvcache.codecs.codec_id import CODE_BITS, parse_codec_id
from kvcache.codecs.datatype import Datatype, LayerConstants, LayerFactors
from kvcache.codecs.hadamard import uniform_levels
from kvcache.codecs.page import NUM_SINKS, Floats

LAYERS, KV_HEADS, HEAD_DIM = 6, 4, 32
WIDTH = KV_HEADS * HEAD_DIM
FP8 = torch.float8_e4m3fn


def per_token_scheme(bits: int) -> CodingScheme:
    """Uniform codes with one scale and minimum per token, over all heads; keys after rotation."""

    def round_rows(rows: Floats) -> Floats:
        flat = rows.reshape(len(rows), -1)
        low, high = flat.min(axis=1, keepdims=True), flat.max(axis=1, keepdims=True)
        step = np.maximum((high - low) / (2**bits - 1), np.float32(1e-12))
        coded: Floats = (np.rint((flat - low) / step) * step + low).astype(np.float32)
        return coded.reshape(rows.shape)

    def code(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        return round_rows(keys), round_rows(values)

    return CodingScheme(f"[int{bits} per token]", bits + 32 / WIDTH, True, code)


def fp8_scheme(samples: Sequence[LayerSample]) -> CodingScheme:
    """The 8-bit floats e4m3, keys after rotation; the scales of each layer hold the largest number of `samples`."""
    scales = []
    for sample in samples:
        pairs = sample.keys.reshape(-1, KV_HEADS, 2, HEAD_DIM // 2)
        # However far a pair of keys is rotated, neither gets larger than this.
        largest = float(np.sqrt(np.square(pairs).sum(axis=2)).max()), float(np.abs(sample.values).max())
        scales.append([one / torch.finfo(FP8).max for one in largest])

    def round_rows(rows: Floats, scale: float) -> Floats:
        # Larger numbers become the largest one, not infinite.
        within = (torch.from_numpy(rows) / scale).clamp(torch.finfo(FP8).min, torch.finfo(FP8).max)
        return (within.to(FP8).to(torch.float32) * scale).numpy()

    def code(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        key_scale, value_scale = scales[layer]
        return round_rows(keys, key_scale), round_rows(values, value_scale)

    return CodingScheme("[fp8 per tensor]", 8, True, code)


def fit_samples(samples: list[LayerSample], names: Sequence[str], weigh: Weigh = weigh_errors) -> Calibration:
    """Constants for captured samples."""
    ids = [parse_codec_id(name) for name in names]
    layers = [fit_layer(sample, ids, WIDTH, weigh) for sample in samples]
    constants = {name: tuple(layer[name] for layer in layers) for name in names}
    model = CalibratedModel("measured here", LAYERS, KV_HEADS, HEAD_DIM)
    return Calibration(model, WIDTH, len(samples[0].keys), constants)


def fit_sample_factors(
    model: Any, samples: list[LayerSample], sequences: Sequence[torch.Tensor]
) -> dict[str, tuple[LayerFactors, ...]]:
    """Factors of the codecs whose error they lower enough, for the captured samples of sequences."""
    positions = np.concatenate([np.arange(NUM_SINKS, len(one)) for one in sequences])
    frequencies, ids = rotary_frequencies(model), [parse_codec_id(name) for name in FACTORED_NAMES]
    return select_factors([fit_factors(sample, positions, frequencies, ids) for sample in samples])


def change_datatypes(calibration: Calibration, change: Callable[[Datatype], Datatype]) -> Calibration:
    def changed(one: LayerConstants) -> LayerConstants:
        return replace(one, keys=change(one.keys), values=change(one.values))

    constants = {name: tuple(map(changed, layers)) for name, layers in calibration.constants.items()}
    return replace(calibration, constants=constants)


def list_schemes(full: Calibration, samples: list[LayerSample]) -> Iterator[CodingScheme]:
    """All codecs with the constants of `full`, those with factors again (`int4@`), baselines, ablations at 2 bits."""
    bare = replace(full, factors={})
    for name in CODE_BITS:
        yield build_scheme(complete_id(name, bare), bare)
    for name in full.factors:
        yield build_scheme(complete_id(name, full), full, f"{name}@")
    for bits in (4, 3, 2):
        yield per_token_scheme(bits)
    yield fp8_scheme(samples)
    variants = {
        "[2: uniform]": change_datatypes(full, lambda one: Datatype(uniform_levels(2), uniform_levels(2))),
        "[2: unweighted]": fit_samples(samples, ("nuq2",), lambda fisher, scales: np.ones_like(fisher)),
        "[2: Fisher alone]": fit_samples(samples, ("nuq2",), lambda fisher, scales: fisher),
        "[2: F s²]": full,
    }
    plain = {
        name: change_datatypes(one, lambda each: replace(each, levels=each.centroids))
        for name, one in variants.items()
    }
    for name, calibration in plain.items():
        yield build_scheme(complete_id("nuq2", calibration), calibration, name, sink=False)
    last = plain["[2: F s²]"]
    yield build_scheme(complete_id("nuq2-1%", last), last, "[2: F s² + outliers]", sink=False)
    yield build_scheme(complete_id("nuq2-1%", last), last, "[2: F s² + outliers + sink]")
