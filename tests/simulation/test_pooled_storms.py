"""Storms with prompts that are pooled beside requests for answers: every law holds, and no decode worker is needed."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from diptych.request import BULK_PRIORITY, Pooling, SamplingParams, Tenancy
from tests.simulation.faults import ClientLoad, ClientMix
from tests.simulation.storms import run_storm
from tests.simulation.virtual_laws import InvariantChecker, settle_world
from tests.simulation.world import VirtualWorld

SEEDS = range(6)
QUIET_S = 5.0
POOLED = SamplingParams(0, 0, temperature=0.0, pooling=Pooling("last"))


def test_every_law_holds_with_pooled_prompts_beside_answers() -> None:
    """A lost worker costs no pooled prompt: another one computes the same."""
    ends, retried = Counter[str](), 0
    for seed in SEEDS:
        try:
            world, laws = run_storm(seed, crowd=ClientMix(rate=20.0, pooled=0.5, leaving=0.05))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for client in world.clients:
            if client.sampling.pooling is not None:
                ends[laws.ends[client.name]] += 1
                retried += client.end == "stop" and bool(client.retried)
    print(ends, retried)
    assert retried and ends["stop"] > ends.total() / 2, ends


@pytest.mark.parametrize("priority", [0, BULK_PRIORITY])
def test_no_decode_worker_is_needed_nor_touched(priority: int) -> None:
    world = VirtualWorld(1, 2, 2)
    laws = InvariantChecker(world)
    assert world.run(lambda: world.whole, QUIET_S)
    for name in ("decode-0", "decode-1"):
        world.stop(name, 60.0)
    origin = Tenancy("", "", priority)
    clients = [world.ask([i + 1] * (40 + 12 * i), POOLED, origin, 30.0) for i in range(20)]
    assert world.run(lambda: all(client.end for client in clients), QUIET_S, laws.check_running)
    assert {client.end for client in clients} == {"stop"}
    assert not any(client.retried for client in clients)


def test_a_prompt_that_waits_for_room_to_decode_holds_up_none_that_is_pooled() -> None:
    """Decode workers are full of answers, so that prompts for answers wait; pooled ones pass them."""
    world = VirtualWorld(2, 1, 1, num_slabs=12)
    laws = InvariantChecker(world)
    assert world.run(lambda: world.whole, QUIET_S)
    for number in range(12):
        world.ask([number + 1] * 200, SamplingParams(max_tokens=80, seed=number), Tenancy(), 120.0)
    pooled = [world.ask([100 + i] * 60, POOLED, Tenancy(), 30.0) for i in range(8)]
    assert world.run(lambda: all(client.end for client in pooled), QUIET_S, laws.check_running)
    assert {client.end for client in pooled} == {"stop"}
    assert any(client.end is None for client in world.clients)
    settle_world(world, laws)


def test_it_waits_for_the_only_worker_that_pools_to_come_back() -> None:
    world = VirtualWorld(3, 1, 1)
    laws, rng = InvariantChecker(world), Random(3)
    assert world.run(lambda: world.whole, QUIET_S)
    ClientLoad(world, rng, ClientMix(rate=5.0), world.agenda.now_s + 1.0)
    world.kill("prefill-0")
    client = world.ask([1] * 100, POOLED, Tenancy(), 60.0)
    assert world.run(lambda: client.end is not None, 30.0, laws.check_running)
    assert client.end == "stop"
    settle_world(world, laws)
