"""The metric of requests whose prompts were pooled."""

from __future__ import annotations

from services.gateway.metrics.buckets import REQUEST_BUCKETS_MS, bucket_bounds_s
from services.gateway.metrics.metric_registry import MetricRegistry
from services.gateway.outcomes import SequenceRecord

POOLED_ROUTES = ("embeddings", "rerank", "score")


class PooledHistogram:
    """How long requests took whose prompts were pooled, by route."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._seconds = registry.histogram(
            "diptych:pooled_request_seconds",
            "From arrival until vectors or scores were written; their sequences have no TTFT",
            bucket_bounds_s(REQUEST_BUCKETS_MS),
            "route",
        )
        for route in POOLED_ROUTES:
            self._seconds.labels(route)

    def observe_request(self, record: SequenceRecord) -> None:
        """A request is answered; `record` is one of its sequences."""
        self._seconds.labels(record.pooled).observe(record.ended_s - record.arrived_s)
