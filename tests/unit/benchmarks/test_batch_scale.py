"""The benchmark of batches beside many others, in a small form."""

from __future__ import annotations

import pytest

from benchmarks import batch_scale


def test_it_prints_ratios_of_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_scale, "FEW", 20)
    monkeypatch.setattr(batch_scale, "PER_ROUND", 5)
    monkeypatch.setattr(batch_scale, "NUM_WORKERS", 1)
    found = batch_scale.measure_scale(2000, 80, 1)
    ratios = {name: found[f"{name}_ratio"] for name in batch_scale.NAMED}
    assert found["batch_scale"] == max(ratios.values())
    # 100 times the ended batches and 4 times the open ones: with scans it would be tens of times as much.
    assert min(ratios.values()) > 0 and max(ratios.values()) < 20, found
