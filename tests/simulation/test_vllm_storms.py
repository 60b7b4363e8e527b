"""Storms over workers with a toy in vLLM's place: no law is broken in 100,000 steps, and all that may happen does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from kvtransfer.digests import ChunkDigester
from tests.simulation.faults import FAULTS, ClientLoad, ClientMix, FaultStorm
from tests.simulation.storms import QUIET_S, STORM_S
from tests.simulation.virtual_laws import DONE, InvariantBroken, InvariantChecker, settle_world
from tests.simulation.vllm_world import VllmProcess, VllmWorld
from vllm_worker.rank_copies import RankCopies

STEPS = 100_000
SEEDS = range(26)
# Blocks of each worker: so few that sequences are preempted.
NUM_BLOCKS = 14
TRAITS: list[tuple[str, ...]] = [(), ("seed",)]


def run_vllm_storm(seed: int, kinds: Sequence[str] = tuple(FAULTS)) -> VllmWorld:
    """From a whole deployment through a storm to rest. Raises InvariantBroken."""
    pools = [(2, 2), (1, 2), (1, 1), (3, 2)][seed % 4]
    world = VllmWorld(seed, *pools, shared=seed % 8 < 4, num_slabs=NUM_BLOCKS, traits=TRAITS[seed // 2 % 2])
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, QUIET_S)
    until_s = world.agenda.now_s + STORM_S
    ClientLoad(world, rng, ClientMix(), until_s)
    FaultStorm(world, rng, 1.0, until_s, sorted(kinds))
    world.run(lambda: world.agenda.now_s >= until_s, 2 * STORM_S, laws.check_running)
    settle_world(world, laws)
    return world


def test_no_law_is_broken() -> None:
    steps, seen, faults = Counter[str](), Counter[str](), Counter[str]()
    for seed in SEEDS:
        try:
            world = run_vllm_storm(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        steps.update(world.agenda.counts)
        faults.update(world.faults)
        for client in world.clients:
            seen["done" if client.end in DONE else "not done"] += 1
            seen["moved on"] += client.moved_on and client.end in DONE
            seen["deferred"] += client.deferred
        seen["corrupted"] += world.pipes.corrupted
        for process in world.living():
            assert isinstance(process, VllmProcess)
            counts = process.port.counts
            seen["preempted"] += counts.preemptions
            seen["cached"] += counts.prefix_hits
    print(f"{steps.total()} steps, {seen}, {faults}")
    assert steps.total() >= STEPS and set(faults) == set(FAULTS)
    assert all(seen[what] for what in ("moved on", "deferred", "corrupted", "preempted", "cached")), seen
    assert seen["done"] > seen["not done"]


def test_kv_that_is_not_verified_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkDigester, "matches_chunk", lambda self, index, payload, promised: True)
    with pytest.raises(InvariantBroken, match="has got"):
        for seed in SEEDS:
            run_vllm_storm(seed, ["corrupt"])


def test_blocks_that_keep_what_others_left_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that fails and is not reported leaves the junk of the block's last user."""
    monkeypatch.setattr(RankCopies, "take_invalid", lambda self: set())
    with pytest.raises(InvariantBroken, match="has got"):
        for seed in SEEDS:
            run_vllm_storm(seed, ["slow"])
