"""The numbers are those of the requests that made them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import WorkerStats
from diptych.slo import Slo
from diptych.specs import GatewaySpec
from router.requests.relay import ATTEMPT_MESSAGES, Relay
from services.gateway.metrics.buckets import bucket_bounds_s
from services.gateway.metrics.prometheus import (
    HANDOFF_STAGES,
    TTFT_STAGES,
    GatewayMetrics,
    ttft_breakdown,
)
from services.gateway.metrics.telemetry import RelayTelemetry
from services.gateway.metrics.traffic_feed import TrafficFeed
from services.gateway.metrics.workers import LinkSpeed, WorkerSnapshot
from services.gateway.ops.readiness import CanaryProber
from services.gateway.ops.replan_endpoint import ReplanRoute
from services.gateway.outcomes import Ending, RequestOutcomes, SequenceRecord
from services.gateway.process_parts import make_exporter
from services.replan.roster import FLIP, START, STOP
from tests.support.metric_values import values

seconds = st.floats(0, 100, allow_nan=False)


def record(**changes: float) -> SequenceRecord:
    life = SequenceRecord(
        "toy",
        10,
        arrived_s=1.0,
        first_token_s=1.2,
        first_written_s=1.25,
        last_token_s=2.2,
        ended_s=2.3,
        tokens=11,
    )
    life.stages = {"admission": 0.01, "prefill_queue": 0.09, "prefill": 0.1}
    for name, value in changes.items():
        setattr(life, name, value)
    return life


def failed(reason: str) -> RequestFailure:
    return RequestFailure(FailureReason(reason), "as the test says")


@given(st.dictionaries(st.sampled_from((*TTFT_STAGES[:-1], *HANDOFF_STAGES)), seconds), seconds)
def test_the_stages_of_a_request_sum_to_its_time_to_first_token(
    stages: dict[str, float], writing_s: float
) -> None:
    whole = sum(stages.values()) + writing_s
    parts = ttft_breakdown(record(arrived_s=0.0, first_written_s=whole, stages=stages))  # type: ignore[arg-type]
    # Those of the hand-off are there if a decode worker drew the token.
    assert set(parts) == {*TTFT_STAGES, *stages} and tuple(parts)[-1] == "write"
    assert sum(parts.values()) == pytest.approx(whole, abs=1e-9)
    assert parts["write"] == pytest.approx(writing_s, abs=1e-9)


def test_the_exposed_sums_agree_too() -> None:
    metrics = GatewayMetrics()
    for i in range(5):
        metrics.on_first_token(record(first_written_s=1.25 + i))
    found = values(metrics)
    stages = sum(value for name, value in found.items() if name.startswith("diptych:ttft_stage_seconds_sum"))
    assert stages == pytest.approx(found["vllm:time_to_first_token_seconds_sum{model_name=toy}"])


def test_a_step_with_several_tokens_counts_each() -> None:
    metrics = GatewayMetrics()
    metrics.observe_gap("toy", 0.03, 3)
    found = values(metrics)
    assert found["vllm:inter_token_latency_seconds_count{model_name=toy}"] == 3
    assert found["vllm:inter_token_latency_seconds_sum{model_name=toy}"] == pytest.approx(0.03)
    assert found["vllm:inter_token_latency_seconds_bucket{le=0.01,model_name=toy}"] == 3


def test_objectives_are_exact_buckets() -> None:
    assert bucket_bounds_s((1, 2, 50), 0.0375, None, 0.05) == [0.001, 0.002, 0.0375, 0.05]
    metrics = GatewayMetrics(Slo(ttft_s=0.333, tpot_s=0.0444))
    metrics.on_first_token(record())
    metrics.observe_gap("toy", 0.01, 1)
    assert "vllm:time_to_first_token_seconds_bucket{le=0.333,model_name=toy}" in values(metrics)
    assert "vllm:inter_token_latency_seconds_bucket{le=0.0444,model_name=toy}" in values(metrics)


def test_attainment_and_goodput() -> None:
    metrics = GatewayMetrics(slo := Slo(ttft_s=0.3, tpot_s=0.2))
    outcomes = RequestOutcomes(slo, [metrics])
    outcomes.end_sequence(record(), Ending.ANSWERED)  # within both: 0.25 s, and 1 s for 10 tokens
    outcomes.end_sequence(record(first_written_s=1.31), Ending.ANSWERED)  # first token too late
    outcomes.end_sequence(record(last_token_s=3.3), Ending.ANSWERED)  # tokens too slow
    outcomes.end_sequence(record(), Ending.FAILED, failed("worker_lost"))
    found = values(metrics)
    assert found["diptych:slo_attainment{objective=ttft}"] == 0.5
    assert found["diptych:slo_attainment{objective=tpot}"] == 0.5
    assert found["diptych:slo_attainment{objective=all}"] == 0.25
    assert found["diptych:goodput_requests_total{}"] == 1
    assert found["diptych:goodput_tokens_total{}"] == 11
    assert found["vllm:generation_tokens_total{model_name=toy}"] == 33


def test_without_objectives_no_sequence_is_checked() -> None:
    metrics = GatewayMetrics()
    RequestOutcomes(None, [metrics]).end_sequence(record(), Ending.ANSWERED)
    found = values(metrics)
    assert not [
        name for name in found if name.startswith(("diptych:slo_attainment{", "diptych:slo_outcomes"))
    ]
    assert found["diptych:goodput_requests_total{}"] == 1


def test_cached_prefixes_are_not_in_use_and_hits_are_counted_in_tokens() -> None:
    metrics = GatewayMetrics()
    stats = WorkerStats(
        slabs_total=8, slabs_used=2, slabs_cached=5, prefix_queries=1000, prefix_hits=640,
        preemptions={"recompute": 3, "park": 1}, step_parts={"run": 0.5, "sample": 0.25}, seat_pauses=7,
        segment_slabs={"found": 8, "pulled": 2},
    )  # fmt: skip
    metrics.watch_workers(lambda: [WorkerSnapshot("decode-0", "decode", stats)], list, "toy")
    found = values(metrics)
    engine, worker = "{engine=decode-0,model_name=toy}", "role=decode,worker=decode-0"
    assert found[f"vllm:kv_cache_usage_perc{engine}"] == 0.25
    assert found[f"diptych:kv_slabs_cached{{{worker}}}"] == 5
    assert found[f"vllm:prefix_cache_queries_total{engine}"] == 1000
    assert found[f"vllm:prefix_cache_hits_total{engine}"] == 640
    assert found[f"vllm:num_preemptions_total{engine}"] == 4
    assert found["diptych:preemptions_total{role=decode,way=park,worker=decode-0}"] == 1
    assert found[f"diptych:step_seconds_total{{part=run,{worker}}}"] == 0.5
    assert found[f"diptych:seat_pauses_total{{{worker}}}"] == 7
    assert found[f"diptych:kv_segment_slabs_total{{outcome=found,{worker}}}"] == 8


def test_transfer_buffers_are_shown_of_workers_that_have_one() -> None:
    metrics = GatewayMetrics()
    stats = WorkerStats(
        buffer_slabs=32, buffer_used=9, buffer_leased=4, buffer_cached=7, copies_in_flight=2, offers_waiting=3
    )
    workers = [
        WorkerSnapshot("prefill-0", "prefill", stats, device="NVIDIA H200"),
        WorkerSnapshot("decode-0", "decode", WorkerStats()),
    ]
    metrics.watch_workers(lambda: workers, list, "toy")
    found = values(metrics)
    assert found["diptych:worker_device_info{device=NVIDIA H200,role=prefill,worker=prefill-0}"] == 1
    shown = {"buffer_slabs": 32, "buffer_slabs_used": 9, "buffer_slabs_leased": 4, "buffer_slabs_cached": 7}
    for name, value in (shown | {"device_copies": 2, "offers_waiting": 3}).items():
        assert found[f"diptych:{name}{{role=prefill,worker=prefill-0}}"] == value
        assert f"diptych:{name}{{role=decode,worker=decode-0}}" not in found
    del workers[0]
    assert not [name for name in values(metrics) if "buffer" in name or "device" in name]


def test_workers_appear_while_they_are_there() -> None:
    metrics, books = (
        GatewayMetrics(),
        [
            WorkerSnapshot(
                "prefill-0",
                "prefill",
                WorkerStats(slabs_total=8, slabs_used=2, leases=1, running=3),
                {"nuq4-1%.g128@0123456789abcdef": (8, 55296)},
            )
        ],
    )
    metrics.watch_workers(
        lambda: books, lambda: [LinkSpeed("prefill-0", "decode-0", "shm", 9.5, 20.0)], "toy"
    )
    found = values(metrics)
    assert found["vllm:kv_cache_usage_perc{engine=prefill-0,model_name=toy}"] == 0.25
    assert found["vllm:num_requests_running{engine=prefill-0,model_name=toy}"] == 3
    assert found["diptych:leases{role=prefill,worker=prefill-0}"] == 1
    kv_class = "{kv_class=nuq4-1%.g128@0123456789abcdef,role=prefill,worker=prefill-0}"
    assert found[f"diptych:kv_class_slabs{kv_class}"] == 8
    assert found[f"diptych:kv_class_chunk_bytes{kv_class}"] == 55296
    assert found[f"diptych:kv_class_slabs_used{kv_class}"] == 2, "its only class has all of them"
    assert found["diptych:link_gb_per_s{source=prefill-0,target=decode-0,transport=shm}"] == 9.5
    books.clear()
    assert not [name for name in values(metrics) if "worker=" in name]


def test_what_is_refused_was_offered_and_met_nothing() -> None:
    metrics = GatewayMetrics(slo := Slo(ttft_s=0.3, attainment=0.95))
    outcomes = RequestOutcomes(slo, [metrics])
    outcomes.add_arrival(answered := record())
    outcomes.end_sequence(answered, Ending.ANSWERED)
    outcomes.end_sequence(None, Ending.FAILED, failed("queue_full"))
    found = values(metrics)
    assert found["diptych:offered_requests_total{}"] == 2
    assert found["diptych:refused_requests_total{code=queue_full}"] == 1
    assert found["diptych:slo_requests_total{met=false,objective=all}"] == 1
    targets = {name: value for name, value in found.items() if name.startswith("diptych:slo_target_ratio{")}
    assert targets == {
        "diptych:slo_target_ratio{objective=all}": 0.95,
        "diptych:slo_target_ratio{objective=ttft}": 0.95,
    }


def test_what_may_never_happen_is_counted_from_0_on() -> None:
    """Else Prometheus would not see the first of them: what a series begins with is no increase."""
    metrics = GatewayMetrics()
    assert not [
        name for name in values(metrics) if name.startswith(("diptych:traces_", "diptych:replan_act"))
    ]
    spec = SimpleNamespace(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    exporter = make_exporter(cast(GatewaySpec, spec), metrics)
    assert exporter is not None
    exporter.close()
    ReplanRoute(TrafficFeed(), cast(CanaryProber, None), metrics)
    RelayTelemetry(Relay(split=True), metrics, None)
    found = values(metrics)
    for kind in ATTEMPT_MESSAGES:
        assert found[f"diptych:gateway_late_messages_total{{kind={kind.__name__}}}"] == 0
    for outcome in ("sent", "dropped", "failed"):
        assert found[f"diptych:traces_total{{outcome={outcome}}}"] == 0
    for action in (FLIP, START, STOP):
        assert found[f"diptych:replan_actions_total{{action={action},outcome=done}}"] == 0


def test_without_objectives_there_is_no_target() -> None:
    assert not [name for name in values(GatewayMetrics()) if name.startswith("diptych:slo_target_ratio")]


def test_the_names_that_dashboards_of_vllm_ask_for() -> None:
    metrics = GatewayMetrics()
    stats = WorkerStats(slabs_total=8, waiting=5, deferred=3, step_tokens=40, step_sizes=[4, 3, 0, 1])
    worker = WorkerSnapshot("decode-0", "decode", stats, {"raw": (8, 4096)})
    metrics.watch_workers(lambda: [worker], list, "toy")
    found = values(metrics)
    reason = "vllm:num_requests_waiting_by_reason{engine=decode-0,model_name=toy,reason="
    assert (found[f"{reason}deferred}}"], found[f"{reason}capacity}}"]) == (3, 2)
    (cache,) = [name for name in found if name.startswith("vllm:cache_config_info")]
    assert "block_size=64" in cache and "num_gpu_blocks=8" in cache and "cache_dtype=raw" in cache
    sizes = {
        bound: found[f"vllm:iteration_tokens_total_bucket{{engine=decode-0,le={bound},model_name=toy}}"]
        for bound in ("1.0", "8.0", "16.0", "32.0", "16384.0", "+Inf")
    }
    assert sizes == {"1.0": 4, "8.0": 7, "16.0": 7, "32.0": 8, "16384.0": 8, "+Inf": 8}
    assert found["vllm:iteration_tokens_total_sum{engine=decode-0,model_name=toy}"] == 40


@pytest.mark.parametrize("counts", [[], [1] * 50])
def test_a_worker_s_counts_cannot_break_the_page(counts: list[int]) -> None:
    metrics = GatewayMetrics()
    worker = WorkerSnapshot("decode-0", "decode", WorkerStats(step_sizes=counts))
    metrics.watch_workers(lambda: [worker], list, "toy")
    assert values(metrics)


def test_only_nixl_s_hand_offs_have_vllm_s_names() -> None:
    metrics = GatewayMetrics()
    metrics.nixl.observe_transfer("shm", 0.5, 4096)
    metrics.nixl.observe_transfer("nixl", 0.004, 4096)
    found = values(metrics)
    assert found["vllm:nixl_xfer_time_seconds_count{}"] == 1
    assert found["vllm:nixl_bytes_transferred_sum{}"] == 4096


def test_slabs_are_counted_by_class() -> None:
    metrics = GatewayMetrics()
    stats = WorkerStats(
        slabs_total=40,
        slabs_used=5,
        slabs_cached=9,
        class_slabs_used={"raw": 3, "tq4.s0": 2},
        class_slabs_cached={"raw": 9, "tq4.s0": 0},
    )
    worker = WorkerSnapshot("decode-0", "decode", stats, {"raw": (8, 4096), "tq4.s0": (32, 576)})
    metrics.watch_workers(lambda: [worker], list, "toy")
    found = values(metrics)
    for kv_class, slabs, used, cached in (("raw", 8, 3, 9), ("tq4.s0", 32, 2, 0)):
        label = f"{{kv_class={kv_class},role=decode,worker=decode-0}}"
        assert found[f"diptych:kv_class_slabs{label}"] == slabs
        assert found[f"diptych:kv_class_slabs_used{label}"] == used
        assert found[f"diptych:kv_class_slabs_cached{label}"] == cached
