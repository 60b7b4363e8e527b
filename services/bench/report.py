"""What runs say in figures: percentiles, attainment, errors by kind, and how much of it the client may explain.

TTFT is from when a request was due to its first token; TPOT what followed, over the tokens after the first; ITL the
gaps between events with tokens; E2E until the last token. Percentiles are of requests that were answered; the others
are counted by what went wrong, and attain nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from diptych.slo import Slo
from services.bench.goodput import GoodputEstimate
from services.bench.load_generator import LoadRun, RequestRecord
from services.bench.rate_search import RatePoint
from services.bench.server import BenchServer

PERCENTS = (50, 90, 95, 99)
TIMES = ("ttft", "tpot", "itl", "e2e")


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of the sorted values that at least `percent` of 100 do not exceed; nan of none."""
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)] if ordered else math.nan


def spread_ms(values: Iterable[float]) -> dict[str, float | None]:
    """Mean, percentiles and largest of seconds, in milliseconds; None of none."""
    ordered = sorted(values)
    figures = {"mean": sum(ordered) / len(ordered) if ordered else math.nan}
    figures |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTS}
    figures["max"] = ordered[-1] if ordered else math.nan
    return {name: None if math.isnan(value) else round(value * 1e3, 3) for name, value in figures.items()}


def request_times(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """Seconds of the requests that were answered; answers of one token have no TPOT."""
    answered_records = [one for one in records if not one.result.failed]
    return {
        "ttft": [one.result.ttft_s for one in answered_records],
        "tpot": [one.result.tpot_s for one in answered_records if one.tokens > 1],
        "itl": list(chain.from_iterable(one.gaps_s for one in answered_records)),
        "e2e": [one.result.ended_s - one.result.job.at_s for one in answered_records],
    }


def point_report(point: RatePoint, slo: Slo) -> dict[str, Any]:
    """The figures of all runs at one rate."""
    records = [request for run in point.runs for request in run.counted_records]
    answered_records = [request for request in records if not request.result.failed]
    wall_s = sum(run.wall_s for run in point.runs)
    span_s = sum(
        max((r.result.job.at_s for r in run.records), default=0.0) - run.warmup_s for run in point.runs
    )
    goods = sum(request.result.meets_slo(slo) for request in records)
    return {
        "rate": round(point.rate, 6),
        "attainment": _rounded_or_none(point.attainment),
        "attainment_interval": [round(point.low, 5), round(point.high, 5)],
        "given_up": point.hopeless,
        "began_busy": sum(not run.began_idle for run in point.runs),
        "run_requests": max((run.num_jobs for run in point.runs), default=0),
        "requests": len(records),
        "warmup_requests": sum(len(run.records) - len(run.counted_records) for run in point.runs),
        "seeds": sorted({run.seed for run in point.runs}),
        "seconds": round(wall_s, 3),
        "answered": len(answered_records),
        "good_per_s": round(goods / span_s, 4) if span_s > 0 else None,
        "output_tokens_per_s": round(
            sum(r.tokens for run in point.runs for r in run.records) / max(wall_s, 1e-9), 2
        ),
        "errors": dict(Counter(request.result.failed for request in records if request.result.failed)),
        "short_answers": sum(request.tokens < request.result.job.output for request in answered_records),
        **{f"{name}_ms": spread_ms(values) for name, values in request_times(records).items()},
        "client": client_report(point.runs, answered_records),
    }


def client_report(runs: Sequence[LoadRun], answered_records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What the client adds: its share of one core, how late it sent, how far its prompts are from what was wanted."""
    late = spread_ms(one.late_s for run in runs for one in run.records if math.isfinite(one.result.ended_s))
    off = [
        abs(one.prompt - one.result.job.prompt) / one.result.job.prompt
        for one in answered_records
        if one.prompt
    ]
    return {
        "cpu_share": round(sum(run.cpu_s for run in runs) / max(1e-9, sum(run.wall_s for run in runs)), 4),
        "cpu_ms_per_request": _rounded_or_none(
            1e3 * sum(run.cpu_s for run in runs) / max(1, sum(run.num_sent for run in runs))
        ),
        "late_ms": {name: late[name] for name in ("p50", "p99", "max")},
        "most_open": max((run.max_open for run in runs), default=0),
        "prompt_length_error": round(sum(off) / len(off), 5) if off else None,
    }


def full_report(
    server: BenchServer,
    asked: Mapping[str, Any],
    slo: Slo,
    points: Sequence[RatePoint],
    estimate: GoodputEstimate | None,
    trace: int | None = None,
) -> dict[str, Any]:
    """The report, as `--json` prints it. `asked` is how it was called, `trace` the requests of one that is replayed."""
    fields = server.length_fields
    report: dict[str, Any] = {
        "server": server.client.address.url,
        "model": server.model,
        "route": server.route,
        "lengths_forced": fields.ignore_eos,
        "prompts_counted": server.vocabulary.checked,
        **asked,
        "slo": {
            "ttft_ms": _to_milliseconds(slo.ttft_s),
            "tpot_ms": _to_milliseconds(slo.tpot_s),
            "attainment": slo.attainment,
        },
        "trace_requests": trace,
        "points": [point_report(point, slo) for point in points],
    }
    return report | ({"goodput": goodput_report(estimate)} if estimate is not None else {})


def replay_cut_note(full: Mapping[str, Any]) -> str:
    """How much of a replayed trace was sent, by a report; "" where all of it was, or nothing is replayed."""
    every = full["trace_requests"]
    sent = sorted({one["run_requests"] for one in full["points"]})
    if every is None or not sent or sent[0] == every:
        return ""
    first = f"{sent[0]:,}" if len(sent) == 1 else f"{sent[0]:,} to {sent[-1]:,}"
    return f"of the trace's {every:,} requests a run sent the first {first}, as --duration or --num-requests asks"


def goodput_report(estimate: GoodputEstimate) -> dict[str, Any]:
    """The largest rate that meets the SLOs: mean over seeds, its 95 % interval (None of one seed), brackets."""
    bounded = all(math.isfinite(one) for one in estimate.interval)
    return {
        "rate": round(estimate.rate, 6),
        "interval": [round(max(0.0, one), 6) for one in estimate.interval] if bounded else None,
        "requests": estimate.n,
        "warmup_requests": estimate.warmup,
        "seeds": list(estimate.seeds),
        "rates": [round(one, 6) for one in estimate.rates],
        "brackets": [[round(one.low, 6), _rounded_or_none(one.high)] for one in estimate.found],
    }


def request_rows(runs: Iterable[LoadRun]) -> Iterable[dict[str, Any]]:
    """Each request of each run, so that every figure can be computed again."""
    for run in runs:
        for one in run.records:
            job, result = one.result.job, one.result
            yield {
                "rate": run.rate,
                "seed": run.seed,
                "at_s": job.at_s,
                "prompt": job.prompt,
                "output": job.output,
                "counted": job.at_s >= run.warmup_s,
                "prompt_tokens": one.prompt,
                "output_tokens": one.tokens,
                "ttft_s": _finite_or_none(result.ttft_s),
                "tpot_s": _finite_or_none(result.tpot_s),
                "ended_s": _finite_or_none(result.ended_s),
                "late_s": one.late_s,
                "failed": result.failed,
            }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded_or_none(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _to_milliseconds(value_s: float) -> float | None:
    return round(value_s * 1e3, 6) if math.isfinite(value_s) else None
