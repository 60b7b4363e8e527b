"""What the gateway counts of bulk work, and that nothing else counts it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from diptych.channel.hub import ChannelHub
from diptych.failure_statuses import RequestFailure
from diptych.messages import Output, Step
from diptych.request import BULK_PRIORITY, Request, SamplingParams, Tenancy
from router.requests.relay import Relay
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.metrics.prometheus import GatewayMetrics
from tests.support.metric_values import values
from tests.unit.gateway.recorded_channel import Channel, until


class BulkSink:
    """Collects what the backend says about one sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end = ""

    def deliver_output(self, output: Output, now_s: float) -> None:
        self.tokens += output.tokens

    def record_effect(self, effect: object, now_s: float) -> None:
        pass

    def record_kv_class(self, kv_class: str, reason: str, details: object) -> None:
        pass

    def finish_sequence(self, reason: str, now_s: float) -> None:
        self.end = reason

    def fail_sequence(self, failure: RequestFailure) -> None:
        self.end = str(failure.code)


def moved(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What has changed, apart from gauges of the process and its clock."""
    names = after.keys() | before.keys()
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
    return {name: change for name, change in changes.items() if change}


def test_bulk_work_is_counted_by_its_own_metrics_alone() -> None:
    metrics, sink, gone = GatewayMetrics(), BulkSink(), BulkSink()
    seen: dict[str, Any] = {}

    async def story() -> None:
        channel = Channel()
        backend = RelayBackend(Relay(), cast(ChannelHub, channel), metrics)
        running = asyncio.create_task(backend.run_tasks())
        await until(lambda: bool(backend.worker_pairs()))
        before = values(metrics)
        for name, one in (("line", sink), ("gone", gone)):
            sampling = SamplingParams(max_tokens=2, seed=1)
            origin = Tenancy("t", "s", BULK_PRIORITY)
            request = Request(name, [1, 2, 3], sampling, backend.clock() + 1e5, tenancy=origin)
            backend.submit_requests([(request, one)])
        seen["open"] = backend.bulk_report
        channel.say("decode-0", Step([Output("line", 0, [70])]))
        channel.say("decode-0", Step([Output("line", 0, [71], finish="length")]))
        await until(lambda: bool(sink.end))
        backend.cancel_request("gone")
        seen["closed"] = backend.bulk_report
        seen["moved"] = moved(before, values(metrics))
        assert not backend.relay.live
        running.cancel()

    asyncio.run(story())
    assert (sink.tokens, sink.end) == ([70, 71], "length")
    assert seen["open"] == {"waiting": 0, "running": 2, "tokens": {"prompt": 0, "generation": 0}}
    assert seen["closed"] == {"waiting": 0, "running": 0, "tokens": {"prompt": 3, "generation": 2}}
    changed = {name: value for name, value in seen["moved"].items() if name.startswith(("diptych:", "vllm:"))}
    # Gauges of the moment, which a tick may or may not have updated.
    changed = {name: value for name, value in changed.items() if "_open" not in name}
    assert changed == {
        "diptych:bulk_sequences_total{outcome=done}": 1,
        "diptych:bulk_sequences_total{outcome=cancelled}": 1,
        "diptych:bulk_tokens_total{kind=prompt}": 3,
        "diptych:bulk_tokens_total{kind=generation}": 2,
    }
