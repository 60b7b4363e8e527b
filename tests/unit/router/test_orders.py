"""Orders to drain and to change pools: when their workers are told, and who may still come until then."""

from __future__ import annotations

import pytest

from diptych.messages import Admit, Beat, Drain, Prefill, Stats, Turn
from router.effects import Choice, ClientGone, Command, Finish
from tests.unit.router.world import PAIR, at_rest, hello, linked, sent


def test_who_is_to_drain_is_told_when_those_on_the_way_have_come() -> None:
    """A request whose prompt is being read was promised room at the only decode worker of its version."""
    world = linked(*PAIR)
    world.arrive("r")
    assert sent(world.do(Command("decode-0", Drain())), "decode-0") == []
    assert sent(world.do(Command("prefill-0", Drain())), "prefill-0") == [Drain()], "it has what it has"
    world.first("prefill-0", ("r", 0))
    told = sent(world.flush("prefill-0"), "decode-0")
    assert [type(message) for message in told] == [Admit, Drain]
    world.pull("decode-0", ("r", 0))
    world.decode("decode-0", ("r", 0), finish="stop")
    world.flush("decode-0")
    assert world.terminal["r"] == Finish("r", "stop") and at_rest(world)


def test_who_is_on_the_way_to_one_that_is_to_drain_rather_goes_elsewhere() -> None:
    world = linked("prefill-0", "decode-0", "decode-1")
    world.arrive("r")
    assert sent(world.do(Command("decode-0", Turn("prefill"))), "decode-0") == []
    world.first("prefill-0", ("r", 0))
    effects = world.flush("prefill-0")
    assert [type(message) for message in sent(effects, "decode-1")] == [Admit]
    assert sent(effects, "decode-0") == [Turn("prefill")]


@pytest.mark.parametrize("offered", [False, True])
def test_a_lost_decode_worker_is_replaced_by_one_that_is_to_drain_and_does_not_know(offered: bool) -> None:
    world = linked("prefill-0", "decode-0", "decode-1")
    for name in ("a", "b"):
        world.arrive(name)
    one = next(
        name for name in ("a", "b") if world.relay.live[name].choice == Choice("prefill-0", "decode-0")
    )
    if offered:
        world.first("prefill-0", (one, 0))
        world.flush("prefill-0")
    world.do(Command("decode-1", Drain()))
    world.workers["decode-0"].alive = False
    world.lost("decode-0")
    assert world.relay.live[one].choice == Choice("prefill-0", "decode-1")
    assert ((one, 0) in world.workers["decode-1"].held) == offered and not world.workers["decode-1"].told


def test_a_request_without_a_token_goes_on_with_any_version() -> None:
    world = linked(*PAIR)
    world.arrive("r")
    for name in ("prefill-1", "decode-1"):  # the other version of a rollout
        world.join(name)
        world.relay.fleet.lose(name, "")
        world.relay.fleet.hear(name, hello(name, 9, fingerprint="g"), 0.0)
    world.link("decode-1", "prefill-1")
    world.do(Command("decode-0", Drain()))
    world.workers["decode-0"].alive = False
    again = sent(world.lost("decode-0"), "prefill-1")
    assert [type(message) for message in again] == [Prefill]
    assert world.relay.live["r"].choice == Choice("prefill-1", "decode-1")


@pytest.mark.parametrize("how", ["cancelled", "signalled"])
def test_an_order_waits_for_nobody_who_does_not_come(how: str) -> None:
    world = linked(*PAIR)
    world.arrive("r")
    world.do(Command("decode-0", Drain()))
    assert not world.workers["decode-0"].told
    if how == "cancelled":
        world.do(ClientGone("r"))
    else:  # it refuses all orders by now
        world.say(
            "decode-0", Beat("decode-0", world.workers["decode-0"].hello.incarnation, Stats(draining=True))
        )
    assert world.workers["decode-0"].told


def test_an_order_that_was_lost_with_its_link_is_given_again() -> None:
    world = linked(*PAIR)
    world.do(Command("decode-0", Turn("prefill")))
    again = world.relink("decode-0")
    assert sent(again, "decode-0")[-1] == Turn("prefill") and world.relay.ways() == []
    world.turn("decode-0", "prefill")
    assert not world.workers["decode-0"].told, "the order was for the life before"
    world.join("decode-0")
    assert not world.workers["decode-0"].told and not world.relay.fleet.members["decode-0"].draining


def test_who_is_to_end_is_not_turned() -> None:
    world = linked("prefill-0", "decode-0", "decode-1")
    world.do(Command("decode-0", Turn("prefill")))
    assert sent(world.do(Command("decode-0", Drain())), "decode-0") == [Drain()]
    world.do(Command("decode-0", Turn("prefill")))
    assert world.relink("decode-0") and world.workers["decode-0"].turning == ""
