"""Storms: a world from a whole deployment through faults to rest, with laws checked all the time."""

from __future__ import annotations

from random import Random

from diptych.chunks import RAW_CLASS
from diptych.request import TRAITS
from router.requests.relay import Relay
from tests.simulation.dropping_model import DroppingRunner
from tests.simulation.faults import FAULTS, ClientLoad, ClientMix, FaultSequence, FaultStorm
from tests.simulation.virtual_laws import DONE, InvariantChecker, settle_world
from tests.simulation.virtual_model import CODED
from tests.simulation.world import VirtualWorld

STORM_S, SHORT_STORM_S, SPELL_S = 8.0, 6.0, 10.0
CALM_CLIENTS = ClientMix(rate=12.0, hurried=0.0, leaving=0.0)
QUIET_S = 5.0
CLASSES = (RAW_CLASS, CODED)
BOTH = f"{RAW_CLASS},{CODED}"
POOLS = [(2, 2), (1, 1), (0, 2), (1, 2)]
# So few that sequences are preempted; NUM_SLABS also where two classes share them.
NUM_SLABS, FEW_SLABS = 24, 20


def run_storm(
    seed: int,
    kinds: list[str] | None = None,
    crowd: ClientMix | None = None,
    traits: tuple[str, ...] = TRAITS,
    relays: type[Relay] = Relay,
) -> tuple[VirtualWorld, InvariantChecker]:
    """One run, from a whole deployment through a storm to rest, with raw or coded KV. Raises Broken."""
    pools = [(2, 2), (1, 2), (2, 2), (0, 2), (1, 1), (3, 3)][seed % 6]
    kv_class = CLASSES[seed // 6 % 2]
    world = VirtualWorld(
        seed,
        *pools,
        shared=seed % 4 < 2,
        num_slabs=NUM_SLABS,
        kv_class=kv_class,
        traits=traits,
        relays=relays,
    )
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, QUIET_S)
    until_s = world.agenda.now_s + STORM_S
    ClientLoad(world, rng, crowd or ClientMix(), until_s)
    FaultStorm(world, rng, 1.0, until_s, kinds or sorted(FAULTS))
    world.run(lambda: world.agenda.now_s >= until_s, 2 * STORM_S, laws.check_running)
    settle_world(world, laws)
    return world, laws


def run_class_storm(
    seed: int, kinds: list[str], bulk: float = 0.0, **parts: type
) -> tuple[VirtualWorld, InvariantChecker]:
    """Requests of both classes at once, through a storm to rest; `bulk` is the share of bulk work.

    Raises InvariantBroken.
    """
    pools = POOLS[seed % len(POOLS)]
    world = VirtualWorld(seed, *pools, num_slabs=NUM_SLABS, kv_class=BOTH, **parts)  # type: ignore[arg-type]
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, 5.0)
    until_s = world.agenda.now_s + SHORT_STORM_S
    ClientLoad(world, rng, ClientMix(rate=16.0 / (1 - bulk), bulk=bulk), until_s)
    FaultStorm(world, rng, 1.0, until_s, kinds)
    world.run(lambda: world.agenda.now_s >= until_s, 2 * SHORT_STORM_S, laws.check_running)
    settle_world(world, laws)
    return world, laws


def run_kept_storm(
    seed: int, kinds: list[str], runners: type[DroppingRunner] = DroppingRunner, bulk: float = 0.0
) -> VirtualWorld:
    """Requests with and without eviction at once, through a storm to rest; `bulk` is the share of bulk work.

    Raises InvariantBroken.
    """
    world = VirtualWorld(seed, *POOLS[seed % len(POOLS)], num_slabs=FEW_SLABS, runners=runners)
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, 5.0)
    until_s = world.agenda.now_s + SHORT_STORM_S
    ClientLoad(world, rng, ClientMix(rate=16.0 / (1 - bulk), dropping=0.6, bulk=bulk), until_s)
    FaultStorm(world, rng, 1.0, until_s, kinds)
    world.run(lambda: world.agenda.now_s >= until_s, 2 * SHORT_STORM_S, laws.check_running)
    settle_world(world, laws)
    for process in world.living():
        runner = process.engine.runner
        assert isinstance(runner, DroppingRunner)
        assert not runner.states, f"{process.name} remembers {sorted(runner.states)} at rest"
    return world


def failed_ends(world: VirtualWorld) -> dict[str, str]:
    """Clients that did not get their whole answer, and why."""
    return {client.name: str(client.end) for client in world.clients if client.end not in DONE}


def run_spell(
    world: VirtualWorld, seed: int, crowd: ClientMix, kinds: list[str], seconds: float = SPELL_S
) -> InvariantChecker:
    """Clients ask, one blow falls at a time, then all comes to rest. Raises InvariantBroken."""
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, QUIET_S)
    until_s = world.agenda.now_s + seconds
    ClientLoad(world, rng, crowd, until_s)
    if kinds:
        FaultSequence(world, rng, 3.0, until_s, kinds)
    world.run(lambda: world.agenda.now_s >= until_s, 2 * seconds, laws.check_running)
    settle_world(world, laws)
    return laws
