"""Collects the metrics of workers, and of the links between them, whenever `/metrics` is requested.

docs/metrics.md has names, labels and meanings. A worker that is gone has no metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.chunks import CHUNK_TOKENS
from diptych.messages import STEP_SIZE_BOUNDS, WorkerStats

# Names that a counter has from 0 on: what a series begins with is no increase to Prometheus.
ALWAYS_NAMED = {"preemptions": ("park", "recompute")}
# Labels of `vllm:cache_config_info` that stock dashboards read. A block is a slab, and a dtype is a KV class.
CACHE_LABELS = (
    "model_name", "engine", "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching",
)  # fmt: skip


class ClassUse(NamedTuple):
    """A worker's pool for one KV class: its slabs, those that requests hold, and those of cached prefixes without a
    holder.
    """

    slabs: int
    used: int
    cached: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The latest statistics that a worker sent, and the KV classes of its `Hello`."""

    worker: str
    role: str
    stats: WorkerStats
    # KV class -> number of slabs, bytes of a chunk.
    kv_classes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # The name of its device.
    device: str = "cpu"

    @property
    def class_use(self) -> dict[str, ClassUse]:
        """The room in each class, and what takes it."""
        stats, alone = self.stats, len(self.kv_classes) == 1
        return {
            name: ClassUse(
                num_slabs,
                stats.slabs_used if alone else stats.class_slabs_used.get(name, 0),
                stats.slabs_cached if alone else stats.class_slabs_cached.get(name, 0),
                chunk_bytes,
            )
            for name, (num_slabs, chunk_bytes) in self.kv_classes.items()
        }


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of the link from prefill worker `source` to decode worker `target`, measured when it was opened.

    `moved_bytes` is the KV that this pair of workers has moved since both came up.
    """

    source: str
    target: str
    transport: str
    gb_per_s: float
    latency_us: float
    moved_bytes: int = 0


class WorkerCollector(Collector):
    """A Prometheus collector that converts the workers' latest statistics to gauges and counters."""

    def __init__(
        self,
        snapshots: Callable[[], Iterable[WorkerSnapshot]],
        links: Callable[[], Iterable[LinkSpeed]],
        model: str,
        prefix_caching: bool = True,
    ) -> None:
        """`model` is the served name. `prefix_caching` says whether workers cache prefixes."""
        self._snapshots, self._links, self._model = snapshots, links, model
        self._prefix_caching = prefix_caching

    GAUGES = (
        ("diptych:kv_slabs", "Slabs (64 tokens) of the KV pool", "slabs_total"),
        ("diptych:kv_slabs_used", "Slabs that requests hold; shared ones count once", "slabs_used"),
        (
            "diptych:kv_slabs_cached",
            "Slabs of cached prefixes that no request holds: evicted when needed",
            "slabs_cached",
        ),
        (
            "diptych:kv_slabs_lent",
            "Slabs that only bulk work holds; not in diptych:kv_slabs_used",
            "slabs_lent",
        ),
        ("diptych:leases", "Requests whose KV waits to be pulled", "leases"),
        ("diptych:staging_bytes", "Bytes of KV being moved to this worker", "staging_bytes"),
        ("diptych:waiting_tokens", "Prompt tokens in the queue", "waiting_tokens"),
        ("diptych:worker_draining", "1 for a worker that takes no new work", "draining"),
        (
            "diptych:worker_stuck_seconds",
            (
                "Seconds since the engine's last progress, above 20 s and 4 times the longest round; it "
                "counts as lost"
            ),
            "stuck_s",
        ),
    )
    # Of workers with a transfer buffer.
    BUFFER_GAUGES = (
        ("diptych:buffer_slabs", "Slabs of the transfer buffer", "buffer_slabs"),
        ("diptych:buffer_slabs_used", "Slabs of the transfer buffer written, read or leased", "buffer_used"),
        ("diptych:buffer_slabs_leased", "Slabs of the transfer buffer that are leased", "buffer_leased"),
        (
            "diptych:buffer_slabs_cached",
            "Slabs of the transfer buffer with chunks that may be offered again",
            "buffer_cached",
        ),
        ("diptych:device_copies", "Slabs being copied to or from the device", "copies_in_flight"),
        ("diptych:offers_waiting", "Prefilled requests that wait for the buffer", "offers_waiting"),
    )
    COUNTERS = (
        ("diptych:late_messages", "Messages about ended attempts, dropped", "late_messages"),
        (
            "diptych:integrity_failures",
            "Hand-offs given up because a KV chunk did not match its digest",
            "integrity_failures",
        ),
        ("diptych:wasted_bytes", "Bytes of KV pulled early, and again after a change", "wasted_bytes"),
        ("diptych:leases_expired", "Leases that ended because they were not renewed", "leases_expired"),
        ("diptych:engine_steps", "Steps of the engine", "steps"),
        ("diptych:engine_step_seconds", "Seconds in steps", "step_seconds"),
        ("diptych:engine_step_tokens", "Tokens computed in steps", "step_tokens"),
        ("diptych:bulk_units", "Units of bulk work, not in steps", "bulk_units"),
        ("diptych:bulk_seconds", "Seconds in units of bulk work", "bulk_seconds"),
        ("diptych:bulk_preemptions", "Bulk sequences that lost their memory", "bulk_preemptions"),
        ("diptych:seat_pauses", "Running sequences paused to give their place to another", "seat_pauses"),
    )

    VLLM_COUNTERS = (
        (
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache, in full chunks",
            "prefix_queries",
        ),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_hits"),
    )
    # Of workers with tiers below the pool; the first two have vLLM's names.
    TIER_COUNTERS = (
        (
            "vllm:external_prefix_cache_queries",
            "Prompt tokens looked up in the tiers, which the pool lacked",
            "tier_queries",
        ),
        ("vllm:external_prefix_cache_hits", "Prompt tokens read back from the tiers", "tier_hits"),
    )
    TIER_GAUGES = (
        ("diptych:kv_tier_capacity_bytes", "Bound of a tier, of all workers of the host", "capacity_bytes"),
        ("diptych:kv_tier_used_bytes", "Bytes in a tier, of all workers of the host", "used_bytes"),
        ("diptych:kv_tier_waiting_chunks", "Chunks that wait to be stored in a tier", "waiting_chunks"),
        ("diptych:kv_tier_paused", "1 while nothing is stored, since a tier failed", "paused"),
        ("diptych:kv_tier_read_bytes_per_second", "How fast a tier is read, measured", "read_bytes_per_s"),
    )
    CHUNK_COUNTERS = (
        ("diptych:kv_tier_stored_chunks", "Chunks that were stored in a tier", "stored_chunks"),
        ("diptych:kv_tier_restored_chunks", "Chunks read back and verified", "restored_chunks"),
        (
            "diptych:kv_tier_dropped_chunks",
            "Chunks not stored: too many waited, or it paused",
            "dropped_chunks",
        ),
        ("diptych:kv_tier_corrupt_chunks", "Stored chunks found damaged, and removed", "corrupt_chunks"),
        ("diptych:kv_tier_failures", "Times that a tier could not be used; each is a miss", "failures"),
    )
    # Of each KV class.
    CLASS_GAUGES = (
        ("diptych:kv_class_slabs", "Slabs of the KV pool by class: a codec's id or raw", "slabs"),
        ("diptych:kv_class_slabs_used", "Slabs that requests hold, by class", "used"),
        (
            "diptych:kv_class_slabs_cached",
            "Slabs of cached prefixes that no request holds, by class",
            "cached",
        ),
        (
            "diptych:kv_class_chunk_bytes",
            "Bytes of 64 tokens of KV, as they are stored and moved",
            "chunk_bytes",
        ),
    )
    # Counters by name: (metric, help text, label that holds the name, attribute of the statistics).
    NAMED = (
        (
            "diptych:preemptions",
            ("Running requests interrupted because memory was full: recompute, park (KV in host memory)"),
            "way",
            "preemptions",
        ),
        (
            "diptych:step_seconds",
            "Seconds in steps: schedule, prepare, run, evict, sample, send",
            "part",
            "step_parts",
        ),
        (
            "diptych:kv_segment_slabs",
            "Slabs with what zap keeps of whole chunks, of sequences decoded here: found, or pulled",
            "outcome",
            "segment_slabs",
        ),
    )

    def describe(self) -> Iterable[Metric]:
        """No metrics in advance, since the collected ones depend on the workers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of all present workers and links."""
        snapshots = list(self._snapshots())
        yield from self._collect_vllm(snapshots)
        yield from self._collect_vllm_details(snapshots)
        up = GaugeMetricFamily("diptych:worker_up", "1 for each worker that is up", labels=["worker", "role"])
        for snapshot in snapshots:
            up.add_metric([snapshot.worker, snapshot.role], 1)
        yield up
        for name, help_text, attribute in self.GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=["worker", "role"])
            for snapshot in snapshots:
                gauge.add_metric([snapshot.worker, snapshot.role], getattr(snapshot.stats, attribute))
            yield gauge
        for name, help_text, attribute in self.COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=["worker", "role"])
            for snapshot in snapshots:
                counter.add_metric([snapshot.worker, snapshot.role], getattr(snapshot.stats, attribute))
            yield counter
        yield from self._collect_by_name(snapshots)
        yield from self._collect_classes(snapshots)
        yield from self._collect_buffers([one for one in snapshots if one.stats.buffer_slabs])
        yield from self._collect_tiers([one for one in snapshots if one.stats.tiers])
        yield from self._collect_links()

    def _collect_classes(self, snapshots: list[WorkerSnapshot]) -> Iterator[Metric]:
        """Which classes of KV each worker has, and the room in each."""
        labels = ["worker", "role", "kv_class"]
        for name, help_text, attribute in self.CLASS_GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=labels)
            for snapshot in snapshots:
                for kv_class, use in snapshot.class_use.items():
                    gauge.add_metric([snapshot.worker, snapshot.role, kv_class], getattr(use, attribute))
            yield gauge

    def _collect_buffers(self, snapshots: list[WorkerSnapshot]) -> Iterator[Metric]:
        """Transfer buffers, of the workers that have one; and on which device these compute."""
        if not snapshots:
            return
        device = GaugeMetricFamily(
            "diptych:worker_device_info",
            "1 for each worker on a GPU; the label is the device",
            labels=["worker", "role", "device"],
        )
        for snapshot in snapshots:
            device.add_metric([snapshot.worker, snapshot.role, snapshot.device], 1)
        yield device
        for name, help_text, attribute in self.BUFFER_GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=["worker", "role"])
            for snapshot in snapshots:
                gauge.add_metric([snapshot.worker, snapshot.role], getattr(snapshot.stats, attribute))
            yield gauge

    def _collect_tiers(self, snapshots: list[WorkerSnapshot]) -> Iterator[Metric]:
        """Tiers below the pool, of the workers that have any."""
        if not snapshots:
            return
        for name, help_text, attribute in self.TIER_COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=["model_name", "engine"])
            for snapshot in snapshots:
                counter.add_metric([self._model, snapshot.worker], getattr(snapshot.stats, attribute))
            yield counter
        labels = ["worker", "role", "tier"]
        for family, rows in (
            (GaugeMetricFamily, self.TIER_GAUGES),
            (CounterMetricFamily, self.CHUNK_COUNTERS),
        ):
            for name, help_text, attribute in rows:
                metric = family(name, help_text, labels=labels)
                for snapshot in snapshots:
                    for tier, stats in snapshot.stats.tiers.items():
                        metric.add_metric([snapshot.worker, snapshot.role, tier], getattr(stats, attribute))
                yield metric

    def _collect_by_name(self, snapshots: list[WorkerSnapshot]) -> Iterator[Metric]:
        """The counters whose values are dictionaries, with the name as a label."""
        for name, help_text, label, attribute in self.NAMED:
            counter = CounterMetricFamily(name, help_text, labels=["worker", "role", label])
            for snapshot in snapshots:
                named = dict.fromkeys(ALWAYS_NAMED.get(attribute, ()), 0) | getattr(snapshot.stats, attribute)
                for key, value in sorted(named.items()):
                    counter.add_metric([snapshot.worker, snapshot.role, key], value)
            yield counter

    def _collect_vllm(self, snapshots: list[WorkerSnapshot]) -> Iterator[Metric]:
        """The metrics with vLLM's names."""
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily(
            "vllm:num_requests_running", "Sequences in prefill or decode", labels=labels
        )
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting", "Sequences queued, or whose KV has not arrived", labels=labels
        )
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the pool that requests hold, 0 to 1", labels=labels
        )
        for snapshot in snapshots:
            row = [self._model, snapshot.worker]
            running.add_metric(row, snapshot.stats.running)
            waiting.add_metric(row, snapshot.stats.waiting)
            usage.add_metric(row, snapshot.stats.slabs_used / max(1, snapshot.stats.slabs_total))
        yield from (running, waiting, usage)
        preempted = CounterMetricFamily(
            "vllm:num_preemptions", "Requests requeued by a full pool", labels=labels
        )
        for snapshot in snapshots:
            preempted.add_metric([self._model, snapshot.worker], sum(snapshot.stats.preemptions.values()))
        yield preempted
        for name, help_text, attribute in self.VLLM_COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=labels)
            for snapshot in snapshots:
                counter.add_metric([self._model, snapshot.worker], getattr(snapshot.stats, attribute))
            yield counter

    def _collect_vllm_details(self, snapshots: list[WorkerSnapshot]) -> Iterator[Metric]:
        """What vLLM's own dashboards ask for besides: the cache's size, why sequences wait, how large steps are."""
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "1; the labels are the KV cache, whose blocks are slabs",
            labels=CACHE_LABELS,
        )
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting sequences: deferred (KV has not arrived), capacity",
            labels=["model_name", "engine", "reason"],
        )
        sizes = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed in a step", labels=["model_name", "engine"]
        )
        for snapshot in snapshots:
            row, stats = [self._model, snapshot.worker], snapshot.stats
            blocks, classes = str(stats.slabs_total), ",".join(sorted(snapshot.kv_classes))
            cached = str(self._prefix_caching)
            cache.add_metric([*row, str(CHUNK_TOKENS), blocks, classes, cached], 1)
            reasons.add_metric([*row, "capacity"], max(0, stats.waiting - stats.deferred))
            reasons.add_metric([*row, "deferred"], stats.deferred)
            sizes.add_metric(row, _cumulate_sizes(stats.step_sizes), stats.step_tokens)
        yield from (cache, reasons, sizes)

    def _collect_links(self) -> Iterator[Metric]:
        """Speed and latency of each link, and what was moved over it."""
        labels = ["source", "target", "transport"]
        speed = GaugeMetricFamily(
            "diptych:link_gb_per_s", "A link's bandwidth, measured when it was opened", labels=labels
        )
        latency = GaugeMetricFamily(
            "diptych:link_latency_us", "A link's latency, measured when it was opened", labels=labels
        )
        moved = CounterMetricFamily("diptych:link_bytes", "KV moved by this pair of workers", labels=labels)
        for link in self._links():
            ends = [link.source, link.target, link.transport]
            speed.add_metric(ends, link.gb_per_s)
            latency.add_metric(ends, link.latency_us)
            moved.add_metric(ends, link.moved_bytes)
        yield from (speed, latency, moved)


def _cumulate_sizes(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts of steps by size as a histogram's cumulative buckets. A worker that sends none has none."""
    bounds = [*(str(float(bound)) for bound in STEP_SIZE_BOUNDS), "+Inf"]
    padded = [*counts, *[0] * len(bounds)][: len(bounds)]
    return list(zip(bounds, accumulate(padded), strict=True))
