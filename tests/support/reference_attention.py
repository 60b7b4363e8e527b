"""Attention over pages in plain torch: slow, obviously right; what every other back-end is tested against."""

from __future__ import annotations

import torch


def gather_pages(
    data: torch.Tensor, layer: int, slabs: list[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens 0..num_tokens-1, each [kv_heads, num_tokens, head_dim], token by token.

    data: the pool, [slabs, layers, kv_heads, 2, 64, head_dim]; slabs: the sequence's, in order.
    """
    page = data.shape[4]
    rows = [data[slabs[token // page], layer, :, :, token % page] for token in range(num_tokens)]
    keys, values = torch.stack(rows, dim=2).unbind(dim=1)  # [kv_heads, 2, tokens, head_dim] before
    return keys, values


def attend_reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int = 0
) -> torch.Tensor:
    """Causal grouped-query attention of the last tokens of a sequence, in float64.

    q: [tokens, heads, head_dim], queries of the last `tokens` positions; keys, values: [kv_heads, length, head_dim].
    Returns [tokens, heads, head_dim] float64.
    """
    tokens, heads, width = q.shape
    length = keys.shape[1]
    group = heads // keys.shape[0]
    keys, values = (x.double().repeat_interleave(group, dim=0) for x in (keys, values))
    scores = torch.einsum("thd,hld->htl", q.double(), keys) / width**0.5
    query = torch.arange(length - tokens, length)[:, None]
    key = torch.arange(length)[None]
    hidden = (key > query) | ((key <= query - window) if window else torch.zeros_like(key > query))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("htl,hld->thd", weights, values)
