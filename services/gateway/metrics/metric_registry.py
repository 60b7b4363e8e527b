"""A Prometheus registry that defines metrics, each in a line."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gateway.metrics.buckets import bucket_bounds_s


class MetricRegistry(CollectorRegistry):
    """The metrics that it makes are registered in it."""

    def histogram(
        self, name: str, help_text: str, buckets: Iterable[float], label: str = "model_name"
    ) -> Histogram:
        """A histogram with one label."""
        return Histogram(name, help_text, [label], registry=self, buckets=list(buckets))

    def plain_histogram(self, name: str, help_text: str, buckets_ms: Iterable[float]) -> Histogram:
        """A histogram of seconds without labels; bucket bounds are in milliseconds."""
        return Histogram(name, help_text, registry=self, buckets=bucket_bounds_s(buckets_ms))

    def gauge(self, name: str, help_text: str) -> Gauge:
        """A gauge without labels."""
        return Gauge(name, help_text, registry=self)

    def counter(self, name: str, help_text: str, *labels: str) -> Counter:
        """A counter with any labels."""
        return Counter(name, help_text, labels, registry=self)
