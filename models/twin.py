"""A model's twin: the same function to the last bit, with the outliers that large models have in their keys and values.

A small model has no channels that stick out, so every codec looks fine on it. Here, per KV head, one rotary pair of key
rows is multiplied by 16 and the same pair of its query heads divided by 16, and in each layer four value rows are
multiplied by 4 and the columns of the output product that read them divided by 4. All factors are powers of two, so in
float32 every product and every sum is what it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KEY_FACTOR, VALUE_FACTOR = 16.0, 4.0
PAIR = 5  # of a KV head's rotary pairs
NUM_VALUE_ROWS = 4  # per layer
VALUE_DIM = 7  # of a head, where the first value row lies; further ones follow in other heads


@torch.no_grad()
def make_twin(model: Any, head_dim: int) -> None:
    """Turns a float32 Llama (of transformers, or `models.llama`) into its twin, in place.

    Raises:
        ValueError: the weights are not float32.
    """
    for layer in model.model.layers:
        attention = layer.self_attn
        matrices = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        if any(matrix.dtype != torch.float32 for matrix in matrices):
            raise ValueError("only weights in float32 can be scaled without a rounding")
        queries, keys, values = (matrix.view(-1, head_dim, matrix.shape[1]) for matrix in matrices)
        pair = [PAIR, PAIR + head_dim // 2]
        keys[:, pair] *= KEY_FACTOR
        queries[:, pair] /= KEY_FACTOR
        outputs = attention.o_proj.weight.view(-1, len(queries), head_dim)
        _scale_values(values, outputs)


def _scale_values(values: Tensor, outputs: Tensor) -> None:
    """values: [KV heads, head_dim, hidden]. outputs: [hidden, heads, head_dim]."""
    per_head = outputs.shape[1] // len(values)
    for number in range(NUM_VALUE_ROWS):
        head, dim = number % len(values), VALUE_DIM + number // len(values)
        values[head, dim] *= VALUE_FACTOR
        outputs[:, head * per_head : (head + 1) * per_head, dim] /= VALUE_FACTOR
