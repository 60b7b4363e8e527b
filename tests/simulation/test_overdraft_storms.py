"""Storms in which prompts begin before their decode room is free, with hardly any: all end, nothing is left."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from router.requests.relay import Relay
from router.routing.overdraft import MAX_HELD_SHARE
from tests.simulation.faults import FAULTS, ClientLoad, ClientMix, FaultStorm
from tests.simulation.storms import CALM_CLIENTS, QUIET_S, SHORT_STORM_S, failed_ends, run_spell
from tests.simulation.virtual_laws import DONE, InvariantBroken, InvariantChecker, settle_world
from tests.simulation.world import VirtualWorld

STEPS = 100_000  # at least so many happen, over all seeds
SEEDS = range(26)
POOLS = [(2, 1), (2, 2), (3, 2), (1, 1)]
# A prompt and its answer take up to five.
FEW_SLABS = 12
CROWD = ClientMix(rate=20.0)


class OverdrawingRelay(Relay):
    """A relay that lets prompts begin early."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings, overdraft=True)


class RecklessRelay(OverdrawingRelay):
    """Believes that any room is free in a moment, so that nearly all that it overdraws waits."""

    def handle_event(self, event: Any, now_s: float) -> Any:
        self.pairs.patience.share = 1e3
        return super().handle_event(event, now_s)


RELAYS = (OverdrawingRelay, RecklessRelay)


def check_bounds(world: VirtualWorld, laws: InvariantChecker) -> None:
    """As after every step, and the overdrawn prompts leave half of each prefill worker's pool to others."""
    laws.check_running()
    if world.gate is None:
        return
    for member in world.relay.fleet.workers_of("prefill"):
        held = world.relay.ledger.load_of(member.name).overdrawn_tokens
        if held > MAX_HELD_SHARE * member.hello.num_slabs * 64:
            raise InvariantBroken(f"{member.name} holds {held} overdrawn tokens")


def run_overdrawn_storm(seed: int, relays: type[Relay]) -> tuple[VirtualWorld, InvariantChecker]:
    """One run, from a whole deployment through a storm to rest. Raises InvariantBroken."""
    world = VirtualWorld(seed, *POOLS[seed % len(POOLS)], num_slabs=FEW_SLABS, relays=relays)
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, QUIET_S)
    until_s = world.agenda.now_s + SHORT_STORM_S
    ClientLoad(world, rng, CROWD, until_s)
    FaultStorm(world, rng, 1.0, until_s, sorted(FAULTS))
    world.run(lambda: world.agenda.now_s >= until_s, 2 * SHORT_STORM_S, lambda: check_bounds(world, laws))
    settle_world(world, laws)
    return world, laws


def test_storms_end() -> None:
    """Every other one with a relay that is mostly wrong."""
    steps, ends, settled = 0, Counter[str](), Counter[str]()
    for seed in SEEDS:
        try:
            world, laws = run_overdrawn_storm(seed, RELAYS[seed // len(POOLS) % 2])
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        steps += world.agenda.steps
        ends.update(laws.ends.values())
        patience = world.relay.pairs.patience
        settled.update(in_time=patience.num_in_time, late=patience.num_late)
        assert not world.relay.pairs.num_overdrawn
    print(f"{steps} steps, {settled}, {ends}")
    assert steps >= STEPS
    assert settled["in_time"] and settled["late"], settled
    assert sum(ends[end] for end in DONE) > ends.total() / 2, "most answers were whole"


@pytest.mark.parametrize("relays", RELAYS)
@pytest.mark.parametrize("seed", range(2))
def test_one_lost_worker_at_a_time_fails_nobody(seed: int, relays: type[Relay]) -> None:
    world = VirtualWorld(seed, 2, 2, num_slabs=FEW_SLABS, relays=relays)
    run_spell(world, seed, CALM_CLIENTS, ["kill", "reset", "stop"])
    assert failed_ends(world) == {}
