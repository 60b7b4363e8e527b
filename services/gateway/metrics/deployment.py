"""Metrics about the deployment as a whole: how it is built, how many workers it should have, what replanning did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.metrics.buckets import REQUEST_BUCKETS_MS, bucket_bounds_s
from services.gateway.metrics.metric_registry import MetricRegistry
from services.gateway.outcomes import SequenceRecord

POOLED_ROUTES = ("embeddings", "rerank", "score")


class DeploymentCollector(Collector):
    """A Prometheus collector of what may change while the gateway runs: the build's fingerprint, the workers wanted."""

    def __init__(
        self,
        version: str,
        model: str,
        fingerprint: Callable[[], str | None],
        wanted_workers: Callable[[], Mapping[str, int]],
    ) -> None:
        """`fingerprint` returns the model's fingerprint, None until a worker is up. `wanted_workers` is by role."""
        self._version, self._model = version, model
        self._fingerprint, self._wanted_workers = fingerprint, wanted_workers

    def describe(self) -> Iterable[Metric]:
        """No metrics in advance, since the labels depend on the workers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The build, and the workers wanted."""
        build = GaugeMetricFamily(
            "diptych:build_info",
            "1; the labels say what is running",
            labels=["version", "model_name", "fingerprint"],
        )
        build.add_metric([self._version, self._model, self._fingerprint() or ""], 1)
        wanted = GaugeMetricFamily(
            "diptych:wanted_workers", "Workers that should be up, with drained ones", labels=["role"]
        )
        for role, count in self._wanted_workers().items():
            wanted.add_metric([role], count)
        yield from (build, wanted)


class ReplanCounters:
    """Reports of the replanner (`diptych serve --replan`)."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.decisions = registry.counter(
            "diptych:replan_decisions",
            "Reviews: first, shift of traffic, breach of SLOs, review after these, unfinished steps",
            "trigger",
        )
        self.alarms = registry.counter(
            "diptych:replan_alarms", "Detected changes of traffic: rate, prompt, output", "what"
        )
        self.actions = registry.counter(
            "diptych:replan_actions",
            (
                "Changes of the fleet: flip a role, start, stop a worker; done, failed, rolled_back (no "
                "link in the new role), advised (only logged)"
            ),
            "action",
            "outcome",
        )
        self.target = Gauge(
            "diptych:replan_target_workers",
            "Workers in the fleet last decided: prefill, decode, both",
            ["role"],
            registry=registry,
        )
        self.expected = registry.gauge(
            "diptych:replan_expected_attainment", "Expected attainment of the fleet last decided"
        )
        self.dropped = registry.counter(
            "diptych:replan_unheard_events", "Traffic events dropped before the replanner fetched them"
        )


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
