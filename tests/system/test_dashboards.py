"""A real Prometheus scrapes a real deployment: every query of every dashboard and rule parses and finds its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.bench_runs import CHAT, run_bench
from tests.support.dashboard_queries import check_queries, panel_queries, rule_queries
from tests.support.deployment import Served, serve_parts, wait_for
from tests.support.prometheus_server import PrometheusServer, is_installed, scraping

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="prometheus is not installed (Debian's package prometheus)"
)

ANSWERS = 4
# Rows whose panels have data as soon as a few requests were answered; the others need faults, queues or a replanner.
USUAL = ("SLO: ", "What clients see: ", "Where the time goes: Stages", "Pools: ", "Gateway: ")
UNUSUAL = (
    "Preemptions: {{way}}",
    "Prefilled by",
    "Prefix cache hits",
    "KV freed by eviction",
    "Heads by policy",
)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Served]:
    with serve_parts(
        "--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000", "--kv-cache-memory-bytes", "64MiB"
    ) as served:
        yield served


@pytest.fixture(scope="module")
def server(deployment: Served) -> Iterator[PrometheusServer]:
    with scraping(deployment.url.removeprefix("http://"), evaluation="1s") as started:
        yield started


def ask(deployment: Served) -> None:
    with deployment.client() as client:
        client.completions.create(model="tiny", prompt="To be or not to be", max_tokens=8)


def test_every_query_parses_and_finds_its_metrics(deployment: Served, server: PrometheusServer) -> None:
    # Rates need samples before and after: the requests are made between two scrapes.
    wait_for(lambda: server.query("diptych:build_info"))
    for _ in range(ANSWERS):
        ask(deployment)
    count = 'diptych:slo_requests_total{objective="all",met="true"}'
    wait_for(lambda: (server.value(count) or 0) >= ANSWERS)
    queries = panel_queries()
    usual = {what for what in queries if what.startswith(USUAL) and not any(one in what for one in UNUSUAL)}
    assert len(usual) > 40

    def empty() -> list[str]:
        # Rates over 15 s have data for as long as requests come.
        ask(deployment)
        return check_queries(server, deployment.get("/metrics").text, queries, usual).empty

    wait_for(lambda: not empty(), timeout_s=120, explain=empty)
    report = check_queries(server, deployment.get("/metrics").text, queries | rule_queries(0.9))
    assert (report.wrong, report.unknown) == ([], []) and report.total > 120


def test_stages_stack_to_the_mean_and_good_service_alerts_nobody(
    deployment: Served, server: PrometheusServer
) -> None:
    ask(deployment)
    counts = "vllm:time_to_first_token_seconds_count"
    asked = deployment.metric(counts)
    wait_for(lambda: (server.value(f"sum({counts})") or 0) >= asked)
    stages, whole = (
        server.value(f"sum({name})")
        for name in ("diptych:ttft_stage_seconds_sum", "vllm:time_to_first_token_seconds_sum")
    )
    assert stages is not None and stages == pytest.approx(whole, rel=0.01)
    wait_for(lambda: server.query("diptych:slo_burn:rate5m"))
    assert server.value("max(diptych:slo_burn:rate5m)") == 0
    assert not server.firing()


def test_prometheus_stores_the_attainment_that_bench_counts(
    deployment: Served, server: PrometheusServer
) -> None:
    """As `python -m benchmarks.dashboards` compares them."""
    of_all = 'sum(diptych:slo_requests_total{objective="all"})'
    before = server.value(of_all) or 0
    slos = ("--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000")
    figures = asyncio.run(run_bench(deployment.url, *CHAT, "--rate", "20", "--num-requests", "10", *slos))
    assert (figures["requests"], figures["attainment"]) == (10, 1.0)
    wait_for(lambda: (server.value(of_all) or 0) >= before + 10)
    assert server.value('sum(diptych:slo_requests_total{objective="all", met="false"})') == 0
    with pytest.raises(RuntimeError, match="diptych bench failed"):
        asyncio.run(run_bench(deployment.url, "--rate", "0"))


def test_a_query_of_a_metric_that_is_not_there_is_seen(deployment: Served, server: PrometheusServer) -> None:
    wrong = {"a": "rate(vllm:num_preemptions[5m])", "b": "sum by (role (up)", "c": "up"}
    report = check_queries(server, deployment.get("/metrics").text, wrong, wrong)
    assert report.unknown == ["a: vllm:num_preemptions"] and report.empty == ["a"]
    assert len(report.wrong) == 1 and report.wrong[0].startswith("b: ")
