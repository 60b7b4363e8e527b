"""The arithmetic of benchmarks/prefix_serving.py."""

from __future__ import annotations

import pytest

from benchmarks.prefix_serving import Seen, compare, held, summary


def seen(scale: float, slabs: float = 100.0) -> Seen:
    return Seen(
        ttft_s=[0.1 * scale, 0.2 * scale, 0.9 * scale],
        tpot_s=[0.01 * scale] * 3,
        lone_ttft_s=0.05 * scale,
        busy_s=2.0 * scale,
        tokens=300,
        slabs=slabs,
        running=4.0 * scale,
    )


def test_ratios_are_medians_of_each_rounds_own_ratio() -> None:
    """A machine that was slow for one round was slow for both sides of it."""
    ratios = compare([seen(0.5), seen(5.0), seen(1.0)], [seen(1.0), seen(10.0), seen(1.0)])
    assert ratios == {
        "ttft_ratio": 0.5, "ttft_last_ratio": 0.5, "lone_ttft_ratio": 0.5, "throughput_ratio": 2.0,
        "tpot_ratio": 0.5, "kv_ratio": 2.0,
    }  # fmt: skip


def test_slabs_are_compared_per_stream() -> None:
    """Twice the slabs for four times the streams are half the memory."""
    assert compare([seen(4.0, slabs=200.0)], [seen(1.0, slabs=100.0)])["kv_ratio"] == 0.5


def test_only_samples_at_which_a_stream_ran_count() -> None:
    stamps = [[1.0, 2.0, 3.0], [2.5, 6.0]]
    assert held([(0.5, 90), (1.0, 10), (2.0, 20), (2.7, 60), (5.0, 30), (7.0, 99)], stamps) == (30.0, 1.25)
    with pytest.raises(RuntimeError, match="longer answers"):
        held([(0.5, 1)], stamps)


def test_a_summary_is_in_milliseconds_and_tokens_per_second() -> None:
    assert summary([seen(1.0), seen(1.0), seen(30.0)]) == pytest.approx({
        "ttft_ms": 200.0, "ttft_last_ms": 900.0, "lone_ttft_ms": 50.0, "tpot_ms": 10.0,
        "tokens_per_s": 150.0, "slabs_per_stream": 25.0, "running": 4.0,
    })  # fmt: skip
