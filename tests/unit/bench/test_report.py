"""Figures: each can be computed again from the rows of `--save`."""

from __future__ import annotations

import math
from array import array

import pytest

from diptych.slo import Slo
from planner.types import Job, JobResult
from services.bench import report
from services.bench.goodput import GoodputEstimate, RateBracket
from services.bench.load_generator import LoadRun, RequestRecord
from services.bench.rate_search import RatePoint

SLO = Slo(0.25, 0.05)


def seen(at_s: float, ttft_s: float, gaps_s: list[float], failed: str = "", output: int = 4) -> RequestRecord:
    tokens = len(gaps_s) + 1
    tpot_s = sum(gaps_s) / len(gaps_s) if gaps_s else 0.0
    served = JobResult(Job(at_s, 10, output), ttft_s, tpot_s, at_s + ttft_s + sum(gaps_s), failed)
    return RequestRecord(served, tokens, 11, array("d", gaps_s), 0.001)


RUN = LoadRun(
    2.0, 0, 5, 0.5,
    [
        seen(0.0, 9.0, [9.0]),  # warm-up
        seen(1.0, 0.1, [0.01, 0.02, 0.03]),
        seen(2.0, 0.2, [0.1, 0.1, 0.1]),
        seen(3.0, 0.3, [0.01]),
        seen(4.0, 0.2, [], output=1),
        seen(5.0, math.inf, [], "429 queue_full"),
    ],
    wall_s=10.0, cpu_s=0.5, num_sent=6, max_open=3, num_expected=5,
)  # fmt: skip


def test_a_point_has_what_was_asked_for_and_what_came() -> None:
    figures = report.point_report(RatePoint(2.0, 2 / 5, 0.1, 0.8, [RUN], False), SLO)
    assert (figures["requests"], figures["answered"], figures["warmup_requests"]) == (5, 4, 1)
    assert figures["errors"] == {"429 queue_full": 1} and figures["short_answers"] == 1
    assert figures["good_per_s"] == pytest.approx(2 / 4.5, abs=1e-4)
    assert figures["ttft_ms"] == {
        "mean": 200.0, "p50": 200.0, "p90": 300.0, "p95": 300.0, "p99": 300.0, "max": 300.0
    }  # fmt: skip
    assert figures["tpot_ms"]["p50"] == 20.0, "an answer of one token has none"
    assert figures["itl_ms"]["max"] == 100.0 and figures["itl_ms"]["p50"] == 30.0
    assert figures["client"]["cpu_share"] == 0.05 and figures["client"]["prompt_length_error"] == 0.1


def test_percentiles_are_values_that_were_seen() -> None:
    ordered = [1.0, 2.0, 3.0, 4.0]
    assert [report.percentile(ordered, p) for p in (0, 25, 26, 50, 99, 100)] == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert math.isnan(report.percentile([], 50))
    assert report.spread_ms([])["p99"] is None


def test_rows_give_the_attainment_again() -> None:
    rows = list(report.request_rows([RUN]))
    counted = [row for row in rows if row["counted"]]
    kept = [
        row for row in counted
        if not row["failed"] and row["ttft_s"] <= SLO.ttft_s and row["tpot_s"] <= SLO.tpot_s
    ]  # fmt: skip
    assert (len(kept), len(counted)) == RUN.count_attained(SLO) == (2, 5)


def test_a_goodput_says_what_it_rests_on() -> None:
    found = RateBracket(5.0, 5.0, 5.5, ((5.0, 0.95), (5.5, 0.8)))
    one = report.goodput_report(GoodputEstimate(5.0, (-math.inf, math.inf), 300, 30, (0,), (5.0,), (found,)))
    assert one == {
        "rate": 5.0, "interval": None, "requests": 300, "warmup_requests": 30, "seeds": [0], "rates": [5.0],
        "brackets": [[5.0, 5.5]],
    }  # fmt: skip
    two = report.goodput_report(GoodputEstimate(5.0, (4.0, 6.0), 300, 30, (0, 1), (4.5, 5.5), (found, found)))
    assert two["interval"] == [4.0, 6.0]


@pytest.mark.parametrize(
    ("trace", "sent", "said"),
    [
        (None, [60, 120], ""),
        (60, [60, 60], ""),
        (2867, [60], "of the trace's 2,867 requests a run sent the first 60, as"),
        (2867, [300, 60], "of the trace's 2,867 requests a run sent the first 60 to 300, as"),
        (300, [300, 60], "of the trace's 300 requests a run sent the first 60 to 300, as"),
    ],
)
def test_what_of_a_trace_was_not_sent_is_reported(trace: int | None, sent: list[int], said: str) -> None:
    fields = {"trace_requests": trace, "points": [{"run_requests": one} for one in sent]}
    assert report.replay_cut_note(fields).startswith(said) and bool(report.replay_cut_note(fields)) == bool(
        said
    )


def test_a_point_says_how_many_requests_a_run_had() -> None:
    assert report.point_report(RatePoint(2.0, 2 / 5, 0.1, 0.8, [RUN], False), SLO)["run_requests"] == 5
