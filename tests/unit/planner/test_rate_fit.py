"""Rates of bulk work: fitted from what was measured, and kept in profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diptych.errors import ConfigError
from planner.costs.profile import analytic_profile
from planner.costs.profile_file import load_profile, save_profile
from planner.offload.rate_fit import RatePoints, fit_bulk_rates
from planner.types import LayerTime

FEW, MANY = (1, 4, 16, 64), (64, 128, 512)
EXACT, INT4 = LayerTime(2e-3, 1e-4, 3e-3, 5e-5), LayerTime(1e-3, 2e-4, 2e-3, 1e-4)


def measured(layer: LayerTime, noise: float = 0.0) -> list[tuple[int, float]]:
    """Points of units of decoding rows, of which every second is too long by `noise`."""
    return [(rows, layer.decode_s(rows) * (1 + noise * (number % 2))) for number, rows in enumerate(FEW)]


def prompts(layer: LayerTime) -> list[tuple[int, float]]:
    """Points of units of prompts."""
    return [(rows, layer.prompt_pass_s + rows * layer.prompt_row_s) for rows in MANY]


POINTS = RatePoints(
    threads=2,
    layer_weights=1e6,
    products={"exact": measured(EXACT), "int4": measured(INT4)},
    prompts={"exact": prompts(EXACT), "int4": prompts(INT4)},
    # A batch takes 2e-4 s, and a sequence 3e-5 s.
    steps=[(1, 1, 2.3e-4), (1, 8, 4.4e-4), (8, 8, 1.84e-3), (2, 32, 1.36e-3)],
    # 4e-4 s and 10 GB/s.
    attention=[(1_000_000, 5e-4), (4_000_000, 8e-4), (16_000_000, 2e-3)],
    # 2e-6 s for each root of an operation, and 100 GFLOP/s.
    prompt_attention=[(10**6, 2.01e-3), (10**8, 2.1e-2)],
    logit_row_s=3e-4,
    copies=[(10**9, 0.1)],
    reads=[(10**9, 2.0), (10**9, 4.0), (10**9, 5.0)],
    writes=[(10**9, 8.0)],
    disk_direct=False,
    coded_attention=[(10**9, 1.0)],
    coded_rows=[(100, 1e-3), (300, 3e-3)],
)


def test_the_lines_of_a_layer_are_found_again() -> None:
    points = replace(POINTS, products={kind: some[:] for kind, some in POINTS.products.items()})
    rates, errors = fit_bulk_rates(points)
    layer = rates.exact
    assert (layer.pass_s, layer.row_s) == pytest.approx((EXACT.pass_s, EXACT.row_s))
    assert (layer.prompt_pass_s, layer.prompt_row_s) == pytest.approx(
        (EXACT.prompt_pass_s, EXACT.prompt_row_s)
    )
    assert rates.widen_s == pytest.approx(-1e-3), "widening, less the bytes that are not read"
    # Rates of attention are those with which it grows: what it takes at a short context is in the layer.
    assert (rates.attention, rates.prompt_attention) == pytest.approx((1e10, 1e11))
    assert (rates.end_pass_s, rates.end_row_s) == pytest.approx((2e-4, 3e-5 + 3e-4))
    # Of the disk the measurement in the middle counts.
    assert (rates.disk_read, rates.disk_write) == (2.5e8, 1.25e8)
    assert rates.coded_row_s == pytest.approx(1e-5) and rates.coded_attention == 1e9
    assert not rates.disk_direct and rates.threads == 2
    assert errors["bulk_exact_mean"] < 1e-6 and errors["bulk_disk_read_mean"] > 0


def test_errors_tell_how_far_a_fit_is_off() -> None:
    _, exact = fit_bulk_rates(POINTS)
    _, noisy = fit_bulk_rates(replace(POINTS, products={"exact": measured(EXACT, 0.5)}))
    assert noisy["bulk_exact_mean"] > exact["bulk_exact_mean"] + 0.05
    assert "bulk_int4_mean" not in noisy


def test_without_four_bits_there_are_no_rates_of_them() -> None:
    rates, _ = fit_bulk_rates(
        replace(POINTS, products={"exact": measured(EXACT)}, coded_attention=[], coded_rows=[])
    )
    assert rates.int4 is None and rates.coded_attention is None and rates.widen_s is None
    assert rates.coded_row_s == 0


@pytest.mark.parametrize("products", [{}, {"exact": [(1, 1e-3)]}])
def test_too_few_measurements_are_refused(products: dict[str, list[tuple[int, float]]]) -> None:
    with pytest.raises(ConfigError, match="cannot be fitted"):
        fit_bulk_rates(replace(POINTS, products=products))
    for bare in (replace(POINTS, prompts={}), replace(POINTS, steps=[(1, 1, 1e-3)])):
        with pytest.raises(ConfigError, match="cannot be fitted"):
            fit_bulk_rates(bare)


def test_a_profile_keeps_them(tmp_path: Path) -> None:
    rates, errors = fit_bulk_rates(POINTS)
    bare = analytic_profile("embedded", "cpu")
    save_profile(replace(bare, bulk=rates, fit_error=errors), tmp_path / "p.json")
    found = load_profile(tmp_path / "p.json")
    assert found.bulk == rates and found.fit_error == errors
    save_profile(bare, tmp_path / "q.json")
    assert load_profile(tmp_path / "q.json").bulk is None
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace('"disk_direct"', '"disk_fast"'))
    with pytest.raises(ConfigError) as caught:
        load_profile(tmp_path / "p.json")
    assert "bulk.disk_fast" in caught.value.why
