"""Metrics that are read off the workers' books, and off the links between them, whenever somebody asks.

Names, labels and meanings are in docs/metrics.md. A worker that is not there has no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.messages import Stats


@dataclass(frozen=True, slots=True)
class Books:
    """One worker's latest books, for the gauges."""

    worker: str
    role: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What a decode worker measured to a prefill worker."""

    source: str
    target: str
    transport: str
    gb_per_s: float
    latency_us: float


class FleetBooks(Collector):
    """Gauges and counters out of the workers' latest books; a worker that is gone has no series."""

    def __init__(
        self, books: Callable[[], Iterable[Books]], links: Callable[[], Iterable[LinkSpeed]], model: str
    ) -> None:
        self._books, self._links, self._model = books, links, model

    GAUGES = (
        ("diptych:kv_slabs", "Slabs of the KV pool", "slabs_total"),
        ("diptych:kv_slabs_used", "Slabs that requests hold", "slabs_used"),
        ("diptych:kv_slabs_cached", "Slabs of cached prefixes that nobody holds", "slabs_cached"),
        ("diptych:leases", "Requests whose KV waits to be pulled", "leases"),
        ("diptych:staging_bytes", "Bytes of KV on the way", "staging_bytes"),
        ("diptych:waiting_tokens", "Prompt tokens waiting", "waiting_tokens"),
        ("diptych:worker_draining", "1 for one that takes no new work", "draining"),
        ("diptych:worker_stuck_seconds", "Since its engine last moved, if unusual", "stuck_s"),
    )
    COUNTERS = (
        ("diptych:late_messages", "Messages of attempts that had ended", "late_messages"),
        ("diptych:integrity_failures", "Chunks that were not what was offered", "integrity_failures"),
        ("diptych:wasted_bytes", "Bytes of KV pulled ahead in vain", "wasted_bytes"),
        ("diptych:leases_expired", "Leases that nobody renewed", "leases_expired"),
        ("diptych:engine_steps", "Steps of the engine", "steps"),
        ("diptych:engine_step_seconds", "Seconds in steps", "step_seconds"),
        ("diptych:engine_step_tokens", "Tokens computed in steps", "step_tokens"),
    )

    VLLM_COUNTERS = (
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prefix_queries"),
        ("vllm:prefix_cache_hits", "Of these, found there", "prefix_hits"),
    )
    # counted by name: (metric, what it tells, label of the name, attribute)
    NAMED = (
        ("diptych:preemptions", "Running requests put back for want of memory", "way", "preemptions"),
        (
            "diptych:step_seconds",
            "Seconds in steps of the engine by what they went into",
            "part",
            "step_parts",
        ),
    )

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        books = list(self._books())
        yield from self._vllm(books)
        up = GaugeMetricFamily("diptych:worker_up", "Workers present", labels=["worker", "role"])
        for book in books:
            up.add_metric([book.worker, book.role], 1)
        yield up
        for name, told, attribute in self.GAUGES:
            gauge = GaugeMetricFamily(name, told, labels=["worker", "role"])
            for book in books:
                gauge.add_metric([book.worker, book.role], getattr(book.stats, attribute))
            yield gauge
        for name, told, attribute in self.COUNTERS:
            counter = CounterMetricFamily(name, told, labels=["worker", "role"])
            for book in books:
                counter.add_metric([book.worker, book.role], getattr(book.stats, attribute))
            yield counter
        yield from self._named(books)
        yield from self._speeds()

    def _named(self, books: list[Books]) -> Iterator[Metric]:
        for name, told, label, attribute in self.NAMED:
            counter = CounterMetricFamily(name, told, labels=["worker", "role", label])
            for book in books:
                for key, value in sorted(getattr(book.stats, attribute).items()):
                    counter.add_metric([book.worker, book.role, key], value)
            yield counter

    def _vllm(self, books: list[Books]) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests running per worker", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests waiting per worker", labels=labels)
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1", labels=labels
        )
        for book in books:
            row = [self._model, book.worker]
            running.add_metric(row, book.stats.running)
            waiting.add_metric(row, book.stats.waiting)
            usage.add_metric(row, book.stats.slabs_used / max(1, book.stats.slabs_total))
        yield from (running, waiting, usage)
        preempted = CounterMetricFamily("vllm:num_preemptions", "Preempted requests", labels=labels)
        for book in books:
            preempted.add_metric([self._model, book.worker], sum(book.stats.preemptions.values()))
        yield preempted
        for name, told, attribute in self.VLLM_COUNTERS:
            counter = CounterMetricFamily(name, told, labels=labels)
            for book in books:
                counter.add_metric([self._model, book.worker], getattr(book.stats, attribute))
            yield counter

    def _speeds(self) -> Iterator[Metric]:
        labels = ["source", "target", "transport"]
        speed = GaugeMetricFamily("diptych:link_gb_per_s", "Measured when the link was made", labels=labels)
        latency = GaugeMetricFamily(
            "diptych:link_latency_us", "Measured when the link was made", labels=labels
        )
        for link in self._links():
            speed.add_metric([link.source, link.target, link.transport], link.gb_per_s)
            latency.add_metric([link.source, link.target, link.transport], link.latency_us)
        yield from (speed, latency)
