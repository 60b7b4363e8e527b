"""What `benchmarks/kv_links.py` makes of its figures, and the links that it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kv_links import LongEnoughLoad, compare_codecs
from benchmarks.load.shaped_link import link_shape, split_column
from planner.types import Job
from planner.workload.workload import Workload


def cell(goodput: float, request_s: float = 0.6, second_token_s: float = 0.1) -> dict[str, Any]:
    """Figures of a codec on a link; raw's KV of 1,000 tokens has 6 MB."""
    times = {"request_s": request_s, "second_token_s": second_token_s}
    return times | {"goodput": goodput, "cable_bytes_per_token": 6000.0}


def test_goodput_is_compared_on_every_link_and_the_worst_where_the_link_is_free() -> None:
    slow = {"raw": cell(0.2), "fp16": cell(0.5), "nuq4-1%": cell(1.0)}
    fast = {"raw": cell(2.0), "fp16": cell(1.9), "nuq4-1%": cell(1.98)}
    found = compare_codecs({"20": slow, "1000": fast}, tokens=1000)
    assert found["over_raw"] == {"20": {"fp16": 2.5, "nuq4-1%": 5.0}, "1000": {"fp16": 0.95, "nuq4-1%": 0.99}}
    assert found["over_fp16"] == {"20": {"raw": 0.4, "nuq4-1%": 2.0}, "1000": {"raw": 1.05, "nuq4-1%": 1.04}}
    assert found["worst_over_raw"] == 0.95, "at 20 Mbit/s the KV takes 2.4 s, beside a prefill of 0.5 s"


def test_a_codec_that_meets_nothing_has_no_ratio() -> None:
    found = compare_codecs({"20": {"raw": cell(0.0), "nuq4-1%": cell(1.0)}}, tokens=1000)
    assert found == {"over_raw": {}, "over_fp16": {}, "auto_over_best": {}, "worst_over_raw": None}


def test_auto_is_compared_with_the_best_and_is_no_codec() -> None:
    found = compare_codecs({"20": {"raw": cell(0.2), "nuq4-1%": cell(1.0), "auto": cell(0.95)}}, tokens=1000)
    assert (found["auto_over_best"], found["over_raw"]) == ({"20": 0.95}, {"20": {"nuq4-1%": 5.0}})


@pytest.mark.parametrize(
    ("column", "codec", "threshold"),
    [("raw", "raw", 1.0), ("nuq3-1%.keep0.95", "nuq3-1%", 0.95), ("auto", "auto", 1.0)],
)
def test_a_column_may_have_a_threshold_of_eviction(column: str, codec: str, threshold: float) -> None:
    assert split_column(column) == (codec, threshold)
    with pytest.raises(ValueError, match="at most 1"):
        split_column("raw.keep1.5")


def test_runs_are_long_enough() -> None:
    load = LongEnoughLoad(Workload.of([Job(0.0, 1024, 2)]), seconds=25.0, requests=16)
    assert (len(load.make_jobs(0.2, 1)), len(load.make_jobs(4.0, 1))) == (16, 100)
    assert {(job.prompt, job.output) for job in load.make_jobs(4.0, 1)} == {(1024, 2)}


@pytest.mark.parametrize(("mbit", "bits", "burst"), [(20, 20_000_000, 16 << 10), (1000, 10**9, 125_000)])
def test_a_link_passes_a_millisecond_at_once_and_at_least_some_packets(
    mbit: float, bits: int, burst: int
) -> None:
    assert link_shape(mbit) == f"rate {bits}bit burst {burst} latency 50ms"
