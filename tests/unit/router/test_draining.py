"""Orders to drain and to change pools: when their workers are informed, and who may still come until then."""

from __future__ import annotations

import pytest

from diptych.messages import Admit, Drain, Heartbeat, Prefill, SwitchRole, WorkerStats
from router.effects import ChosenPair, ClientGone, FinishRequest, WorkerCommand
from tests.unit.router.fake_deployment import (
    PAIR,
    is_at_rest,
    linked_deployment,
    make_hello,
    messages_to,
)


def test_a_drain_is_sent_when_pending_requests_have_come() -> None:
    """A request whose prompt is being read was promised room at the only decode worker of its version."""
    world = linked_deployment(*PAIR)
    world.arrive("r")
    assert messages_to(world.do(WorkerCommand("decode-0", Drain())), "decode-0") == []
    assert messages_to(world.do(WorkerCommand("prefill-0", Drain())), "prefill-0") == [Drain()], (
        "it has what it has"
    )
    world.first("prefill-0", ("r", 0))
    sent = messages_to(world.flush("prefill-0"), "decode-0")
    assert [type(message) for message in sent] == [Admit, Drain]
    world.pull("decode-0", ("r", 0))
    world.decode("decode-0", ("r", 0), finish="stop")
    world.flush("decode-0")
    assert world.terminal["r"] == FinishRequest("r", "stop") and is_at_rest(world)


def test_who_is_on_the_way_to_one_that_is_to_drain_rather_goes_elsewhere() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    world.arrive("r")
    assert messages_to(world.do(WorkerCommand("decode-0", SwitchRole("prefill"))), "decode-0") == []
    world.first("prefill-0", ("r", 0))
    effects = world.flush("prefill-0")
    assert [type(message) for message in messages_to(effects, "decode-1")] == [Admit]
    assert messages_to(effects, "decode-0") == [SwitchRole("prefill")]


@pytest.mark.parametrize("offered", [False, True])
def test_a_lost_decode_worker_is_replaced_by_one_that_is_to_drain_and_does_not_know(offered: bool) -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    for name in ("a", "b"):
        world.arrive(name)
    one = next(
        name for name in ("a", "b") if world.relay.live[name].pair == ChosenPair("prefill-0", "decode-0")
    )
    if offered:
        world.first("prefill-0", (one, 0))
        world.flush("prefill-0")
    world.do(WorkerCommand("decode-1", Drain()))
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert world.relay.live[one].pair == ChosenPair("prefill-0", "decode-1")
    assert ((one, 0) in world.workers["decode-1"].held) == offered and not world.workers[
        "decode-1"
    ].must_drain


def test_a_request_without_a_token_goes_on_with_any_version() -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    for name in ("prefill-1", "decode-1"):  # the other version of a rollout
        world.join(name)
        world.relay.fleet.remove_worker(name, "")
        world.relay.fleet.on_message(name, make_hello(name, 9, fingerprint="g"), 0.0)
    world.link("decode-1", "prefill-1")
    world.do(WorkerCommand("decode-0", Drain()))
    world.workers["decode-0"].alive = False
    again = messages_to(world.lost("decode-0"), "prefill-1")
    assert [type(message) for message in again] == [Prefill]
    assert world.relay.live["r"].pair == ChosenPair("prefill-1", "decode-1")


@pytest.mark.parametrize("how", ["cancelled", "signalled"])
def test_an_order_waits_for_nobody_who_does_not_come(how: str) -> None:
    world = linked_deployment(*PAIR)
    world.arrive("r")
    world.do(WorkerCommand("decode-0", Drain()))
    assert not world.workers["decode-0"].must_drain
    if how == "cancelled":
        world.do(ClientGone("r"))
    else:  # it refuses all orders by now
        world.say(
            "decode-0",
            Heartbeat("decode-0", world.workers["decode-0"].hello.incarnation, WorkerStats(draining=True)),
        )
    assert world.workers["decode-0"].must_drain


def test_an_order_that_was_lost_with_its_link_is_given_again() -> None:
    world = linked_deployment(*PAIR)
    world.do(WorkerCommand("decode-0", SwitchRole("prefill")))
    again = world.relink("decode-0")
    assert messages_to(again, "decode-0")[-1] == SwitchRole("prefill") and world.relay.find_pairs() == []
    world.switch_role("decode-0", "prefill")
    assert not world.workers["decode-0"].must_drain, "the order was for the life before"
    world.join("decode-0")
    assert not world.workers["decode-0"].must_drain and not world.relay.fleet.workers["decode-0"].draining


def test_a_draining_worker_does_not_switch_roles() -> None:
    world = linked_deployment("prefill-0", "decode-0", "decode-1")
    world.do(WorkerCommand("decode-0", SwitchRole("prefill")))
    assert messages_to(world.do(WorkerCommand("decode-0", Drain())), "decode-0") == [Drain()]
    world.do(WorkerCommand("decode-0", SwitchRole("prefill")))
    assert world.relink("decode-0") and world.workers["decode-0"].next_role == ""
