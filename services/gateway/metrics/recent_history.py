"""The last 15 minutes of the service in buckets of equal length: SLOs met, latencies, requests, and the queue.

`/status` has it for the operators' page, which shows recent attainment without a Prometheus server. Memory is bounded:
a bucket holds numbers only, and buckets that are too old are dropped. Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.outcomes import BOTH, EndedSequence, Ending, Outcome, OutcomeSink

BUCKET_S = 15.0
NUM_BUCKETS = 60
# The last five minutes are reported beside the whole history.
SHORT_BUCKETS = 20
OBJECTIVES = ("ttft", "tpot", BOTH)
# "left" are sequences whose client left after an SLO had been missed; "not_counted" neither met nor missed their SLOs.
OUTCOMES = ("answered", "failed", "refused", "left", "not_counted")
LATENCIES = ("ttft", "tpot")
# Latencies are counted by powers of this number, so a quantile is at most 5 % too high.
LATENCY_STEP = 1.05
# Below this many seconds, and above an hour, latencies are not told apart.
MIN_LATENCY_S, MAX_LATENCY_S = 1e-5, 3600.0


@dataclass(slots=True)
class HistoryBucket:
    """What happened in one bucket. `requests` and `met` are by objective; `num_ended` is by outcome.

    `latencies` counts answers by the power of `LATENCY_STEP` that their latency in seconds does not exceed.
    """

    index: int
    latencies: dict[str, Counter[int]] = field(
        default_factory=lambda: {name: Counter() for name in LATENCIES}
    )
    requests: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    num_ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    # The most sequences that waited in the gateway, and the longest predicted wait in seconds.
    queued: int = 0
    wait_s: float = 0.0


def burn_rate(attainment: float | None, target: float) -> float | None:
    """How many times as fast as allowed the error budget is spent: the missed share over the allowed share.

    None without requests, and for a target of 1, which allows no miss.
    """
    return None if attainment is None or target >= 1.0 else (1.0 - attainment) / (1.0 - target)


class RecentHistory(OutcomeSink):
    """Counts requests and samples the queue. All times are seconds on one monotonic clock."""

    def __init__(self, bucket_s: float = BUCKET_S, num_buckets: int = NUM_BUCKETS) -> None:
        self._bucket_s, self._num_buckets = bucket_s, num_buckets
        self._buckets: deque[HistoryBucket] = deque(maxlen=num_buckets)

    def on_ended(self, ended: EndedSequence) -> None:
        """Count a sequence that has ended, or a request that was refused before it became sequences."""
        if ended.checked.slos:
            self.count_slo(ended.now_s, ended.checked.slos)
        record, tokens = ended.record, 0
        if record is not None and ended.ending is Ending.ANSWERED:
            tokens = record.tokens
            self.record_latencies(ended.now_s, record.ttft_s, record.tpot_s)
        self.count_ended(ended.now_s, _name_end(ended), tokens)

    def count_slo(self, now_s: float, met: Mapping[str, bool]) -> None:
        """Count one request: whether it met each objective that is set."""
        bucket = self._bucket_at(now_s)
        bucket.requests.update(met.keys())
        bucket.met.update(name for name, is_met in met.items() if is_met)

    def count_ended(self, now_s: float, outcome: str, tokens: int = 0) -> None:
        """Count the end of one request, as one of `OUTCOMES`, with the tokens of its answer."""
        bucket = self._bucket_at(now_s)
        bucket.num_ended[outcome] += 1
        bucket.tokens += tokens

    def record_latencies(self, now_s: float, ttft_s: float | None, tpot_s: float | None) -> None:
        """Record the latencies of one complete answer, in seconds; None for one that it does not have."""
        bucket = self._bucket_at(now_s)
        for name, seconds in zip(LATENCIES, (ttft_s, tpot_s), strict=True):
            if seconds is not None:
                bounded = min(MAX_LATENCY_S, max(MIN_LATENCY_S, seconds))
                bucket.latencies[name][math.ceil(math.log(bounded, LATENCY_STEP))] += 1

    def sample_queue(self, now_s: float, queued: int, wait_s: float) -> None:
        """Record how many sequences wait, and the predicted wait of a new request; a bucket keeps the maxima."""
        bucket = self._bucket_at(now_s)
        bucket.queued, bucket.wait_s = max(bucket.queued, queued), max(bucket.wait_s, wait_s)

    def report(self, now_s: float, target: float) -> dict[str, Any]:
        """The history as JSON values: totals by objective, and lists by bucket, the oldest first.

        `target` is the share of requests that must meet the SLOs. The last bucket is the present one, which has not
        ended. A bucket in which nothing was recorded is 0.
        """
        last = self._index_at(now_s)
        known = {bucket.index: bucket for bucket in self._buckets}
        shown = [
            known.get(index) or HistoryBucket(index)
            for index in range(last - self._num_buckets + 1, last + 1)
        ]
        return {
            "bucket_s": self._bucket_s,
            "target": target,
            "objectives": {
                name: {
                    "recent": _attainment(shown[-SHORT_BUCKETS:], name, target),
                    "whole": _attainment(shown, name, target),
                    "requests": [bucket.requests[name] for bucket in shown],
                    "met": [bucket.met[name] for bucket in shown],
                }
                for name in OBJECTIVES
                if any(bucket.requests[name] for bucket in shown)
            },
            "latencies": {
                name: {
                    "recent": _latency([bucket.latencies[name] for bucket in shown[-SHORT_BUCKETS:]]),
                    "whole": _latency([bucket.latencies[name] for bucket in shown]),
                    "p50_s": [_quantile(bucket.latencies[name], 0.5) for bucket in shown],
                }
                for name in LATENCIES
                if any(bucket.latencies[name] for bucket in shown)
            },
            **{outcome: [bucket.num_ended[outcome] for bucket in shown] for outcome in OUTCOMES},
            "tokens": [bucket.tokens for bucket in shown],
            "queued": [bucket.queued for bucket in shown],
            "predicted_wait_s": [round(bucket.wait_s, 3) for bucket in shown],
        }

    def _index_at(self, now_s: float) -> int:
        """The number of the bucket that holds this time."""
        return int(now_s // self._bucket_s)

    def _bucket_at(self, now_s: float) -> HistoryBucket:
        """The present bucket. A clock that went back counts in the latest one."""
        index = self._index_at(now_s)
        if not self._buckets or self._buckets[-1].index < index:
            self._buckets.append(HistoryBucket(index))
        return self._buckets[-1]


def _name_end(ended: EndedSequence) -> str:
    """The one of `OUTCOMES` that an end counts as."""
    if ended.checked.outcome is Outcome.NOT_COUNTED:
        return "not_counted"
    if ended.ending is Ending.ANSWERED:
        return "answered"
    if ended.is_refused:
        return "refused"
    return "failed" if ended.ending is Ending.FAILED else "left"


def _attainment(buckets: Iterable[HistoryBucket], name: str, target: float) -> dict[str, Any]:
    """Requests, attainment and burn rate of an objective over some buckets."""
    every = list(buckets)
    requests = sum(bucket.requests[name] for bucket in every)
    attainment = sum(bucket.met[name] for bucket in every) / requests if requests else None
    burn = burn_rate(attainment, target)
    return {
        "requests": requests,
        "attainment": None if attainment is None else round(attainment, 6),
        "burn": None if burn is None else round(burn, 4),
    }


def _latency(counts: Iterable[Counter[int]]) -> dict[str, Any]:
    """The number of answers with a latency, its median and its 90th percentile in seconds, over some buckets."""
    every = sum(counts, Counter[int]())
    return {"answers": every.total(), "p50_s": _quantile(every, 0.5), "p90_s": _quantile(every, 0.9)}


def _quantile(counts: Counter[int], share: float) -> float | None:
    """The latency in seconds that this share of the answers does not exceed; None without answers."""
    rank = math.ceil(share * counts.total())
    for power in sorted(counts):
        rank -= counts[power]
        if rank <= 0:
            return float(f"{LATENCY_STEP**power:.4g}")
    return None
