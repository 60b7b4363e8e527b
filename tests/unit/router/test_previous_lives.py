"""Workers whose names do not come back are forgotten, and those that may come back are not."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from diptych.channel.hub import ChannelHub
from diptych.messages import Drain
from diptych.slo import Slo
from router.requests.relay import Relay
from router.workers.fleet import MAX_UNFIT, RIVAL_GRACE_S, Fleet
from services.gateway.generation.relay_backend import RelayBackend
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.ops.readiness import CanaryProber
from tests.unit.gateway.recorded_channel import Channel
from tests.unit.router.fake_deployment import make_hello
from tests.unit.router.fleet_messages import beat, kinds, met


def retire(fleet: Fleet, worker: str, drained: bool = True) -> None:
    """A worker joins, drains if it is told to, and is lost."""
    fleet.on_message(worker, make_hello(worker), 0.0)
    if drained:
        fleet.on_message(worker, beat(worker, draining=True), 0.0)
    fleet.remove_worker(worker, "its connection is closed")


@pytest.mark.parametrize("drained", [True, False])
def test_a_thousand_workers_that_join_and_retire_are_forgotten(drained: bool) -> None:
    fleet = Fleet()
    for number in range(1000):
        retire(fleet, f"decode-{number}", drained)
    assert [hello.worker for hello in fleet.known_hellos()] == [f"decode-{n}" for n in range(992, 1000)]
    assert sum(fleet.remembers_worker(f"decode-{number}") for number in range(1000)) <= 8


def test_a_large_fleet_that_retires_is_forgotten() -> None:
    fleet = met(*(f"decode-{number}" for number in range(200)))
    for number in range(200):
        fleet.on_message(f"decode-{number}", beat(f"decode-{number}", draining=True), 0.0)
        fleet.remove_worker(f"decode-{number}", "its connection is closed")
    assert len(fleet.known_hellos()) <= 8


def test_orders_and_homes_of_workers_that_retire_are_forgotten() -> None:
    metrics, relay = GatewayMetrics(Slo()), Relay()
    fleet, orders = relay.fleet, relay.drain_orders
    prober = CanaryProber(RelayBackend(relay, cast(ChannelHub, Channel()), metrics), metrics, [1], (1, 1))
    for number in range(1000):
        worker = f"decode-{number}"
        fleet.on_message(worker, make_hello(worker), 0.0)
        orders.give_order(worker, Drain())
        prober.wanted_workers()
        fleet.remove_worker(worker, "its connection is closed")
    assert max(len(orders._given), len(orders._unsent), len(prober._homes)) <= 10


def test_workers_that_crash_together_may_all_come_back() -> None:
    fleet = met(*(f"decode-{number}" for number in range(40)))
    for number in range(40):
        fleet.remove_worker(f"decode-{number}", "silent for 10 s")
    assert len(fleet.known_hellos()) == 40
    for number in range(40):
        fleet.on_message(f"decode-{number}", make_hello(f"decode-{number}", link="2"), 1.0)
        assert fleet.workers[f"decode-{number}"].ended == "alive", "the process is the same"
    assert len(fleet.known_hellos()) == 40


def test_workers_that_are_replaced_one_by_one_may_come_back() -> None:
    fleet = met(*(f"decode-{number}" for number in range(20)))
    for life in range(2, 5):
        for number in range(20):
            worker = f"decode-{number}"
            fleet.on_message(worker, beat(worker, life - 1, draining=True), 0.0)
            fleet.remove_worker(worker, "its connection is closed")
            assert fleet.remembers_worker(worker) and len(fleet.known_hellos()) == 20
            fleet.on_message(worker, make_hello(worker, life), 0.0)


def test_a_life_that_was_replaced_is_rejected_however_many_workers_left_since() -> None:
    fleet = met("decode-0")
    fleet.remove_worker("decode-0", "silent for 10 s")
    fleet.on_message("decode-0", make_hello("decode-0", 2), 1.0)
    for number in range(1, 1000):
        retire(fleet, f"decode-{number}")
    changes = fleet.on_message("decode-0", make_hello("decode-0", 1, link="late"), 2000.0)
    assert kinds(changes) == ["WorkerUnfit", "RejectSession"]
    assert fleet.workers["decode-0"].hello.incarnation == "decode-0/2"


def test_a_forgotten_life_that_returns_waits_for_the_living_worker_of_its_name() -> None:
    fleet = Fleet()
    retire(fleet, "decode-0")
    for number in range(1, 20):
        retire(fleet, f"decode-{number}")
    assert not fleet.remembers_worker("decode-0")
    fleet.on_message("decode-0", make_hello("decode-0", 2), 1.0)
    assert fleet.on_message("decode-0", make_hello("decode-0", 1, "late", pid=77), 2.0) == []
    changes = fleet.on_message("decode-0", beat("decode-0", 2), 2.0 + RIVAL_GRACE_S)
    assert kinds(changes) == ["WorkerUnfit", "RejectSession"]


def test_a_stuck_worker_that_sends_heartbeats_is_not_forgotten() -> None:
    fleet = met("decode-0")
    fleet.on_message("decode-0", beat("decode-0", stuck_s=60.0), 0.0)
    for number in range(1, 1000):
        retire(fleet, f"decode-{number}", drained=False)
        fleet.on_message("decode-0", make_hello("decode-0"), 10.0 * number)
        fleet.on_message("decode-0", beat("decode-0", stuck_s=60.0), 10.0 * number)
    changes = fleet.on_message("decode-0", beat("decode-0"), 10_000.0)
    assert kinds(changes) == ["WorkerUp"]


def test_unfit_workers_are_listed_in_a_bounded_number() -> None:
    fleet = Fleet()
    for number in range(1000):
        fleet.on_message(f"w-{number}", msgspec.structs.replace(make_hello(f"w-{number}"), role="cook"), 0.0)
    assert sorted(fleet.find_mismatches()) == [f"w-{number}" for number in range(1000 - MAX_UNFIT, 1000)]
