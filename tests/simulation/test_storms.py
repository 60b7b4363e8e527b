"""Seeded storms over the real relay, hand-off, loop and roles in virtual time. No law is broken; a seed is a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from tests.simulation.laws import DONE, Laws, settle
from tests.simulation.storm import BLOWS, Clients, Crowd, Storm
from tests.simulation.world import World

STORM_S = 8.0
STEPS = 100_000  # at least so many happen, over all seeds
SEEDS = range(27)
QUIET_S = 5.0


@dataclass
class Tally:
    """What happened in all runs, so that a test can say that it did."""

    steps: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    migrated: int = 0  # answers that went on elsewhere after they had begun, and were right to the last token
    corrupted: int = 0

    def note(self, world: World, laws: Laws) -> None:
        self.steps.update(world.agenda.counts)
        self.faults.update(world.faults)
        self.ends.update(laws.ends.values())
        self.corrupted += world.pipes.corrupted
        for client in world.clients:
            self.retried.update(client.retried)
            self.migrated += client.end in DONE and client.moved_on


def storm(seed: int, kinds: list[str] | None = None, crowd: Crowd | None = None) -> tuple[World, Laws]:
    """One run, from a whole deployment through a storm to rest. Raises Broken."""
    world = World(seed, *[(2, 2), (1, 2), (2, 2), (0, 2), (1, 1), (3, 3)][seed % 6], shared=seed % 4 < 2)
    laws, rng = Laws(world), Random(seed)
    assert world.run(lambda: world.whole, QUIET_S)
    until_s = world.agenda.now_s + STORM_S
    Clients(world, rng, crowd or Crowd(), until_s)
    Storm(world, rng, 1.0, until_s, kinds or sorted(BLOWS))
    world.run(lambda: world.agenda.now_s >= until_s, 2 * STORM_S, laws.hold)
    settle(world, laws)
    return world, laws


def test_no_law_is_broken() -> None:
    """And the runs were long enough, and met everything that they are there for."""
    tally = Tally()
    for seed in SEEDS:
        try:
            tally.note(*storm(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    print(f"{tally.steps.total()} steps\n{tally}")
    assert tally.steps.total() >= STEPS
    assert set(tally.faults) == set(BLOWS), "every kind of blow fell"
    assert tally.corrupted and tally.retried and tally.migrated
    assert sum(tally.ends[end] for end in DONE) > tally.ends.total() / 2, "most answers were whole"


def test_a_seed_is_a_run() -> None:
    first, again, other = (storm(seed)[0] for seed in (6, 6, 12))
    assert first.trace == again.trace and first.agenda.counts == again.agenda.counts
    assert first.trace != other.trace
