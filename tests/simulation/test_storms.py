"""Seeded storms over the real relay, hand-off, loop and roles in virtual time. No law is broken; a seed is a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from diptych.chunks import RAW_CLASS
from tests.simulation.faults import FAULTS, ClientLoad, ClientMix, FaultStorm
from tests.simulation.virtual_laws import DONE, InvariantChecker, settle_world
from tests.simulation.virtual_model import CODED
from tests.simulation.world import VirtualWorld

STORM_S = 8.0
STEPS = 100_000  # at least so many happen, over all seeds
SEEDS = range(27)
QUIET_S = 5.0
CLASSES = (RAW_CLASS, CODED)
# So few that sequences are preempted.
NUM_SLABS = 24


@dataclass
class EventTally:
    """What happened in all runs, so that a test can say that it did."""

    steps: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    # By KV class: answers that went on elsewhere after they had begun, and were right to the last token; altered
    # pieces; sequences that gave up their memory for a while; tokens found in the prefix cache.
    migrated: Counter[str] = field(default_factory=Counter)
    corrupted: Counter[str] = field(default_factory=Counter)
    preempted: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)

    def note(self, world: VirtualWorld, laws: InvariantChecker) -> None:
        self.steps.update(world.agenda.counts)
        self.faults.update(world.faults)
        self.ends.update(laws.ends.values())
        kv_class = world.kv_class
        self.corrupted[kv_class] += world.pipes.corrupted
        for client in world.clients:
            self.retried.update(client.retried)
            self.migrated[kv_class] += client.end in DONE and client.moved_on
        for process in world.living():
            self.preempted[kv_class] += sum(process.engine.stats.preemptions.values())
            self.cached[kv_class] += process.holdings.prefix_hits


def run_storm(
    seed: int, kinds: list[str] | None = None, crowd: ClientMix | None = None
) -> tuple[VirtualWorld, InvariantChecker]:
    """One run, from a whole deployment through a storm to rest, with raw or coded KV. Raises Broken."""
    pools = [(2, 2), (1, 2), (2, 2), (0, 2), (1, 1), (3, 3)][seed % 6]
    kv_class = CLASSES[seed // 6 % 2]
    world = VirtualWorld(seed, *pools, shared=seed % 4 < 2, num_slabs=NUM_SLABS, kv_class=kv_class)
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, QUIET_S)
    until_s = world.agenda.now_s + STORM_S
    ClientLoad(world, rng, crowd or ClientMix(), until_s)
    FaultStorm(world, rng, 1.0, until_s, kinds or sorted(FAULTS))
    world.run(lambda: world.agenda.now_s >= until_s, 2 * STORM_S, laws.check_running)
    settle_world(world, laws)
    return world, laws


def test_no_law_is_broken() -> None:
    """And the runs were long enough, and met everything that they are there for."""
    tally = EventTally()
    for seed in SEEDS:
        try:
            tally.note(*run_storm(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    print(f"{tally.steps.total()} steps\n{tally}")
    assert tally.steps.total() >= STEPS
    assert set(tally.faults) == set(FAULTS), "every kind of blow fell"
    assert tally.retried
    for seen in (tally.corrupted, tally.migrated, tally.preempted, tally.cached):
        assert all(seen[kv_class] for kv_class in CLASSES), tally
    assert sum(tally.ends[end] for end in DONE) > tally.ends.total() / 2, "most answers were whole"


def test_a_seed_is_a_run() -> None:
    first, again, other = (run_storm(seed)[0] for seed in (6, 6, 12))
    assert first.trace == again.trace and first.agenda.counts == again.agenda.counts
    assert first.trace != other.trace
