"""Log-probabilities of tokens by raw logits, as OpenAI and vLLM report them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diptych.messages import Logprob

# Written for minus infinity, which JSON does not have.
LOWEST_LOGPROB = -9999.0
# Prompt tokens are scored in blocks that fit into a core's cache: 512 kB of float64.
SCORE_BLOCK_FLOATS = 1 << 16


def score_rows(
    logits: NDArray[np.float32], tokens: list[int], top: int, ranked: bool = False
) -> list[Logprob]:
    """Log-probabilities of `tokens`, row by row, computed in blocks in float64. Raises ValueError.

    If they are `ranked`, each has the number of tokens that are at least as likely.
    """
    block = max(1, SCORE_BLOCK_FLOATS // logits.shape[1])
    logprobs: list[Logprob] = []
    for begin in range(0, len(tokens), block):
        part = logits[begin : begin + block].astype(np.float64)
        peak = part.max(axis=1, keepdims=True)
        if not np.isfinite(peak).all():
            raise ValueError("the logits are not finite")
        part -= peak + np.log(np.exp(part - peak).sum(axis=1, keepdims=True))
        np.maximum(part, LOWEST_LOGPROB, out=part)
        chosen = tokens[begin : begin + block]
        ranks = np.zeros(len(chosen), np.int64)
        if ranked:
            ranks = np.count_nonzero(part >= part[np.arange(len(chosen)), chosen][:, None], axis=1)
        logprobs += [
            Logprob(token, float(row[token]), _top_logprobs(row, top), int(rank))
            for row, token, rank in zip(part, chosen, ranks, strict=True)
        ]
    return logprobs


def _top_logprobs(logprobs: NDArray[np.float64], top: int) -> list[tuple[int, float]]:
    """The `top` most likely tokens, best first; of equal ones the lowest ids."""
    top = min(top, len(logprobs))
    if top == 0:
        return []
    lowest = np.partition(logprobs, -top)[-top]
    ids = np.flatnonzero(logprobs >= lowest)
    ids = ids[np.argsort(-logprobs[ids], kind="stable")][:top]
    return [(int(token), float(logprobs[token])) for token in ids]
