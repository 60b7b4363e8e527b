"""Thresholds of burn rates: those of the literature where they can be reached, and reachable ones everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dashboard.burn_rates import burn_alerts, max_burn_rate


@pytest.mark.parametrize(
    ("target", "thresholds"),
    [(0.9, [6, 3, 1.5]), (0.95, [12, 6, 3]), (0.99, [14.4, 6, 3]), (0.999, [14.4, 6, 3])],
)
def test_thresholds_of_the_targets_that_people_use(target: float, thresholds: list[float]) -> None:
    assert [one.threshold for one in burn_alerts(target)] == pytest.approx(thresholds)
    assert [(one.severity, one.long_window, one.short_window) for one in burn_alerts(target)] == [
        ("page", "1h", "5m"),
        ("page", "6h", "30m"),
        ("ticket", "1d", "2h"),
    ]


@given(st.floats(0.001, 0.999999))
def test_no_threshold_is_out_of_reach(target: float) -> None:
    found = [one.threshold for one in burn_alerts(target)]
    assert all(1 <= threshold < max_burn_rate(target) for threshold in found)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("target", [0.0, 1.0, -0.5, 90.0, float("nan")])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        burn_alerts(target)
