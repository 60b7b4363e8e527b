"""Fleets in which some workers have one KV class and some another, as while a calibration is rolled out."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from diptych.chunks import RAW_CLASS
from diptych.eviction_spec import KEEP_ALL, KeepSpec
from diptych.request import SamplingParams
from tests.simulation.faults import ClientLoad, ClientMix, FaultStorm
from tests.simulation.virtual_laws import DONE, InvariantBroken, InvariantChecker, settle_world
from tests.simulation.virtual_model import CODED
from tests.simulation.world import VirtualWorld

OLD, NEW = CODED, "nuq4.g2@bbbbbbbbbbbbbbbb"
CLIENTS = ClientMix(rate=12.0, hurried=0.0, leaving=0.0)
WITH_BULK = ClientMix(rate=16.0, hurried=0.0, leaving=0.0, bulk=0.3)
# Between the upgrades of two workers.
PAUSE_S = 2.5


def is_settled(world: VirtualWorld) -> bool:
    """Whether all workers live and are linked, each prefill worker to the decode workers of its class."""
    living = [one for one in world.living() if not one.stopped]
    prefill, decode = ([one for one in living if one.kind == role] for role in ("prefill", "decode"))
    pairs = sum(one.kv_class == other.kv_class for one in prefill for other in decode)
    return len(world.relay.fleet.workers) == len(living) and len(world.relay.fleet.linked_pairs()) == pairs


def run_upgrade(world: VirtualWorld, seed: int, kinds: list[str]) -> InvariantChecker:
    """One worker after the other comes back with another class, while clients ask; for bulk work, too, if there are
    faults.

    Raises InvariantBroken.
    """
    laws, rng = InvariantChecker(world), Random(seed)
    assert world.run(lambda: is_settled(world), 5.0)
    order = sorted(world.posts, key=lambda name: (name.partition("-")[2], name))
    until_s = world.agenda.now_s + PAUSE_S * (len(order) + 1)
    ClientLoad(world, rng, WITH_BULK if kinds else CLIENTS, until_s)
    if kinds:
        FaultStorm(world, rng, 0.5, until_s, kinds)
    for number, name in enumerate(order):
        world.agenda.schedule_after(PAUSE_S * (number + 0.5), partial(world.upgrade, name, NEW), "upgrade")
    world.run(lambda: world.agenda.now_s >= until_s, 2 * PAUSE_S * len(order), laws.check_running)
    settle_world(world, laws)
    return laws


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pools", [(2, 2), (3, 3), (0, 2)], ids=lambda pools: f"{pools[0]}P{pools[1]}D")
@pytest.mark.parametrize("kinds", [[], ["kill", "reset", "stop"]], ids=["calm", "faults"])
def test_an_upgrade_rolls_and_no_pair_crosses_classes(
    pools: tuple[int, int], kinds: list[str], seed: int
) -> None:
    """Answers of both classes are right to the last token; where nothing else breaks, few are cut."""
    names = [f"prefill-{i}" for i in range(pools[0])] + [f"decode-{i}" for i in range(pools[1])]
    world = VirtualWorld(seed, *pools, kv_classes=dict.fromkeys(names, OLD))
    run_upgrade(world, seed, kinds)
    failed = [client for client in world.clients if client.end not in DONE]
    assert all(client.end in ("no_workers", "worker_lost") for client in failed) or kinds
    assert len(failed) < 0.1 * len(world.clients)
    assert {client.kv_class for client in world.clients if client.end in DONE} == {OLD, NEW}
    cut = {client.kv_class for client in failed}
    assert kinds or cut <= {OLD}, "only answers whose class was replaced are cut"


def test_two_classes_live_side_by_side() -> None:
    """Half of the workers have each class; a lost worker's answers go on at the other one of its class."""
    names = ["prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1", "decode-2", "decode-3"]
    classes = dict(zip(names, (OLD, NEW, NEW, OLD, OLD, NEW, NEW), strict=True))
    world = VirtualWorld(5, 3, 4, kv_classes=classes)
    laws, rng = InvariantChecker(world), Random(5)
    assert world.run(lambda: is_settled(world), 5.0)
    until_s = world.agenda.now_s + 8.0
    ClientLoad(world, rng, CLIENTS, until_s)
    for number, name in enumerate(("decode-0", "decode-2", "decode-3", "decode-1")):
        world.agenda.schedule_after(1.5 * (number + 1), partial(world.kill, name), "blow")
    world.run(lambda: world.agenda.now_s >= until_s, 30.0, laws.check_running)
    assert world.run(lambda: len(world.over) == len(world.clients) and is_settled(world), 60.0)
    assert all(client.end in DONE for client in world.clients)
    moved = {client.kv_class for client in world.clients if client.moved_on}
    assert moved == {client.kv_class for client in world.clients} == {OLD, NEW}


def test_an_answer_that_changes_its_class_is_seen() -> None:
    """The law of tokens has teeth: answers of the two classes differ."""
    world = VirtualWorld(1, 1, 1, kv_classes=dict.fromkeys(("prefill-0", "decode-0"), OLD))
    laws, rng = InvariantChecker(world), Random(1)

    def answer_of_the_other(
        prompt: list[int], sampling: SamplingParams, kv_class: str = RAW_CLASS, keep: KeepSpec = KEEP_ALL
    ) -> tuple[list[int], str]:
        return VirtualWorld.wanted_answer(world, prompt, sampling, NEW, keep)

    world.wanted_answer = answer_of_the_other  # type: ignore[method-assign]
    world.open()
    assert world.run(lambda: is_settled(world), 5.0)
    ClientLoad(world, rng, CLIENTS, world.agenda.now_s + 2.0)
    with pytest.raises(InvariantBroken, match="has got"):
        settle_world(world, laws)
