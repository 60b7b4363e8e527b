"""Fitting the weights of `zap`: ridge regression and thresholds by hand, and the embedded model's own heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.calibration.keep_fit import RIDGE, RidgeSums, find_thresholds, fit_surrogate
from engine.model.calibration_file import identify_model
from engine.model.checkpoint import Checkpoint
from engine.model.rope import rope_frequencies
from kvcache.eviction.zap import Angles
from models.calibration import calibration_sequences
from tests.engine.cpu.eviction.evicted_runs import FOLDER


def test_sums_give_the_weights_of_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    features = np.concatenate(
        [rng.standard_normal((300, 6)) * [1, 5, 0.1, 1, 1, 1] + 3, np.ones((300, 1))], axis=1
    )
    scores = features @ [1.0, -0.2, 3, 0, 0, 0.5, 2] + 0.1 * rng.standard_normal(300)
    sums = RidgeSums(7)
    for part in range(0, 300, 77):
        sums.add_rows(features[part : part + 77], scores[part : part + 77])
    weights, r2 = sums.solve()
    plain = features[:, :-1]
    scaled = (plain - plain.mean(axis=0)) / plain.std(axis=0)
    slopes = np.linalg.solve(
        scaled.T @ scaled / 300 + RIDGE * np.eye(6), scaled.T @ (scores - scores.mean()) / 300
    )
    assert weights[:-1] == pytest.approx(slopes / plain.std(axis=0), abs=1e-8)
    predicted = features @ weights
    assert predicted.mean() == pytest.approx(scores.mean())
    assert r2 == pytest.approx(1 - np.var(scores - predicted) / np.var(scores)) and r2 > 0.98


def test_a_threshold_keeps_its_share_of_the_attention() -> None:
    rng = np.random.default_rng(1)
    scores, masses = rng.standard_normal(5000), rng.random(5000) ** 3
    found = find_thresholds(scores, masses)
    assert (np.diff(found) <= 0).all() and len(found) == 99
    for place in (0, 49, 74, 97):
        share = masses[scores >= found[place]].sum() / masses.sum()
        assert share == pytest.approx((place + 1) / 100, abs=2e-3)


@torch.no_grad()
def test_scores_are_the_greatest_attention_of_the_repetition() -> None:
    """One head of the embedded model, from transformers' own attention weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    )
    checkpoint = Checkpoint.resolve(str(FOLDER))
    config = checkpoint.config
    frequencies = rope_frequencies(config.rope, config.head_dim).double().numpy()
    text, n = calibration_sequences(FOLDER, 1, 64)[0], 64
    out = model(
        torch.cat([text, text])[None], output_attentions=True, output_hidden_states=True, use_cache=True
    )
    layer, head, group, width = 2, 1, config.heads // config.kv_heads, config.head_dim
    values = out.past_key_values.layers[layer].values[0, head, :n]
    keys = out.past_key_values.layers[layer].keys[0, head, :n].numpy()
    o_proj = model.model.layers[layer].self_attn.o_proj.weight
    best = torch.zeros(n)
    for member in range(group):
        number = head * group + member
        added = (values @ o_proj[:, number * width : (number + 1) * width].T).norm(dim=-1)
        norms = out.hidden_states[layer][0, n:].norm(dim=-1)
        weights = out.attentions[layer][0, number, n:, :n] * added / norms[:, None]
        best = torch.maximum(best, weights.max(dim=0).values)
    scores = best.log().double().numpy()[4:]
    surrogate = fit_surrogate(model, [text], identify_model(checkpoint), frequencies)
    assert surrogate.tokens == n and 0 < surrogate.r2 <= 1
    predicted = surrogate.score_rows(layer, head, keys, values.numpy(), Angles(np.arange(n), frequencies))[4:]
    # 60 rows and 67 features: but for the penalty, rows are met exactly.
    assert np.corrcoef(predicted, scores)[0, 1] > 0.9
    with pytest.raises(ValueError, match="more than 4 tokens"):
        fit_surrogate(model, [text[:4]], identify_model(checkpoint), frequencies)
