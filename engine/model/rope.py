"""Rotary position tables, with the scalings that Llama models use: none, linear, and Llama 3's by wavelength."""

from __future__ import annotations

import math

import torch

from engine.model.architecture import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per token of each pair of dimensions, [head_dim / 2] float32, as in transformers' modeling_rope_utils."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    num_rotations = rope.original_context / wavelength
    # Slow pairs are divided by the factor, fast pairs are kept, and pairs in between are interpolated.
    blend = (num_rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slowed = torch.where(num_rotations < rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(num_rotations > rope.high_freq_factor, plain, slowed)


def rope_tables(rope: RopeConfig, head_dim: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0..num_tokens-1, each [num_tokens, head_dim / 2] float32."""
    angles = torch.arange(num_tokens).float()[:, None] * rope_frequencies(rope, head_dim)[None]
    return angles.cos(), angles.sin()
