"""Fits the weights of the eviction rule `zap` (`kvcache.eviction.zap`) to KVzip's scores.

A model reads a text twice. A row's score is the greatest attention that any token of the repetition gives it, times the
norm of what its value adds to the residual stream, over the norm of that stream there: KVzap's target (arXiv
2601.07891). Scores are fitted in logarithms, by ridge regression for each KV head. A second pass then finds what
threshold keeps which share of the attention of the repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache.codecs.calibration import CalibratedModel
from kvcache.eviction.policies import FIRST_TOKENS
from kvcache.eviction.zap import NUM_THRESHOLDS, Angles, KeepSurrogate, row_features

Doubles = NDArray[np.float64]
Progress = Callable[[int], None]

# Sequences that are read, and the most tokens of each.
FIT_SEQUENCES, FIT_TOKENS = 10, 512
# Weight of the penalty, per row, of weights of features of variance 1.
RIDGE = 1e-3
MIN_SCORE = 1e-9
_NAME = "diptych_own"


class _RepeatedRows:
    """What the text's rows of one KV head are, and what the repetition makes of them; first tokens are left out.

    `features` are [n, 2 D + 3], `scores` logarithms [n], `masses` the attention of all tokens of the repetition [n].
    """

    def __init__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        gains: torch.Tensor,
        angles: Angles,
    ) -> None:
        """`queries` are those of the repetition, [group, n, D], scaled; `seen` are [n, 2 n]; `gains` [group, n, n]."""
        n = queries.shape[1]
        attention = (queries @ keys.T).masked_fill(~seen, -torch.inf).softmax(dim=-1)[:, :, :n]
        best = (attention * gains).amax(dim=(0, 1)).double().cpu().numpy()[FIRST_TOKENS:]
        self.scores = np.log(np.maximum(best, MIN_SCORE))
        self.masses = attention.sum(dim=(0, 1)).double().cpu().numpy()[FIRST_TOKENS:]
        plain = angles.unrotate(keys[:n].cpu().numpy())
        self.features = row_features(plain, values[:n].cpu().numpy())[FIRST_TOKENS:]


class RidgeSums:
    """The sums from which ridge regression follows; rows need not be kept."""

    def __init__(self, width: int) -> None:
        self._products, self._targets = np.zeros((width, width)), np.zeros(width)
        self._squares, self.rows = 0.0, 0

    def add_rows(self, features: Doubles, scores: Doubles) -> None:
        """Add rows [n, width], the last feature being 1, with their scores [n]."""
        self._products += features.T @ features
        self._targets += features.T @ scores
        self._squares += float(scores @ scores)
        self.rows += len(scores)

    def solve(self) -> tuple[Doubles, float]:
        """The weights, and the share of the variance of scores that they explain."""
        means, mean = self._products[-1, :-1] / self.rows, self._targets[-1] / self.rows
        cov = self._products[:-1, :-1] / self.rows - np.outer(means, means)
        with_scores = self._targets[:-1] / self.rows - means * mean
        scales = np.sqrt(np.maximum(np.diag(cov), 1e-12))
        normal = cov / np.outer(scales, scales) + RIDGE * np.eye(len(scales))
        slopes = np.linalg.solve(normal, with_scores / scales) / scales
        variance = self._squares / self.rows - mean * mean
        left = variance - 2 * slopes @ with_scores + slopes @ cov @ slopes
        return np.append(slopes, mean - slopes @ means), float(1 - left / max(variance, 1e-12))


def fit_surrogate(
    model: Any,
    sequences: Sequence[torch.Tensor],
    calibrated: CalibratedModel,
    frequencies: Doubles,
    progress: Progress | None = None,
) -> KeepSurrogate:
    """The weights and thresholds of a model.

    Args:
        model: a decoder of transformers in float32.
        sequences: token ids, [tokens] each, cut to `FIT_TOKENS`; the model's context holds each twice.
        calibrated: what the file says of the model.
        frequencies: of its rotation (`engine.model.rope.rope_frequencies`), [head_dim / 2].
        progress: called with the number of sequences that are done, of twice as many.

    Raises:
        ValueError: the sequences have no tokens to fit.
    """
    texts = [one[:FIT_TOKENS] for one in sequences[:FIT_SEQUENCES]]
    if not texts or min(map(len, texts)) <= FIRST_TOKENS:
        raise ValueError(f"fitting needs sequences of more than {FIRST_TOKENS} tokens")
    shape, width = (calibrated.layers, calibrated.kv_heads), 2 * calibrated.head_dim + 3
    sums = [[RidgeSums(width) for _ in range(shape[1])] for _ in range(shape[0])]
    tell = progress or (lambda done: None)
    for number, text in enumerate(texts):
        for layer, head, rows in _read_twice(model, text, frequencies):
            sums[layer][head].add_rows(rows.features, rows.scores)
        tell(number + 1)
    solved = [[one.solve() for one in heads] for heads in sums]
    weights = np.array([[one for one, _ in heads] for heads in solved], np.float32)
    r2 = float(np.mean([[share for _, share in heads] for heads in solved]))
    scores, masses = list[Doubles](), list[Doubles]()
    for number, text in enumerate(texts):
        for layer, head, rows in _read_twice(model, text, frequencies):
            scores.append((rows.features * weights[layer, head].astype(np.float64)).sum(axis=1))
            masses.append(rows.masses / max(rows.masses.sum(), MIN_SCORE))
        tell(len(texts) + number + 1)
    thresholds = find_thresholds(np.concatenate(scores), np.concatenate(masses))
    return KeepSurrogate(calibrated, weights, thresholds, sum(map(len, texts)), r2)


def find_thresholds(scores: Doubles, masses: Doubles) -> NDArray[np.float32]:
    """The largest score, for each share, so that the rows that score no less have the share of all masses, [99]."""
    order = np.argsort(-scores, kind="stable")
    shares = np.cumsum(masses[order]) / masses.sum()
    wanted = np.arange(1, NUM_THRESHOLDS + 1) / (NUM_THRESHOLDS + 1)
    found = np.minimum(np.searchsorted(shares, wanted), len(order) - 1)
    return scores[order][found].astype(np.float32)


def _read_twice(
    model: Any, text: torch.Tensor, frequencies: Doubles
) -> Iterator[tuple[int, int, _RepeatedRows]]:
    """The rows of every head of a text that is read twice."""
    found = list[tuple[int, int, _RepeatedRows]]()
    n, angles = len(text), Angles(np.arange(len(text)), frequencies)
    norms = dict[int, torch.Tensor]()

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        keys, values = key[0].float(), value[0].float()
        queries = query[0].float().unflatten(0, (len(keys), -1)) * module.scaling
        group, width, layer = queries.shape[1], keys.shape[2], module.layer_idx
        causal = torch.ones(2 * n, 2 * n, dtype=torch.bool, device=keys.device).tril()
        seen = (causal if mask is None or mask.dtype != torch.bool else mask[0, 0])[n:]
        outputs = module.o_proj.weight.float().unflatten(1, (len(keys), group, width))
        for head in range(len(keys)):
            # The norm of what a value adds through each query head of the group, [group, n].
            added = torch.einsum("ogd,nd->gno", outputs[:, head], values[head, :n]).norm(dim=-1)
            gains = added[:, None] / norms[layer][n:, None]
            found.append(
                (
                    layer,
                    head,
                    _RepeatedRows(queries[head][:, n:], keys[head], values[head], seen, gains, angles),
                )
            )
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def note_norm(layer: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, options: Any) -> None:
            hidden = inputs[0] if inputs else options["hidden_states"]
            norms[layer] = hidden[0].float().norm(dim=-1).clamp_min(MIN_SCORE)

        return hook

    ids = torch.cat([text, text])[None].to(next(model.parameters()).device)
    with torch.no_grad(), own_attention(model, attend), ExitStack() as undo:
        for layer, module in enumerate(model.model.layers):
            handle = module.register_forward_pre_hook(note_norm(layer), with_kwargs=True)
            undo.callback(handle.remove)
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    yield from found


@contextmanager
def own_attention(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Within, every layer of the model calls `attend`, an attention function of transformers."""
    ALL_ATTENTION_FUNCTIONS[_NAME] = attend
    ALL_MASK_ATTENTION_FUNCTIONS[_NAME] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    before, model.config._attn_implementation = model.config._attn_implementation, _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
