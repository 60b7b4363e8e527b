"""Rotary position tables, with the scalings of Llama: none, linear, and Llama 3's by wavelength."""

from __future__ import annotations

import math

import torch

from engine.model.shape import Rope


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per token of each pair of dimensions, [head_dim / 2] float32, as transformers' modeling_rope_utils."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    turns = rope.original_context / wavelength
    # Slow pairs are slowed further, fast ones kept, those between blended.
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slowed = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, plain, slowed)


def tables(rope: Rope, head_dim: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0..num_tokens-1, each [num_tokens, head_dim / 2] float32."""
    angles = torch.arange(num_tokens).float()[:, None] * frequencies(rope, head_dim)[None]
    return angles.cos(), angles.sin()
