"""Storms with bulk work beside online requests: every law holds, and online requests do not notice it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from diptych.chunks import RAW_CLASS
from diptych.request import BULK_PRIORITY, SamplingParams, Tenancy
from tests.simulation.faults import FAULTS, ClientLoad, ClientMix, FaultStorm
from tests.simulation.storms import run_class_storm, run_kept_storm, run_storm
from tests.simulation.virtual_laws import DONE, InvariantChecker, settle_world
from tests.simulation.virtual_model import CODED
from tests.simulation.world import VirtualWorld

SEEDS = range(6)
QUIET_S = 5.0
WITH_BULK = ClientMix(rate=20.0, bulk=0.5)


def test_every_law_holds_with_bulk_work_beside() -> None:
    """And bulk work was done, moved on when its worker was lost, and gave its memory back."""
    ends, seen = Counter[str](), Counter[str]()
    for seed in SEEDS:
        try:
            world, laws = run_storm(seed, crowd=WITH_BULK)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for client in world.clients:
            if client.origin.bulk:
                ends[laws.ends[client.name]] += 1
                seen["moved on"] += client.end in DONE and client.moved_on
        for process in world.living():
            stats = process.bulk.complete_stats(process.engine.stats)
            seen["units"] += stats.bulk_units
            seen["preempted"] += stats.bulk_preemptions
    print(ends, seen)
    assert seen["units"] and seen["moved on"] and seen["preempted"]
    assert sum(ends[end] for end in DONE) > ends.total() / 2, ends


@pytest.mark.parametrize("run", [run_class_storm, run_kept_storm])
def test_every_law_holds_beside_classes_and_evicted_kv(run: Callable[..., object]) -> None:
    """Bulk work of both KV classes, and such that drops KV, is preempted and moves on as well."""
    seen = Counter[str]()
    for seed in range(2):
        found = run(seed, sorted(FAULTS), bulk=0.4)
        world = found if isinstance(found, VirtualWorld) else found[0]  # type: ignore[index]
        for client in world.clients:
            if client.origin.bulk and client.end in DONE:
                seen["moved on"] += client.moved_on
                seen[client.kv_class] += 1
                seen["evicted"] += client.keep.evicts
        seen["preempted"] += sum(process.bulk.table.counters.preempted.total() for process in world.living())
    print(seen)
    assert seen["preempted"] and seen["moved on"]
    assert seen["evicted"] or all(seen[name] for name in (RAW_CLASS, CODED))


def online_run(seed: int, bulk: int) -> tuple[dict[str, tuple[list[int], str | None]], int]:
    """The answers of online requests in a colocated world, and units of bulk work done for `bulk` requests."""
    world = VirtualWorld(seed, 0, 1, num_slabs=24)
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: world.whole, QUIET_S)
    for number in range(bulk):
        prompt = [number % 7 + 1] * (30 + 10 * (number % 9))
        sampling = SamplingParams(max_tokens=60, seed=number)
        world.ask(prompt, sampling, Tenancy("batch", "", BULK_PRIORITY), 1e6)
    until_s = world.agenda.now_s + 4.0
    ClientLoad(world, rng, ClientMix(rate=6.0, hurried=0.0, leaving=0.0), until_s)
    world.run(lambda: world.agenda.now_s >= until_s, 10.0, laws.check_running)
    units = sum(process.bulk.units for process in world.living())
    settle_world(world, laws)
    online = [client for client in world.clients if not client.origin.bulk]
    return {f"{i}": (client.got, client.end) for i, client in enumerate(online)}, units


def test_online_answers_are_the_same_with_and_without_bulk_work() -> None:
    without, none = online_run(5, 0)
    beside, units = online_run(5, 40)
    assert not none and units > 20 and len(without) > 10
    assert beside == without


def test_a_draining_worker_gives_bulk_work_back_at_once() -> None:
    world = VirtualWorld(3, 0, 2)
    laws = InvariantChecker(world)
    assert world.run(lambda: world.whole, QUIET_S)
    origin = Tenancy("batch", "", BULK_PRIORITY)
    clients = [world.ask([i] * 100, SamplingParams(max_tokens=80, seed=i), origin, 1e6) for i in range(12)]
    assert world.run(lambda: all(process.bulk.units > 3 for process in world.living()), QUIET_S)
    begun_s = world.agenda.now_s
    world.drain("decode-0")
    old = world.posts["decode-0"].process
    assert world.run(lambda: world.posts["decode-0"].process is not old, 1.0, laws.check_running)
    assert world.agenda.now_s - begun_s < 0.5, "it did not wait for the ends of the answers"
    settle_world(world, laws)
    assert {client.end for client in clients} <= set(DONE) and any(client.retried for client in clients)


def test_bulk_work_survives_losses_of_gateways_and_workers() -> None:
    world = VirtualWorld(11, 1, 2)
    laws, rng = InvariantChecker(world), Random(11)
    assert world.run(lambda: world.whole, QUIET_S)
    until_s = world.agenda.now_s + 4.0
    ClientLoad(world, rng, ClientMix(rate=15.0, bulk=1.0), until_s)
    FaultStorm(world, rng, 2.0, until_s, ["kill", "switch_role", "drain", "command"])
    world.run(lambda: world.agenda.now_s >= until_s, 10.0, laws.check_running)
    settle_world(world, laws)
