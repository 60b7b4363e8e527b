"""One `/metrics` for all processes of a gateway: what fronts have counted is added to what the relay's process has.

Counters and histograms are sums. Gauges are those of the relay's process, but for the open requests, which fronts have.
A front that is gone has counted what it had counted: no sum becomes smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from services.gateway.fronts.wire import CountedSample

SUMMED = ("counter", "histogram")
OPEN_REQUESTS = "diptych:open_requests"
# Of the process itself, and when a series began: no sums.
_OF_PROCESS, _BEGUN = ("process_", "python_"), "_created"

Samples = dict[str, list[CountedSample]]
_Key = tuple[str, tuple[tuple[str, str], ...]]


def count_samples(registry: CollectorRegistry) -> Samples:
    """The samples of all counters and histograms of this process that are not 0, by metric."""
    counted: Samples = {}
    for metric in registry.collect():
        if metric.type in SUMMED and not metric.name.startswith(_OF_PROCESS):
            found = [
                CountedSample(one.name, dict(one.labels), one.value)
                for one in metric.samples
                if not one.name.endswith(_BEGUN)
            ]
            if any(one.value for one in found):
                counted[metric.name] = found
    return counted


class CountSums:
    """Sums of the samples of several processes."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[_Key, float]] = {}

    def add(self, samples: Samples) -> None:
        """Add what one process has counted."""
        for metric, counted in samples.items():
            sums = self._sums.setdefault(metric, {})
            for one in counted:
                key = (one.name, tuple(sorted(one.labels.items())))
                sums[key] = sums.get(key, 0.0) + one.value

    def of_metric(self, metric: str) -> dict[_Key, float]:
        """The sums of one metric."""
        return dict(self._sums.get(metric, {}))

    def copy(self) -> CountSums:
        """Sums that can be added to by themselves."""
        copied = CountSums()
        copied._sums = {metric: dict(sums) for metric, sums in self._sums.items()}
        return copied


class MergedRegistry(Collector):
    """The metrics of a registry with sums added to them."""

    def __init__(self, registry: CollectorRegistry, sums: CountSums, num_open: int) -> None:
        self._registry, self._sums, self._num_open = registry, sums, num_open

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        for metric in self._registry.collect():
            if metric.type in SUMMED:
                yield merge_metric(metric, self._sums.of_metric(metric.name))
            elif metric.name == OPEN_REQUESTS:
                yield with_samples(
                    metric, (one._replace(value=one.value + self._num_open) for one in metric.samples)
                )
            else:
                yield metric


def merge_metric(metric: Metric, sums: dict[_Key, float]) -> Metric:
    """The metric with these sums added. Series that it does not have come behind its own."""
    if not sums:
        return metric
    own = [
        one._replace(value=one.value + sums.pop((one.name, tuple(sorted(one.labels.items()))), 0.0))
        for one in metric.samples
    ]
    return with_samples(
        metric, [*own, *(Sample(name, dict(labels), value) for (name, labels), value in sums.items())]
    )


def with_samples(metric: Metric, samples: Iterable[Sample]) -> Metric:
    """The metric with other samples."""
    merged = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    merged.samples = list(samples)
    return merged
