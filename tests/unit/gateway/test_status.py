"""What /status says: sums of statistics, the plan, the last errors; and what it costs with many workers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from diptych.channel.hub import ChannelHub
from diptych.failure_statuses import FailureReason, RequestFailure
from diptych.messages import Heartbeat, Hello, Linked, WorkerStats
from diptych.slo import Slo
from router.effects import KvMoved, WorkerLost, WorkerSaid
from router.requests.relay import Relay
from router.workers.fleet import Fleet
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.recent_events import RecentErrors
from services.gateway.metrics.traffic_feed import ReplanReport, TrafficFeed
from services.gateway.ops.readiness import CanaryProber
from services.gateway.ops.replan_endpoint import ReplanRoute
from services.gateway.ops.status_body import StatusBody, accepted_age_s
from services.gateway.service import GatewayService
from services.gateway.status import LiveHealthProbes, sum_stats


def test_books_are_added_number_by_number_and_name_by_name() -> None:
    one = WorkerStats(
        slabs_used=2, step_seconds=0.5, preemptions={"park": 1}, step_parts={"run": 0.5}, step_sizes=[1, 2]
    )
    other = WorkerStats(slabs_used=3, step_seconds=1.5, preemptions={"recompute": 2}, step_parts={"run": 1.0})
    both = sum_stats([one, other])
    assert (both.slabs_used, both.step_seconds) == (5, 2.0)
    assert (both.preemptions, both.step_parts) == ({"park": 1, "recompute": 2}, {"run": 1.5})
    assert both.step_sizes == [1, 2]
    assert sum_stats([]) == WorkerStats() and one.preemptions == {"park": 1}


class SilentHub:
    """A channel to workers that accepts everything and sends nothing."""

    refused: dict[str, int] = {}

    def send(self, worker: str, message: Any) -> bool:
        return True

    def accept_session(self, worker: str, link: str) -> bool:
        return True

    def end_session(self, worker: str) -> None: ...


class StatusWorld:
    """A gateway's probes over `num_each` prefill and decode workers that are all linked."""

    def __init__(self, num_each: int, plan_note: str = "") -> None:
        metrics, relay = GatewayMetrics(Slo(1.0, 0.1, 0.95)), Relay(split=True)
        self.backend = RelayBackend(relay, cast(ChannelHub, SilentHub()), metrics)
        for role in ("prefill", "decode"):
            for number in range(num_each):
                self._join(f"{role}-{number}", role)
        for target in range(num_each):
            for source in range(num_each):
                linked = Linked(f"prefill-{source}", f"life-prefill-{source}", "shm", 9.0, 12.0)
                self.backend._handle_event(WorkerSaid(f"decode-{target}", linked))
        self.errors = RecentErrors()
        service = SimpleNamespace(
            rules=SimpleNamespace(served_names=("toy",), keep_threshold=1.0), context_tokens=64,
            num_open=0, fronts=None, metrics=metrics, errors=self.errors,
        )  # fmt: skip
        prober = CanaryProber(self.backend, metrics, [1], (num_each, num_each))
        self.replanning = ReplanRoute(TrafficFeed(), prober, metrics)
        self._probes = LiveHealthProbes(
            cast(GatewayService, service), self.backend, prober, self.replanning, plan_note
        )

    def _join(self, name: str, role: str) -> None:
        endpoints = {"shm": b"somewhere"} if role == "prefill" else {}
        identity, classes = {"model": "toy"}, {"raw": (64, 4096)}
        life = f"life-{name}"
        hello = Hello(
            name, role, life, "same", identity, "127.0.0.1", 7, 64, 4096, 64, endpoints, kv_classes=classes
        )
        self.backend._handle_event(WorkerSaid(name, hello))
        self.backend._handle_event(WorkerSaid(name, Heartbeat(name, life, WorkerStats(slabs_total=64))))

    def report(self) -> dict[str, Any]:
        """What a client of /status gets."""
        body: dict[str, Any] = json.loads(msgspec.json.encode(self._probes.status_report()))
        return body


def test_the_plan_has_its_reason_and_the_replanners() -> None:
    world = StatusWorld(1, "plan plan.json: 1 + 1")
    assert world.report()["plan"] == {
        "workers": {"prefill": 1, "decode": 1}, "note": "plan plan.json: 1 + 1", "replanner": None
    }  # fmt: skip
    world.replanning.report = ReplanReport(target={"decode": 2}, attainment=0.97, reason="more traffic")
    replanner = world.report()["plan"]["replanner"]
    assert (replanner["reason"], replanner["target"], replanner["expected_attainment"]) == (
        "more traffic", {"decode": 2}, 0.97)  # fmt: skip


def test_errors_history_and_lost_workers_are_there() -> None:
    world = StatusWorld(2)
    failure = RequestFailure(FailureReason.NO_WORKERS, "none is left", cause="Traceback: a planted secret")
    world.errors.add_error(world.backend.clock(), failure, "req_1", "/v1/completions", "cmpl-1")
    world.backend._handle_event(WorkerLost("decode-1", "life-decode-1", "it was killed"))
    report = world.report()
    assert [(one["request_id"], one["message"]) for one in report["errors"]] == [("req_1", "none is left")]
    assert "secret" not in json.dumps(report)
    first = report["fleet_events"][0]
    assert (first["what"], first["worker"], first["role"], first["reason"]) == (
        "lost", "decode-1", "decode", "it was killed")  # fmt: skip
    assert [one["worker"] for one in report["workers"]] == ["decode-0", "prefill-0", "prefill-1"]
    assert report["history"]["target"] == 0.95 and report["history"]["objectives"] == {}
    assert report["links"][0] == {
        "source": "prefill-0", "target": "decode-0", "transport": "shm", "gb_per_s": 9.0, "latency_us": 12.0,
        "moved_bytes": 0, "kv_classes": {"raw": False},
    }  # fmt: skip


def test_what_a_link_moved_is_counted_while_both_of_its_workers_are_there() -> None:
    world = StatusWorld(2)

    def move(source: str, target: str) -> None:
        moved = KvMoved("cmpl-1", source, target, "shm", 4096, 0.01)
        world.backend._telemetry.on_effect(moved, world.backend.clock())

    move("prefill-0", "decode-1")
    move("prefill-0", "decode-1")
    move("prefill-1", "decode-0")
    move("prefill-9", "decode-0")
    assert {(one["source"], one["target"]): one["moved_bytes"] for one in world.report()["links"]} == {
        ("prefill-0", "decode-0"): 0, ("prefill-0", "decode-1"): 8192,
        ("prefill-1", "decode-0"): 4096, ("prefill-1", "decode-1"): 0,
    }  # fmt: skip
    world.backend._handle_event(WorkerLost("decode-1", "life-decode-1", "it was killed"))
    assert world.backend._telemetry.moved_bytes == {("prefill-1", "decode-0"): 4096}
    backend = world.backend
    backend.metrics.watch_workers(backend.worker_stats, backend.link_speeds, "toy")
    page = backend.metrics.render_text().decode()
    assert 'diptych:link_bytes_total{source="prefill-1",target="decode-0",transport="shm"} 4096.0' in page


def test_clients_that_take_an_older_status_share_one() -> None:
    now_s, made = 100.0, list[float]()

    def build_report() -> dict[str, float]:
        made.append(now_s)
        return {"time_s": now_s}

    status = StatusBody(build_report, lambda: now_s)
    assert status.read(1.0) == (b'{"time_s":100.0}', 0.0)
    now_s = 100.75
    assert {status.read(1.0) for _ in range(50)} == {(b'{"time_s":100.0}', 0.75)}
    assert status.read() == (b'{"time_s":100.75}', 0.0), "who does not say so gets a new one"
    now_s = 101.5
    assert status.read(1.0) == (b'{"time_s":100.75}', 0.75)
    now_s = 101.75
    assert status.read(1.0) == (b'{"time_s":101.75}', 0.0)
    assert made == [100.0, 100.75, 101.75]


@pytest.mark.parametrize(
    ("header", "age_s"),
    [
        ("", 0), ("no-cache", 0), ("max-age=1", 1), ("no-transform, Max-Age=2", 2), ("max-age=-1", 0),
        ("max-age=1.5", 0), ("x-max-age=9", 0), ("max-age=" + "9" * 40, 0),
        ("max-age=5", 5), ("max-age=999999999", 5),
        ("no-cache, max-age=60", 0), ("max-age=60, no-store", 0), ("max-age=1,No-Cache", 0),
        ("x-no-cache, max-age=1", 1),
    ],
)  # fmt: skip
def test_how_old_a_client_lets_a_status_be(header: str, age_s: float) -> None:
    assert accepted_age_s(header) == age_s


def test_workers_are_compared_with_each_other_no_more_often_when_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    compare = Fleet.find_mismatches

    def counted(fleet: Fleet) -> dict[str, str]:
        calls[-1] += 1
        return compare(fleet)

    worlds = [StatusWorld(num_each) for num_each in (1, 8)]
    monkeypatch.setattr(Fleet, "find_mismatches", counted)
    for world in worlds:
        calls.append(0)
        assert all(one["state"] == "up" for one in world.report()["workers"])
    assert calls[0] == calls[1] > 0
