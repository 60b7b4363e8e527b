"""Seeded storms over the real relay, hand-off, loop and roles in virtual time. No law is broken; a seed is a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.faults import FAULTS
from tests.simulation.storms import CLASSES, run_storm
from tests.simulation.virtual_laws import DONE, InvariantChecker
from tests.simulation.world import VirtualWorld

STEPS = 100_000  # at least so many happen, over all seeds
SEEDS = range(27)


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
