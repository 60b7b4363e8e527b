"""One text of metrics for all processes."""

from __future__ import annotations

from prometheus_client import generate_latest

from services.gateway.fronts.merged_metrics import CountSums, MergedRegistry, count_samples
from services.gateway.metrics.prometheus import GatewayMetrics


def lines_of(registry: MergedRegistry, name: str) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if line.startswith(name)]


def test_counters_and_histograms_are_sums_and_gauges_are_not() -> None:
    relay, front = GatewayMetrics(), GatewayMetrics()
    relay.http.labels("/status", "200").inc(3)
    for _ in range(2):
        front.http.labels("/status", "200").inc()
        front.http.labels("/v1/completions", "429").inc()
        front.observe_gap("toy", 0.004, 1)
    relay.observe_gap("toy", 0.004, 1)
    relay.queued.set(5)
    front.queued.set(7)
    front.open.set(4)
    sums = CountSums()
    for _ in range(2):
        sums.add(count_samples(front.registry))
    merged = MergedRegistry(relay.registry, sums, 4)
    assert lines_of(merged, "diptych:http_requests_total") == [
        'diptych:http_requests_total{route="/status",status="200"} 7.0',
        'diptych:http_requests_total{route="/v1/completions",status="429"} 4.0',
    ]
    assert lines_of(merged, "vllm:inter_token_latency_seconds_count") == [
        'vllm:inter_token_latency_seconds_count{model_name="toy"} 5.0'
    ]
    assert lines_of(merged, "diptych:queued_requests") == ["diptych:queued_requests 5.0"]
    assert lines_of(merged, "diptych:open_requests") == ["diptych:open_requests 4.0"]
    names = [line.rpartition(" ")[0] for line in generate_latest(merged).decode().splitlines()]
    assert len(names) == len(set(names)), "every series is there once"


def test_a_copy_of_sums_is_added_to_by_itself() -> None:
    front = GatewayMetrics()
    front.cancelled.inc()
    sums = CountSums()
    sums.add(count_samples(front.registry))
    copied = sums.copy()
    copied.add(count_samples(front.registry))
    assert list(sums.of_metric("diptych:requests_cancelled").values()) == [1.0]
    assert list(copied.of_metric("diptych:requests_cancelled").values()) == [2.0]
