"""Values of a page of metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from services.gateway.metrics.prometheus import (
    GatewayMetrics,
)


def values(metrics: GatewayMetrics) -> dict[str, float]:
    """Every sample by its name and labels, as in the exposition."""
    found = {}
    for family in text_string_to_metric_families(metrics.render_text().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found
