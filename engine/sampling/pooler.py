"""Makes a vector or a score of what a model computed for a prompt (`diptych.request.Pooling`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diptych.request import Pooling


def pool_row(row: NDArray[np.float32], pooling: Pooling, num_tokens: int) -> bytes:
    """The vector or the score, as float32 numbers.

    Args:
        row: [vocab] logits of the last token, for a score; else [hidden], the sum of the hidden states that count.
        pooling: what is wanted.
        num_tokens: of the prompt.

    Raises:
        ValueError: it is not finite.
    """
    if pooling.kind == "score":
        found = _score(row, pooling.tokens)
    else:
        found = row[: pooling.dimensions or None].astype(np.float64)
        found = found / num_tokens if pooling.kind == "mean" else found
        if pooling.normalize:
            # As PyTorch's `normalize`: a vector of zeros stays one.
            found = found / max(float(np.linalg.norm(found)), 1e-12)
    if not np.isfinite(found).all():
        raise ValueError("what was pooled is not finite")
    return found.astype("<f4").tobytes()


def _score(logits: NDArray[np.float32], tokens: tuple[int, ...]) -> NDArray[np.float64]:
    """The logistic function of the logit of the last of `tokens`, less that of the one before it."""
    chosen = logits[list(tokens)].astype(np.float64)
    margin = chosen[-1] - (chosen[0] if len(tokens) > 1 else 0.0)
    # Written so that no exponential overflows.
    return np.array([np.exp(-np.logaddexp(0.0, -margin))])
