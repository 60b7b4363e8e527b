"""The router chooses the KV class of each request: whatever it chooses and whatever breaks, the laws hold."""

from __future__ import annotations

from random import Random

import pytest

from diptych.chunks import AUTO_CLASS, RAW_CLASS
from router.effects import AttemptBegan, RelayEffect, RelayEvent
from router.requests.relay import Relay
from router.routing import auto_class
from router.routing.class_choice import LINK, POOL, QUALITY
from tests.simulation.faults import ClientLoad, ClientMix, FaultStorm
from tests.simulation.virtual_laws import DONE, InvariantChecker, settle_world
from tests.simulation.virtual_model import CODED
from tests.simulation.world import VirtualWorld

BOTH = f"{AUTO_CLASS},{RAW_CLASS},{CODED}"
CROWD = ClientMix(rate=30.0, hurried=0.0, leaving=0.05)
WITH_BULK = ClientMix(rate=40.0, hurried=0.0, leaving=0.05, bulk=0.25)
PAIR = ("prefill-0", "decode-0")
# Bytes per second.
SLOW_RATE = 2e4
REASONS: list[tuple[str, str]] = []


class ListeningRelay(Relay):
    """Remembers which classes attempts began with, and why."""

    def handle_event(self, event: RelayEvent, now_s: float) -> list[RelayEffect]:
        effects = super().handle_event(event, now_s)
        REASONS.extend((one.kv_class, one.kv_reason) for one in effects if isinstance(one, AttemptBegan))
        return effects


@pytest.mark.parametrize(
    ("pools", "kinds", "reason"),
    [
        ((1, 1), [], LINK),
        ((2, 2), ["kill", "reset", "stop", "drain"], POOL),
        ((0, 2), ["kill", "reset", "stop", "drain"], POOL),
    ],
    ids=["1P1D calm", "2P2D faults", "2 colocated faults"],
)
def test_answers_are_right_while_the_choice_changes(
    pools: tuple[int, int], kinds: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools of eight slabs for each class bind when many ask; in larger ones the link does while it is slow.

    Where workers fail, a part of the requests is bulk work.
    """
    REASONS.clear()
    # The toy model's KV is small.
    monkeypatch.setattr(auto_class, "MIN_MEASURED_BYTES", 1)
    slabs = 128 if reason == LINK else 16
    world = VirtualWorld(3, *pools, num_slabs=slabs, kv_class=BOTH, relays=ListeningRelay)
    laws, rng = InvariantChecker(world), Random(3)
    assert world.run(lambda: world.whole, 5.0)
    until_s = world.agenda.now_s + 5.0
    ClientLoad(world, rng, WITH_BULK if kinds else CROWD, until_s)
    if reason == LINK:
        world.agenda.schedule_after(1.0, lambda: world.throttle(*PAIR, SLOW_RATE, 2.0), "slow link")
    if kinds:
        FaultStorm(world, rng, 0.5, until_s, kinds)
    world.run(lambda: world.agenda.now_s >= until_s, 20.0, laws.check_running)
    settle_world(world, laws)
    done = {client.kv_class for client in world.clients if client.end in DONE}
    assert done == {RAW_CLASS, CODED}
    assert world.gate is not None and bool(world.gate.moved) == bool(pools[0])
    assert {(RAW_CLASS, QUALITY), (CODED, reason)} <= set(REASONS)
